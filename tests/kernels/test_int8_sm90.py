"""INT8 on sm_90a: every bit is the reference's."""

import pytest
import torch
from int8_check import FORMATS, PAIR, check_extremes, check_list_masked_and_batched, check_ragged, some
from stage_release import unfinished_reads

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.ops import parts
from nvfp4_cute.planning.arch import sm90_fp8
from nvfp4_cute.planning.config import KernelConfig

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_90a"


def config(tokens, weights=128, **settings):
    return KernelConfig((weights, tokens, 128), num_acc_stage=1, swap_ab=True, **settings)


CONFIGS = [
    (config(64, 256, num_cta=2), "lazy"),
    pytest.param(config(16, num_cta=3), "random:1", marks=SLOW),
    pytest.param(config(128, 256), "eager", marks=SLOW),
    pytest.param(config(96, multicast_n=2, num_cta=4), "lazy", marks=SLOW),
    pytest.param(config(192), "random:2", marks=SLOW),
    pytest.param(config(128, 256, multicast_n=2, num_ab_stage=2), "random:3", marks=SLOW),
    pytest.param(config(32, split_k=2, num_cta=4), "lazy", marks=SLOW),
    pytest.param(config(8, split_k=8, num_cta=8), "random:4", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
]


@pytest.mark.parametrize(("chosen", "mode"), CONFIGS, ids=str)
def test_ragged(chosen, mode):
    check_ragged(200, 400, chosen, EMULATED, mode)


@SLOW
@pytest.mark.parametrize(
    "chosen", [config(32, split_k=4, num_cta=8), config(32, 256, multicast_n=2)], ids=str
)
def test_list_masked_and_batched(chosen):
    check_list_masked_and_batched(chosen, EMULATED)


@SLOW
def test_extremes():
    check_extremes(EMULATED)


@SLOW
def test_registers_and_release():
    """No spills, and no release of a stage before its reads are complete."""
    for chosen, dtype in ((config(128, 256, multicast_n=2), torch.bfloat16), (config(192), torch.int32)):
        key = KernelKey("sm_90a", chosen, 1, dtype, dtype != torch.int32, **FORMATS).validated()
        kernel = get_kernel(key)
        assert kernel.resources.stack_bytes == 0
        stages = sm90_fp8.smem_plan(key.config, formats=PAIR).num_ab_stage
        assert not [str(finding) for finding in unfinished_reads(kernel.cubin, (stages,), "nvfp4_")]


@SLOW
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("chosen", sm90_fp8.candidates(formats=PAIR), ids=lambda chosen: chosen.to_name())
def test_no_spills(chosen, form):
    key = KernelKey("sm_90a", chosen, 1, torch.bfloat16, True, form, **FORMATS).validated()
    assert get_kernel(key).resources.stack_bytes == 0


def test_a_refusal_names_the_nearest_legal_value():
    assert "use N tile 48" in sm90_fp8.unsupported_reason(config(40), formats=PAIR)
    assert sm90_fp8.unsupported_reason(config(40)) is None


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("chosen", [c.values[0] if hasattr(c, "values") else c[0] for c in CONFIGS], ids=str)
def test_gpu_ragged(chosen):
    check_ragged(200, 400, chosen, "cuda", device="cuda")


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("chosen", [config(128, 256), config(128, 256, multicast_n=2), config(16)], ids=str)
def test_every_launch_gives_the_same_bits_on_the_gpu(chosen):
    """Stages are refilled as soon as they are released."""
    x, w = (t.to("cuda") for t in (some(512, 8192), some(4096, 8192)))
    outs = [parts.gemm(x, w, config=chosen, out_dtype=torch.int32) for _ in range(40)]
    want = (x.data.double() @ w.data.double().T).int()
    assert not [i for i, out in enumerate(outs) if not torch.equal(out, want)]
