"""INT8 on sm_100a: every bit is the reference's. sm_103a, whose tensor cores do not multiply integers, refuses it."""

import pytest
import torch
from int8_check import FORMATS, PAIR, check_extremes, check_list_masked_and_batched, check_ragged, some
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.ops import parts
from nvfp4_cute.planning.arch import sm100_int8
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_100a"


def config(n, stages=2, **settings):
    return KernelConfig((128, n, 128), num_acc_stage=stages, **settings)


CONFIGS = [
    (config(64, 4, swap_ab=True, num_cta=3), "random:1"),
    pytest.param(config(128, num_cta=2), "lazy", marks=SLOW),
    pytest.param(config(256, use_2cta_instrs=True), "eager", marks=SLOW),
    pytest.param(config(192, swap_ab=True, use_2cta_instrs=True, num_cta=4), "lazy", marks=SLOW),
    pytest.param(config(64, swap_ab=True, split_k=4, num_cta=8), "random:2", marks=SLOW),
    # Fewer K tiles than CTAs.
    pytest.param(config(64, swap_ab=True, split_k=8, num_cta=8), "lazy", marks=SLOW),
    pytest.param(config(128, swap_ab=True, multicast_n=2, num_ab_stage=2), "random:3", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
]


@pytest.mark.parametrize(("chosen", "mode"), CONFIGS, ids=str)
def test_ragged(chosen, mode):
    check_ragged(200, 400, chosen, EMULATED, mode)


@SLOW
@pytest.mark.parametrize("chosen", [config(64, swap_ab=True), config(128, use_2cta_instrs=True)], ids=str)
def test_list_masked_and_batched(chosen):
    check_list_masked_and_batched(chosen, EMULATED)


@SLOW
def test_extremes():
    check_extremes(EMULATED)


@SLOW
def test_on_sm110():
    check_ragged(200, 256, None, "emulator:sm_110a")


def test_sm103_refuses_it():
    x, w = some(9, 128), some(16, 128)
    with pytest.raises(nv.UnsupportedProblem, match="^sm_103a: no kernel for int8 x int8"):
        nv.gemm(x, w, backend="emulator:sm_103a")


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("swap_ab", [False, True])
def test_results_in_columns(out_dtype, swap_ab):
    x, w = some(40, 256), some(136, 256)
    got, want = (torch.zeros((136, 40), dtype=out_dtype).T for _ in range(2))
    chosen = config(64, swap_ab=swap_ab)
    parts.gemm(x, w, out=got, out_dtype=out_dtype, config=chosen, backend=EMULATED)
    nv.gemm(x, w, out=want, out_dtype=out_dtype)
    assert_bitwise_equal(got, want)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("chosen", sm100_int8.CANDIDATES, ids=lambda chosen: chosen.to_name())
def test_no_spills(chosen, form, out_dtype):
    has_alpha = out_dtype != torch.int32
    kernel = get_kernel(KernelKey("sm_100a", chosen, 1, out_dtype, has_alpha, form, **FORMATS).validated())
    assert kernel.resources.stack_bytes == 0


@pytest.mark.parametrize(
    ("chosen", "fix"),
    [
        (config(96), "use one of"),
        (config(256, 3), "use num_acc_stage=2"),
        (KernelConfig((128, 64, 256), num_acc_stage=2), "use K tile 128"),
    ],
    ids=str,
)
def test_a_refusal_names_the_nearest_legal_value(chosen, fix):
    assert fix in sm100_int8.unsupported_reason(chosen)


def test_what_is_chosen():
    """Few tokens are on the N side. Problems that are large in both directions use pairs of CTAs."""
    few, many = (
        choose_config(GroupedProblem(((m, 4096, 4096),), a_format=PAIR[0], b_format=PAIR[1]), "sm_100a", 148)
        for m in (1, 4096)
    )
    assert few.swap_ab and few.cta_tile_shape_mnk[1] == 64 and many.use_2cta_instrs


@pytest.mark.gpu("sm_100a")
@pytest.mark.parametrize("chosen", [c.values[0] if hasattr(c, "values") else c[0] for c in CONFIGS], ids=str)
def test_gpu_ragged(chosen):
    check_ragged(200, 400, chosen, "cuda", device="cuda")
