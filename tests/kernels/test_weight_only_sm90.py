"""The weight-only grouped GEMM of sm_90a on the emulator: where sums are exact, every bit is the reference's."""

import pytest
import torch
from oracle import assert_bitwise_equal
from weight_only_check import (
    ROWS,
    config,
    dual,
    key_of,
    largest_candidates,
    on_gpu,
    run_both,
    task,
)

from nvfp4_cute import backends
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.errors import ConfigError, UnsupportedProblem
from nvfp4_cute.formats.codecs import decode_ue4m3
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.gpus.targets import H200
from nvfp4_cute.launch import workspace
from nvfp4_cute.planning.arch import sm90_weight_only as planning
from nvfp4_cute.planning.arch.warp_mma import COUNTER_BYTES
from nvfp4_cute.problem import Gate
from nvfp4_cute.reference import expand_operand

SLOW, SILU = pytest.mark.slow, Gate("silu", None, "separate")


def assert_same_bits(**arguments):
    for got, want in zip(*run_both(**arguments), strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("chosen", "dtype", "mode"),
    [
        (config(16, num_cta=2), torch.bfloat16, "random:1"),
        (config(32, multicast_n=2, num_cta=4), torch.float16, "lazy"),
        pytest.param(config(64, 256), torch.bfloat16, "eager", marks=SLOW),
        pytest.param(config(48, 256, multicast_n=2, num_cta=2), torch.bfloat16, "lazy", marks=SLOW),
        pytest.param(config(8, 256, num_cta=3), torch.float16, "random:2", marks=SLOW),
        pytest.param(config(24, split_k=2, num_cta=4), torch.bfloat16, "lazy", marks=SLOW),
        pytest.param(config(160, multicast_n=2, num_cta=2), torch.float16, "random:3", marks=SLOW),
    ],
    ids=str,
)
def test_ragged(chosen, dtype, mode):
    """Partial tiles in every direction, several per CTA, an odd number of K tiles, the last one partial, and rows of no group."""
    assert_same_bits(
        form="ragged", rows=ROWS, n=200, k=336, chosen=chosen, dtype=dtype, has_alpha=True, mode=mode
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("form", "mode"), [("masked", "random:1"), ("list", "lazy"), pytest.param("list", "random:2", marks=SLOW)]
)
def test_other_forms(form, mode):
    assert_same_bits(
        form=form, rows=ROWS, n=136, k=288, chosen=config(32, num_cta=3), out_dtype=torch.bfloat16, mode=mode
    )


def test_batches():
    assert_same_bits(form="batched", rows=(20, 20, 20), n=72, k=160, chosen=config(16, num_cta=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("split", "k", "mode"),
    [(4, 640, "random:1"), (2, 160, "lazy"), pytest.param(8, 1184, "random:2", marks=SLOW)],
)
def test_split_k(split, k, mode):
    """The CTAs of a cluster add their sums, also if some have no K tile. A cluster has several tiles."""
    chosen = config(16, split_k=split, num_cta=2 * split)
    assert_same_bits(form="ragged", rows=(20, 0, 9), n=136, k=k, chosen=chosen, mode=mode)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("chosen", "form", "mode"),
    [
        (config(32, stream_k=True, num_cta=7), "masked", "random:1"),
        (config(64, stream_k=True, num_cta=5), "list", "lazy"),
        (config(48, multicast_n=2, stream_k=True, num_cta=6), "ragged", "random:2"),
        pytest.param(config(128, multicast_n=2, stream_k=True, num_cta=6), "ragged", "eager", marks=SLOW),
        pytest.param(config(32, 256, stream_k=True, num_cta=3), "batched", "random:3", marks=SLOW),
    ],
)
def test_stream_k(chosen, form, mode):
    """Clusters share tiles through memory, and reset the flags in it."""
    rows = (9,) * 3 if form == "batched" else (20, 0, 9, 70)
    arguments = dict(form=form, rows=rows, n=300, k=672, chosen=chosen, out_dtype=torch.bfloat16)
    assert_same_bits(mode=mode, **arguments)
    memory = workspace.take(None, 0, 0, counters=True).memory
    assert memory[COUNTER_BYTES:].any() and not memory[:COUNTER_BYTES].any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("activation", ["relu2", "silu"])
