"""INT8 on every family of GPUs: every bit is the reference's."""

import flat_parts as parts
import pytest
import torch
from fp8_check import ENDS, check_ends, on_sm90, on_sm100, on_sm120, variants
from int8_check import FORMATS, PAIR, some
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.block_format import MAX_INTEGER_K
from nvfp4_cute.planning.arch import sm90_fp8, sm100_int8, sm120
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

SLOW = pytest.mark.slow
# The first config of a family is fast.
CONFIGS = {
    "sm_90a": [
        (on_sm90(64, 256, num_cta=2), "lazy"),
        (on_sm90(16, num_cta=3), "random:1"),
        (on_sm90(128, 256), "eager"),
        (on_sm90(96, multicast_n=2, num_cta=4), "lazy"),
        (on_sm90(192), "random:2"),
        (on_sm90(128, 256, multicast_n=2, num_ab_stage=2), "random:3"),
        (on_sm90(32, split_k=2, num_cta=4), "lazy"),
        (on_sm90(8, split_k=8, num_cta=8), "random:4"),
        (None, "eager"),
    ],
    "sm_100a": [
        (on_sm100(64, True, 4, num_cta=3), "random:1"),
        (on_sm100(128, num_cta=2), "lazy"),
        (on_sm100(256, use_2cta_instrs=True), "eager"),
        (on_sm100(192, True, use_2cta_instrs=True, num_cta=4), "lazy"),
        (on_sm100(64, True, split_k=4, num_cta=8), "random:2"),
        # Fewer K tiles than CTAs.
        (on_sm100(64, True, split_k=8, num_cta=8), "lazy"),
        (on_sm100(128, True, multicast_n=2, num_ab_stage=2), "random:3"),
        (None, "eager"),
    ],
    "sm_120a": [
        (on_sm120(16, 2, num_cta=3), "random:1"),
        (on_sm120(128, swap_ab=False, num_cta=2), "lazy"),
        (on_sm120(64, 2), "eager"),
        (on_sm120(32, 2, num_ab_stage=2, num_cta=3), "random:2"),
        (on_sm120(8, 2), "lazy"),
        (on_sm120(64, split_k=2, num_cta=4), "random:3"),
        # Fewer K tiles than CTAs.
        (on_sm120(8, split_k=8, num_cta=8), "lazy"),
        (None, "eager"),
    ],
}


def check_ragged(n, k, chosen, backend, mode="eager", device="cpu"):
    """Checks ragged groups: empty ones, groups that end inside a tile, and rows that belong to no group."""
    alpha = torch.tensor([0.3, -2.0, 1.0, 4.0, 0.25])
    check_ends(some(120, k), some(len(ENDS), n, k), alpha, chosen, backend, mode, device)


@pytest.mark.parametrize(("arch", "chosen", "mode"), variants(CONFIGS))
def test_ragged(arch, chosen, mode):
    check_ragged(*((136, 272) if arch == "sm_120a" else (200, 400)), chosen, f"emulator:{arch}", mode)


@pytest.mark.parametrize(("arch", "chosen", "mode"), variants(CONFIGS, on_gpu=True))
def test_gpu_ragged(arch, chosen, mode):
    check_ragged(*((136, 272) if arch == "sm_120a" else (200, 400)), chosen, "cuda", device="cuda")


@SLOW
@pytest.mark.parametrize("arch", ["sm_110a", "sm_121a"])
def test_on_the_rest_of_a_family(arch):
    check_ragged(200, 256, None, f"emulator:{arch}")


def test_sm103_refuses_it():
    """Its tensor cores do not multiply integers."""
    x, w = some(9, 128), some(16, 128)
    with pytest.raises(nv.UnsupportedProblem, match="^sm_103a: no kernel for int8 x int8"):
        nv.gemm(x, w, backend="emulator:sm_103a")


