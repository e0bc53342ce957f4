"""The plug-in in vLLM on the CPU: layers and tokens against those of transformers, supported checkpoints, and refusals.

NVFP4_CUTE_CHECKPOINTS=folder adds checkpoints: each of its subfolders is one.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import gpt_oss_files  # noqa: E402
import vllm_tokens  # noqa: E402
from checkpoint_files import MODELOPT, write  # noqa: E402
from int4_files import AWQ, GPTQ, compressed_tensors, write_int4  # noqa: E402
from lockstep import Lockstep, Recorded, closeness  # noqa: E402
from tiny_models import EXPERTS, model_of  # noqa: E402
from token_checks import PROMPTS, TOKENS, check_tokens, transformers_model  # noqa: E402
from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: E402

from nvfp4_cute.bench.vllm import hybrid  # noqa: E402
from nvfp4_cute.errors import UnsupportedProblem  # noqa: E402
from nvfp4_cute.models import transformers as ours  # noqa: E402
from nvfp4_cute.models.checkpoints import Checkpoint  # noqa: E402
from nvfp4_cute.models.checkpoints.stored import Scheme  # noqa: E402
from nvfp4_cute.models.checkpoints.tensors import TensorFiles, TensorWriter  # noqa: E402
from nvfp4_cute.models.layers import experts_module, linear_module  # noqa: E402
from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint  # noqa: E402
from nvfp4_cute.models.vllm import requirements  # noqa: E402
from nvfp4_cute.models.vllm.config import CheckpointConfig, renamed  # noqa: E402
from nvfp4_cute.models.vllm.experts import as_moving_parameters, filled  # noqa: E402
from nvfp4_cute.models.vllm.graphs import add_to_key  # noqa: E402
from nvfp4_cute.models.vllm.taken import NAME, original, refusal  # noqa: E402
from nvfp4_cute.nn.linear import QuantizedLinear  # noqa: E402
from nvfp4_cute.nn.moe import MoE  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
MORE = os.environ.get("NVFP4_CUTE_CHECKPOINTS")
FOLDERS = [
    p for root in (DATA, *([Path(MORE)] if MORE else [])) for p in sorted(root.iterdir()) if p.is_dir()
]
OUTPUT = {"vocab_size": 256, "tie_word_embeddings": False}
DENSE, MOE = DATA / "ct-qwen3-nvfp4", DATA / "modelopt-qwen3moe-nvfp4"


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def is_taken(folder):
    config = config_of(folder)
    return refusal(config["quantization_config"], config["model_type"]) is None


def changed(folder, to, change):
    """Copies a checkpoint and passes its tensors through ``change(name, tensor)``, which may return None to drop one."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    files = TensorFiles(folder)
    tensors = {name: change(name, files[name]) for name in files}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with TensorWriter(to, [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return to


def check_in_lockstep(folder, llm):
    """Compares vLLM's layers with transformers': equal bits for equal rows.

    Everything between the layers, and so the logits, differs by the order of sums. Tokens are equal where that cannot change
    them.
    """
    served, logits = vllm_tokens.model_of(llm), []
    hook = served.logits_processor.register_forward_hook(lambda module, inputs, out: logits.append(out))
    with Recorded(served) as recorded:
        got = vllm_tokens.tokens(llm)
    hook.remove()
    model, prompts, hidden = transformers_model(folder), PROMPTS, []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0][0]))
    starts, steps = torch.tensor([0, *map(len, prompts)]).cumsum(0), TOKENS
    assert len(logits) == steps
    for i, (prompt, answer) in enumerate(zip(prompts, got, strict=True)):
        # The first step has the rows of all prompts, every later step one row per prompt.
        own_rows, later = torch.arange(starts[i], starts[i + 1]), torch.arange(steps - 1)
        expected = recorded.over(steps, torch.cat([own_rows, starts[-1] + i + len(prompts) * later]))
        with torch.no_grad(), Lockstep(model, expected) as lockstep:
            own = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        lockstep.check()
        # Rows of the output layer differ like those of other layers, and its own sums have another order.
        h, w = hidden[-1][len(prompt) - 1 :], model.lm_head.weight
        bound = 2 * closeness(w.shape[1]) * h.abs().amax(1, keepdim=True) * w.abs().sum(1)
        theirs = torch.stack([step[i, : own.shape[1]] for step in logits])
        assert ((own - theirs).abs() <= bound).all()
        chosen = torch.tensor(answer).unsqueeze(1)
        assert (own.amax(1) - own.gather(1, chosen)[:, 0] <= 2 * bound.amax(1)).all()


@pytest.mark.parametrize("folder", [f for f in FOLDERS if is_taken(f)], ids=lambda p: p.name)
def test_layers_are_those_of_transformers(folder):
    with vllm_tokens.engine(folder) as llm:
        assert llm.llm_engine.vllm_config.model_config.quantization == "nvfp4_cute"
        check_in_lockstep(folder, llm)


