"""The calls of ``blind``, as their users make them: dense, dual, grouped, few rows, 16-bit rows, quantization, layers."""

import random
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

SEED = 5
Call = Callable[[str], object]
"""Enqueues the launches on a backend."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        kind: a key of ``MAKERS``.
        sizes: whole numbers that its maker takes.
    """

    kind: str
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.kind} {' x '.join(map(str, self.sizes))}"

    def call(self, device: str) -> Call:
        """With operands on a device: random ones on a GPU, ones that hold no data on the CPU."""
        return MAKERS[self.kind](torch.device(device), *self.sizes)


# ---- operands and calls --------------------------------------------------------------------------------------------
def _bytes(device: torch.device, *shape: int) -> torch.Tensor:
    if device.type == "cpu":
        return torch.empty(shape, dtype=torch.uint8)
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)


def _scales(device: torch.device, *shape: int) -> torch.Tensor:
    """E4m3 from 0.5 to 2."""
    codes = _bytes(device, *shape)
    return (codes if device.type == "cpu" else 0x30 + codes % 16).view(torch.float8_e4m3fn)


def _rows(device: torch.device, *shape: int) -> torch.Tensor:
    if device.type == "cpu":
        return torch.zeros(shape, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randn(shape, device=device, generator=generator).bfloat16()


def _operand(device: torch.device, rows: int, k: int, *batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and blocked scales, [*batches, rows, K]."""
    data = _bytes(device, *batches, rows, NVFP4.row_bytes(k))
    return data, _scales(device, *batches, *NVFP4.scale_shape(rows, k))


def _gemm(device: torch.device, m: int, n: int, k: int) -> Call:
    (a, a_scale), (b, b_scale) = _operand(device, m, k), _operand(device, n, k)
    return lambda backend: parts.gemm(a, b, a_scale, b_scale, backend=backend)


def _dual_gemm(device: torch.device, m: int, n: int, k: int) -> Call:
    (a, a_scale), (b, b_scale), (b2, b2_scale) = (_operand(device, rows, k) for rows in (m, n, n))
    return lambda backend: parts.dual_gemm(a, b, b2, a_scale, b_scale, b2_scale, backend=backend)


def _w4a16(device: torch.device, m: int, n: int, k: int) -> Call:
    x, (b, b_scale) = _rows(device, m, k), _operand(device, n, k)
    return lambda backend: parts.gemm(x, b, None, b_scale, backend=backend)


def _gemv(device: torch.device, m: int, k: int, batches: int) -> Call:
    matrix = _bytes(device, batches, m, NVFP4.row_bytes(k)).permute(1, 2, 0)
    vector = _bytes(device, batches, NVFP4.row_bytes(k)).T
    scales = [_scales(device, batches, *NVFP4.scale_shape(rows, k)) for rows in (m, 1)]
    return lambda backend: parts.gemv(matrix, vector, *scales, backend=backend)


def _sizes(groups: int, mean: int) -> list[int]:
    draw = random.Random(SEED)
    return [draw.randint(1, 2 * mean - 1) for _ in range(groups)]


def _ragged(device: torch.device, groups: int, mean: int, n: int, k: int) -> Call:
    rows = _sizes(groups, mean)
    a = _bytes(device, sum(rows), NVFP4.row_bytes(k))
    a_scale = _scales(device, *NVFP4.ragged_scale_shape(sum(rows), k, groups))
    b, b_scale = _operand(device, n, k, groups)
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    return lambda backend: parts.grouped_gemm(a, b, a_scale, b_scale, offs, backend=backend)


def _list(device: torch.device, groups: int, mean: int, n: int, k: int) -> Call:
    sides = [
        [_operand(device, m, k) for m in _sizes(groups, mean)],
        [_operand(device, n, k) for _ in range(groups)],
    ]
    a, b, a_scale, b_scale = ([pair[part] for pair in side] for part in (0, 1) for side in sides)
    return lambda backend: parts.grouped_gemm(a, b, a_scale, b_scale, backend=backend)


def _ragged_16bit(device: torch.device, groups: int, mean: int, n: int, k: int) -> Call:
    rows = _sizes(groups, mean)
    x = _rows(device, sum(rows), k)
    b, b_scale = _operand(device, n, k, groups)
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    return lambda backend: parts.grouped_gemm(x, b, None, b_scale, offs, backend=backend)


def _quantize(device: torch.device, m: int, k: int) -> Call:
    x = _rows(device, m, k)
    return lambda backend: nvfp4_cute.quantize(x, backend=backend)


def _linear(device: torch.device, m: int, n: int, k: int) -> Call:
    layer, x = QuantizedLinear(k, n, bias=False, input_scale=None, device=device), _rows(device, m, k)
    layer._buffers["weight"], layer.weight_scale = _operand(device, n, k)

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
"""Sizes: M, N, K of products; M, K, batches of a gemv; groups, mean of their rows, N, K; M, K; M, N, K of a linear layer; tokens,
experts, experts a token, hidden and intermediate size."""

FIRST = (
    *(Case("gemm", sizes) for sizes in (
        (128, 4096, 4096), (256, 3072, 4096), (384, 2560, 5120), (512, 2048, 2048), (640, 5120, 1536), (1024, 2048, 1024),
        (1536, 1536, 1536), (64, 8192, 3072), (32, 6144, 4096), (2, 8192, 4096), (4, 4096, 7168), (8, 6144, 2048),
    )),
    *(Case("dual_gemm", sizes) for sizes in ((128, 2048, 4096), (320, 1536, 2048), (16, 4096, 3072))),
    *(Case("gemm, 16-bit rows", sizes) for sizes in (
        (1, 8192, 8192), (3, 12288, 4096), (8, 8192, 3072), (16, 10240, 4096), (48, 6144, 4096), (96, 4096, 4096),
    )),
    *(Case("gemv", sizes) for sizes in ((8192, 8192, 1), (3072, 5120, 4))),
    *(Case("grouped_gemm, ragged", sizes) for sizes in (
        (8, 16, 2048, 4096), (16, 48, 2048, 2048), (32, 8, 1536, 2048), (6, 160, 3072, 1536), (12, 96, 1024, 4096),
    )),
    *(Case("grouped_gemm, list", sizes) for sizes in ((4, 80, 3072, 4096), (8, 24, 2560, 2048))),
    *(Case("grouped_gemm, ragged, 16-bit rows", sizes) for sizes in ((8, 4, 4096, 3072), (16, 20, 2048, 2048))),
    *(Case("quantize", sizes) for sizes in ((1, 8192), (64, 5120), (512, 4096))),
    *(Case("LinearNVFP4", sizes) for sizes in ((1, 8192, 4096), (24, 5120, 5120), (200, 4096, 2560))),
    *(Case("route + MoENVFP4", sizes) for sizes in (
        (1, 32, 4, 2048, 1024), (6, 32, 4, 2048, 1024), (48, 32, 4, 2048, 1024), (2, 64, 6, 1536, 512),
        (20, 64, 6, 1536, 512), (160, 16, 2, 1024, 1024), (4, 8, 2, 3072, 2048),
    )),
)  # fmt: skip

SECOND = (
    *(Case("gemm", sizes) for sizes in (
        (128, 2048, 4096), (192, 3072, 2048), (256, 2048, 3072), (512, 1536, 2048), (768, 2048, 1536), (1024, 1024, 2048),
        (96, 5120, 2048), (48, 4096, 3072), (16, 8192, 2048), (1, 6144, 4096), (3, 4096, 3072), (6, 5120, 3072),
    )),
    *(Case("dual_gemm", sizes) for sizes in ((128, 1536, 3072), (256, 2048, 2048), (32, 3072, 2048), (8, 2048, 4096))),
    *(Case("gemm, 16-bit rows", sizes) for sizes in (
        (2, 4096, 4096), (8, 5120, 2048), (16, 4096, 2048), (32, 3072, 3072), (64, 4096, 2048),
    )),
    *(Case("gemv", sizes) for sizes in ((4096, 4096, 1), (6144, 4096, 1), (2048, 7168, 2), (4096, 3072, 3))),
    *(Case("grouped_gemm, ragged", sizes) for sizes in ((4, 32, 2048, 2048), (8, 64, 1536, 2048), (16, 16, 1024, 2048))),
    *(Case("grouped_gemm, list", sizes) for sizes in ((3, 100, 2048, 2048), (6, 40, 1536, 3072))),
    *(Case("grouped_gemm, ragged, 16-bit rows", sizes) for sizes in ((4, 8, 2048, 2048),)),
    *(Case("quantize", sizes) for sizes in ((2, 4096), (32, 2048), (256, 3072))),
    *(Case("LinearNVFP4", sizes) for sizes in ((1, 4096, 4096), (8, 6144, 2048), (64, 3072, 3072), (128, 2048, 4096))),
    *(Case("route + MoENVFP4", sizes) for sizes in (
        (1, 16, 2, 1024, 1024), (4, 16, 4, 1024, 512), (8, 8, 2, 2048, 1024), (32, 16, 2, 1024, 512), (64, 8, 2, 1024, 1024),
    )),
)  # fmt: skip
THIRD = (
    *(Case("gemm", sizes) for sizes in (
        (128, 3072, 3072), (224, 2560, 4096), (384, 1536, 3072), (896, 1536, 2048), (64, 5120, 3072), (24, 6144, 3072),
        (1, 8192, 3072), (5, 3072, 5120), (2048, 1024, 1024),
    )),
    *(Case("dual_gemm", sizes) for sizes in ((192, 2048, 2048), (64, 2048, 3072), (4, 3072, 3072))),
    *(Case("gemm, 16-bit rows", sizes) for sizes in (
        (1, 5120, 5120), (4, 6144, 2048), (8, 4096, 4096), (12, 6144, 3072), (16, 3072, 6144), (24, 4096, 2048), (32, 5120, 3072),
        (80, 3072, 3072),
    )),
    *(Case("gemv", sizes) for sizes in ((5120, 5120, 1), (3072, 4096, 2), (2048, 2048, 6))),
    *(Case("grouped_gemm, ragged", sizes) for sizes in ((6, 24, 2048, 3072), (12, 40, 1536, 1536), (24, 8, 1024, 3072))),
    *(Case("grouped_gemm, list", sizes) for sizes in ((4, 64, 2048, 3072), (5, 128, 1536, 2048))),
    *(Case("grouped_gemm, ragged, 16-bit rows", sizes) for sizes in ((6, 6, 2048, 3072), (8, 16, 1536, 2048))),
    *(Case("quantize", sizes) for sizes in ((4, 6144), (128, 4096), (384, 2048))),
    *(Case("LinearNVFP4", sizes) for sizes in ((1, 6144, 3072), (16, 4096, 3072), (64, 3072, 3072), (96, 3072, 2048))),
    *(Case("route + MoENVFP4", sizes) for sizes in (
        (1, 32, 2, 1024, 1024), (8, 16, 2, 1536, 1024), (16, 8, 2, 1024, 2048), (48, 16, 4, 1024, 512),
    )),
)  # fmt: skip
FOURTH = (
    *(Case("gemm", sizes) for sizes in (
        (160, 2048, 3072), (320, 2560, 2048), (448, 1536, 4096), (1152, 1024, 1536), (80, 4096, 2048), (40, 5120, 2048),
        (12, 4096, 4096), (2, 6144, 3072), (7, 2048, 6144),
    )),
    *(Case("dual_gemm", sizes) for sizes in ((224, 1536, 2048), (96, 1536, 3072), (6, 2560, 3072))),
    *(Case("gemm, 16-bit rows", sizes) for sizes in (
        (1, 4096, 6144), (6, 4096, 3072), (10, 5120, 2560), (14, 3072, 4096), (20, 3072, 3072), (28, 2560, 4096),
        (56, 2560, 3072),
    )),
    *(Case("gemv", sizes) for sizes in ((4096, 5120, 1), (2560, 4096, 3), (3072, 2048, 5))),
    *(Case("grouped_gemm, ragged", sizes) for sizes in ((5, 20, 2048, 2560), (10, 56, 1536, 2048), (20, 12, 1024, 2048))),
    *(Case("grouped_gemm, list", sizes) for sizes in ((5, 48, 2048, 2048), (4, 112, 1536, 2560))),
    *(Case("grouped_gemm, ragged, 16-bit rows", sizes) for sizes in ((5, 5, 2048, 2560), (10, 12, 1536, 1536))),
    *(Case("quantize", sizes) for sizes in ((3, 5120), (48, 4096), (320, 2560))),
    *(Case("LinearNVFP4", sizes) for sizes in ((2, 5120, 3072), (12, 4096, 2048), (80, 3072, 2560), (112, 2048, 3072))),
    *(Case("route + MoENVFP4", sizes) for sizes in (
        (2, 32, 2, 1024, 1024), (5, 16, 4, 1536, 512), (12, 8, 2, 1536, 1024), (40, 16, 2, 1024, 768),
    )),
)  # fmt: skip
FIFTH = (
    *(Case("gemm", sizes) for sizes in (
        (176, 2560, 2048), (288, 2048, 2560), (640, 1536, 3072), (1408, 1024, 1024), (112, 3072, 2560), (56, 4096, 3072),
        (20, 5120, 3072), (10, 3072, 6144), (3, 5120, 4096),
    )),
    *(Case("dual_gemm", sizes) for sizes in ((160, 1536, 2560), (48, 2048, 4096), (3, 3072, 4096))),
    *(Case("gemm, 16-bit rows", sizes) for sizes in (
        (1, 6144, 3072), (5, 5120, 3072), (9, 3072, 5120), (16, 5120, 4096), (22, 4096, 3072), (30, 3072, 2560), (48, 3072, 4096),
        (120, 2560, 2560),
    )),
    *(Case("gemv", sizes) for sizes in ((5120, 3072, 2), (3072, 6144, 1), (2048, 4096, 4))),
    *(Case("grouped_gemm, ragged", sizes) for sizes in ((6, 16, 1536, 3072), (9, 72, 1536, 1536), (18, 10, 1536, 2048))),
    *(Case("grouped_gemm, list", sizes) for sizes in ((6, 32, 2048, 2560), (3, 144, 2048, 1536))),
    *(Case("grouped_gemm, ragged, 16-bit rows", sizes) for sizes in ((6, 4, 2048, 2048), (7, 20, 1536, 2560))),
    *(Case("quantize", sizes) for sizes in ((6, 4096), (96, 3072), (448, 2048))),
    *(Case("LinearNVFP4", sizes) for sizes in ((3, 4096, 4096), (20, 5120, 2048), (72, 2560, 3072), (144, 2048, 2560))),
    *(Case("route + MoENVFP4", sizes) for sizes in (
        (3, 16, 2, 1536, 1024), (7, 32, 4, 1024, 512), (24, 8, 2, 1024, 1024), (56, 16, 2, 1536, 512),
    )),
)  # fmt: skip
SIXTH = (
    *(Case("gemm", sizes) for sizes in (
        (144, 3072, 2048), (272, 2048, 3072), (576, 1536, 2560), (1280, 1024, 2048), (104, 2560, 3072), (72, 3072, 4096),
        (28, 4096, 3072), (14, 5120, 4096), (4, 2560, 6144),
    )),
    *(Case("dual_gemm", sizes) for sizes in ((144, 1536, 2048), (40, 2560, 3072), (5, 2048, 5120))),
    *(Case("gemm, 16-bit rows", sizes) for sizes in (
        (1, 3072, 5120), (3, 4096, 5120), (7, 6144, 2560), (11, 4096, 4096), (18, 3072, 4096), (26, 5120, 2560), (32, 4096, 4096),
        (96, 3072, 3072),
    )),
    *(Case("gemv", sizes) for sizes in ((4096, 3072, 2), (5120, 4096, 1), (3072, 3072, 3))),
    *(Case("grouped_gemm, ragged", sizes) for sizes in ((7, 18, 2048, 2048), (8, 60, 1536, 2560), (16, 14, 1024, 3072))),
    *(Case("grouped_gemm, list", sizes) for sizes in ((5, 40, 2048, 3072), (4, 128, 1536, 2048))),
    *(Case("grouped_gemm, ragged, 16-bit rows", sizes) for sizes in ((7, 5, 2048, 2048), (9, 14, 1536, 2048))),
    *(Case("quantize", sizes) for sizes in ((5, 6144), (72, 4096), (288, 3072))),
    *(Case("LinearNVFP4", sizes) for sizes in ((4, 5120, 4096), (28, 4096, 2560), (88, 2560, 2560), (160, 2048, 2048))),
    *(Case("route + MoENVFP4", sizes) for sizes in (
        (4, 32, 2, 1536, 512), (10, 16, 4, 1024, 1024), (20, 8, 2, 2048, 512), (72, 16, 2, 1024, 512),
    )),
)  # fmt: skip
SETS = {"first": FIRST, "second": SECOND, "third": THIRD, "fourth": FOURTH, "fifth": FIFTH, "sixth": SIXTH}
"""Calls that were predicted together. No constant of the model was set from the times of a set before they were predicted."""
BY_NAME = {case.name: case for cases in SETS.values() for case in cases}