@pytest.mark.parametrize(
    ("layout", "chosen"),
    [
        ("separate", dual(32, multicast_n=2, num_cta=4)),
        ("separate", dual(16, split_k=2, num_cta=2)),
        ("separate", dual(32, stream_k=True, num_cta=5)),
        ("interleaved_64_up_first", config(16, num_cta=1)),
        ("interleaved_32_gate_first", config(64, 256, num_cta=1)),
    ],
)
def test_dual(layout, chosen, activation):
    """A squared ReLU of exact sums is exact.

    SiLU's exponential on the GPU is approximate, more so for large x, because its argument x / ln 2 is rounded.
    """
    gate = Gate(activation, 40.0, layout)
    got, want = run_both(
        form="ragged", rows=ROWS, n=192, k=160, chosen=chosen, gate=gate, has_alpha=True, mode="random:1"
    )
    if activation == "relu2":
        assert_bitwise_equal(got[0], want[0])
    else:
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_weight_is_exact(dtype):
    """All e2m1 codes times all finite scales times 1. The sign of a scale is ignored."""
    made = task("list", (16,), 256, 32, config(16), dtype)
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    (weights,), (a,) = made.operands.b, (made.operands.a[0].data,)
    b = weights.data
    b[:] = 0
    b[0, :, :8] = (torch.arange(8) * 2 | (torch.arange(8) * 2 + 1) << 4).byte()
    a[:] = 0
    a[0, torch.arange(16), torch.arange(16)] = 1
    scale = torch.zeros(256, 4, dtype=torch.uint8)
    scale[:, 0] = codes
    weights.scale[0] = to_blocked(scale).flatten()
    with observe(check=True):
        backends.run_task("emulator:sm_90a", made)
    want = expand_operand(b[0], weights.scale[0], "blocked")[:, :16].T
    assert torch.equal(made.operands.out[0][0].double(), want)
    assert decode_ue4m3(codes).unique().numel() == 127


def test_nan_scale_and_infinite_token():
    """A NaN scale makes its column NaN, and a non-finite token affects only its row."""
    arguments = dict(form="ragged", rows=(5, 9), n=136, k=128, chosen=config(16))
    made, expected = task(**arguments), task(**arguments)
    for one in (made, expected):
        one.operands.b[0].scale[1, 0] = 0x7F  # group 1, row 0, block 0
        one.operands.a[0].data[0, 7, 3] = float("inf")
    with observe(check=True):
        backends.run_task("emulator:sm_90a", made)
    expected.reference()
    (got,), (want,) = made.operands.out, expected.operands.out
    assert got[0, 5:14, 0].isnan().all() and not got[0, :5].isnan().any()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.slow
def test_chosen_config():
    """A call without a config chooses one and computes with it."""
    made = task("ragged", (30, 0, 70), 264, 512, None)
    assert planning.unsupported_reason(made.config_on(H200.gpu)) is None
    assert_same_bits(form="ragged", rows=(30, 0, 70), n=264, k=512, chosen=None)


def test_refusals():
    for settings, part in (
        ({"decode_first": True}, "use decode_first=False"),
        ({"multicast_n": 2, "split_k": 2}, "use multicast_n=1"),
        ({"multicast_n": 4}, "use multicast_n=1"),
        ({"stream_k": True, "split_k": 2}, "use split_k=1"),
        ({"split_k": 8}, "use split_k=4"),
        ({"num_ab_stage": 40}, "use 2 to"),
    ):
        with pytest.raises(ConfigError, match=part):
            key_of(config(64, **settings))
    for chosen, part in (
        (config(20), "use N tile 24"),
        (config(64, 64), "use K tile 128"),
        (dual(64), "use M tile 128"),
    ):
        with pytest.raises(ConfigError, match=part):
            key_of(chosen)
    with pytest.raises(ConfigError, match="sm_100a: weights are on the M side"):
        key_of(config(32), arch="sm_100a")
    with pytest.raises(UnsupportedProblem, match="quantize them"):
        key_of(config(64), out_dtype="nvfp4")


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chosen", largest_candidates(), ids=lambda chosen: chosen.to_name())
def test_on_a_gpu(chosen, dtype):
    """Many launches all return the reference's bits."""
    made = task("ragged", (40, 0, 300, 1, 129), 520, 2080, chosen, dtype)
    moved = on_gpu(made)
    made.reference()
    for _ in range(20):
        backends.run_task("cuda", moved)
        assert_bitwise_equal(moved.operands.out[0][:, :470].cpu(), made.operands.out[0][:, :470])