@pytest.mark.parametrize(
    ("source", "tool", "orders"),
    [(DENSE, "gptq", True), (DENSE, "compressed-tensors", False), (MOE, "awq", False), (MOE, "gptq", False)],
    ids=["gptq-ordered", "compressed-tensors", "experts-awq", "experts-gptq"],
)
def test_int4(tmp_path, source, tool, orders):
    """Has zero points, separate orders for q, k and v, and experts whose router the config does not exclude."""
    folder = write_int4(source, tmp_path / "m", tool, orders)
    with vllm_tokens.engine(folder) as llm:
        assert llm.llm_engine.vllm_config.model_config.quantization == "nvfp4_cute"
        kinds = {type(m).__name__ for m in vllm_tokens.model_of(llm).modules()}
        assert {"QuantizedLinear", "MoE" if source == MOE else "QuantizedLinear"} <= kinds
        check_in_lockstep(folder, llm)


def gpt_oss(folder, **fields):
    """Writes a tiny gpt-oss with biases that are not zero."""
    model = model_of("gpt_oss", torch.bfloat16, **gpt_oss_files.SIZES | OUTPUT | fields)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            parameter.data.normal_(0, 0.5)
    model.save_pretrained(folder / "in")
    return gpt_oss_files.write_gpt_oss(folder / "in", folder / "m")


def mxfp4(folder, kind, **fields):
    """Writes a tiny model of compressed-tensors with MXFP4 weights and 16-bit activations."""
    fields |= OUTPUT | (EXPERTS if kind == "qwen3_moe" else {})
    model_of(kind, torch.bfloat16, **fields).save_pretrained(folder / "in")
    quantize_checkpoint(folder / "in", folder / "m", format="mxfp4", layout="compressed-tensors")
    config = config_of(folder / "m")
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (folder / "m" / "config.json").write_text(json.dumps(config))
    return folder / "m"


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3", "qwen3_moe"])
def test_mxfp4(tmp_path, kind):
    folder = gpt_oss(tmp_path) if kind == "gpt_oss" else mxfp4(tmp_path, kind)
    with vllm_tokens.engine(folder, quantization="nvfp4_cute") as llm:
        formats = {str(m.formats[0]) for m in vllm_tokens.model_of(llm).modules() if isinstance(m, MoE)}
        assert formats == (set() if kind == "qwen3" else {"mxfp4"})
        check_in_lockstep(folder, llm)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3"])
def test_mxfp4_with_fp8_rows(tmp_path, monkeypatch, kind):
    """Layers have the bits of this package's modules with FP8 rows, and no option has to name the method.

    Rows of 64 values, in o_proj of qwen3, keep 16 bits.
    """
    fields = {"hidden_size": 128, "intermediate_size": 128}  # at least 128 values along K
    folder = gpt_oss(tmp_path, **fields) if kind == "gpt_oss" else mxfp4(tmp_path, kind, **fields)
    monkeypatch.setenv("NVFP4_CUTE_ACTIVATIONS", "fp8")
    options = {"dtype": torch.float32, "device": "cpu", "activations": "fp8"}
    checkpoint = Checkpoint(folder)
    if kind == "gpt_oss":
        stored = checkpoint.read_experts("model.layers.0.mlp.experts")
        module = experts_module(stored, checkpoint.experts_config.activation, **options)
        assert str(module.experts.formats[0]) == "mxfp4_fp8"
    else:
        module = linear_module(checkpoint.linear("model.layers.0.mlp.down_proj"), None, **options)
        assert module.mode == "fp8"
    with (
        warnings.catch_warnings(record=True) as warned,
        vllm_tokens.engine(folder) as llm,
        Recorded(vllm_tokens.model_of(llm)) as recorded,
    ):
        assert all(vllm_tokens.tokens(llm))
        assert NAME in llm.llm_engine.vllm_config.additional_config  # in the key of compiled graphs
    said = [str(w.message).partition(":")[0] for w in warned if "keeps 16-bit rows" in str(w.message)]
    short = [] if kind == "gpt_oss" else [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)]
    assert said == [f"{name} keeps 16-bit rows instead of FP8 ones" for name in short]
    call = recorded.readers[0 if kind == "gpt_oss" else 3]  # after qkv, o, and gate and up of the first layer
    assert torch.equal(module(*call.inputs), call.outputs[0])


