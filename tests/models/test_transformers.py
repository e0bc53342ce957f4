"""Checkpoints through transformers: each layer follows its scheme, and logits match those of dequantized weights.

NVFP4_CUTE_CHECKPOINTS=folder adds checkpoints: each of its subfolders is one.
"""

import copy
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_files import write

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

import safetensors.torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeForCausalLM  # noqa: E402

from nvfp4_cute.activation import activation_of  # noqa: E402
from nvfp4_cute.errors import CheckpointError  # noqa: E402
from nvfp4_cute.models import transformers as ours  # noqa: E402
from nvfp4_cute.models.checkpoints import Checkpoint  # noqa: E402
from nvfp4_cute.models.checkpoints.tensors import TensorFiles  # noqa: E402
from nvfp4_cute.nn.experts import ModelExperts, SortedExperts  # noqa: E402
from nvfp4_cute.nn.moe import MoE  # noqa: E402
from nvfp4_cute.nn.rounded import rounded  # noqa: E402
from nvfp4_cute.reference import activated  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
MORE = os.environ.get("NVFP4_CUTE_CHECKPOINTS")
FOLDERS = [
    p for root in (DATA, *([Path(MORE)] if MORE else [])) for p in sorted(root.iterdir()) if p.is_dir()
]


def ids():
    return torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


def stacked(stored):
    """Returns float32 weights of experts: [E, 2 I, H] (or [E, I, H]) and [E, H, I]."""
    w13, w2 = stored.w13.dequantize(), stored.w2.dequantize()
    if stored.w13_global is not None:
        parts = stored.w13_global.shape[1]
        w13 = (w13.unflatten(1, (parts, -1)) * stored.w13_global[..., None, None]).flatten(1, 2)
        w2 = w2 * stored.w2_global[:, None, None]
    return w13, w2


