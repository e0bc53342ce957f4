"""Block-by-block quantization of models: the recorded inputs of layers, and the result."""

import copy
import json
import math

import pytest
import torch
from tiny_models import EXPERTS, model_of

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from nvfp4_cute.cli import main  # noqa: E402
from nvfp4_cute.models import transformers as ours  # noqa: E402
from nvfp4_cute.models.checkpoints import Checkpoint  # noqa: E402
from nvfp4_cute.models.checkpoints.tensors import TensorFiles  # noqa: E402
from nvfp4_cute.models.quantizing.calibrate import generated  # noqa: E402
from nvfp4_cute.models.quantizing.checkpoint import Calibration, quantize_checkpoint  # noqa: E402
from nvfp4_cute.models.quantizing.layerwise import quantize_blocks  # noqa: E402
from nvfp4_cute.models.quantizing.layouts import LAYOUTS, RECIPES  # noqa: E402
from nvfp4_cute.models.quantizing.rules import Rules, groups, layers_to_quantize  # noqa: E402
from nvfp4_cute.models.quantizing.weights import quantized  # noqa: E402


def windows(count=8, seed=1):
    return list(torch.randint(0, 128, (count, 48), generator=torch.Generator().manual_seed(seed)).split(1))


def parts_of(model, tmp_path, format="nvfp4a16"):
    model.save_pretrained(tmp_path)
    return groups(layers_to_quantize(TensorFiles(tmp_path).entries, Rules(RECIPES[format]))[0])


class Given:
    """Given weights for a layer, instead of rounded ones."""

    def __init__(self, values):
        self.values = values

    def dequantize(self):
        return self.values


def inputs_of(model, name, batches):
    """Returns the rows that a linear layer reads, [T, K]."""
    rows = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: rows.append(args[0][0]))
    with torch.no_grad():
        for ids in batches:
            model(ids)
    hook.remove()
    return torch.cat(rows)


def test_weights_that_stay(tmp_path):
    """Every layer comes once, in the order of the model, with the sums of the unchanged model's inputs."""
    model, batches = model_of(), windows(3)
    reference = copy.deepcopy(model)
    parts = parts_of(model, tmp_path)
    same = lambda layers, inputs: [Given(reference.get_submodule(one.name).weight) for one in layers]
    found = list(quantize_blocks(model, batches, parts, same))
    names = [layers[0].name.partition("layers.")[2] for layers, _, _ in found]
    order = ("self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert names == [f"{i}.{name}" for i in range(2) for name in order]
    for layers, _, inputs in found:
        x = inputs_of(reference, layers[0].name, batches)
        assert inputs.rows == len(x) == 3 * 48 and inputs.amax == float(x.abs().max())
        torch.testing.assert_close(inputs.hessian, x.T @ x, rtol=1e-4, atol=1e-3)


def test_inputs_come_from_the_rounded_layers_before(tmp_path):
    """With all weights halved, each layer's recorded inputs are those in the halved model."""
    model, batches = model_of(), windows(2)
    halved = copy.deepcopy(model)
    for layer in halved.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data *= 0.5
    half = lambda layers, inputs: [Given(halved.get_submodule(one.name).weight) for one in layers]
    for layers, _, inputs in quantize_blocks(model, batches, parts_of(model, tmp_path), half):
        got = inputs_of(halved, layers[0].name, batches)
        torch.testing.assert_close(inputs.hessian, got.T @ got, rtol=1e-4, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), halved.parameters(), strict=True))


