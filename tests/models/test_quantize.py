"""Quantizing a checkpoint: rounding, choice of layers, contents of files, and reading them back."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import MODELOPT, nvfp4, write
from model_folder import E, H, seen, source

from nvfp4_cute import dequantize, quantize
from nvfp4_cute.cli import main
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints import Checkpoint
from nvfp4_cute.models.quantizing.calibrate import Seen
from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint
from nvfp4_cute.models.quantizing.layouts import LAYOUTS
from nvfp4_cute.models.quantizing.rules import group_of
from nvfp4_cute.models.quantizing.weights import quantized

# Root mean square error for normally distributed values, relative to the values, as in formats.block_scales.
ERRORS = {"nvfp4": 0.1, "nvfp4a16": 0.1, "mxfp4": 0.12, "mxfp8": 0.031}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ERRORS)
def test_every_format_is_read_back(tmp_path, format, layout):
    folder, tensors = source(tmp_path / "in")
    (folder / "tokenizer.json").write_text("{}")
    done = quantize_checkpoint(
        folder, tmp_path / "out", format=format, layout=layout, seen=seen(), unreached="largest"
    )
    checkpoint = Checkpoint(tmp_path / "out")
    assert done.layers == 4 + 3 * E and done.bytes_after < done.bytes_before
    assert (checkpoint.tool, len(checkpoint.linears), len(checkpoint.experts)) == (layout, 4, 1)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    for name in checkpoint.plain:
        assert torch.equal(checkpoint.files[name], tensors[name])
    for layer in checkpoint.each_linear():
        values = tensors[f"{layer.name}.weight"].float()
        error = (layer.weight.dequantize() - values).norm() / values.norm()
        assert 0.5 * ERRORS[format] < error < 1.1 * ERRORS[format]
        assert (layer.input_scale is None) == (format != "nvfp4")
    one = checkpoint.read_experts("model.layers.0.mlp.experts")
    gate_up = torch.stack(
        [
            torch.cat([tensors[f"{one.name}.{e}.{p}.weight"] for p in ("gate_proj", "up_proj")])
            for e in range(E)
        ]
    )
    got = one.w13.dequantize() * (1 if one.w13_global is None else one.w13_global[:, :1, None])
    assert (got - gate_up.float()).norm() / gate_up.float().norm() < 1.1 * ERRORS[format]
    if one.w13_global is not None:
        assert torch.equal(one.w13_global[:, 0], one.w13_global[:, 1]), "gate and up share it"
        amax = torch.stack([gate_up[e].float().abs().amax() for e in range(E)])
        torch.testing.assert_close(one.w13_global[:, 0], amax / 2688)


def test_what_calibration_saw(tmp_path):
    """q, k and v read the same rows; an expert that no token reached gets the largest scale of its layer."""
    folder, tensors = source(tmp_path / "in")
    done = quantize_checkpoint(folder, tmp_path / "out", seen=seen(), unreached="largest")
    checkpoint = Checkpoint(tmp_path / "out")
    for name, amax in (("q", 4), ("k", 4), ("v", 4), ("o", 2)):
        layer = checkpoint.linear(f"model.layers.0.self_attn.{name}_proj")
        torch.testing.assert_close(layer.input_scale, torch.tensor(amax / 2688))
    shared = [tensors[f"model.layers.0.self_attn.{n}_proj.weight"].float().abs().max() for n in "qkv"]
    for n in "qkv":
        factor = checkpoint.linear(f"model.layers.0.self_attn.{n}_proj").weight.global_scale
        torch.testing.assert_close(factor, max(shared) / 2688)
    one = checkpoint.read_experts("model.layers.0.mlp.experts")
    torch.testing.assert_close(one.w13_input, torch.tensor([3.0, 5.0, 5.0]) / 2688)
    torch.testing.assert_close(one.w2_input, torch.tensor([7.0, 7.0, 1.0]) / 2688)
    assert len(done.unreached) == 3 and all(".1." in name for name in done.unreached)


def test_left_out(tmp_path, capsys):
    folder, _ = source(tmp_path / "in", **{"model.layers.0.odd.weight": torch.zeros(4, 24).bfloat16()})
    code = main(
        [
            "quantize",
            str(folder),
            "--out",
            str(tmp_path / "out"),
            "--format",
            "nvfp4a16",
            "--keep",
            "*.o_proj",
            "*.down_proj",
        ]
    )
    text = capsys.readouterr().out
    checkpoint = Checkpoint(tmp_path / "out")
    assert code == 0 and "left out by the rule *.o_proj" in text and "K=24 is not a multiple of 16" in text
    assert [n.rpartition(".")[2] for n in checkpoint.linears] == ["q_proj", "k_proj", "v_proj"]
    assert not checkpoint.experts and "experts of one layer are alike, and model.layers.0.mlp.experts" in text
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.self_attn.o_proj",
    } < set(config["ignore"])
    own = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert own["exclude_modules"] == config["ignore"] and own["quant_algo"] == "W4A16_NVFP4"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {}, "calibrate with a text"),
        ({}, {"seen": Seen()}, "self_attn.q_proj was not calibrated.*--keep"),
        ({"model.layers.0.self_attn.o_proj.weight": torch.full((64, H), torch.nan)}, {"format": "nvfp4a16"}, "o_proj.weight.*not finite"),
        ({}, {"format": "nvfp4a16", "formats": {"model.*": "16bit"}}, "no layer to quantize: .* is left out by the rule"),
        ({}, {"format": "int3"}, "formats are nvfp4"),
    ],
)  # fmt: skip
def test_refusals(tmp_path, change, options, message):
    folder, _ = source(tmp_path / "in", **change)
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(folder, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists(), "nothing is written before all is known"
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(folder, tmp_path / "out", **options)
    assert not any((tmp_path / "out").iterdir())


def test_experts_whose_down_is_narrow_stay(tmp_path):
    """Their K of 96 is not a multiple of int4's block, and readers refuse experts that are half quantized."""
    folder, _ = source(tmp_path / "in", **{"model.layers.0.wide.weight": torch.ones(8, 128).bfloat16()})
    done = quantize_checkpoint(folder, tmp_path / "out", format="int4", layout="compressed-tensors")
    checkpoint = Checkpoint(tmp_path / "out")
    assert done.layers == 1 and list(checkpoint.linears) == ["model.layers.0.wide"] and not checkpoint.experts