def decoded_model(folder, loaded):
    """Returns the 16-bit model with the dequantized weights, and the plain tensors that transformers loaded."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plain = {n: t for n, t in loaded.state_dict().items() if t.dtype.itemsize > 1}
    model.load_state_dict(plain, strict=False)
    checkpoint = Checkpoint(folder)
    seen = 0
    with torch.no_grad():
        for name, module in model.named_modules():
            if prefix := checkpoint.linear_named(name):
                module.weight.copy_(checkpoint.linear(prefix).dequantize())
                seen += 1
            elif prefix := checkpoint.experts_named(name):
                stored = checkpoint.read_experts(prefix)
                w13, w2 = stacked(stored)
                bias = stored.w13_bias
                if not getattr(module, "is_concatenated", True):
                    turns = lambda t: torch.stack(t.chunk(2, 1), 2).flatten(1, 2)
                    w13, bias = turns(w13), None if bias is None else turns(bias)
                if getattr(module, "is_transposed", False):
                    w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
                (module.gate_up_proj if stored.has_gate else module.up_proj).copy_(w13)
                module.down_proj.copy_(w2)
                if bias is not None:
                    module.gate_up_proj_bias.copy_(bias)
                    module.down_proj_bias.copy_(stored.w2_bias)
                seen += 1
    assert seen == len(checkpoint.linears) + len(checkpoint.experts)
    return model, checkpoint


@torch.no_grad()
def logits(folder):
    return ours.load(folder, dtype=torch.bfloat16)(ids()).logits


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def check_experts(module, stored, x, index, weights, y):
    """Compares with one product per token and expert, with activations rounded as the scheme says."""
    w13, w2 = stacked(stored)
    own = getattr(module, "experts", module)
    act = activation_of(own.activation, getattr(own, "limit", None))
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for e, weight in zip(index[t].tolist(), weights[t].tolist(), strict=True):
            round_with = lambda v, g, e=e: v if g is None else rounded(v.bfloat16(), "nvfp4", g[e])
            h = round_with(x[t : t + 1], stored.w13_input).double() @ w13[e].double().T
            h = h if stored.w13_bias is None else h + stored.w13_bias[e].double()
            h = activated(*(h.float().chunk(2, 1) if stored.has_gate else (h.float(), None)), act)
            h = round_with(h, stored.w2_input).double() @ w2[e].double().T
            h = h if stored.w2_bias is None else h + stored.w2_bias[e].double()
            expected[t] += weight * h[0]
    # Hidden values near the midpoint of two codes may round either way: about 1 % do, by at most 1/3.
    assert relative(y, expected) < (0.02 if stored.w2_input is None else 0.06)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_checkpoint(folder):
    torch.manual_seed(0)
    model = ours.load(folder, dtype=torch.bfloat16)
    seen = {}
    names = Checkpoint(folder)
    for name, module in model.named_modules():
        if names.linear_named(name) or isinstance(module, (SortedExperts, ModelExperts)):
            module.register_forward_hook(lambda m, a, y, name=name: seen.__setitem__(name, (m, a, y)))
    with torch.no_grad():
        logits = model(ids()).logits
        decoded, checkpoint = decoded_model(folder, model)
        expected = decoded(ids()).logits
    schemes = {*checkpoint.linears.values(), *checkpoint.experts.values()}
    is_exact = all(scheme.activations is None for scheme in schemes)
    error = relative(logits, expected)
    assert error < (0.02 if is_exact else 0.35), f"{error}; {schemes}"
    assert len(seen) == len(checkpoint.linears) + len(checkpoint.experts)
    assert sum(isinstance(m, MoE) for m in model.modules()) == len(checkpoint.experts)
    for name, (module, (x, *rest), y) in seen.items():
        if prefix := checkpoint.linear_named(name):
            stored = checkpoint.linear(prefix)
            given = stored.input_scale
            x = x if stored.scheme.activations is None else rounded(x, stored.scheme.activations, given)
            exact = x.double() @ stored.dequantize(torch.float64).T
            bias = getattr(module, "bias", None)
            exact = exact if bias is None else exact + bias.double()
            assert relative(y, exact) < 2**-7, name
        else:
            check_experts(module, checkpoint.read_experts(checkpoint.experts_named(name)), x, *rest, y)


def test_from_pretrained_takes_modelopt_by_itself():
    """Importing the module suffices for methods without a quantizer in transformers."""
    model = AutoModelForCausalLM.from_pretrained(DATA / "modelopt-qwen3moe-nvfp4", dtype=torch.bfloat16)
    with torch.no_grad():
        tokens = model.generate(ids()[:1], max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 16)
    with pytest.raises(ValueError, match="copy that"):
        model.hf_quantizer.is_serializable()


@pytest.mark.parametrize("name", ["modelopt-qwen3moe-nvfp4", "ct-qwen3-nvfp4"])
def test_copied_saved_and_converted(tmp_path, name):
    """A copy computes the same bits without the files of the checkpoint; another dtype gives nearly the same."""
    model = ours.load(DATA / name, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(ids()).logits
        torch.save(model, tmp_path / "model.pt")
        for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert torch.equal(other(ids()).logits, expected)
            assert other.hf_quantizer.checkpoint is None and model.hf_quantizer.checkpoint is not None
        # 4-bit activations near a tie may round either way.
        assert relative(other.to(torch.float16)(ids()).logits, expected) < 0.2


def test_load_leaves_transformers_as_it_was():
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    before = dict(AUTO_QUANTIZER_MAPPING)
    ours.load(DATA / "ct-qwen3-nvfp4", dtype=torch.bfloat16)
    assert AUTO_QUANTIZER_MAPPING == before
    with pytest.raises(ValueError, match="'hqq' has no reader"):
        ours.take_over("hqq")


def test_experts_implementation():
    """A 16-bit model's experts are quantized when they are first called."""
    config = AutoConfig.from_pretrained(DATA / "modelopt-qwen3moe-nvfp4")
    del config.quantization_config
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        expected = model(ids()).logits
        model.set_experts_implementation("nvfp4_cute")
        got = model(ids()).logits
    assert 0 < relative(got, expected) < 0.35
    assert "_nvfp4_cute" in model.model.layers[0].mlp.experts.__dict__


def test_experts_follow_their_weights():
    """After loading or copying, a model does not compute with the weights that it quantized before."""
    config = AutoConfig.from_pretrained(DATA / "modelopt-qwen3moe-nvfp4")
    del config.quantization_config
    config.num_hidden_layers = 1
    with torch.no_grad():
        model, other = (
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval() for _ in range(2)
        )
        for one in (model, other):
            one.set_experts_implementation("nvfp4_cute")
        model(ids())
        copied = pickle.loads(pickle.dumps(model))
        expected = other(ids()).logits
        for one in (model, copied):
            one.load_state_dict(other.state_dict())
            assert torch.equal(one(ids()).logits, expected)