@pytest.mark.parametrize(
    ("tied", "names"),
    [(False, ["lm_head"]), (True, ["model.embed_tokens"]), (True, ["lm_head", "model.embed_tokens"])],
    ids=["apart", "one matrix", "tied, other formats"],
)
def test_the_output_layer_reads_what_follows_the_blocks(tmp_path, tied, names):
    """A matrix that is also the embedding is quantized for its product, unless the product has a separate one."""
    model, batches = model_of(tie_word_embeddings=tied), windows(3)
    reference = copy.deepcopy(model)
    recipe = RECIPES["nvfp4a16"]
    model.save_pretrained(tmp_path)
    entries = TensorFiles(tmp_path).entries
    entries["lm_head.weight"] = entries.get("lm_head.weight", entries["model.embed_tokens.weight"])
    parts = groups(layers_to_quantize(entries, Rules(recipe, dict.fromkeys(names, recipe)))[0])
    same = lambda layers, inputs: [Given(reference.get_submodule(one.name).weight) for one in layers]
    found = list(quantize_blocks(model, batches, parts, same))
    layers, _, inputs = found[-1]
    assert [one.name for one in layers] == names[:1] and len(found) == 9
    x = inputs_of(reference, "lm_head", batches)
    torch.testing.assert_close(inputs.hessian, x.T @ x, rtol=1e-4, atol=1e-3)
    assert inputs.rows == 3 * 48


