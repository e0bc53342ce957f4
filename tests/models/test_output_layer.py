"""Quantized output layers and embeddings: contents of files, and modules of the loader, tied or not."""

import json

import pytest
import torch
from tiny_models import SIZES, config_of, model_of

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from nvfp4_cute.bench.models.random_model import random_model  # noqa: E402
from nvfp4_cute.cli import main  # noqa: E402
from nvfp4_cute.errors import CheckpointError  # noqa: E402
from nvfp4_cute.models import transformers as ours  # noqa: E402
from nvfp4_cute.models.checkpoints import Checkpoint  # noqa: E402
from nvfp4_cute.models.inspect import inspect, kept_bytes, what_runs  # noqa: E402
from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint  # noqa: E402
from nvfp4_cute.models.quantizing.layouts import LAYOUTS  # noqa: E402
from nvfp4_cute.nn.decoded import KEPT_ROWS  # noqa: E402
from nvfp4_cute.nn.embedding import QuantizedEmbedding  # noqa: E402
from nvfp4_cute.nn.linear import QuantizedLinear  # noqa: E402

ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 160}
EMBEDDING, OUTPUT = "model.embed_tokens", "lm_head"


def tied_or_apart(tied):
    return model_of("qwen3", torch.bfloat16, **ONE_LAYER, tie_word_embeddings=tied)


@pytest.fixture(params=[True, False], ids=["tied", "apart"])
def model(request, tmp_path):
    made = tied_or_apart(request.param)
    made.save_pretrained(tmp_path / "in")
    return made


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(0, 160, 7).unsqueeze(0)).logits.double()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("lm_head", "embedding"),
    [("nvfp4", "nvfp4"), ("nvfp4", "mxfp8"), ("nvfp4", None), (None, "mxfp4"), ("nvfp4", "16bit")],
)
def test_round_trip(model, tmp_path, layout, lm_head, embedding):
    """The loaded model computes with the file's weights; a tied pair in one format is one matrix."""
    tied = model.config.tie_word_embeddings
    options = {"lm_head": lm_head, "embedding": embedding}
    done = quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="nvfp4a16", layout=layout, **options)
    loaded, decoded = (ours.load(tmp_path / "out", dtype=torch.bfloat16, decode=d) for d in (False, True))
    checkpoint = Checkpoint(tmp_path / "out")
    if tied:
        lm_head, embedding = lm_head or embedding, embedding or lm_head
    one = tied and lm_head == embedding
    stored = {name: checkpoint.linears.get(name) for name in (EMBEDDING, OUTPUT)}
    weights = {n: s and s.weights.removesuffix("_e4m3") for n, s in stored.items()}
    expected = {EMBEDDING: embedding, OUTPUT: None if one else lm_head}
    assert weights == {n: None if f == "16bit" else f for n, f in expected.items()}
    assert all(
        scheme is None or scheme.activations is None or name == EMBEDDING for name, scheme in stored.items()
    )
    table, output = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    assert isinstance(table, QuantizedEmbedding) == (embedding not in (None, "16bit"))
    if lm_head == "nvfp4":
        assert isinstance(output, QuantizedLinear) and output.mode == "16bit"
    assert one == (getattr(table, "weight", None) is getattr(output, "packed_weight", 0))
    got, reference = logits_of(loaded), logits_of(decoded)
    assert (got - reference).norm() < 0.03 * reference.norm()
    assert 0.05 * reference.norm() < (reference - logits_of(model)).norm() < 0.7 * reference.norm()
    assert done.layers == 7 + sum(f not in (None, "16bit") for f in expected.values())
    if embedding not in (None, "16bit"):
        kinds = {kind.name: kind for kind in inspect(checkpoint).kinds}
        assert what_runs(kinds[EMBEDDING]).startswith("QuantizedEmbedding")


def test_command(model, tmp_path, capsys):
    arguments = ["quantize", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--format", "nvfp4a16"]
    assert main([*arguments, "--lm-head", "nvfp4", "--embedding", "mxfp8"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    entry = config["quantization_config"]
    assert entry["quant_algo"] == "MIXED_PRECISION" and not config["tie_word_embeddings"]
    assert entry["quantized_layers"][OUTPUT]["quant_algo"] == "W4A16_NVFP4"
    assert entry["quantized_layers"][EMBEDDING] == {"quant_algo": "MXFP8", "group_size": 32}
    assert OUTPUT not in entry["ignore"] and EMBEDDING not in entry["ignore"]
    with pytest.raises(ValueError, match="'int4' is not a format of single layers"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "other", lm_head="int4")


def test_an_embedding_that_scales_its_rows(tmp_path):
    config = AutoConfig.for_model("gemma3_text", **SIZES | ONE_LAYER)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="nvfp4a16", embedding="nvfp4")
    with pytest.raises(CheckpointError, match="may scale or change rows.*without --embedding"):
        ours.load(tmp_path / "out", dtype=torch.bfloat16)


def test_a_layer_that_computes_something_else():
    """Such as DeepSeek-V4's grouped layers and Llama-4's router, both subclasses of torch.nn.Linear."""
    made = lambda name, **members: type(name, (torch.nn.Linear,), members)(64, 32)
    forward = lambda self, x: torch.nn.functional.linear(x, self.weight) * 2
    for plain in (torch.nn.Linear(64, 32), made("Renamed"), made("FalconLinear", forward=forward)):
        ours._check_linear("model.layers.0.proj", plain)
    with pytest.raises(CheckpointError, match="GroupedLinear has a forward of its own"):
        ours._check_linear("model.layers.0.proj", made("GroupedLinear", forward=forward))


@pytest.mark.parametrize("tied", [True, False])
def test_random_model(tied):
    torch.manual_seed(0)
    model = random_model(config_of("qwen3", **ONE_LAYER, tie_word_embeddings=tied), "all", "cpu")
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(output, QuantizedLinear) and (table.weight is output.packed_weight) == tied
    assert table.format.name == ("nvfp4" if tied else "mxfp8_e4m3")
    logits = logits_of(model)
    assert logits.isfinite().all() and logits.std() > 0


def test_kept_decoded_weights(tmp_path, capsys):
    """Dequantized weights multiply many rows; the inspection has their size; a missing folder is named."""
    torch.manual_seed(0)
    tied_or_apart(True).save_pretrained(tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="nvfp4a16")
    kept, decoded = (
        ours.load(tmp_path / "out", dtype=torch.bfloat16, **{o: True}) for o in ("keep_decoded", "decode")
    )
    assert all(m.keep_decoded for m in kept.modules() if isinstance(m, QuantizedLinear))
    ids = torch.arange(KEPT_ROWS).remainder(160).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(kept(ids).logits, decoded(ids).logits)
    assert kept_bytes(inspect(Checkpoint(tmp_path / "out"))) == 2 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 96)
    assert main(["models", "inspect", str(tmp_path / "out")]) == 0
    assert "(keep_decoded) take 61.44 kB more" in capsys.readouterr().out
    with pytest.raises(
        FileNotFoundError, match="folder-with-a-typo is not a folder; .* or a name on the hub: owner/name"
    ):
        ours.load("folder-with-a-typo")
    with pytest.raises(FileNotFoundError, match="none is not a folder"):
        ours.load(tmp_path / "none")