def test_a_quantized_model_is_not_quantized_again(tmp_path):
    folder = write(tmp_path / "in", nvfp4("model.layers.0.mlp.up_proj"), MODELOPT)
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(folder, tmp_path / "out", format="mxfp8")
    folder, _ = source(tmp_path / "plain")
    for _ in range(2):
        code = main(["quantize", str(folder), "--out", str(tmp_path / "out2"), "--format", "mxfp8"])
    assert code == 1, "files that are there are not overwritten"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_searched_scales_lose_less(format):
    """No block is worse than with the scale of its largest value, and some are better."""
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    weight[0, :16] = 0
    block = 16 if format == "nvfp4" else 32
    errors = [
        (quantized(weight, format, search=s).dequantize() - weight)
        .square()
        .unflatten(-1, (-1, block))
        .sum(-1)
        for s in (False, True)
    ]
    assert (errors[1] <= errors[0] * (1 + 1e-6)).all() and errors[1].sum() < 0.97 * errors[0].sum()


def test_searched_scales_serve_the_columns_that_count(tmp_path):
    """With a calibration, search minimizes errors times the mean squares of inputs: of an expert those of its own tokens."""
    folder, tensors = source(tmp_path / "in")
    prefix = "model.layers.0.mlp.experts"
    g = torch.Generator().manual_seed(4)
    each = {e: torch.rand(H, generator=g).pow(8) for e in range(E)}
    noticed = Seen(
        rows={(prefix, e): 3 for e in each}, squares={(prefix, e, False): 3 * each[e] for e in each}
    )
    quantize_checkpoint(folder, tmp_path / "out", format="nvfp4a16", method="search", seen=noticed)
    experts = Checkpoint(tmp_path / "out").read_experts(prefix)
    for e, importance in each.items():
        gate, up = (tensors[f"{prefix}.{e}.{name}_proj.weight"] for name in ("gate", "up"))
        amax = torch.stack((gate, up)).abs().max()
        error = lambda stored, x=gate, w=importance: ((stored.dequantize() - x).square() * w).sum()
        chosen = quantized(gate, "nvfp4", amax, True, importance)
        assert torch.equal(experts.w13.data[e, : len(gate)], chosen.data)
        assert error(chosen) < 0.97 * error(quantized(gate, "nvfp4", amax, True))
        down = quantized(tensors[f"{prefix}.{e}.down_proj.weight"], "nvfp4", search=True)
        assert torch.equal(experts.w2.data[e], down.data), "of no recorded input"


