"""Calls of ``blind``, made like those of users: dense, dual, grouped, few rows, 16-bit rows, quantization, layers."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

import nvfp4_cute
from nvfp4_cute import QuantizedLinear, route
from nvfp4_cute.bench.layers import empty_experts
from nvfp4_cute.bench.moe import Model
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.ops import parts
from nvfp4_cute.ops.parts import Parts

SEED = 5
Call = Callable[[str], object]
"""Enqueues the launches on a backend."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        kind: a key of ``MAKERS``.
        sizes: integers that its maker takes.
    """

    kind: str
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """Unique name of the call."""
        return f"{self.kind} {' x '.join(map(str, self.sizes))}"

    def call(self, device: str) -> Call:
        """Returns the call with operands on a device: random on a GPU, without data on the CPU."""
        return MAKERS[self.kind](torch.device(device), *self.sizes)


# ---- operands and calls --------------------------------------------------------------------------------------------
def _bytes(device: torch.device, *shape: int) -> torch.Tensor:
    if device.type == "cpu":
        return torch.empty(shape, dtype=torch.uint8)
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)


def _scales(device: torch.device, *shape: int) -> torch.Tensor:
    """Returns e4m3 scales from 0.5 to 2."""
    codes = _bytes(device, *shape)
    return (codes if device.type == "cpu" else 0x30 + codes % 16).view(torch.float8_e4m3fn)


def _rows(device: torch.device, *shape: int) -> torch.Tensor:
    if device.type == "cpu":
        return torch.zeros(shape, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randn(shape, device=device, generator=generator).bfloat16()


def _operand(device: torch.device, rows: int, k: int, *batches: int) -> Parts:
    """Returns an operand with blocked scales, [*batches, rows, K]."""
    data = _bytes(device, *batches, rows, NVFP4.row_bytes(k))
    return Parts(data, _scales(device, *batches, *NVFP4.scale_shape(rows, k)))


def _gemm(device: torch.device, m: int, n: int, k: int) -> Call:
    a, b = _operand(device, m, k), _operand(device, n, k)
    return lambda backend: parts.gemm(a, b, backend=backend)


def _dual_gemm(device: torch.device, m: int, n: int, k: int) -> Call:
    a, gate, up = (_operand(device, rows, k) for rows in (m, n, n))
    w = parts.gate_up(gate, up)
    return lambda backend: parts.dual_gemm(a, w, backend=backend)


def _w4a16(device: torch.device, m: int, n: int, k: int) -> Call:
    x, b = _rows(device, m, k), _operand(device, n, k)
    return lambda backend: parts.gemm(x, b, backend=backend)


def _gemv(device: torch.device, m: int, k: int, batches: int) -> Call:
    matrix = _bytes(device, batches, m, NVFP4.row_bytes(k)).permute(1, 2, 0)
    vector = _bytes(device, batches, NVFP4.row_bytes(k)).T
    a, b = (
        Parts(data, _scales(device, batches, *NVFP4.scale_shape(rows, k)))
        for data, rows in ((matrix, m), (vector, 1))
    )
    return lambda backend: parts.gemv(a, b, backend=backend)


def _sizes(groups: int, mean: int) -> list[int]:
    draw = random.Random(SEED)
    return [draw.randint(1, 2 * mean - 1) for _ in range(groups)]


def _ragged(device: torch.device, groups: int, mean: int, n: int, k: int) -> Call:
    rows = _sizes(groups, mean)
    a = _bytes(device, sum(rows), NVFP4.row_bytes(k))
    given = Parts(a, _scales(device, *NVFP4.ragged_scale_shape(sum(rows), k, groups)))
    b = _operand(device, n, k, groups)
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    return lambda backend: parts.grouped_gemm(given, b, offs, backend=backend)


def _list(device: torch.device, groups: int, mean: int, n: int, k: int) -> Call:
    sides = [
        [_operand(device, m, k) for m in _sizes(groups, mean)],
        [_operand(device, n, k) for _ in range(groups)],
    ]
    a, b = (Parts([x.data for x in side], [x.scale for x in side]) for side in sides)
    return lambda backend: parts.grouped_gemm(a, b, backend=backend)


def _ragged_16bit(device: torch.device, groups: int, mean: int, n: int, k: int) -> Call:
    rows = _sizes(groups, mean)
    x = _rows(device, sum(rows), k)
    b = _operand(device, n, k, groups)
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    return lambda backend: parts.grouped_gemm(x, b, offs, backend=backend)


def _quantize(device: torch.device, m: int, k: int) -> Call:
    x = _rows(device, m, k)
    return lambda backend: nvfp4_cute.quantize(x, backend=backend)


def _linear(device: torch.device, m: int, n: int, k: int) -> Call:
    layer, x = QuantizedLinear(k, n, bias=False, input_scale=None, device=device), _rows(device, m, k)
    weight = _operand(device, n, k)
    layer._buffers["weight"], layer.weight_scale = weight.data, weight.scale

    def run(backend: str) -> object:
        layer.backend = backend
        return layer(x)

    return run


def _experts(device: torch.device, tokens: int, experts: int, top_k: int, hidden: int, width: int) -> Call:
    model = Model(experts, top_k, hidden, width)
    layer, x = empty_experts(model, device), _rows(device, tokens, hidden)
    if device.type != "cpu":
        for name in ("w13", "w2"):
            setattr(layer, name, _bytes(device, *getattr(layer, name).shape))
            setattr(layer, f"{name}_scale", _scales(device, *getattr(layer, f"{name}_scale").shape))
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn((tokens, experts), generator=generator).bfloat16().to(device)

    def run(backend: str) -> object:
        layer.backend = backend
        return layer(x, *route(logits, top_k, backend=backend))

    return run


MAKERS: dict[str, Callable[..., Call]] = {
    "gemm": _gemm,
    "dual_gemm": _dual_gemm,
    "gemm, 16-bit rows": _w4a16,
    "gemv": _gemv,
    "grouped_gemm, ragged": _ragged,
    "grouped_gemm, list": _list,
    "grouped_gemm, ragged, 16-bit rows": _ragged_16bit,
    "quantize": _quantize,
    "LinearNVFP4": _linear,
    "route + MoENVFP4": _experts,
}
"""Makers and their sizes.

M, N, K of products; M, K, batches of a gemv; groups, their mean rows, N, K; M, K; M, N, K of a linear layer; tokens, experts,
experts per token, hidden and intermediate size.
"""


def case_named(name: str) -> Case:
    """Returns the call of a name, such as "gemm 128 x 4096 x 4096"."""
    found = re.fullmatch(r"(.+?) ((?:\d+ x )*\d+)", name)
    assert found is not None, name
    return Case(found[1], tuple(map(int, found[2].split(" x "))))