def test_parts_of_one_tensor_keep_their_global_scales(tmp_path):
    """k_proj and up_proj have other global scales than the layers with which vLLM merges them."""
    factors = {"k_proj.weight_scale_2": 0.5, "up_proj.weight_scale_2": 3.0}
    change = lambda name, t: t * next((f for end, f in factors.items() if name.endswith(end)), 1)
    folder = changed(MOE, tmp_path / "m", lambda n, t: change(n, t) if n.endswith("_scale_2") else t)
    with vllm_tokens.engine(folder) as llm:
        check_in_lockstep(folder, llm)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks():
    """Each rank has half of every layer.

    Sums of experts are rounded to bfloat16 on each rank, so ties may round differently.
    """
    command = [sys.executable, vllm_tokens.__file__, str(MOE), "2"]
    run = subprocess.run(command, capture_output=True, text=True)
    line = next((line for line in run.stdout.splitlines() if line.startswith("tokens ")), None)
    assert line is not None, run.stderr[-2000:]
    check_tokens(MOE, json.loads(line.removeprefix("tokens ")), 0.02)


@pytest.mark.parametrize(
    "end, value, message",
    [
        ("layers.1.mlp.experts.3.up_proj.input_scale", 0.0, r"layers.1.mlp.experts.w13_input_scale is 0, and a scale"),
        ("layers.0.mlp.experts.2.down_proj.weight_scale_2", None, r"experts.w2_weight_scale_2 is nan, and a scale"),
        ("layers.0.self_attn.k_proj.weight_scale_2", -1.0, r"qkv_proj.weight_scale_2 is -1, and a scale"),
        ("layers.1.self_attn.k_proj.weight", None, r"qkv_proj.weight is in no file of the checkpoint, or not all"),
        ("layers.1.mlp.experts.3.up_proj.weight_scale", None, r"experts.w13_weight_scale is in no file"),
        ("layers.0.mlp.experts.2.down_proj.weight", None, r"experts.w2_weight is in no file"),
    ],
)  # fmt: skip
def test_damaged_scales_are_refused_by_name(tmp_path, end, value, message):
    def change(name, tensor):
        if not name.endswith(end):
            return tensor
        return None if value is None else torch.full_like(tensor, value)

    folder = changed(MOE, tmp_path / "m", change)
    with pytest.raises(Exception, match=message), vllm_tokens.engine(folder):
        pass


def test_scales_that_calibration_did_not_see_can_be_filled(tmp_path):
    end = "layers.1.mlp.experts.3.up_proj.input_scale"
    folder = changed(MOE, tmp_path / "m", lambda n, t: torch.zeros_like(t) if n.endswith(end) else t)
    config = config_of(folder)
    config["quantization_config"]["missing_input_scale"] = "fill"
    (folder / "config.json").write_text(json.dumps(config))
    with vllm_tokens.engine(folder) as llm:
        assert all(vllm_tokens.tokens(llm))


def test_filled():
    stored = torch.tensor([0.5, 0.0, 2.0, torch.nan])
    assert filled(stored, False).tolist() == [0.5, 2.0, 2.0, 2.0]
    assert filled(stored, True).tolist() == [0.5, 0.5, 2.0, 0.5]
    assert filled(torch.zeros(2), False).tolist() == [0.0, 0.0]


def test_dummy_weights(tmp_path):
    """``--load-format dummy`` fills parameters with random numbers, with which times can be measured."""
    with vllm_tokens.engine(MOE, load_format="dummy") as llm:
        assert all(vllm_tokens.tokens(llm))


# ---- supported checkpoints -------------------------------------------------------------------------------------

CT = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
}  # fmt: skip
MXFP4 = CT | {
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 32}}},
}  # fmt: skip
MIXED = MODELOPT | {"quant_algo": "MIXED_PRECISION"}
LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    "config, expected",
    [
        (MODELOPT, True),
        (MODELOPT | {"quant_algo": "w4a16_nvfp4"}, True),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, True),
        (MODELOPT | {"quant_algo": "FP8"}, False),
        (MIXED | {"quantized_layers": {LAYER: {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "W4A16_NVFP4"}}}, True),
        (MIXED | {"quantized_layers": {LAYER: {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "FP8"}}}, True),
        (MIXED | {"quantized_layers": {LAYER: {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "MXFP8"}}}, False),
        (MIXED | {"quantized_layers": {LAYER: {"quant_algo": "FP8"}}}, False),
        (CT, True),
        (CT | {"kv_cache_scheme": {"strategy": "attn_head"}}, False),
        (CT | {"transform_config": {"config_groups": {}}}, False),
        (GPTQ, True),
        (AWQ, True),
        (GPTQ | {"bits": 8}, False),
        (compressed_tensors(), True),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, False),
        (MODELOPT | {"quant_algo": "MXFP4"}, True),  # vLLM has no method for it
        (MXFP4, None),
        (MXFP4 | {"activations": "fp8"}, True),
    ],
)  # fmt: skip
def test_which_checkpoints_are_taken(config, expected):
    """None: only if the user asks."""
    assert (refusal(config) is None) is bool(expected)
    choice = CheckpointConfig.override_quantization_method
    assert choice(config, None) == ("nvfp4_cute" if expected else None)
    # vLLM's own methods keep their names.
    assert choice(config, "modelopt_fp4") is None
    assert choice(config, None, SimpleNamespace(model_type="gpt_oss")) is None
    if expected is False:
        with pytest.raises(UnsupportedProblem, match="--quantization nvfp4_cute: .*; leave the option out"):
            choice(config, "nvfp4_cute")
    else:
        assert choice(config, "nvfp4_cute") == "nvfp4_cute"