def test_activations_are_rounded_where_the_layer_rounds_them(tmp_path):
    """mxfp4 inputs: sums use values of the format, and the block's result is that of rounded rows."""
    from nvfp4_cute.nn.rounded import rounded

    model, batches = model_of(), windows(1)
    reference = copy.deepcopy(model)
    same = lambda layers, inputs: [Given(reference.get_submodule(one.name).weight) for one in layers]
    first = next(iter(quantize_blocks(model, batches, parts_of(model, tmp_path, "mxfp4"), same)))[2]
    x = inputs_of(reference, "model.layers.0.self_attn.q_proj", batches)
    used = rounded(x, "mxfp4")
    torch.testing.assert_close(first.hessian, used.T @ used, rtol=1e-4, atol=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_less_is_lost(tmp_path, kind):
    """Weight-only: logits on the text and on other tokens have a smaller error than with rounding to nearest."""
    model = model_of(kind, torch.bfloat16, **(EXPERTS if kind == "qwen3_moe" else {}))
    model.save_pretrained(tmp_path / "in")
    errors = {}
    with torch.no_grad():
        for method in ("nearest", "search", "gptq"):
            given = {}
            if method == "gptq":
                given["calibration"] = Calibration(copy.deepcopy(model), windows(16))
            done = quantize_checkpoint(
                tmp_path / "in", tmp_path / method, format="nvfp4a16", method=method, **given
            )
            assert not done.uncompensated
            loaded = ours.load(tmp_path / method, dtype=torch.bfloat16)
            pairs = [(loaded(ids).logits.double(), model(ids).logits.double()) for ids in windows(4, seed=2)]
            errors[method] = sum(float((a - b).norm() / b.norm()) for a, b in pairs) / len(pairs)
    assert errors["gptq"] < 0.9 * errors["nearest"] and errors["gptq"] < errors["search"], errors


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_command(tmp_path, format, layout, capsys):
    model = model_of("qwen3_moe", torch.bfloat16, **EXPERTS)
    model.save_pretrained(tmp_path / "in")
    command = ["quantize", str(tmp_path / "in"), "--format", format, "--layout", layout, "--method", "gptq"]
    assert (
        main([*command, "--out", str(tmp_path / "no")]) == 2 and "pass --calibrate" in capsys.readouterr().err
    )
    assert main([*command, "--out", str(tmp_path / "out"), "--calibrate", "random"]) == 0
    checkpoint = Checkpoint(tmp_path / "out")
    assert (len(checkpoint.linears), len(checkpoint.experts)) == (8, 2)
    values = TensorFiles(tmp_path / "in")
    for layer in checkpoint.each_linear():
        exact = values[f"{layer.name}.weight"].float()
        assert 0.05 < (layer.weight.dequantize() - exact).norm() / exact.norm() < 0.5
        assert (layer.input_scale is None) == (format != "nvfp4")
    loaded = ours.load(tmp_path / "out", dtype=torch.bfloat16)
    ids = windows(1)[0]
    with torch.no_grad():
        got, expected = loaded(ids).logits.double(), model(ids).logits.double()
    # Tokens of a random model change experts easily; rounding to nearest gives 0.63.
    assert 0.01 < (got - expected).norm() / expected.norm() < 0.7


def test_experts_without_tokens(tmp_path):
    """They are named, have searched weights, and get the largest scale of their layer."""
    model = model_of("qwen3_moe", torch.bfloat16, **EXPERTS)
    with torch.no_grad():  # all tokens have a positive component that two experts prefer
        model.model.layers[0].mlp.gate.weight.zero_()
    model.save_pretrained(tmp_path / "in")
    weight = TensorFiles(tmp_path / "in")
    done = quantize_checkpoint(
        tmp_path / "in",
        tmp_path / "out",
        method="gptq",
        unreached="largest",
        calibration=Calibration(model, windows(2)),
    )
    assert done.unreached == done.uncompensated
    experts = {name.split(".experts.")[1].split(".")[0] for name in done.unreached}
    assert len(experts) == 2 and len(done.unreached) == 6, "equal scores: two experts get all tokens"
    one = Checkpoint(tmp_path / "out").read_experts("model.layers.0.mlp.experts")
    for e in map(int, experts):
        down = weight[f"model.layers.0.mlp.experts.{e}.down_proj.weight"]
        assert torch.equal(one.w2.data[e], quantized(down, "nvfp4", search=True).data)
        assert one.w13_input[e] == one.w13_input.max() and one.w2_input[e] == one.w2_input.max()


def test_layers_that_the_model_does_not_have(tmp_path):
    """Weight-only layers are searched and named; layers with stored scales of activations are refused."""
    model = model_of("llama", torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    shorter = AutoConfig.from_pretrained(tmp_path / "in")
    shorter.num_hidden_layers = config["num_hidden_layers"] - 1
    short = AutoModelForCausalLM.from_pretrained(tmp_path / "in", config=shorter, dtype=torch.bfloat16)
    given = {"method": "gptq", "calibration": Calibration(short, windows(2))}
    with pytest.raises(ValueError, match=r"layers.1.*has none.*--keep"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "no", **given)
    done = quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="nvfp4a16", **given)
    assert len(done.uncompensated) == 7 and all("layers.1." in name for name in done.uncompensated)
    assert len(Checkpoint(tmp_path / "out").linears) == 14


@pytest.mark.parametrize(
    "given", [{"method": "gptq"}, {"calibration": Calibration(None, [])}, {"method": "best"}]
)
def test_refusals(tmp_path, given):
    model_of("llama", torch.bfloat16).save_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match="pass a Calibration|methods nearest, four_over_six, search, gptq"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="nvfp4a16", **given)
    assert not (tmp_path / "out").exists()


def test_text_that_the_model_writes(tmp_path, capsys):
    """Tokens of the model's own distribution: the mean loss on them is about the entropy; the seed decides, no state is kept."""
    model = model_of("llama", torch.bfloat16)
    state = torch.random.get_rng_state()
    first, again, other = (torch.cat(generated(model, 20, tokens=24, seed=s)) for s in (0, 0, 1))
    assert torch.equal(state, torch.random.get_rng_state())
    assert first.shape == (20, 24) and torch.equal(first, again) and not torch.equal(first, other)
    with torch.no_grad():
        odds = model(first).logits[:, :-1].float().log_softmax(-1)
    loss, entropy = -odds.gather(2, first[:, 1:, None]).mean(), -(odds.exp() * odds).sum(-1).mean()
    assert abs(loss - entropy) < 0.15 * entropy < 0.12 * math.log(128), (loss, entropy)
    model.save_pretrained(tmp_path / "in")
    command = ["quantize", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--method", "gptq"]
    assert main(command) == 2 and "--generate TEXTS" in capsys.readouterr().err
    assert main([*command, "--method", "search", "--generate", "1"]) == 0
    assert len(Checkpoint(tmp_path / "out").linears) == 14
