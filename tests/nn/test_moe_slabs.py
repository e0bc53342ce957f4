"""MoE holds 4-bit weights in slabs on sm_90a with 16-bit activations; files and state dicts hold rows."""

import copy

import pytest
import torch

from nvfp4_cute import MoE, MoENVFP4, int4_format, route
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_format import MXFP8_E4M3, NVFP4
from nvfp4_cute.formats.slabs import from_slabs, to_slabs
from nvfp4_cute.nn.by_rows import sharing
from nvfp4_cute.planning.arch import reads_slabs

E, H, I = 4, 256, 128
BACKEND = "emulator:sm_90a"


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(format=NVFP4):
    return (
        ExpertWeights.quantize(some(E, 2 * I, H) / 8, format),
        ExpertWeights.quantize(some(E, H, I, seed=1) / 8, format),
    )


def layer(format=NVFP4, backend=BACKEND, **options):
    options = {"activations": "16bit", "backend": backend} | options
    return MoE.from_quantized(*weights(format), **options)


def rows_of(w):
    return w.data.contiguous()


@pytest.mark.parametrize("format", [NVFP4, pytest.param(int4_format(32), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("tokens", [1, 80])
def test_results_are_those_of_rows(format, tokens):
    """Both for few rows, which warps multiply, and for many."""
    made, (w13, w2) = layer(format), weights(format)
    assert made.in_slabs
    assert torch.equal(made.w13, to_slabs(w13.data)) and torch.equal(made.w2, to_slabs(w2.data))
    in_rows = copy.deepcopy(made)
    in_rows.keeps_rows = True
    in_rows._apply(lambda tensor: tensor)
    assert not in_rows.in_slabs and torch.equal(in_rows.w13, w13.data)
    x, choice = some(tokens, H, seed=2).bfloat16(), route(some(tokens, E, seed=3), 2)
    assert torch.equal(made(x, *choice), in_rows(x, *choice))


def test_state_dicts_have_rows():
    """A layer with slabs is loaded in place, so captured graphs see the new weights."""
    made, (w13, w2) = layer(), weights()
    state = made.state_dict()
    assert torch.equal(state["w13"], rows_of(w13)) and torch.equal(state["w2"], rows_of(w2))
    on_cpu = MoENVFP4(E, H, I, activations="16bit")
    on_cpu.load_state_dict(state)
    assert not on_cpu.in_slabs and torch.equal(on_cpu.w13, w13.data)
    empty = MoENVFP4(E, H, I, activations="16bit", backend=BACKEND)
    address = empty.w13.data_ptr()
    assert empty.in_slabs
    empty.load_state_dict(state)
    assert empty.in_slabs and empty.w13.data_ptr() == address and torch.equal(empty.w13, made.w13)
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty.w13, made.w13) and torch.equal(state["w13"], rows_of(w13))


def test_a_refused_state_dict_leaves_weights_that_belong_together():
    made, state = layer(), layer().state_dict()
    before = from_slabs(made.w2)
    with pytest.raises(RuntimeError, match="size mismatch for w2"):
        made.load_state_dict(state | {"w2": state["w2"][:, :64]})
    assert torch.equal(from_slabs(made.w2), before)


def test_copies_and_moves():
    made = layer()
    copied = copy.deepcopy(made)
    assert copied.in_slabs and torch.equal(copied.w13, made.w13)
    assert not made.to("meta").in_slabs


def test_who_holds_rows():
    """The reference, quantized activations, 8-bit weights, other GPUs, parts of a slab, and weights of two layers."""
    assert not layer(backend="reference").in_slabs
    quantizing = layer(activations="nvfp4")
    assert not quantizing.in_slabs and not layer(MXFP8_E4M3).in_slabs
    assert not layer(backend="emulator:sm_100a").in_slabs and not layer(backend="emulator:sm_80").in_slabs
    assert reads_slabs("sm_90a", NVFP4, 256) and not reads_slabs("sm_90a", NVFP4, 192)
    shared = sharing(quantizing, (torch.ones(2, E), torch.ones(E)))
    assert shared.keeps_rows and not shared.in_slabs
