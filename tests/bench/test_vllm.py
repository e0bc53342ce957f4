"""Whole models in vLLM: plan, folders and page, and one engine on the CPU if vLLM is installed."""

import importlib.util
import json

import pytest

from nvfp4_cute.bench.vllm import page
from nvfp4_cute.bench.vllm.__main__ import merged
from nvfp4_cute.bench.vllm.folders import make_folder
from nvfp4_cute.bench.vllm.plan import WAVES, Job, Wave, selected
from nvfp4_cute.bench.vllm.waves import environment, run_wave
from nvfp4_cute.models.checkpoints.checkpoint import convention_of
from nvfp4_cute.models.vllm.taken import refusal

SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 512,
}  # fmt: skip


def test_jobs_travel_as_json_and_have_names_of_their_own():
    jobs = [job for wave in WAVES for job in wave.jobs]
    assert len({job.name for job in jobs}) == len(jobs)
    assert [Job.from_dict(json.loads(json.dumps(job.as_dict()))) for job in jobs] == jobs


@pytest.mark.parametrize(
    "job", [j for wave in WAVES for j in wave.jobs if j.scheme != "bf16"], ids=lambda j: j.name
)
def test_folders_are_checkpoints_that_the_plug_in_takes(tmp_path, job):
    config = json.loads((make_folder(tmp_path, job.model, job.scheme) / "config.json").read_text())
    assert refusal(config["quantization_config"], config["model_type"]) is None
    convention = convention_of(config["quantization_config"])
    scheme = convention.scheme("model.layers.0.mlp.down_proj")
    assert (scheme.weights, scheme.activations) == ("nvfp4", "nvfp4" if job.scheme == "w4a4" else None)
    plain = ["lm_head"]
    if "num_experts" in config:
        plain.append("model.layers.47.mlp.gate")
    if "hybrid_override_pattern" in config:
        plain.append(f"backbone.layers.{config['hybrid_override_pattern'].index('*')}.mixer.o_proj")
    assert all(convention.scheme(name) is None for name in plain)


def test_vllms_own_methods_run_without_the_plug_in(tmp_path):
    plugin, own = Job("qwen3-8b", "w4a16", "plugin"), Job("qwen3-8b", "w4a16", "vllm")
    assert [environment(job, tmp_path)["VLLM_PLUGINS"] for job in (plugin, own)] == ["nvfp4_cute", ""]


def record(scheme, method, ms, **more):
    job = Job("qwen3-8b", scheme, method)
    return {
        "name": job.name, "job": job.as_dict(), "start_s": 60.0, "weights_gib": 6.0,
        "decode_ms": {"1": [ms, ms * 1.3], "32": [2 * ms, 2 * ms]}, "prefill_ms": {"1 x 2048": [50.0, 51.0]},
    } | more  # fmt: skip


def test_the_page():
    soak = {"requests": 500, "seconds": 30.0, "ours": [], "others": ["Triton x"]}
    rows = [
        record("w4a16", "plugin", 2.0, soak=soak, profile={"1": [["gemm|x", 3, 1.5]]}),
        record("bf16", "vllm", 4.0),
    ]
    text = page.page({"machine": {"gpu": "H200", "vllm": "0.32.0"}, "engines": {r["name"]: r for r in rows}})
    assert "| NVFP4, W4A16 | plug-in | 500 | 8000 | 50.0 | 6.00 | 60 |" in text
    assert "| bf16 | vLLM | 250 | 4000 | 50.0 | 6.00 | 60 |" in text
    assert "qwen3-8b-bf16-vllm at 1: 4.00 and 5.20 ms" in text
    assert "| qwen3-8b-w4a16-plugin | 500 | 30 | 0 | 1 |" in text and "| `gemm/x` | 3 | 1.50 |" in text


def test_later_runs_replace_earlier_ones():
    first = {"machine": {}, "engines": {"a": 1, "b": 1}}
    assert merged([first, {"machine": {}, "engines": {"b": 2}, "serve": 3}]) == {
        "machine": {}, "engines": {"a": 1, "b": 2}, "serve": 3
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; make test-vllm installs it"
)
def test_engines_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine = {
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
    }
    options = {
        "batches": (1,), "prefills": ((1, 40),), "seqs": 4, "kv_gib": 0.05, "soak": 4, "steps": 2, "engine": engine, "config": SMALL
    }  # fmt: skip
    jobs = Job("qwen3-8b", "w4a16", "plugin", **options), Job("qwen3-8b", "bf16", "vllm", **options)
    ours, theirs = run_wave(Wave("dense", 400, jobs), tmp_path, 400, tmp_path)
    assert "error" not in ours and "error" not in theirs
    assert (ours["quantization"], theirs["quantization"]) == ("nvfp4_cute", "None")
    assert ours["soak"]["requests"] == 4 and len(ours["decode_ms"]["1"]) == 2


def test_one_wave_of_the_engines_that_match():
    (wave,) = selected("30b.*plugin$|nemotron.*w4a16")
    names = ["qwen3-30b-a3b-w4a16-plugin", "qwen3-30b-a3b-w4a4-plugin", "nemotron-nano-9b-v2-w4a16-plugin"]
    assert [job.name for job in wave.jobs] == names
    assert selected("gpt") == ()
