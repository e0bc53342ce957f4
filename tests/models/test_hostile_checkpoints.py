"""Damaged and hostile checkpoints are refused in bounded time, by an error that names the file or the tensor."""

import copy
import json
import random
import re
import struct
from time import perf_counter

import pytest
import torch
from checkpoint_files import MODELOPT, experts, nvfp4, write

from nvfp4_cute import cli
from nvfp4_cute.errors import CheckpointError, printable
from nvfp4_cute.models.checkpoints import Checkpoint, names
from nvfp4_cute.models.checkpoints.checkpoint import convention_of, quantization_of
from nvfp4_cute.models.checkpoints.convention import Modules
from nvfp4_cute.models.checkpoints.folders import check_objects, local_folder
from nvfp4_cute.models.checkpoints.patterns import _Sets, matcher, parser
from nvfp4_cute.models.checkpoints.tensors import INDEX, TensorFiles

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"
DEEP = b'{"a":' * 100_000
ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def file_of(folder, header, body=b""):
    """Makes a folder with one safetensors file with this header, an object or text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", INDEX, "header"])
@pytest.mark.parametrize(
    "text", [DEEP, b'{"a":' + b"[" * 500 + b"]" * 500 + b"}", b'{"a": 1, "a": 2}', b"\xff\xfe{}", b"[]"]
)
def test_damaged_json_is_refused_by_file(tmp_path, name, text):
    """Covers nesting too deep for Python or for copies, a duplicate key, another encoding, and values that are not objects."""
    file_of(tmp_path, {})
    if name == "header":
        file_of(tmp_path, text)
    else:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(CheckpointError, match="model.safetensors" if name == "header" else name):
        Checkpoint(tmp_path)


def test_files_that_others_read_are_looked_at_first(tmp_path):
    (tmp_path / "generation_config.json").write_bytes(DEEP)
    with pytest.raises(CheckpointError, match="generation_config.json"):
        check_objects(tmp_path, "generation_config.json", "absent.json")


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": 5}, {"data_offsets": None}, {"data_offsets": [0]}, {"shape": 4}, {"shape": None}, {"shape": {}},
        {"dtype": ["U8"]}, {"dtype": {}}, {"dtype": None}, {"shape": [True, 4]},
        {"shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}, {"shape": [10**30]}, {"shape": [4] + [1] * 64},
        {"shape": [0, 1 << 62, 4], "data_offsets": [0, 0]}, {"dtype": "F4", "shape": [4]}, {"dtype": "U32", "shape": [4]},
    ],
    ids=str,
)  # fmt: skip
def test_types_and_sizes_in_headers(tmp_path, change):
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        TensorFiles(file_of(tmp_path, {"a.weight": ENTRY | change}, bytes(4)))


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": ENTRY}, 400, "396 bytes after the last tensor"),
        (
            {"a": ENTRY, "b": ENTRY | {"data_offsets": [104, 108]}},
            108,
            "'a' and 'b' 100 bytes of no tensor apart",
        ),
        ({"a": ENTRY | {"data_offsets": [4, 8]}}, 8, "'the header' and 'a' 4 bytes"),
        ({"__metadata__": [1], "a": ENTRY}, 4, "__metadata__"),
        ({"__metadata__": {"a": 1}, "a": ENTRY}, 4, "__metadata__"),
        ({"x" * 10_001: ENTRY}, 4, "10001 characters"),
    ],
)
def test_headers_that_safetensors_refuses(tmp_path, header, size, message):
    with pytest.raises(CheckpointError, match=message):
        TensorFiles(file_of(tmp_path, header, bytes(size)))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b", "a\0b", "x" * 5000])
def test_index_entries_outside_the_folder(tmp_path, name):
    folder = write(tmp_path / "own", nvfp4(Q), MODELOPT)
    write(tmp_path, nvfp4(Q), MODELOPT)
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"{Q}.weight": name}}))
    with pytest.raises((CheckpointError, FileNotFoundError), match="index.json names"):
        Checkpoint(folder)


def test_two_sets_of_files(tmp_path):
    """One file next to the shards of an index is a second checkpoint; an index of only that file is fine."""
    folder = write(tmp_path, nvfp4(Q), MODELOPT)
    tensors = nvfp4(Q, seed=3)
    write(tmp_path / "other", tensors, MODELOPT)
    (tmp_path / "other" / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert TensorFiles(folder)[f"{Q}.weight_scale_2"] == nvfp4(Q)[f"{Q}.weight_scale_2"], "as transformers"
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"has model\.safetensors and model\.safetensors\.index\.json.*remove"
    ):
        Checkpoint(folder)
    read = Checkpoint(folder, files=[folder / "model-00001-of-00001.safetensors"]).linear(Q)
    assert read.weight.global_scale == tensors[f"{Q}.weight_scale_2"]
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert list(Checkpoint(folder).linears) == [Q]


@pytest.mark.parametrize("number", ["2000000000", "01", "1" * 5000, "\u0663"])
def test_numbers_of_experts(tmp_path, number):
    tensors = experts(EXPERTS)
    more = {n.replace("experts.1.", f"experts.{number}."): t for n, t in tensors.items() if "experts.1." in n}
    with pytest.raises(CheckpointError, match="has expert number"):
        Checkpoint(write(tmp_path, tensors | more, MODELOPT))


def test_a_gap_of_experts_is_named_at_once(tmp_path):
    tensors = experts(EXPERTS)
    more = {n.replace("experts.1.", "experts.999999."): t for n, t in tensors.items() if "experts.1." in n}
    checkpoint = Checkpoint(write(tmp_path, tensors | more, MODELOPT))
    with pytest.raises(CheckpointError, match="projection of expert 3, and 1000000 experts"):
        checkpoint.read_experts(EXPERTS)


@pytest.mark.parametrize("other", [f"{EXPERTS}.1.w3", f"{EXPERTS}.up_proj.1"])
def test_one_projection_in_two_spellings(tmp_path, other):
    tensors = experts(EXPERTS)
    own = f"{EXPERTS}.1.up_proj"
    more = {n.replace(own, other): t for n, t in tensors.items() if n.startswith(own)}
    with pytest.raises(CheckpointError, match="are both the up projection"):
        Checkpoint(write(tmp_path, tensors | more, MODELOPT))


FP4 = {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
CT = {"quant_method": "compressed-tensors", "config_groups": {"g": FP4}}


def test_one_role_in_two_spellings(tmp_path):
    tensors = {f"{Q}.weight_packed": nvfp4(Q)[f"{Q}.weight"]} | nvfp4(Q)
    with pytest.raises(CheckpointError, match="weight_packed and .*weight are the data of one layer"):
        Checkpoint(write(tmp_path, tensors, CT))


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "weight_packed"),
        ({"quant_method": "awq"}, "weight_scale_inv"),
        (MODELOPT, "qweight"),
        (CT, "weight_scale_2"),
        ({"quant_method": "mxfp4"}, "qzeros"),
    ],
)
def test_methods_that_contradict_the_tensors(tmp_path, method, name):
    folder = write(tmp_path, {f"{Q}.{name}": torch.zeros(8, 8, dtype=torch.int32)}, method)
    with pytest.raises(CheckpointError, match=f"{name} is not a tensor of .*quant_method"):
        Checkpoint(folder)


@pytest.mark.parametrize("role", ["weight_scale_2", "input_scale"])
@pytest.mark.parametrize("value", [1e-39, 1e-30, 3e38, 1e30, float("inf"), float("nan"), -1.0])
def test_factors_out_of_range(tmp_path, role, value):
    """The factor, its inverse and the product of two must be normal float32 numbers; "fill" replaces those of activations."""
    folder = write(tmp_path, nvfp4(Q) | {f"{Q}.{role}": torch.tensor(value)}, MODELOPT)
    with pytest.raises(CheckpointError, match=f"{Q}.{role} is "):
        Checkpoint(folder).linear(Q)
    if role == "input_scale":
        assert Checkpoint(folder, missing_input_scale="fill").linear(Q).input_scale is None


def test_scales_of_a_cache_are_single(tmp_path):
    tensors = nvfp4(Q) | {f"{Q}.k_scale": torch.ones(4), f"{Q}.k_bias": torch.ones(4)}
    with pytest.raises(CheckpointError, match=r"k_scale has shape \[4\]"):
        Checkpoint(write(tmp_path, tensors, MODELOPT)).kv_scales()


@pytest.mark.parametrize(
    "pattern", [r"(a+)+$", r"(a|a)*b", r"(.*a){20}$", r"(a|aa)+$", r".*.*.*.*.*.*.*.*b", r"(a*)*(a*)*c"]
)
def test_expressions_that_backtrack_for_ever(pattern):
    begun = perf_counter()
    assert ("a" * 90 + "!") not in Modules([f"re:{pattern}"])
    assert perf_counter() - begun < 5


@pytest.mark.parametrize("pattern", [r"(a+)+\1$", r"(?i)(a+)+$", r"(?:(?<=a)a+)+$"])
def test_expressions_that_cannot_be_bounded(pattern):
    with pytest.raises(CheckpointError, match="may take for ever"):
        assert "a" * 90 in Modules([f"re:{pattern}"])


@pytest.mark.parametrize("pattern", ["(" * 3000, "((", "a{99999999999}", "a" * 2001])
def test_expressions_that_are_none(pattern):
    with pytest.raises(CheckpointError, match="re:"):
        Modules([f"re:{pattern}"])


def test_sets_match_as_python_does():
    """Random patterns over a small alphabet give the same answers on random names."""
    draw = random.Random(0)
    pieces = ["a", "b", ".", "[^a]", "[a-b1]", r"\d", r"\w", r"\.", r"\b", "^", "$", "(?=a)", "(?!b)"]

    def pattern(depth):
        if depth == 0:
            return draw.choice(pieces)
        parts = [pattern(depth - 1) for _ in range(draw.randint(1, 3))]
        joined = draw.choice(["", "|"]).join(parts)
        return f"({joined}){draw.choice(['', '*', '+', '?', '*?', '{1,2}', '{2}'])}"

    for _ in range(1500):
        source = pattern(draw.randint(1, 3))
        name = "".join(draw.choice("ab1.\n") for _ in range(draw.randint(0, 7)))
        found = bool(_Sets(source, name).ends(parser.parse(source), {0}))
        assert found == (re.match(source, name) is not None), (source, name)
        assert bool(matcher(source)(name)) == found


def test_order_of_targets(tmp_path):
    """The library's order: a name, then expressions alphabetically, then classes; the order of groups does not matter."""
    eight = {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    cases = [
        ([Q], ["re:.*proj$"], "fp8"),
        (["re:.*q_proj"], ["Linear"], "fp8"),
        (["re:b.*|model.*"], ["re:.*q_proj$"], "nvfp4"),
        (["model.layers.0"], ["re:.*q_proj"], "fp8"),
        (["Embedding"], ["Linear"], "nvfp4"),
    ]
    for own, others, expected in cases:
        groups = {"x": eight | {"targets": own}, "y": FP4 | {"targets": others}}
        for order in (("x", "y"), ("y", "x")):
            config = CT | {"config_groups": {name: groups[name] for name in order}}
            assert convention_of(config).scheme(Q).weights == expected, (own, others, order)
    assert convention_of(config).scheme("model.embed_tokens").weights == "fp8"


CONFIGS = [
    MODELOPT | {"config_groups": {"g": {"input_activations": {}}}, "exclude_modules": ["a*"]},
    {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a*": {"quant_algo": "FP8"}},
    },
    {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["x"]}},
    CT
    | {
        "ignore": ["re:.*x"],
        "sparsity_config": {"format": "dense"},
        "transform_config": {"config_groups": {}},
    },
    {
        "quant_method": "gptq",
        "bits": 4,
        "checkpoint_format": "gptq",
        "sym": True,
        "desc_act": True,
        "group_size": 128,
    },
    {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
    {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "ignored_layers": None,
    },
    {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]},
]
VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "re:(",
    [],
    [1],
    [None],
    [["x"]],
    {},
    {"a": 1},
    {"a": None},
    {"a": {}},
]


