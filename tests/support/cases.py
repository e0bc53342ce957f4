"""Kernel test cases: named groups of small grouped problems, and their operands.

Every case is cheap enough for the emulator on two cores: about 30 K tiles of 128 x 128 x 256, the long K case 40.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from nvfp4_cute.formats.codecs import encode_e4m3
from nvfp4_cute.formats.scale_layout import SF_VEC_SIZE, padded_shape, to_blocked
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.reference import expand_operand

NAN_CODE = 0x7F
FINITE_E4M3_CODES = tuple(code for code in range(256) if code & 0x7F != NAN_CODE)
# Every term is a multiple of 0.5 * 0.5 and at most 6 * 6 * 2 * 2, so sums of K terms are exact in fp32, in any order,
# while 144 * K <= 2^24 * 0.25.
EXACT_SCALES = (0.0, 1.0, 2.0)
EXACT_MAX_K = 2**24 // (4 * 144)
EXACT_ALPHAS = (1.0, -0.5, 2.0, 0.25, -1.0, 4.0)
SM120_TILES = [
    KernelConfig((128, n, k), num_acc_stage=teams, swap_ab=swap_ab)
    for n, k, teams, swap_ab in [
        (8, 256, 1, True), (16, 128, 1, False), (16, 256, 2, True), (32, 256, 1, True), (64, 128, 1, False),
        (64, 128, 2, False), (128, 128, 2, False),
    ]
]  # fmt: skip
"""Tiles of the sm_120a kernel besides the candidates."""


@dataclass(frozen=True)
class Case:
    """One grouped problem with operands that a seed determines.

    Attributes:
        name: test id.
        sizes: (m, n, k) of every group.
        seed: of all operands.
        out_dtype: of the result.
        has_alpha: powers of two in kind "exact", any float32 in kind "wide".
        kind: "exact": fp32 accumulation is exact in any order, results are compared bit for bit. "wide": scales are
            all finite e4m3 codes, compared within :func:`error_bound`.
        padding: what the scales' padding rows hold: random finite codes, or NaN.
    """

    name: str
    sizes: tuple[tuple[int, int, int], ...]
    seed: int = 0
    out_dtype: torch.dtype = torch.float16
    has_alpha: bool = False
    kind: Literal["exact", "wide"] = "exact"
    padding: Literal["random", "nan"] = "random"


@dataclass(frozen=True)
class CaseOperands:
    """Arguments of ``grouped_gemm``: uint8 a, b [rows, K/2]; uint8 blocked scales, flat; alpha float32 [G] or None."""

    a: list[torch.Tensor]
    b: list[torch.Tensor]
    a_scale: list[torch.Tensor]
    b_scale: list[torch.Tensor]
    alpha: torch.Tensor | None

    def __iter__(self):
        return iter((self.a, self.b, self.a_scale, self.b_scale, self.alpha))


def make_operands(case: Case) -> CaseOperands:
    """Draw the operands of ``case``; unpack as ``a, b, a_scale, b_scale, alpha``."""
    generator = torch.Generator().manual_seed(case.seed)
    a, b, a_scale, b_scale = [], [], [], []
    for m, n, k in case.sizes:
        assert case.kind == "wide" or k <= EXACT_MAX_K, f"{case.name}: K={k} is not exact in fp32"
        a.append(_values(m, k, generator))
        b.append(_values(n, k, generator))
        a_scale.append(_scales(m, k, case, generator))
        b_scale.append(_scales(n, k, case, generator))
    return CaseOperands(a, b, a_scale, b_scale, _alphas(case, generator))


def _values(rows: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Random bytes [rows, K/2], with a row pitch that is a multiple of 16 bytes. Nobody may read the gaps between rows."""
    buffer = torch.full((rows, math.ceil(k / 32) * 16), 0x77, dtype=torch.uint8)
    buffer[:, : k // 2] = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    return buffer[:, : k // 2]


def _scales(rows: int, k: int, case: Case, generator: torch.Generator) -> torch.Tensor:
    """Flat blocked scales. Padding rows hold what the case says; padding columns are zero, as the operand contract requires."""
    k_blocks = k // SF_VEC_SIZE
    padded_rows, _ = padded_shape(rows, k_blocks)
    if case.kind == "exact":
        codes = encode_e4m3(torch.tensor(EXACT_SCALES))
    else:
        codes = torch.tensor(FINITE_E4M3_CODES, dtype=torch.uint8)
    # Every code occurs equally often, in random places, so that small operands contain all of them.
    order = torch.randperm(padded_rows * k_blocks, generator=generator)
    scale = codes[order % len(codes)].view(padded_rows, k_blocks)
    if case.padding == "nan":
        scale[rows:] = NAN_CODE
    return to_blocked(scale).flatten()


def _alphas(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if not case.has_alpha:
        return None
    num_groups = len(case.sizes)
    if case.kind == "exact":
        return torch.tensor([EXACT_ALPHAS[g % len(EXACT_ALPHAS)] for g in range(num_groups)])
    return torch.randn(num_groups, generator=generator)


def error_bound(case: Case, operands: CaseOperands, expected: list[torch.Tensor]) -> list[torch.Tensor]:
    """Largest allowed |result - expected| of every element, float64 [M, N] a group.

    ``expected`` is what ``grouped_gemm_reference`` gives in the case's dtype.

    The MMA adds 64 products at a time to the fp32 accumulator: it aligns the terms to the largest exponent, cuts each
    at 35 fractional bits (four groups and the accumulator), and truncates the sum to fp32. So one step errs by at
    most 2^-23 of the sum of absolute products plus 5 * 2^-35 of the largest product of two scales. Result and
    reference then round to fp32, times alpha, and to ``out_dtype``.
    """
    bounds = []
    for g, (_, _, k) in enumerate(case.sizes):
        a = expand_operand(operands.a[g], operands.a_scale[g], "blocked")
        b = expand_operand(operands.b[g], operands.b_scale[g], "blocked")
        steps = math.ceil(k / 64)
        bound = steps * (a.abs() @ b.abs().T * 2.0**-23 + 5 * 2.0**-35 * 448**2)
        if operands.alpha is not None:
            bound = bound * operands.alpha[g].abs().double()
        exact = expected[g].double().abs() + bound
        out = torch.finfo(case.out_dtype)
        bounds.append(bound + exact * (3 * 2.0**-24 + out.eps) + out.tiny * out.eps)
    return bounds


# one group
ONE_GROUP = (
    Case("one_tile", ((128, 128, 256),)),
    Case("one_row", ((1, 128, 256),)),
    Case("one_element", ((1, 1, 256),)),
    Case("tiles_3x2", ((300, 256, 512),)),
)

# M not a multiple of the tile, 1 to 300
RAGGED_M = (
    Case("ragged_small_m", ((1, 128, 256), (7, 128, 256), (40, 128, 256), (127, 128, 256))),
    Case("ragged_large_m", ((129, 128, 256), (148, 128, 512), (255, 128, 256), (300, 128, 256))),
)

# N not a multiple of the tile, of a vector store, or of two
RAGGED_N = (
    Case("n_tail_aligned", ((64, 8, 256), (64, 136, 256), (130, 200, 256))),
    Case("n_tail_odd", ((64, 1, 256), (70, 33, 256), (20, 129, 256), (5, 255, 256))),
)

# K from one block to 40 tiles
K_RANGE = (
    Case("k_below_tile", ((64, 128, 32), (64, 128, 64), (64, 128, 96), (64, 128, 128))),
    Case("k_tail", ((64, 128, 288), (64, 128, 320), (64, 128, 480), (64, 128, 736))),
    Case("k_tiles", ((64, 128, 256), (64, 128, 512), (64, 128, 768), (64, 128, 2048))),
    Case("k_long", ((72, 64, 10240),)),
)

# K is a multiple of 16 but not of 32, so the row pitch is larger than the row.
K_PITCHED = (Case("k_pitched", ((64, 128, 16), (40, 128, 48), (130, 64, 272))),)

# groups without rows, or without columns
EMPTY_GROUPS = (
    Case("empty_first", ((0, 128, 256), (64, 128, 256), (30, 128, 512))),
    Case("empty_middle", ((64, 128, 256), (0, 128, 256), (30, 128, 512))),
    Case("empty_last", ((64, 128, 256), (30, 128, 512), (0, 128, 256))),
    Case("empty_all_but_one", ((0, 128, 256), (0, 64, 512), (129, 128, 256), (0, 128, 256))),
    Case("empty_all", ((0, 128, 256), (0, 128, 512))),
    Case("empty_columns", ((64, 0, 256), (64, 128, 256))),
)

# 1 to 8 groups, every M, N and K of its own
_EIGHT = (
    (80, 128, 256),
    (176, 64, 512),
    (128, 136, 256),
    (72, 128, 768),
    (64, 256, 256),
    (248, 128, 288),
    (1, 40, 512),
    (160, 128, 256),
)
GROUP_COUNTS = tuple(Case(f"groups_{count}", _EIGHT[:count], seed=count) for count in range(1, 9))

OUTPUTS = tuple(
    Case(
        f"out_{str(dtype).removeprefix('torch.')}{'_alpha' if has_alpha else ''}", sizes, 3, dtype, has_alpha
    )
    for sizes in [((100, 128, 256), (30, 72, 512), (129, 33, 256))]
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for has_alpha in (False, True)
)

# every finite e4m3 code as a scale, both signs (which the tensor cores ignore)
ALL_SCALES = (
    Case("scales_float32", ((128, 128, 512), (40, 72, 768)), 4, torch.float32, kind="wide"),
    Case("scales_bfloat16_alpha", ((64, 128, 512), (130, 64, 256)), 5, torch.bfloat16, True, kind="wide"),
)

# NaN where only padding rows have scales
NAN_PADDING = (
    Case("nan_padding", ((1, 40, 256), (72, 129, 512), (130, 64, 96)), padding="nan"),
    Case("nan_padding_wide", ((33, 100, 256), (140, 8, 512)), 6, torch.float32, kind="wide", padding="nan"),
)

ALL = (
    *ONE_GROUP,
    *RAGGED_M,
    *RAGGED_N,
    *K_RANGE,
    *K_PITCHED,
    *EMPTY_GROUPS,
    *GROUP_COUNTS,
    *OUTPUTS,
    *ALL_SCALES,
    *NAN_PADDING,
)
