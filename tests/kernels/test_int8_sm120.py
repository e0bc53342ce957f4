"""INT8 on sm_120a: every bit is the reference's."""

import pytest
import torch
from int8_check import FORMATS, PAIR, check_extremes, check_list_masked_and_batched, check_ragged, some
from oracle import assert_bitwise_equal
from stage_release import unfinished_reads

import nvfp4_cute as nv
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.ops import parts
from nvfp4_cute.planning.arch import sm120
from nvfp4_cute.planning.config import KernelConfig

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_120a"


def config(n, teams=1, swap_ab=True, **settings):
    return KernelConfig((sm120.TILE_M, n, 128), num_acc_stage=teams, swap_ab=swap_ab, **settings)


CONFIGS = [
    (config(16, 2, num_cta=3), "random:1"),
    pytest.param(config(128, swap_ab=False, num_cta=2), "lazy", marks=SLOW),
    pytest.param(config(64, 2), "eager", marks=SLOW),
    pytest.param(config(32, 2, num_ab_stage=2, num_cta=3), "random:2", marks=SLOW),
    pytest.param(config(8, 2), "lazy", marks=SLOW),
    pytest.param(config(64, split_k=2, num_cta=4), "random:3", marks=SLOW),
    # Fewer K tiles than CTAs.
    pytest.param(config(8, split_k=8, num_cta=8), "lazy", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
]


@pytest.mark.parametrize(("chosen", "mode"), CONFIGS, ids=str)
def test_ragged(chosen, mode):
    check_ragged(136, 272, chosen, EMULATED, mode)


@SLOW
@pytest.mark.parametrize("chosen", [config(32, num_cta=2), config(64, swap_ab=False)], ids=str)
def test_list_masked_and_batched(chosen):
    check_list_masked_and_batched(chosen, EMULATED)


@SLOW
def test_on_sm121():
    check_ragged(200, 256, None, "emulator:sm_121a")


@SLOW
def test_extremes():
    check_extremes(EMULATED)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
def test_results_in_columns(out_dtype):
    x, w = some(40, 256), some(136, 256)
    got, want = (torch.zeros((136, 40), dtype=out_dtype).T for _ in range(2))
    parts.gemm(x, w, out=got, out_dtype=out_dtype, config=config(32, 2), backend=EMULATED)
    nv.gemm(x, w, out=want, out_dtype=out_dtype)
    assert_bitwise_equal(got, want)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("chosen", sm120.candidates(formats=PAIR), ids=lambda chosen: chosen.to_name())
def test_machine_code(chosen, form, out_dtype):
    """No spills, no calls, and no release of a stage before its reads are complete."""
    has_alpha = out_dtype != torch.int32
    kernel = get_kernel(KernelKey("sm_120a", chosen, 1, out_dtype, has_alpha, form, **FORMATS).validated())
    assert kernel.resources.stack_bytes == 0
    assert b"__cuda_syscall" not in kernel.cubin
    stages = (kernel.key.config.num_ab_stage,)
    assert not [str(finding) for finding in unfinished_reads(kernel.cubin, stages, "nvfp4_")]


def test_every_candidate_can_be_built():
    found = sm120.candidates(formats=PAIR)
    assert found and all(sm120.unsupported_reason(c, 1, PAIR) is None for c in found)


@pytest.mark.gpu("sm_120a")
@pytest.mark.parametrize("chosen", [c.values[0] if hasattr(c, "values") else c[0] for c in CONFIGS], ids=str)
def test_gpu_ragged(chosen):
    check_ragged(136, 272, chosen, "cuda", device="cuda")