def test_values_of_other_types_in_configs():
    """Every value of every convention is replaced by every other kind of value: read, or refused by CheckpointError."""

    def places(value, path=()):
        yield path
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield from places(value[key], (*path, key))

    for config in CONFIGS:
        for *around, last in filter(None, places(config)):
            for value in VALUES:
                changed = place = copy.deepcopy(config)
                for key in around:
                    place = place[key]
                place[last] = value
                try:
                    convention_of(changed).scheme(Q)
                except CheckpointError:
                    continue


@pytest.mark.parametrize(("method", "key"), [("gptq", "sym"), ("gptq", "desc_act"), ("awq", "zero_point")])
def test_flags_are_true_or_false(method, key):
    with pytest.raises(CheckpointError, match=f"{key} is 'false'; it is true or false"):
        convention_of({"quant_method": method, "bits": 4, key: "false"})


def test_control_characters_do_not_reach_a_terminal(tmp_path, capsys):
    evil = "\x1b[2J\x1b]0;owned\x07\n\u202e"
    tensors = {f"{evil}a.weight": torch.zeros(2)} | {f"{evil}{n}": t for n, t in nvfp4("b").items()}
    del tensors[f"{evil}b.weight_scale_2"]
    folder = write(tmp_path, tensors, MODELOPT, model_type=f"x{evil}")
    cli.main(["models", "inspect", str(folder)])
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": evil}}))
    cli.main(["models", "inspect", str(folder)])
    text = "".join(capsys.readouterr())
    assert "owned" in text and not set(evil) & set(text) - set("\n[2J]0;owned")
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_opening_many_experts(tmp_path):
    """Names of experts are spelled once per layer: 190,000 tensors, as in DeepSeek-V3, open in three seconds."""
    tensors = experts(EXPERTS, count=40)
    names._spellings.cache_clear()
    Checkpoint(write(tmp_path, tensors, MODELOPT | {"ignore": ["*.self_attn*", "re:.*shared.*"]}))
    assert names._spellings.cache_info().misses < 40


def test_names_on_the_hub(tmp_path, monkeypatch):
    """A downloaded snapshot is found by its name; without one, the message says how to get it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="download it first, with `hf download owner/name`"):
        quantization_of(local_folder("owner/name"))
    around = tmp_path / "models--owner--name"
    write(around / "snapshots" / "0123", nvfp4(Q), MODELOPT)
    (around / "refs").mkdir()
    (around / "refs" / "main").write_text("0123")
    assert list(Checkpoint(local_folder("owner/name")).linears) == [Q]
    assert str(local_folder("../name")) == "../name" and str(local_folder("a/b/c")) == "a/b/c"
