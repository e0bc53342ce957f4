"""FP8 rows and MXFP4 weights prepared for them, and checks of their products. Sums are exact, so bits equal the reference's."""

import flat_parts as parts
import torch
from fp8_check import ENDS, check_ends
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.exact_fp8 import mxfp4_for_fp8
from nvfp4_cute.planning.config import KernelConfig

ALPHAS = (0.5, -2.0, 1.0, 4.0, 0.25)


def config(tokens, k=256, weights=128, **settings):
    return KernelConfig((weights, tokens, k), num_acc_stage=1, swap_ab=True, **settings)


def tokens_of(*shape, seed=0):
    """Few values other than 0, because the sums of a stage have 13 bits; one power of two per row."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    data = torch.randint(-2, 3, shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.1)
    scale = torch.exp2(torch.randint(-2, 3, (*shape[:-1], 1), generator=generator).float())
    return nv.BlockScaledTensor(
        data.to(torch.float8_e4m3fn), scale, None, shape, "rowmajor", format=nv.FP8_1xK
    )


def mxfp4_of(*shape, seed=0):
    """All e2m1 codes, and rows with scales of their own, each with a few others; K is a multiple of 32."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    *lead, k = shape
    data = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(-2, 1, (*lead, k // 32), generator=generator)
    scale = (127 + scale + torch.randint(-6, 7, (*lead, 1), generator=generator)).to(torch.uint8)
    return nv.BlockScaledTensor(data, scale, None, shape, "rowmajor", format=nv.MXFP4)


def weights_of(*shape, seed=0):
    return mxfp4_for_fp8(mxfp4_of(*shape, seed=seed))


def check_ragged(n, k, chosen, backend, mode="eager", device="cpu"):
    """Checks ragged groups: empty ones, groups that end inside a tile, and rows that belong to no group."""
    x, w = tokens_of(120, k), weights_of(len(ENDS), n, k)
    check_ends(x, w, torch.tensor(ALPHAS), chosen, backend, mode, device)


def check_dual(layout, chosen, backend, mode="eager", device="cpu"):
    """Checks a dual GEMM of ragged groups whose activation is exact, with a limit."""
    n, k = 192, 160
    x, alpha = tokens_of(120, k), torch.tensor(ALPHAS)
    sides = [weights_of(len(ENDS), n, k, seed=i) for i in range(2)]
    if layout != "separate":
        sides = [weights_of(len(ENDS), 2 * n, k), None]
    offs = torch.tensor(ENDS, dtype=torch.int32)
    options = {"activation": "relu2", "limit": 40.0, "weight_layout": layout, "out_dtype": torch.float32}
    want = parts.grouped_dual_gemm(x, *sides, alpha1=alpha, alpha2=alpha, offs=offs, **options)
    x, offs, alpha = (t.to(device) for t in (x, offs, alpha))
    sides = [side if side is None else side.to(device) for side in sides]
    with observe(mode=mode, check=True):
        got = parts.grouped_dual_gemm(
            x, *sides, alpha1=alpha, alpha2=alpha, offs=offs, config=chosen, backend=backend, **options
        )
    assert_bitwise_equal(got.cpu()[: ENDS[-1]], want[: ENDS[-1]])