def test_mxfp8_does_not_saturate():
    """If the mantissa of a block's largest value exceeds 1.75, rounding the scale down would clamp it."""
    weight = torch.full((1, 32), 1.0)
    weight[0, 0] = 1.9
    found = quantized(weight, "mxfp8_e4m3").dequantize()
    assert found[0, 0] == 1.875 and torch.equal(found[0, 1:], weight[0, 1:])
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * 1e-4
    weight[:, 0] = 1.8  # 460.8 of 448: a smaller scale gives it the same value, and the others more bits
    nearest, searched = (
        quantized(weight, "mxfp8_e4m3", search=s).dequantize() - weight for s in (False, True)
    )
    assert torch.equal(nearest[:, 0], searched[:, 0]) and searched[:, 1:].norm() < 0.9 * nearest[:, 1:].norm()


def test_nearest_is_that_of_quantize():
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    got, exact = quantized(weight, "nvfp4"), quantize(weight, global_scale="auto", scale_layout="rowmajor")
    assert torch.equal(got.data, exact.data) and torch.equal(got.dequantize(), dequantize(exact))
    assert not quantized(torch.zeros(2, 32), "nvfp4", search=True).dequantize().any()


def test_groups():
    assert group_of("a.q_proj") == group_of("a.v_proj") != group_of("b.v_proj")
    assert (
        group_of("e.0.gate_proj") == group_of("e.0.up_proj") and group_of("e.0.down_proj") == "e.0.down_proj"
    )