def changed(folder, name, *, config=None, tensors=None):
    """Copies a checkpoint of the repository with another config.json and other tensors."""
    files = TensorFiles(DATA / name)
    own = {key: files[key] for key in files}
    if tensors is not None:
        tensors(own)
    fields = json.loads((DATA / name / "config.json").read_text())
    quantization = fields.pop("quantization_config")
    return write(folder, own, quantization, **(fields | (config or {})))


Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"intermediate_size": 512}, None, None),
        ({"moe_intermediate_size": 32}, None, r"mlp.experts is .* in the checkpoint, and .* by config.json"),
        (None, lambda t: t.pop("model.norm.weight"), "model.norm.weight is in no file of the checkpoint, one of 1 tensors"),
        (None, lambda t: drop(t, Q), f"{Q}.weight is in no file"),
        (None, lambda t: drop(t, EXPERTS), f"{EXPERTS}.gate_up_proj is in no file of the checkpoint, one of 2"),
        (None, lambda t: t.update({f"{Q}.bias": torch.ones(128).bfloat16()}), f"{Q}.bias is in the checkpoint"),
        (None, lambda t: move(t, Q, "model.layers.0.self_attn.x_proj"), "self_attn.x_proj is in the checkpoint, and .* no such"),
        (None, lambda t: t.update({"model.norm.weight": torch.ones(64).bfloat16()}), r"norm.weight is \[64\] in the checkp"),
        (None, lambda t: t.update({"model.norm.weight": torch.ones(128).int()}), "norm.weight has dtype I32, and Qwen3Moe"),
        (None, lambda t: t.update(biases_of_experts()), "gate and up projections have biases in the .* no biases by config"),
        (None, lambda t: move(t, f"{EXPERTS}.0.up_proj", f"{EXPERTS}.0.down_proj"), "down projections of .* of expert 1, of"),
    ],
)  # fmt: skip
def test_another_model_is_refused(tmp_path, config, tensors, message):
    """The error comes before any computation and names the fault; transformers alone would invent what is missing."""
    if message is None:
        name, message = "ct-qwen3-nvfp4", r"mlp\..*_proj is .* in the checkpoint"
    else:
        name = "modelopt-qwen3moe-nvfp4"
    with pytest.raises(CheckpointError, match=message):
        ours.load(changed(tmp_path, name, config=config, tensors=tensors), dtype=torch.bfloat16)


def biases_of_experts():
    """Biases of all experts in the first layer."""
    sizes = {"gate_proj": 64, "up_proj": 64, "down_proj": 128}
    return {
        f"{EXPERTS}.{e}.{name}.bias": torch.ones(n).bfloat16() for e in range(8) for name, n in sizes.items()
    }


def test_biases_of_zeros_change_nothing(tmp_path):
    """Some quantizing tools give every layer a bias."""
    name = "modelopt-qwen3moe-nvfp4"
    zeros = {key: torch.zeros_like(bias) for key, bias in biases_of_experts().items()}
    zeros[f"{Q}.bias"] = torch.zeros(128).bfloat16()
    assert torch.equal(
        logits(changed(tmp_path, name, tensors=lambda t: t.update(zeros))), logits(DATA / name)
    )


def test_experts_without_their_biases(tmp_path):
    """A model whose class adds biases would compute without them."""
    tensors = lambda t: [t.pop(name) for name in list(t) if name.endswith("_proj_bias")]
    with pytest.raises(
        CheckpointError, match="experts: gate and up projections have no biases .* have biases by config.json"
    ):
        ours.load(changed(tmp_path, "modelopt-gptoss-nvfp4", tensors=tensors), dtype=torch.bfloat16)


