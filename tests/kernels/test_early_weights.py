"""Weights that are loaded while the launch before ends, on the emulator."""

import pytest
import torch
from device_groups_check import operands, run
from oracle import bits

from nvfp4_cute import KernelConfig, grouped_gemm
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.experts.gather import gather_quantize
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.planning.arch import family_of

ROWS = (0, 40, 130, 1, 0, 70)
# Rings that hold less than a tile's K, all of it, and more than one tile.
CONFIGS = (
    "t128x64x256_s3a2_swap_p3",
    "t128x64x256_s2a2_2cta_swap_p2",
    "t128x64x256_s7a2_2cta_swap_p4",
    "t128x128x256_s5a2_p2",
    "t128x64x256_s2a2_2cta_swap_m2_p8",
    "t128x64x256_s4a2_swap_k2_p4",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["eager", "lazy", "random:1"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("form", ["ragged", "masked"])
def test_same_bits(form, config, mode):
    arguments = operands(form, ROWS, n=300, k=736, slack=9) | {"early_weights": True}
    expected = run(arguments, "reference")
    with observe(mode=mode, check=True) as observer:
        actual = run(arguments, "emulator:sm_100a", config=KernelConfig.from_name(config))
    kernel = observer.plans[0].kernel
    assert kernel.key.early_weights and kernel.resources.stack_bytes == 0
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.parametrize(("tokens", "is_kept"), [(33, True), (8, False)])
def test_the_launch_before_may_not_write_sizes(tokens, is_kept):
    """Where there are few choices the launch that gathers rows finds their order, too."""
    ids = torch.arange(tokens * 2, dtype=torch.int32).view(tokens, 2) % 3
    w, w_scale = torch.zeros(3, 128, 32, dtype=torch.uint8), torch.zeros(3, 1, 1, 32, 4, 4, dtype=torch.uint8)
    with observe(check=True):
        data, scale, order = gather_quantize(torch.zeros(tokens, 64).bfloat16(), ids, 3, backend="emulator")
        assert order.is_older == is_kept
        multiply = lambda: grouped_gemm(
            data, w, scale, w_scale, order.offs, early_weights=True, backend="emulator"
        )
        if is_kept:
            assert not multiply().any()
        else:
            with pytest.raises(EmulatorError, match="pdl-order"):
                multiply()


@pytest.mark.parametrize(("arch", "form"), [("sm_90a", "ragged"), ("sm_120a", "ragged"), ("sm_100a", "list")])
def test_other_kernels_have_none(arch, form):
    config = family_of(arch, (NVFP4, NVFP4)).DEFAULT_CONFIG
    key = KernelKey(arch, config, 1, torch.bfloat16, False, form, early_weights=True)
    assert not key.validated().early_weights