@SLOW
@pytest.mark.parametrize(
    ("arch", "chosen"),
    [
        ("sm_90a", on_sm90(32, split_k=4, num_cta=8)),
        ("sm_90a", on_sm90(32, 256, multicast_n=2)),
        ("sm_100a", on_sm100(64, True)),
        ("sm_100a", on_sm100(128, use_2cta_instrs=True)),
        ("sm_120a", on_sm120(32, num_cta=2)),
        ("sm_120a", on_sm120(64, swap_ab=False)),
    ],
    ids=str,
)
def test_list_masked_and_batched(arch, chosen):
    """Different sizes, an empty group, and K and N that end inside a tile. Rows of no group stay unchanged. Also int32 sums."""
    how = {"config": chosen, "backend": f"emulator:{arch}"}
    a = [some(m, k) for m, k in ((40, 272), (0, 128), (66, 128))]
    b = [some(n, x.shape[1], seed=n) for n, x in zip((200, 64, 300), a, strict=True)]
    x, w, sizes = some(3, 50, 256), some(3, 200, 256), torch.tensor([3, 0, 50], dtype=torch.int32)
    with observe(check=True):
        got = parts.grouped_gemm(a, b, out_dtype=torch.int32, **how)
        scaled = parts.gemm(x, w, out_dtype=torch.bfloat16, **how)
    for result, left, right in zip(got, a, b, strict=True):
        assert torch.equal(result, (left.data.long() @ right.data.long().T).int())
    assert_bitwise_equal(scaled, nv.gemm(x, w, out_dtype=torch.bfloat16))
    outs = [torch.full((3, 50, 200), torch.nan) for _ in range(2)]
    for out, settings in zip(outs, (how, {}), strict=True):
        parts.grouped_gemm(x, w, masked_m=sizes, out=out, out_dtype=torch.float32, **settings)
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))


@SLOW
@pytest.mark.parametrize("arch", CONFIGS)
def test_extremes(arch):
    """The largest sum that int32 holds, NaN and infinite scales, zeros times a negative scale, and rows with a pitch."""
    backend, k = f"emulator:{arch}", MAX_INTEGER_K // 16 * 16
    low = torch.full((1, k), -128, dtype=torch.int8)
    sums = parts.gemm(low, low, out_dtype=torch.int32, backend=backend, **FORMATS)
    assert sums.item() == 2**14 * k < 2**31
    x, w = some(33, 256), some(130, 256)
    x.scale[3], x.scale[4], w.scale[5] = torch.nan, torch.inf, -1.0
    x.data[7] = 0
    buffers = [torch.full((33, 144), 7.0, dtype=torch.float16) for _ in range(2)]
    for buffer, one in zip(buffers, (backend, "reference"), strict=True):
        nv.gemm(x, w, alpha=0.75, out=buffer[:, :130], out_dtype=torch.float16, backend=one)
    nan = buffers[1].isnan()
    assert nan[3, :130].all() and torch.equal(buffers[0].isnan(), nan)
    assert torch.equal(*(buffer.masked_fill(nan, 0.0).view(torch.int16) for buffer in buffers))


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("arch", "chosen"),
    [("sm_100a", on_sm100(64)), ("sm_100a", on_sm100(64, True)), ("sm_120a", on_sm120(32, 2))],
    ids=str,
)
def test_results_in_columns(arch, chosen, out_dtype):
    x, w = some(40, 256), some(136, 256)
    got, want = (torch.zeros((136, 40), dtype=out_dtype).T for _ in range(2))
    parts.gemm(x, w, out=got, out_dtype=out_dtype, config=chosen, backend=f"emulator:{arch}")
    nv.gemm(x, w, out=want, out_dtype=out_dtype)
    assert_bitwise_equal(got, want)


@pytest.mark.parametrize(
    ("chosen", "fix"),
    [
        (on_sm100(96), "use one of"),
        (on_sm100(256, num_acc_stage=3), "use num_acc_stage=2"),
        (KernelConfig((128, 64, 256), num_acc_stage=2), "use K tile 128"),
    ],
    ids=str,
)
def test_a_refusal_names_the_nearest_legal_value(chosen, fix):
    assert fix in sm100_int8.unsupported_reason(chosen)


def test_refusals_of_other_families():
    assert "use N tile 48" in sm90_fp8.unsupported_reason(on_sm90(40), formats=PAIR)
    assert sm90_fp8.unsupported_reason(on_sm90(40)) is None
    found = sm120.candidates(formats=PAIR)
    assert found and all(sm120.unsupported_reason(c, 1, PAIR) is None for c in found)


def test_what_is_chosen():
    """Few tokens are on the N side. Problems that are large in both directions use pairs of CTAs."""
    few, many = (
        choose_config(GroupedProblem(((m, 4096, 4096),), a_format=PAIR[0], b_format=PAIR[1]), "sm_100a", 148)
        for m in (1, 4096)
    )
    assert few.swap_ab and few.cta_tile_shape_mnk[1] == 64 and many.use_2cta_instrs


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(
    "chosen", [on_sm90(128, 256), on_sm90(128, 256, multicast_n=2), on_sm90(16)], ids=str
)
def test_every_launch_gives_the_same_bits_on_the_gpu(chosen):
    """Stages are refilled as soon as they are released."""
    x, w = (t.to("cuda") for t in (some(512, 8192), some(4096, 8192)))
    outs = [parts.gemm(x, w, config=chosen, out_dtype=torch.int32) for _ in range(40)]
    want = (x.data.double() @ w.data.double().T).int()
    assert not [i for i, out in enumerate(outs) if not torch.equal(out, want)]
