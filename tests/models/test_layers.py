"""Modules of stored layers against products of their dequantized weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import MODELOPT, experts, write

from nvfp4_cute import MXFP4, MoE, quantize, set_batch_invariant
from nvfp4_cute.activation import Activation
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints import Checkpoint
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredLinear
from nvfp4_cute.models.layers import embedding_module, experts_module, linear_module, product_sizes
from nvfp4_cute.nn.experts import ModelExperts, SortedExperts

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
PREFIX = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("is_equal", [True, False])
@torch.no_grad()
def test_gate_and_up_of_64_rows(tmp_path, is_equal):
    """The fused kernel does not take rows with two global scales, so there are two products, and nothing is refused."""
    tensors = experts(PREFIX, width=64, features=64)
    if is_equal:
        for e in range(3):
            tensors[f"{PREFIX}.{e}.up_proj.weight_scale_2"] = tensors[
                f"{PREFIX}.{e}.gate_proj.weight_scale_2"
            ]
    stored = Checkpoint(write(tmp_path, tensors, MODELOPT)).read_experts(PREFIX)
    module = experts_module(stored, "silu", dtype=torch.bfloat16, device="cpu")
    assert isinstance(module, ModelExperts if is_equal else SortedExperts)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0], [1], [2], [1]])
    y = module(x, ids, torch.ones(4, 1))
    w13 = stored.w13.dequantize() * stored.w13_global.repeat_interleave(64, 1).unsqueeze(-1)
    w2 = stored.w2.dequantize() * stored.w2_global[:, None, None]
    for row, e, got in zip(x.float(), ids[:, 0].tolist(), y.double(), strict=True):
        gate, up = (w13[e] @ row).chunk(2)
        exact = (w2[e] @ (torch.nn.functional.silu(gate) * up)).double()
        assert (got - exact).norm() < 0.3 * exact.norm()


@torch.no_grad()
def test_a_global_scale_for_each_row(tmp_path):
    """As the caller asks; and of batch-invariant layers, where the checkpoint has no scale of activations."""
    stored = Checkpoint(write(tmp_path, experts(PREFIX, width=64, features=64), MODELOPT)).read_experts(
        PREFIX
    )
    weight = quantize(torch.randn(32, 64), global_scale="auto", scale_layout="rowmajor")
    layer = StoredLinear("layer", Scheme("NVFP4", "nvfp4", "nvfp4"), weight, torch.tensor(0.01))
    how = {"dtype": torch.bfloat16, "device": "cpu"}
    without = replace(stored, w13_input=None, w2_input=None), replace(layer, input_scale=None)
    for (of_experts, of_layer), own, is_invariant in (
        ((stored, layer), {"activations": "nvfp4_per_row"}, False),
        (without, {}, True),
    ):
        with set_batch_invariant(is_invariant):
            module = experts_module(of_experts, "silu", **how, **own)
            linear = linear_module(of_layer, None, **how, **own)
        assert linear.mode == "nvfp4_per_row" and linear.input_global_scale is None
        x = (torch.randn(4, 64) * torch.logspace(-4, 4, 4)[:, None]).bfloat16()
        ids, ones = torch.tensor([[0], [1], [2], [1]]), torch.ones(4, 1)
        assert torch.equal(linear(x)[2:3], linear(x[2:3]))
        assert torch.equal(module(x, ids, ones)[2:3], module(x[2:3], ids[2:3], ones[:1]))
        assert module.experts.activations == "nvfp4_per_row" if isinstance(module, ModelExperts) else True


@torch.no_grad()
def test_biases_of_a_model_in_float32():
    """Rows in float32 are rounded for the kernel, and biases have the dtype of the rounded rows."""
    stored = Checkpoint(DATA / "modelopt-gptoss-nvfp4").read_experts(PREFIX)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.full((3, 2), 0.5)
    y, expected = (
        experts_module(stored, Activation("swiglu_oai", 7.0), dtype=dtype, device="cpu")(
            x.to(dtype), ids, weights
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert y.dtype == torch.float32 and torch.equal(y.bfloat16(), expected)


@torch.no_grad()
def test_gate_and_up_of_any_width_take_one_launch():
    """Rows of gate and up, and their biases, take turns where one launch cannot read two halves."""
    generator = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(3, n, k, generator=generator) / 8 for n, k in ((192, 128), (128, 96)))
    sides = [quantize(w, format=MXFP4, scale_layout="rowmajor") for w in (w13, w2)]
    bias13, bias2 = (torch.randn(3, n, generator=generator).bfloat16() for n in (192, 128))
    stored = StoredExperts(
        "experts",
        Scheme("MXFP4", "mxfp4", None),
        sides[0],
        None,
        sides[1],
        None,
        None,
        None,
        bias13,
        bias2,
        has_gate=True,
    )
    module = experts_module(stored, Activation("swiglu_oai", 7.0), dtype=torch.bfloat16, device="cpu")
    layer = module.experts
    assert layer.weight_layout == "interleaved_32_gate_first"
    x, ids, weights = (
        torch.randn(4, 128, generator=generator).bfloat16(),
        torch.tensor([[0], [2], [1], [1]]),
        torch.ones(4, 1),
    )
    want = MoE.from_quantized(
        *sides, bias13=bias13, bias2=bias2, activations="16bit", activation=Activation("swiglu_oai", 7.0)
    )
    assert want.weight_layout == "concatenated"
    exact = want(x, ids, weights)  # the other layer rounds gate and up to bfloat16
    assert (module(x, ids, weights) - exact).norm() < 0.01 * exact.norm()


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "layout"),
    [("emulator:sm_100a", "interleaved_32_gate_first"), ("emulator:sm_90a", "concatenated"), ("reference", "concatenated")],
)  # fmt: skip
def test_nvfp4_rows_take_one_launch_where_tensor_cores_multiply_fp4(backend, layout):
    generator = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(3, n, k, generator=generator) / 8 for n, k in ((192, 128), (128, 96)))
    sides = [quantize(w, scale_layout="rowmajor") for w in (w13, w2)]
    bias13 = torch.randn(3, 192, generator=generator).bfloat16()
    scheme = Scheme("NVFP4", "nvfp4", "nvfp4")
    one = torch.ones(3)
    stored = StoredExperts(
        "experts", scheme, sides[0], one[:, None], sides[1], one, one, one, bias13, None, has_gate=True
    )
    own = {"dtype": torch.bfloat16, "device": "cpu"}
    module = experts_module(stored, Activation("swiglu_oai", 7.0), **own, backend=backend)
    assert module.experts.weight_layout == layout


@pytest.mark.parametrize("own", [{"order": torch.arange(64).flip(0)}, {"pre_scale": torch.full((64,), 2.0)}])
def test_an_embedding_has_no_activations(own):
    """An embedding cannot reorder or scale its input, so such weights are refused."""
    weight = quantize(torch.zeros(16, 64), scale_layout="rowmajor")
    stored = StoredLinear("model.embed_tokens", Scheme("NVFP4_AWQ", "nvfp4", None), weight, None, **own)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens is an embedding with an order of K"):
        embedding_module(stored, dtype=torch.bfloat16, device="cpu")


def test_merged_parts_are_one_product_if_their_numbers_agree():
    same, other = torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.25])
    orders = torch.tensor([[0, 1], [0, 1]])
    assert product_sizes([64, 32], [same, orders]) == product_sizes([64, 32], []) == [96]
    assert product_sizes([64, 32], [orders, other]) == product_sizes([64, 32], [orders.tril()]) == [64, 32]
