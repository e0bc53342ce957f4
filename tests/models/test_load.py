"""``load`` and ``quantize`` on whole folders: options, model classes, dtypes, saving."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import MODELOPT, nvfp4, write

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402

from nvfp4_cute.errors import CheckpointError  # noqa: E402
from nvfp4_cute.models import transformers as ours  # noqa: E402
from nvfp4_cute.models.checkpoints import Checkpoint  # noqa: E402
from nvfp4_cute.models.checkpoints.tensors import INDEX  # noqa: E402
from nvfp4_cute.models.quantizing.calibrate import samples  # noqa: E402
from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint  # noqa: E402
from nvfp4_cute.nn.replace import replace_linears  # noqa: E402
from nvfp4_cute.nn.rounded import RoundedInput  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
CT, MOE = DATA / "ct-qwen3-nvfp4", DATA / "modelopt-qwen3moe-nvfp4"
SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip


@torch.no_grad()
def logits(folder, **options):
    return ours.load(str(folder), dtype=torch.float32, **options)(torch.arange(8)[None]).logits


@pytest.mark.parametrize("folder", [CT, MOE], ids=lambda p: p.name)
def test_decoded_layers_keep_16_bits_where_asked(folder):
    """``activations="16bit"`` also applies with ``decode``, to linear layers and to experts."""
    plain, both, four = (
        logits(folder, activations="16bit"),
        logits(folder, activations="16bit", decode=True),
        logits(folder, decode=True),
    )
    assert (both - plain).abs().max() < 0.02 < (four - plain).abs().max()


def test_layers_that_no_kernel_takes_keep_16_bits_where_asked(tmp_path):
    """K of 96 is always dequantized."""
    config = AutoConfig.for_model("llama", **SMALL | {"hidden_size": 96, "intermediate_size": 96})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="mxfp4")
    for activations, is_rounded in (("16bit", False), ("nvfp4", True)):
        model = ours.load(tmp_path / "out", dtype=torch.bfloat16, activations=activations)
        assert any(isinstance(m, RoundedInput) for m in model.modules()) == is_rounded


def test_one_set_of_files(tmp_path):
    """``from_pretrained`` reads quantized layers from the same file as the others."""
    folder = tmp_path / "new"
    shutil.copytree(CT, folder)
    expected = logits(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    write(tmp_path / "old", nvfp4("model.layers.0.self_attn.q_proj"), MODELOPT)
    (tmp_path / "old" / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="two checkpoints"):
        ours.load(folder)
    with ours._taken_over(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert torch.equal(model(torch.arange(8)[None]).logits, expected)


def test_towers_stay_in_16_bits(tmp_path, capsys):
    """A rule leaves out layers of images, and ``load`` selects the class that knows the model."""
    text = SMALL | {
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    }
    vision = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 88, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(tmp_path / "in")
    done = quantize_checkpoint(
        tmp_path / "in", tmp_path / "out", format="nvfp4a16", layout="compressed-tensors"
    )
    names = list(Checkpoint(tmp_path / "out").linears)
    assert len(names) == 7 and not any("visual" in name for name in names)
    assert done.left_out["model.visual.blocks.0.attn.qkv"] == "by the rule *.visual.*"
    model = ours.load(tmp_path / "out", dtype=torch.bfloat16)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"


def test_a_class_that_nothing_knows(tmp_path):
    config = AutoConfig.for_model(
        "vit", hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    config.save_pretrained(tmp_path)
    write(tmp_path, {"a": torch.zeros(4)}, None, **config.to_dict())
    with pytest.raises(CheckpointError, match="ViTConfig.*pass model_class"):
        ours.load(tmp_path)


def test_saving_says_how(tmp_path):
    """Neither a loaded model nor one with replaced layers can be saved in a form that nothing reads."""
    with pytest.raises(ValueError, match=f"saved form is {CT}: copy that"):
        ours.load(CT, dtype=torch.bfloat16).save_pretrained(tmp_path / "a")
    config = AutoConfig.for_model("llama", **SMALL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    replace_linears(model)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="replace_linears replaced.*state_dict"):
            one.save_pretrained(tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_float32_is_float32_throughout():
    """Routers that transformers renames, such as Mixtral's, keep the files' dtype in some of its versions."""
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 4)])
    model.dtype = torch.bfloat16
    ours.widen(model)
    assert model[0].weight.dtype == torch.bfloat16
    model.dtype = torch.float32
    before = model[0].weight.detach().clone()
    ours.widen(model)
    assert model[0].weight.dtype == torch.float32 and torch.equal(model[0].weight, before.float())


def test_a_damaged_tokenizer(tmp_path):
    shutil.copytree(CT, tmp_path / "a")
    (tmp_path / "text").write_text("some text")
    (tmp_path / "a" / "tokenizer.json").write_text('{"a":' * 10_000)
    with pytest.raises(CheckpointError, match="has a tokenizer that cannot be loaded"):
        samples(tmp_path / "a", str(tmp_path / "text"), 128)


@pytest.mark.slow
def test_generate_with_a_static_cache_and_compile():
    """Tokens of a compiled step with a static cache equal those of the eager model."""
    model = ours.load(CT, dtype=torch.bfloat16)
    ids = torch.arange(8)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        eager = model.generate(ids, **options)
        static = model.generate(ids, cache_implementation="static", **options)
        compiled = torch.compile(model, backend="aot_eager")
        assert torch.equal(compiled(ids).logits, model(ids).logits)
    assert torch.equal(static, eager)