def test_calibrated_through_transformers(tmp_path, capsys):
    """A transformers model is saved, quantized from the command line with random tokens, and loaded again."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed; make test-transformers installs it"
    )
    from nvfp4_cute.models import transformers as ours

    config = transformers.AutoConfig.from_pretrained(
        Path(__file__).parents[1] / "data" / "checkpoints" / "modelopt-qwen3moe-nvfp4"
    )
    del config.quantization_config
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "in")
    for layout in LAYOUTS:
        out = tmp_path / layout
        arguments = [
            "quantize",
            str(tmp_path / "in"),
            "--out",
            str(out),
            "--layout",
            layout,
            "--calibrate",
            "random",
        ]
        assert main(arguments) == 0, capsys.readouterr().err
        loaded = ours.load(out, dtype=torch.bfloat16)
        ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            got, expected = loaded(ids).logits.double(), model(ids).logits.double()
        assert 0.01 < (got - expected).norm() / expected.norm() < 0.35
        one = Checkpoint(out).read_experts("model.layers.0.mlp.experts")
        assert (
            0.5 / 2688 < one.w13_input.min()
            and one.w13_input.max() < 8 / 2688
            and (one.w13_input != one.w13_input[0]).any()
        )


def test_calibration_without_a_tokenizer(tmp_path):
    pytest.importorskip(
        "transformers", reason="transformers is not installed; make test-transformers installs it"
    )
    from nvfp4_cute.models.quantizing.calibrate import samples

    (tmp_path / "text.txt").write_text("words")
    folder, _ = source(tmp_path / "in")
    with pytest.raises(ValueError, match='has no tokenizer; pass "random"'):
        samples(folder, str(tmp_path / "text.txt"), 256)
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="text.txt is not UTF-8 text"):
        samples(folder, str(tmp_path / "text.txt"), 256)
    assert all(
        torch.equal(a, b)
        for a, b in zip(samples(folder, "random", 256), samples(folder, "random", 256), strict=True)
    )


@pytest.mark.parametrize("more", [[], ["--method", "gptq", "--calibrate", "random"]])
def test_a_quantized_model_is_refused_before_it_is_loaded(more, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": {}}')
    assert main(["quantize", str(tmp_path), "--out", str(tmp_path / "out"), *more]) == 1
    assert "is quantized already; pass the 16-bit model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calibrate", "nowhere.txt"], 'there is no file nowhere.txt; pass a text file, or "random"'),
        (
            ["--calibrate", "random", "--budget", "4"],
            "budget=4.0 bits per weight; nvfp4 takes 4.5: pass more",
        ),
        (
            ["--calibrate", "random", "--budget", "nan"],
            "budget=nan bits per weight; nvfp4 takes 4.5: pass more",
        ),
    ],
)
def test_what_calibration_would_end_with_is_said_before_it(options, message, tmp_path, capsys):
    folder, _ = source(tmp_path / "in")
    command = ["quantize", str(folder), "--out", str(tmp_path / "out"), *options]
    assert main(command) in (1, 2) and message in capsys.readouterr().err
    assert main([*command[:3], str(folder), "--calibrate", "random"]) == 1
    assert "has safetensors files already; name an empty folder" in capsys.readouterr().err


def test_devices_and_damaged_files_are_named(tmp_path, capsys):
    folder, _ = source(tmp_path / "in")
    command = ["quantize", str(folder), "--out", str(tmp_path / "out"), "--calibrate", "random"]
    for device, message in (
        ("cuda:99", "cuda:99 is not there; torch sees"),
        ("gpu", "'gpu' is not a torch device"),
    ):
        with pytest.raises(SystemExit):
            main([*command, "--device", device])
        assert message in capsys.readouterr().err
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(command) in (1, 2) and "damaged or cut; fetch it again" in capsys.readouterr().err


def test_a_pattern_that_matches_nothing_is_said(tmp_path, capsys):
    folder, _ = source(tmp_path / "in")
    arguments = ["quantize", str(folder), "--out", str(tmp_path / "out"), "--format", "nvfp4a16", "--keep"]
    assert main([*arguments, "*.o_proj", "*.oproj"]) == 0
    said = capsys.readouterr().err
    assert "--keep *.oproj matches no layer" in said and "*.o_proj" not in said


def test_four_over_six_is_that_of_quantize(tmp_path, capsys):
    """Less error than nearest, and the bits of the operation; projections that go together share a global scale."""
    folder, tensors = source(tmp_path / "in")
    names = [f"model.layers.0.self_attn.{n}_proj" for n in "qkv"]
    amax = max(float(tensors[f"{n}.weight"].abs().max()) for n in names)
    command = ["quantize", str(folder), "--format", "nvfp4a16", "--out"]
    assert main([*command, str(tmp_path / "six"), "--method", "four_over_six"]) == 0
    assert main([*command, str(tmp_path / "near")]) == 0
    for name in names:
        stored = Checkpoint(tmp_path / "six").linear(name).weight
        weight = tensors[f"{name}.weight"].float()
        want = quantize(weight, method="four_over_six", global_scale=amax / 1536, scale_layout="rowmajor")
        assert torch.equal(stored.data, want.data) and torch.equal(
            stored.scale.view(torch.uint8), want.scale.view(torch.uint8)
        )
        near = Checkpoint(tmp_path / "near").linear(name).weight
        assert (stored.dequantize() - weight).norm() < 0.95 * (near.dequantize() - weight).norm()
    assert main([*command[:3], "mxfp4", "--out", str(tmp_path / "mx"), "--method", "four_over_six"]) in (1, 2)
    assert "chooses scales of NVFP4, not of mxfp4" in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recipe_by_type_of_layer(layout, tmp_path):
    """Experts and output layer in NVFP4, attention in 16 bits, Mamba and dense layers in FP8 with one scale per row."""
    mamba = (torch.randn(96, H, generator=torch.Generator().manual_seed(1)) / 8).bfloat16()
    mamba[5] = 0
    name, odd = (
        "model.layers.1.mixer.in_proj",
        "model.layers.2.mixer.in_proj",
    )  # engines' FP8 products need multiples of 16
    folder, tensors = source(tmp_path / "in", **{f"{name}.weight": mamba, f"{odd}.weight": mamba[:88]})
    command = ["quantize", str(folder), "--out", str(tmp_path / "out"), "--layout", layout]
    assert main([*command, "--recipe", "nemotron", "--format", "mxfp8"]) in (1, 2)
    assert main([*command, "--recipe", "nemotron", "--keep", "*.mixer.out_proj"]) == 0
    checkpoint = Checkpoint(tmp_path / "out")
    stored = checkpoint.linear(name)
    assert (stored.scheme.weights, stored.scheme.activations, stored.input_scale) == ("fp8", "fp8", None)
    amax = mamba.float().abs().amax(1, keepdim=True)
    assert torch.equal(stored.weight.scale, torch.where(amax == 0, 1.0, amax / 448))
    assert 0.02 < (stored.weight.dequantize() - mamba.float()).norm() / mamba.float().norm() < 0.03
    experts, head = checkpoint.read_experts("model.layers.0.mlp.experts"), checkpoint.linear("lm_head")
    assert str(experts.scheme) == str(head.scheme) == "W nvfp4, A 16 bit"
    assert {"model.layers.0.self_attn.q_proj.weight", f"{odd}.weight"} <= set(checkpoint.plain)
    assert [n for n in checkpoint.linears if "self_attn" in n] == []
