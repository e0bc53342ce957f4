"""Embeddings with quantized tables return rows of the dequantized table."""

import pytest
import torch

from nvfp4_cute import MXFP4, MXFP8_E4M3, NVFP4, QuantizedLinear, dequantize, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.block_format import FP8_128x128
from nvfp4_cute.nn.embedding import QuantizedEmbedding

V = 300  # rows of two whole atoms of scales and part of a third


def ids():
    return torch.tensor([[0, 31, 32, 127, 128], [255, 256, V - 1, 5, 5]])


def embedding_of(format, k, backend="auto"):
    torch.manual_seed(0)
    return QuantizedEmbedding.from_embedding(torch.nn.Embedding(V, k).bfloat16(), format, backend=backend)


@pytest.mark.parametrize(("format", "k"), [(NVFP4, 48), (NVFP4, 576), (MXFP4, 96), (MXFP8_E4M3, 64)])
def test_rows(format, k):
    embedding = embedding_of(format, k)
    whole = dequantize(embedding.table, torch.bfloat16)
    got = embedding(ids())
    assert got.dtype == torch.bfloat16 and torch.equal(got, whole[ids()])
    assert torch.equal(embedding(ids().int()), got) and embedding(ids()[:, :0]).shape == (2, 0, k)
    with pytest.raises(IndexError):
        embedding(torch.tensor([V]))


def test_a_traced_graph():
    embedding = embedding_of(NVFP4, 64)
    traced = torch.compile(embedding, backend="eager", fullgraph=True)
    assert torch.equal(traced(ids()), embedding(ids()))


@pytest.mark.parametrize("format", [NVFP4, MXFP8_E4M3])
def test_one_launch_decodes_the_rows(format):
    embedding = embedding_of(format, 64, "emulator:sm_90a")
    with observe(check=True) as observer:
        got = embedding(ids())
    assert len(observer.stats) == 1
    assert torch.equal(got, dequantize(embedding.table, torch.bfloat16, backend="reference")[ids()])


def test_tied_to_an_output_layer():
    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, V, bias=False).bfloat16(), activations="16bit")
    embedding = QuantizedEmbedding(layer.quantized_weight)
    assert embedding.weight is layer.packed_weight and embedding.weight_scale is layer.weight_scale
    assert torch.equal(embedding(ids()), layer.weight[ids()])


def test_state_and_dtype():
    """A state dict loads; ``.to(dtype)`` changes the dtype of rows and no bit of the table."""
    source, target = embedding_of(NVFP4, 64), QuantizedEmbedding.from_embedding(torch.nn.Embedding(V, 64))
    target.load_state_dict(source.state_dict())
    target.half()
    assert target(ids()).dtype == torch.float16 and target.weight_scale.dtype == torch.float8_e4m3fn
    assert torch.equal(target(ids()).float(), source.float()(ids()).half().float())


def test_refusals():
    class Scaled(torch.nn.Embedding):
        pass

    with pytest.raises(TypeError, match="Scaled, which may scale"):
        QuantizedEmbedding.from_embedding(Scaled(4, 32))
    with pytest.raises(ValueError, match="max_norm"):
        QuantizedEmbedding.from_embedding(torch.nn.Embedding(4, 32, max_norm=1.0))
    with pytest.raises(
        TypeError, match="ids has dtype torch.float32; expected rows of the table in int32 or int64"
    ):
        embedding_of(NVFP4, 64)(ids().float())
    with pytest.raises((TypeError, ValueError), match="format='mxfp5'"):
        QuantizedEmbedding.from_embedding(torch.nn.Embedding(4, 32), "mxfp5")
    with pytest.raises(TypeError, match="table is a Tensor; pass a BlockScaledTensor"):
        QuantizedEmbedding(torch.ones(4, 32))
    with pytest.raises(ValueError, match="fp8_128x128; an embedding has"):
        QuantizedEmbedding(quantize(torch.ones(4, 128), format=FP8_128x128))