def test_gpt_oss_is_taken_where_asked(monkeypatch):
    choice, model = (
        CheckpointConfig.override_quantization_method,
        SimpleNamespace(model_type="gpt_oss"),
    )
    renamed_by_vllm = {"quant_method": "gpt_oss_mxfp4"}
    assert original(renamed_by_vllm) == {"quant_method": "mxfp4"}
    assert original(MXFP4 | {"quant_method": "mxfp4"}) == MXFP4  # Kimi-K3
    for config in ({"quant_method": "mxfp4"}, renamed_by_vllm):
        assert choice(config, None, model) is None and choice(config, "nvfp4_cute", model) == "nvfp4_cute"
        assert "tensors of gpt_oss" in refusal(config, "llama")
        monkeypatch.setenv("NVFP4_CUTE_ACTIVATIONS", "fp8")
        assert choice(config, None, model) == "nvfp4_cute"
        monkeypatch.delenv("NVFP4_CUTE_ACTIVATIONS")


def test_a_gpu_without_kernels_is_left_to_vllm(monkeypatch):
    from nvfp4_cute.models.vllm import config

    for capability, expected in (((9, 0), "nvfp4_cute"), ((8, 9), "nvfp4_cute"), ((7, 5), None)):
        gpu = SimpleNamespace(
            is_cpu=lambda: False, is_cuda=lambda: True, get_device_capability=lambda c=capability: c
        )
        monkeypatch.setattr(config, "current_platform", gpu)
        assert CheckpointConfig.override_quantization_method(MODELOPT, None) == expected


def test_names_are_taken_in_vllms_spelling():
    swap = lambda names: [n.replace("backbone.", "model.") for n in names]
    mapper = SimpleNamespace(apply_list=swap)
    config = MODELOPT | {"ignore": ["lm_head", "backbone.layers.0*", "re:backbone.x"]}
    made = renamed(config, mapper)["ignore"]
    assert set(made) == {*config["ignore"], "model.layers.0", "model.layers.0.*"}
    groups = renamed(CT | {"config_groups": {"g": {"targets": ["backbone.a", "Linear"]}}}, mapper)
    assert groups["config_groups"]["g"]["targets"] == ["backbone.a", "Linear", "model.a"]
    layers = renamed(MIXED | {"quantized_layers": {"backbone.a": {"quant_algo": "NVFP4"}}}, mapper)
    assert set(layers["quantized_layers"]) == {"backbone.a", "model.a"}


