"""Checks machine code with ``stage_release``: every stage is released after its reads are complete."""

import struct

import pytest
import torch
from stage_release import unfinished_reads

from nvfp4_cute import KernelConfig
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.emulator.cubin import read_instructions
from nvfp4_cute.planning.arch import sm90, sm100, sm120

FAMILIES = {"sm_90a": sm90, "sm_100a": sm100, "sm_120a": sm120}
SILU = {"activation": "silu"}
# Small and large tiles, pairs of CTAs, split-K, alternating teams, other outputs, dual GEMMs, and sizes on the device.
SPREAD = [
    ("sm_90a", "t128x8x128_s0a1_swap_k4", torch.float16, {}),
    ("sm_90a", "t128x64x128_s0a1_swap", "nvfp4", {}),
    ("sm_90a", "t128x256x128_s0a1_swap", torch.float32, {"form": "ragged"}),
    ("sm_90a", "t64x32x128_s0a1_swap", torch.bfloat16, SILU),
    ("sm_90a", "t128x128x128_s0a1_swap_pre", torch.float16, {}),
    ("sm_90a", "t128x128x128_s0a1_swap_pre_sk", torch.float16, {}),
    ("sm_90a", "t128x32x128_s0a1_swap_pre_sk", torch.bfloat16, {"form": "ragged"}),
    ("sm_90a", "t128x256x128_s0a1_swap_pre", torch.bfloat16, {"form": "masked"}),
    ("sm_100a", "t128x128x256_s0a3_2cta_swap", torch.float16, {}),
    ("sm_100a", "t128x64x256_s0a2_swap_k2", torch.float16, {}),
    ("sm_100a", "t128x128x256_s0a2_2cta_swap", "nvfp4", SILU),
    ("sm_103a", "t128x256x256_s0a2", torch.float32, {"form": "ragged"}),
    ("sm_120a", "t128x128x128_s0a2", torch.float16, {}),
    ("sm_120a", "t128x64x128_s0a1_swap", "nvfp4", {}),
    ("sm_120a", "t128x8x256_s0a1_swap_k4", torch.float32, {"form": "ragged"}),
    ("sm_120a", "t128x64x128_s0a1", torch.bfloat16, SILU),
]
FIRST_WAIT_BIT, WAIT_BITS = 116, 6


def compiled(arch: str, config: KernelConfig, dtype=torch.float16, **form) -> tuple[bytes, tuple[int, ...]]:
    """A kernel's cubin, and the stages of the rings that warps read with their own instructions."""
    kernel = get_kernel(KernelKey(arch, config, 2, dtype, True, **form).validated())
    num_b = 2 if "activation" in form and "weight_layout" not in form else 1
    return kernel.cubin, stage_counts(arch, kernel.key.config, num_b)


def stage_counts(arch: str, config: KernelConfig, num_b: int) -> tuple[int, ...]:
    """None for sm_100a, because tensor cores read its stages, and warps only what they staged themselves."""
    if arch in sm90.ARCHS:
        plan = sm90.smem_plan(config, num_b)
        if sm90.shares_stages(config):
            return (plan.num_ab_stage,)
        return plan.num_ab_stage, plan.num_decoded_stage
    return (sm120.smem_plan(config, num_b).num_ab_stage,) if arch in sm120.ARCHS else ()


def without_waits(cubin: bytes) -> bytes:
    """Returns the kernel with all scoreboard waits removed."""
    words = read_instructions(cubin)
    old, new = (
        b"".join(struct.pack("<QQ", word & (1 << 64) - 1, word >> 64) for word in some)
        for some in (words, [word & ~(((1 << WAIT_BITS) - 1) << FIRST_WAIT_BIT) for word in words])
    )
    return cubin.replace(old, new)


@pytest.mark.parametrize("arch", FAMILIES)
def test_reads_are_done(arch):
    assert_reads_are_done(*compiled(arch, FAMILIES[arch].DEFAULT_CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "name", "dtype", "form"), SPREAD, ids=str)
def test_reads_are_done_in_other_kernels(arch, name, dtype, form):
    assert_reads_are_done(*compiled(arch, KernelConfig.from_name(name), dtype, **form))


@pytest.mark.parametrize("arch", FAMILIES)
def test_waits_that_are_missing_are_found(arch):
    """In a kernel without waits in its machine code, reads are reported where their stage is released."""
    cubin, counts = compiled(arch, FAMILIES[arch].DEFAULT_CONFIG)
    assert unfinished_reads(without_waits(cubin), counts)


def assert_reads_are_done(cubin: bytes, counts: tuple[int, ...]) -> None:
    assert not [str(finding) for finding in unfinished_reads(cubin, counts, "nvfp4_")]
