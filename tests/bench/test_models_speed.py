"""Random models of real configs: their sizes, and a test run of the timing (on the CPU; graphs need a GPU)."""

import json

import pytest
import torch

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from nvfp4_cute.bench.models import speed  # noqa: E402
from nvfp4_cute.bench.models.fp8_linear import LinearFP8  # noqa: E402
from nvfp4_cute.bench.models.random_model import NAMES, config_of, random_model  # noqa: E402
from nvfp4_cute.cli import main  # noqa: E402
from nvfp4_cute.nn.linear import QuantizedLinear  # noqa: E402
from nvfp4_cute.nn.moe import MoE  # noqa: E402

# Parameters in units of 10^9, from the models' cards.
SIZES = {
    "gpt-oss-20b": 20.9, "llama-3.1-8b": 8.03, "mixtral-8x7b": 46.7, "nemotron-nano-9b-v2": 8.9, "qwen3-30b-a3b": 30.5,
    "qwen3-8b": 8.2,
}  # fmt: skip
TINY = {
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_real_configs(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(SIZES[name], rel=0.005)


@pytest.fixture(autouse=True)
def fewer_repeats(monkeypatch):
    monkeypatch.setattr(speed, "REPEATS", 1)
    monkeypatch.setattr(speed, "WARM_UPS", 1)


@pytest.fixture
def tiny(tmp_path, request):
    fields = {
        "model_type": request.param, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128, "quantization_config": {"quant_method": "unknown"},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | TINY[request.param]))
    return path


@pytest.mark.parametrize("tiny", TINY, indirect=True)
def test_random_model(tiny):
    """Everything but the output layer and the routers is quantized; the result is finite and not constant."""
    torch.manual_seed(0)
    model = random_model(config_of(str(tiny)), "nvfp4", "cpu")
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linears == {"lm_head"}
    assert sum(isinstance(m, QuantizedLinear) for m in model.modules()) == 8
    assert sum(isinstance(m, MoE) for m in model.modules()) == 2
    with torch.no_grad():
        logits = model(torch.arange(8).unsqueeze(0)).logits
    assert logits.isfinite().all() and logits.std() > 0


@pytest.mark.parametrize("tiny", ["qwen3_moe"], indirect=True)
def test_bench(tiny, capsys):
    command = f"models bench {tiny} --device cpu --prompt 8 --tokens 2 --schemes bf16 nvfp4 --json"
    code = main(command.split())
    (result,) = json.loads(capsys.readouterr().out)["models"]
    assert (
        code == 0
        and [scheme["scheme"] for scheme in result["speeds"]] == ["bf16", "nvfp4"]
        and result["layers"] == 2
    )
    bf16, nvfp4 = result["speeds"]
    assert nvfp4["weight_bytes"] < bf16["weight_bytes"] and nvfp4["decode"] == "eager"
    assert nvfp4["prefill_tokens_per_s"] == pytest.approx(8 / nvfp4["prefill_s"])


@pytest.mark.parametrize("tiny", ["qwen3_moe"], indirect=True)
def test_other_ways_and_attention(tiny, capsys):
    """The table has a line per scheme, also for several sequences, another attention and fewer layers."""
    command = (
        f"models bench {tiny} --device cpu --batch 2 --prompt 4 --tokens 1 --schemes bf16 fp8 auto --layers 1"
    )
    assert main([*command.split(), "--attention", "grouped_sdpa"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "2 x 4" in line]
    assert [line[:2] for line in lines] == [[scheme, "grouped_sdpa"] for scheme in ("bf16", "fp8", "auto")]
    weights = [float(line[5]) for line in lines]
    assert all(float(line[9]) > 0 for line in lines) and weights == sorted(weights, reverse=True)


def test_fp8_linear():
    """Values are e4m3, products float32."""
    torch.manual_seed(0)
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(2, 3, 64).bfloat16()
    y = LinearFP8(weight, 0.01, 0.02, torch.ones(48).bfloat16())(x)
    assert y.shape == (2, 3, 48) and y.dtype == torch.bfloat16
    rounded = [(v / s).to(torch.float8_e4m3fn).double() * s for v, s in ((x, 0.02), (weight, 0.01))]
    exact = rounded[0] @ rounded[1].T + 1
    assert (y.double() - exact).norm() < 0.01 * exact.norm()


def test_unknown_model(capsys):
    assert main(["models", "bench", "no-such-model", "--device", "cpu"]) == 1
    assert "nor one of gpt-oss-20b" in capsys.readouterr().err