def mixed_with_fp8(folder):
    """Makes the dense checkpoint with down_proj in FP8 and one scale per output feature."""
    shutil.copytree(DENSE, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model, files, tensors = ours.load(DENSE, dtype=torch.float32), TensorFiles(DENSE), {}
    for name in files:
        if ".down_proj." not in name:
            tensors[name] = files[name]
    for i in range(config_of(DENSE)["num_hidden_layers"]):
        layer = f"model.layers.{i}.mlp.down_proj"
        weight = model.get_submodule(layer).weight.float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[f"{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_scale"] = scale.bfloat16()
    with TensorWriter(folder, [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    config = config_of(DENSE)
    quantization = config["quantization_config"]
    (own,) = quantization["config_groups"].values()
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    quantization["config_groups"] = {
        "group_0": own | {"targets": ["re:.*(q|k|v|o|gate|up)_proj$"], "format": "nvfp4-pack-quantized"},
        "group_1": {
            "targets": ["re:.*down_proj$"], "format": "float-quantized", "output_activations": None,
            "weights": fp8 | {"strategy": "channel", "dynamic": False},
            "input_activations": fp8 | {"strategy": "token", "dynamic": True},
        },
    }  # fmt: skip
    quantization["format"] = "mixed-precision"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_fp8_layers_of_a_mixed_checkpoint_are_vllms(tmp_path):
    with vllm_tokens.engine(mixed_with_fp8(tmp_path / "m")) as llm:
        assert llm.llm_engine.vllm_config.model_config.quantization == "nvfp4_cute"
        kinds = {
            name.rpartition(".")[2]: type(m.quant_method).__name__
            for name, m in vllm_tokens.model_of(llm).named_modules() if hasattr(m, "quant_method")
        }  # fmt: skip
        assert kinds["down_proj"] == "CompressedTensorsLinearMethod" and kinds["qkv_proj"] == "LinearMethod"
        assert all(vllm_tokens.tokens(llm))


@pytest.mark.parametrize(
    ("kind", "layout"), [("qwen3", "modelopt"), ("qwen3", "compressed-tensors"), ("qwen3_moe", "modelopt")]
)
def test_a_recipe_by_type_of_layer(tmp_path, kind, layout):
    """Experts and output layers are this package's, FP8 layers vLLM's, attention has 16 bits; tokens are transformers'."""
    from nvfp4_cute.cli import main

    fields = OUTPUT | (EXPERTS if kind == "qwen3_moe" else {})
    model_of(kind, torch.bfloat16, **fields).save_pretrained(tmp_path / "in")
    command = ["quantize", str(tmp_path / "in"), "--out", str(tmp_path / "m"), "--layout", layout]
    assert main([*command, "--recipe", "nemotron"]) == 0
    with vllm_tokens.engine(tmp_path / "m") as llm:
        kinds = {
            name.rpartition(".")[2]: type(m.quant_method).__name__
            for name, m in vllm_tokens.model_of(llm).named_modules() if hasattr(m, "quant_method")
        }  # fmt: skip
        assert kinds["lm_head"] == "LinearMethod" and kinds["qkv_proj"] == "UnquantizedLinearMethod"
        if kind == "qwen3":
            assert kinds["gate_up_proj"] in ("CompressedTensorsLinearMethod", "ModelOptLinearMethod")
        else:
            assert "ExpertsMethod" in kinds.values()
        got = vllm_tokens.tokens(llm)
    check_tokens(tmp_path / "m", got, tolerance=0.5)


@pytest.mark.parametrize("layout", ["modelopt", pytest.param("compressed-tensors", marks=pytest.mark.slow)])
def test_a_hybrid_by_type_of_layer(tmp_path, layout):
    """Mamba and MLP are FP8 and vLLM's, attention has 16 bits, the output layer is this package's; tokens are transformers'."""
    hybrid.make_hybrid(tmp_path / "in", hybrid.CPU_BLOCKS)
    folder = hybrid.quantize_hybrid(tmp_path / "in", tmp_path / "m", layout)
    found = hybrid.served(folder, "cpu")
    assert found["quantization"] == "nvfp4_cute" and found["computed"]["lm_head"] == "LinearMethod"
    assert found["computed"]["qkv_proj"] == "UnquantizedLinearMethod"
    for name in ("in_proj", "out_proj", "up_proj", "down_proj"):
        assert found["computed"][name] in ("CompressedTensorsLinearMethod", "ModelOptLinearMethod")
    assert len(found["layers"]) == 7 and hybrid.is_right(
        found | hybrid.judged(folder, found["tokens"], "cpu")
    )
    broken = found["layers"] | {"lm_head": float("nan")}
    assert not hybrid.is_right(found | {"layers": broken, "missed": 0.0})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hybrid_with_experts(tmp_path, monkeypatch):
    """vLLM's CPU platform refuses experts without a gate, for lack of a kernel of its own. The plug-in computes them here."""
    from vllm.model_executor.layers.fused_moe import config

    class Platform:
        def __getattr__(self, name):
            return getattr(real, name)

        def is_xpu(self):
            return True

    real = config.current_platform
    monkeypatch.setattr(config, "current_platform", Platform())
    hybrid.make_hybrid(tmp_path / "in")
    folder = hybrid.quantize_hybrid(tmp_path / "in", tmp_path / "m", "modelopt")
    found = hybrid.served(folder, "cpu")
    assert found["computed"]["routed_experts"] == "ExpertsMethod"
    assert hybrid.is_right(found | hybrid.judged(folder, found["tokens"], "cpu"))


def lora_adapter(folder, model, targets):
    """Writes an adapter of the linear layers ``targets``, in the files of peft; returns what it adds to their weights."""
    g, tensors, added = torch.Generator().manual_seed(0), {}, {}
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in targets:
            down = torch.randn(8, layer.in_features, generator=g) / layer.in_features**0.5
            up = torch.randn(layer.out_features, 8, generator=g) * 0.3
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            added[name] = 2 * up @ down
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": targets, "bias": "none"}
    write(folder, tensors, None).joinpath("model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


@pytest.mark.parametrize("source", [DENSE, MOE], ids=["dense", "experts"])
def test_lora_of_linear_layers(tmp_path, source):
    from vllm.lora.request import LoRARequest

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] + (["down_proj"] if source == DENSE else [])
    model, options = transformers_model(source), {"max_lora_rank": 8}
    added = lora_adapter(tmp_path, model, targets)
    if source == MOE:
        options["lora_target_modules"] = targets
    with vllm_tokens.engine(source, enable_lora=True, **options) as llm:
        got = vllm_tokens.tokens(llm, lora_request=LoRARequest("adapter", 1, str(tmp_path)))
        assert got != vllm_tokens.tokens(llm)
    for name, more in added.items():
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda module, inputs, y, more=more: y + inputs[0] @ more.T)
    check_tokens(source, got, 0.05, model)


@pytest.mark.parametrize(
    "options", [{}, {"lora_target_modules": ["q_proj", "experts"]}], ids=["all", "experts"]
)
def test_lora_of_experts_is_refused_by_name(options):
    message = r"--enable-lora: experts of .* such as model.layers.0.mlp.experts, take no LoRA adapters"
    with (
        pytest.raises(UnsupportedProblem, match=message),
        vllm_tokens.engine(MOE, enable_lora=True, **options),
    ):
        pass


# ---- speculative decoding and MLA ------------------------------------------------------------------------------


def speculated(folder, **config):
    """Returns tokens without and with speculative decoding, the draft's model, and vLLM's counters."""
    with vllm_tokens.engine(folder) as llm:
        plain = vllm_tokens.tokens(llm)
    with vllm_tokens.engine(folder, speculative_config=config, disable_log_stats=False) as llm:
        got, counted = vllm_tokens.tokens(llm), {m.name: m for m in llm.get_metrics()}
        model = getattr(vllm_tokens.runner_of(llm).drafter, "model", None)
    count = lambda name: counted[f"vllm:spec_decode_num_{name}_tokens"].value
    return plain, got, model, count("draft"), count("accepted")


def test_a_draft_model():
    """The draft is the same checkpoint, whose layers are this package's as well, so every draft is accepted."""
    plain, got, model, drafted, accepted = speculated(
        DENSE, method="draft_model", model=str(DENSE), num_speculative_tokens=2
    )
    assert got == plain and 0 < drafted == accepted
    kinds = {type(m.quant_method).__name__ for m in model.modules() if hasattr(m, "quant_method")}
    assert "LinearMethod" in kinds


def with_mtp(folder):
    """Writes a tiny GLM-4.5 with NVFP4 weights and a layer that predicts a second token, in 16 bits."""
    fields = OUTPUT | {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    model = model_of("glm4_moe", torch.bfloat16, **fields)
    model.save_pretrained(folder / "in")
    quantize_checkpoint(folder / "in", folder / "out", format="nvfp4a16", layout="modelopt")
    plain, files, layer = TensorFiles(folder / "in"), TensorFiles(folder / "out"), "model.layers.2."
    tensors = {name: files[name] for name in files}
    for name in plain:
        if name.startswith("model.layers.1."):
            tensors[name.replace("model.layers.1.", layer)] = plain[name]
    hidden = model.config.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors[f"{layer}eh_proj.weight"] = torch.eye(hidden, 2 * hidden, dtype=torch.bfloat16)
    tensors[f"{layer}shared_head.head.weight"] = plain["lm_head.weight"]
    tensors[f"{layer}embed_tokens.weight"] = plain["model.embed_tokens.weight"]
    config = config_of(folder / "out") | {"num_nextn_predict_layers": 1}
    quantization = config.pop("quantization_config")
    quantization["ignore"] = [*quantization["ignore"], f"{layer[:-1]}*"]
    return write(folder / "m", tensors, quantization, **config)


def test_mtp_layers_stay_in_16_bits(tmp_path):
    plain, got, model, drafted, _ = speculated(with_mtp(tmp_path), method="mtp", num_speculative_tokens=1)
    assert got == plain and drafted > 0
    kinds = {type(m.quant_method).__name__ for m in model.modules() if hasattr(m, "quant_method")}
    assert "UnquantizedLinearMethod" in kinds and not {"LinearMethod", "ExpertsMethod"} & kinds


def test_mla_with_real_head_sizes(tmp_path):
    """Tokens equal those of vLLM with dequantized weights.

    vLLM's MLA on the CPU gives other tokens than transformers also for models without quantized layers.
    """
    fields = OUTPUT | {
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 128,
        "q_lora_rank": 64, "num_key_value_heads": 2, "first_k_dense_replace": 2,
    }  # fmt: skip
    model_of("deepseek_v3", torch.bfloat16, **fields).save_pretrained(tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "m", format="nvfp4a16", layout="modelopt")
    checkpoint, config = Checkpoint(tmp_path / "m"), config_of(tmp_path / "m")
    tensors = {name: checkpoint.files[name].float() for name in checkpoint.plain}
    tensors |= {f"{name}.weight": checkpoint.linear(name).dequantize() for name in checkpoint.linears}
    del config["quantization_config"]
    with vllm_tokens.engine(write(tmp_path / "wide", tensors, None, **config)) as llm:
        expected = vllm_tokens.tokens(llm)
    with vllm_tokens.engine(tmp_path / "m") as llm:
        assert vllm_tokens.tokens(llm) == expected
        layers = dict(vllm_tokens.model_of(llm).named_modules())
        assert type(layers["model.layers.0.self_attn.kv_b_proj"].quant_method).__name__ == "LinearMethod"


NVFP4_SCHEME = Scheme("NVFP4", "nvfp4", "nvfp4")


@pytest.mark.parametrize("key, variable, expected", [
    ({}, None, "by_rows"), ({"activations": "16bit"}, None, "16bit"), ({"activations": "16bit"}, "4bit", "nvfp4"),
    ({}, "per_row", "nvfp4_per_row"),
])  # fmt: skip
def test_activations_of_w4a4_layers(monkeypatch, key, variable, expected):
    monkeypatch.delenv("NVFP4_CUTE_ACTIVATIONS", raising=False)
    if variable:
        monkeypatch.setenv("NVFP4_CUTE_ACTIVATIONS", variable)
    assert CheckpointConfig(MODELOPT | key).activations_of(NVFP4_SCHEME) == expected
    monkeypatch.delenv("NVFP4_CUTE_ACTIVATIONS", raising=False)
    for value, message in (
        ("8bit", "activations='8bit'; use one of auto, 4bit, 4over6, per_row, fp8, 16bit"),
        ("fp8", "needs MXFP4 weights, and this checkpoint has none"),
    ):
        with pytest.raises(ValueError, match=message):
            CheckpointConfig(MODELOPT | {"activations": value}).activations_of(NVFP4_SCHEME)


def test_activations_of_mxfp4_layers():
    scheme = Scheme("mxfp4-pack-quantized", "mxfp4", "mxfp4")
    assert CheckpointConfig(MXFP4).activations_of(scheme) == "16bit"
    config = CheckpointConfig(MXFP4 | {"activations": "fp8"})
    assert config.activations_of(scheme) == "fp8" and config.activations_of(scheme, True) == "16bit"
    assert config.activations_of(NVFP4_SCHEME) == "by_rows"


def test_weight_only_layers_can_be_asked_of_a_w4a4_checkpoint(monkeypatch):
    monkeypatch.setenv("NVFP4_CUTE_ACTIVATIONS", "16bit")
    with vllm_tokens.engine(MOE) as llm:
        layers = [m for m in vllm_tokens.model_of(llm).modules() if type(m).__name__ == "QuantizedLinear"]
        assert layers and {m.mode for m in layers} == {"16bit"}
        assert all(vllm_tokens.tokens(llm))


class Registry:
    """The parts of vLLM's registry that accept kernels, and a config with a number of tokens."""

    def __init__(self):
        self.registered = []
        self.config = SimpleNamespace(
            kernel_config=SimpleNamespace(enable_jit_warmup=True), scheduler_config=SimpleNamespace(max_num_batched_tokens=40),
            parallel_config=SimpleNamespace(data_parallel_size=1, world_size=1),
        )  # fmt: skip


def test_kernels_are_compiled_while_loading_and_loaded_in_the_warm_up(monkeypatch):
    """On an emulated H200, other processes get all kernels, and vLLM's warm-up finds each of them once."""
    from nvfp4_cute.models.vllm import kernels
    from nvfp4_cute.nn.linear import QuantizedLinear

    registry, submitted, loaded = Registry(), [], []

    class Compilers:
        folder = None

        def __init__(self, folder, jobs):
            pass

        def submit(self, keys):
            submitted.extend(key for key in keys if key not in submitted)
            return [SimpleNamespace(result=lambda: None) for _ in keys]

        def close(self):
            pass

    monkeypatch.setattr(kernels, "get_current_vllm_config", lambda: registry.config)
    monkeypatch.setattr(kernels, "Compilers", Compilers)
    monkeypatch.setattr(kernels, "get_kernel", lambda key, folder: loaded.append(key))
    monkeypatch.setattr(kernels, "_register", lambda one: registry.registered.append(one) or True)
    monkeypatch.setattr(kernels.backends, "resolve", lambda name, device: "cuda")
    monkeypatch.setattr(
        kernels.prepare, "linear_kernels", lambda layer, k, most, dtype, device: [f"{k} {most}", "shared"]
    )
    made, where = kernels.Kernels(), (torch.bfloat16, torch.device("cpu"))
    for k in (64, 64, 128):
        made.add_linear(QuantizedLinear(k, 32, bias=False), k, *where)
    assert registry.registered[0] is made and len(registry.registered) == 2
    assert submitted == made.get_warmup_keys() == ["64 40", "shared", "128 40"]
    made.compile_many(made.get_warmup_keys())
    assert loaded == submitted
    made.compile_many(made.get_warmup_keys())
    assert loaded == submitted


def test_prepared_layers_pass_the_monitor_of_compilations(tmp_path, monkeypatch):
    """With mode "error", vLLM's monitor raises where this process compiles a kernel after the warm-up."""
    from cutlass import cute
    from vllm.utils import jit_monitor

    for name in ("_active", "_mode", "_cutedsl_hook_installed", "_tilelang_hook_installed"):
        monkeypatch.setattr(jit_monitor, name, getattr(jit_monitor, name))
    monkeypatch.setattr(cute, "compile", cute.compile)
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(tmp_path))
    how = {"bias": False, "backend": "emulator:H200"}
    layer = QuantizedLinear(128, 128, activations="16bit", **how)
    other = QuantizedLinear(128, 128, activations="nvfp4", input_scale=0.01, **how)
    assert layer.prepare(24) > 0
    jit_monitor.activate(mode="error")
    for rows in (1, 7, 16, 24):
        layer(torch.zeros(rows, 128, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="during inference"):
        other(torch.zeros(4, 128, dtype=torch.bfloat16))


def test_modes_of_layers_are_in_the_key_of_compiled_graphs():
    """vLLM computes the key after it has loaded the weights, and a graph of other modes or layers has another one."""
    from vllm.config import VllmConfig

    stored = Checkpoint(DENSE).linear("model.layers.0.mlp.down_proj")

    def key(activations, names=(LAYER,)):
        config = VllmConfig()
        module = linear_module(stored, None, dtype=torch.bfloat16, device="cpu", activations=activations)
        for name in names:
            add_to_key(config, name, module)
        return config.compute_hash()

    keys = [key("nvfp4"), key("16bit"), key("nvfp4", (LAYER, LAYER)), VllmConfig().compute_hash()]
    assert len(set(keys)) == 4 and key("nvfp4") == keys[0]


def test_a_config_travels_to_other_processes():
    import pickle

    config = pickle.loads(pickle.dumps(CheckpointConfig(MODELOPT)))
    assert config.convention.scheme("lm_head") is None
    assert config.convention.scheme(LAYER).weights == "nvfp4"


# ---- experts that move between ranks ---------------------------------------------------------------------------


class Holder(torch.nn.Module):
    """The parts of RoutedExperts that pass its weights to vLLM's load balancer."""

    def __init__(self, experts):
        super().__init__()
        self.nvfp4, self.local_num_experts = experts, experts.num_experts


def wide_experts():
    """Makes experts of 128 rows, whose gate and up one kernel multiplies."""
    from nvfp4_cute.nn.experts import ModelExperts as Ours

    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(4, 256, 64, generator=g), torch.randn(4, 64, 128, generator=g)
    return Ours(MoE.from_experts(w13, w2, input_scale=[0.01, 0.02, 0.03, 0.04], hidden_scale=0.1))


@pytest.mark.parametrize("kind", ["stored", "wide"])
@torch.no_grad()
def test_experts_can_be_moved(kind):
    """Rows of all parameters move as in EPLB; the result is the same experts with new numbers."""
    if kind == "stored":
        stored = Checkpoint(MOE).read_experts("model.layers.0.mlp.experts")
        experts = experts_module(stored, "silu", dtype=torch.bfloat16, device="cpu", keep_two_factors=True)
        features = stored.w2.shape[1]
    else:
        experts, features = wide_experts(), 64
    as_moving_parameters(experts)
    count, g = experts.num_experts, torch.Generator().manual_seed(1)
    x = torch.randn(6, features, generator=g).bfloat16()
    ids = torch.randint(0, count, (6, 2), generator=g)
    weights = torch.rand(6, 2, generator=g)
    expected = experts(x, ids, weights)
    order = torch.randperm(count, generator=g)
    for rows in RoutedExperts.get_expert_weights(Holder(experts)):
        assert len(rows) == count
        rows.view(torch.uint8).copy_(rows.view(torch.uint8)[order].clone())
    assert not torch.equal(experts(x, ids, weights), expected)
    assert torch.equal(experts(x, torch.argsort(order)[ids], weights), expected)


# ---- versions --------------------------------------------------------------------------------------------------


def test_this_version_has_all():
    assert requirements.faults() is None


def test_another_version_is_refused_in_words(monkeypatch, caplog):
    from nvfp4_cute.models import vllm as plugin

    module = "vllm.model_executor.layers.linear"
    needed = {module: {"LinearBase": (), "NoSuchClass": (), "LinearMethodBase.apply": ("layer", "rows")}}
    monkeypatch.setattr(requirements, "NEEDED", needed | {"vllm.no_such_module": {"name": ()}})
    found = requirements.faults()
    for name in (f"{module}.NoSuchClass", f"{module}.LinearMethodBase.apply(rows=)", "vllm.no_such_module"):
        assert name in found
    assert "LinearBase," not in found and requirements.TESTED in found
    seen = []
    monkeypatch.setattr("nvfp4_cute.models.vllm.config.register_config", seen.append)
    plugin.register()
    assert not seen