def test_one_tensor_an_expert_is_the_same_model(tmp_path):
    """gpt-oss with separate tensors per expert, including biases."""

    def apart(tensors):
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            for kind in ("gate_up_proj", "down_proj"):
                name = f"{prefix}.{kind}"
                data, scale, bias = (tensors.pop(name + suffix) for suffix in ("", "_weight_scale", "_bias"))
                factor, given = (tensors.pop(name + suffix) for suffix in ("_weight_scale_2", "_input_scale"))
                for e in range(len(data)):
                    weight, block = data[e].T.contiguous(), scale[e].T.contiguous()
                    sides = {"down_proj": slice(None)}
                    if kind == "gate_up_proj":
                        sides = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
                    for side, rows in sides.items():
                        parts = {"weight": weight, "weight_scale": block, "bias": bias[e]}
                        parts = {part: t[rows].clone() for part, t in parts.items()}
                        parts |= {"weight_scale_2": factor.clone(), "input_scale": given.clone()}
                        tensors |= {f"{prefix}.{e}.{side}.{part}": t for part, t in parts.items()}

    name = "modelopt-gptoss-nvfp4"
    assert torch.equal(logits(changed(tmp_path, name, tensors=apart)), logits(DATA / name))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda f: (f / "model.safetensors.index.json").unlink(), FileNotFoundError, "has 2 safetensors files, and neither"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), ValueError, "index.json is not JSON"),
        (lambda f: next(f.glob("*-2-*")).unlink(), FileNotFoundError, "names model-2-of-2.safetensors, which"),
        (lambda f: None, None, None),
        (lambda f: in_a_folder(f), None, None),
    ],
)  # fmt: skip
def test_shards(tmp_path, change, error, message):
    """Covers faults that transformers would not name, and files that it would take from another checkpoint."""
    folder = changed(tmp_path, "modelopt-qwen3moe-nvfp4")
    files = TensorFiles(folder)
    names, places = list(files), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number}-of-2.safetensors"
        safetensors.torch.save_file({n: files[n].clone() for n in part}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    change(folder)
    if error is None:
        assert torch.equal(logits(folder), logits(DATA / "modelopt-qwen3moe-nvfp4"))
        return
    with pytest.raises(error, match=message):
        ours.load(folder, dtype=torch.bfloat16)


def in_a_folder(folder):
    """Moves the files into one folder, and updates the index."""
    (folder / "parts").mkdir()
    for path in folder.glob("*.safetensors"):
        path.rename(folder / "parts" / path.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"parts/model-'))


def drop(tensors, prefix):
    for name in [name for name in tensors if name.startswith(f"{prefix}.")]:
        del tensors[name]


def move(tensors, old, new):
    """Copies the tensors of one layer to the names of another."""
    for name in [name for name in tensors if name.startswith(f"{old}.")]:
        tensors[new + name.removeprefix(old)] = tensors[name]


def test_config_that_says_nothing(tmp_path):
    """Older exports of ModelOpt describe the quantization only in hf_quant_config.json; without it they are refused."""
    folder = changed(tmp_path, "modelopt-qwen3moe-nvfp4")
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match="neither config.json has a quantization_config nor is there a hf_quant"
    ):
        ours.load(folder, dtype=torch.bfloat16)
    entry = {"quant_algo": own["quant_algo"], "group_size": 16, "exclude_modules": own["ignore"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": entry}))
    model = ours.load(folder, dtype=torch.bfloat16)
    assert len(model.hf_quantizer.linears) == 8 and len(model.hf_quantizer.experts) == 2


def test_options_reach_the_config():
    """They have the effect that they have in from_pretrained; passing a config would send them to the model's constructor."""
    model = ours.load(DATA / "ct-qwen3-nvfp4", dtype=torch.bfloat16, use_cache=False)
    assert model.config.use_cache is False


def test_layers_that_a_class_leaves_out(tmp_path, monkeypatch):
    """Gemma, for example, leaves out keys and values of layers that reuse those of an earlier one."""
    other = "model.layers.0.self_attn.x_proj"
    folder = changed(tmp_path, "modelopt-qwen3moe-nvfp4", tensors=lambda t: move(t, Q, other))
    monkeypatch.setattr(
        Qwen3MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", ["layers.0.self_attn.x_proj"]
    )
    model = ours.load(folder, dtype=torch.bfloat16)
    assert other not in model.hf_quantizer.linears


def test_what_is_tied_needs_no_tensor_of_its_own():
    """Moved modules lose the marks of transformers; a tied weight is in no file."""
    quantizer = ours.CheckpointQuantizer(ours.CheckpointConfig())
    quantizer.checkpoint = SimpleNamespace(files={"embed.weight"})
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(2, 2, bias=False) for name in ("norm", "embed", "head")}
    )
    model["norm"].weight._is_hf_initialized = True
    model._keys_to_ignore_on_load_missing, model.all_tied_weights_keys = None, {"head.weight": "embed.weight"}
    quantizer._check_complete(model)
    model.all_tied_weights_keys = {}
    with pytest.raises(
        CheckpointError, match=r"head.weight is in no file of the checkpoint, one of 1 tensors"
    ):
        quantizer._check_complete(model)


def test_weights_are_decoded_in_one_way():
    with pytest.raises(ValueError, match="pass decode or keep_decoded, not both"):
        ours.load(FOLDERS[0], decode=True, keep_decoded=True)
