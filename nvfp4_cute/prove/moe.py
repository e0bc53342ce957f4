"""A mixture-of-experts layer in three launches, compared with torch's bf16: quantize, gated up projections, down projection.

The shape is that of Qwen3-30B-A3B. Rows arrive sorted by expert, as after a router; routing itself is not timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.functional import silu

from nvfp4_cute.bench.cases import TOP_K, routed_rows
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.codecs import encode_e4m3
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.ops.parts import Parts, gate_up, grouped_dual_gemm, grouped_gemm, grouped_quantize
from nvfp4_cute.problem import NVFP4
from nvfp4_cute.reference import expand_operand

MODEL, EXPERTS, HIDDEN, INTERMEDIATE = "Qwen3-30B-A3B", 128, 2048, 768
TOKENS = (1, 8, 32, 128, 512)
ALPHA = 2.0**-9
"""Factor of both up projections. It brings sums of thousands of random terms into the curved range of SiLU."""


def name_of(tokens: int) -> str:
    """The layer's name in predictions and reports."""
    return f"{MODEL} layer, {tokens} token{'s' * (tokens > 1)}"


@dataclass(frozen=True)
class Layer:
    """Weights of all experts and the rows of some tokens, on one device.

    Attributes:
        x: [rows, HIDDEN] bfloat16, sorted by expert.
        offs: int32 [EXPERTS], end of each expert's rows.
        gate_up, gate_up_scale: [EXPERTS, 2 * INTERMEDIATE, HIDDEN / 2] uint8, gate above up, and blocked scales.
        down, down_scale: [EXPERTS, HIDDEN, INTERMEDIATE / 2] and scales.
        alpha: float32 [EXPERTS], factor of both up projections.
    """

    x: torch.Tensor
    offs: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    alpha: torch.Tensor

    def run(self, backend: str = "auto") -> torch.Tensor:
        """Computes [rows, HIDDEN] bfloat16 by three launches."""
        data, scale = grouped_quantize(self.x, self.offs, backend=backend)
        w = gate_up(Parts(self.gate_up, self.gate_up_scale), None, "concatenated", self.alpha, self.alpha)
        hidden = grouped_dual_gemm(
            Parts(data, scale), w, self.offs, out_dtype=NVFP4, backend=backend
        )  # fmt: skip
        return grouped_gemm(Parts(*hidden), Parts(self.down, self.down_scale), self.offs, backend=backend)

    def torch_bf16(self) -> Callable[[], torch.Tensor]:
        """Returns a call of the layer in bf16 with ``torch._grouped_mm``. Weights are expanded here, untimed."""
        expand = lambda data, scale: torch.stack(
            [expand_operand(d, s, "blocked").to(torch.bfloat16) for d, s in zip(data, scale, strict=True)]
        )
        gate_up = expand(self.gate_up, self.gate_up_scale).transpose(1, 2)
        down = expand(self.down, self.down_scale).transpose(1, 2)

        def run() -> torch.Tensor:
            both = ALPHA * torch._grouped_mm(self.x, gate_up, offs=self.offs)
            gate, up = both.chunk(2, 1)
            return torch._grouped_mm(silu(gate) * up, down, offs=self.offs)

        return run

    @property
    def weight_bytes(self) -> int:
        """NVFP4 bytes of the experts that have rows: the least that one run has to read."""
        rows = torch.diff(self.offs.cpu(), prepend=torch.zeros(1, dtype=torch.int32))
        per_expert = sum(
            t[0].numel() * t.element_size()
            for t in (self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        )
        return int((rows > 0).sum()) * per_expert


def make_layer(tokens: int, device: torch.device, seed: int = 0, *, empty: bool = False) -> Layer:
    """Makes random weights and rows. empty: operands without data, for models, which only need addresses."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = routed_rows(tokens, EXPERTS, TOP_K[MODEL])
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)

    def weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, row_bytes = NVFP4_FORMAT.padded_scale_shape(n, k), NVFP4_FORMAT.row_bytes(k)
        if empty:
            tiles = (EXPERTS, *NVFP4_FORMAT.scale_shape(n, k))
            return torch.empty((EXPERTS, n, row_bytes), dtype=torch.uint8), torch.empty(
                tiles, dtype=torch.uint8
            )
        data = torch.randint(
            0, 256, (EXPERTS, n, row_bytes), dtype=torch.uint8, device=device, generator=generator
        )
        uniform = torch.rand((EXPERTS, *shape), device=device, generator=generator)
        return data, torch.stack([to_blocked(encode_e4m3(0.5 + 1.5 * one)) for one in uniform])

    x = torch.randn((sum(rows), HIDDEN), device=device, generator=generator).bfloat16()
    gate_up, down = weights(2 * INTERMEDIATE, HIDDEN), weights(HIDDEN, INTERMEDIATE)
    return Layer(x, offs, *gate_up, *down, torch.full((EXPERTS,), ALPHA, device=device))
