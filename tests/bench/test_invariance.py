"""Checks of batch invariance: draws find a planted difference, models answer alike in any batch, and costs make a table."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvfp4_cute.bench.invariance import __main__ as program
from nvfp4_cute.bench.invariance import cost, draws
from nvfp4_cute.bench.invariance.answers import Answer, Runs, difference, random_prompts
from nvfp4_cute.bench.invariance.draws import MAIN, SMALL, Case, draw, draw_rows, product
from nvfp4_cute.tuning.stopwatch import Sample

EMULATED = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


@pytest.fixture(autouse=True)
def few_known(monkeypatch):
    monkeypatch.setattr(draws, "KNOWN", 2)


@pytest.mark.parametrize("form", ["gemm", "ragged"])
def test_draws_on_the_emulator(form):
    make = lambda: product(MAIN[2], form, "cpu", SMALL, "emulator:sm_90a")
    found = draw(make, 2, "cpu")
    assert (found.draws, found.wrong, found.refused) == (2, 0, "") and found.compared >= 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", *(f"emulator:{arch}" for arch in EMULATED)])
@pytest.mark.parametrize("number", range(len(list(draws.cases("cpu", SMALL)))))
def test_every_operation_format_and_form(number, backend):
    found = draw(list(draws.cases("cpu", SMALL, backend))[number], 2, "cpu")
    assert found.wrong == 0 and (found.draws == 2 or found.refused)


def test_a_bit_that_depends_on_the_number_of_rows_is_found():
    x = torch.randn(draws.POOL, 8)
    run = lambda index, sizes: x[index] * (1 + 2.0**-20 * (len(index) > 3))
    found = draw(lambda: Case("planted", run, groups=3, most=20), 20, "cpu")
    assert 0 < found.wrong < found.compared


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_draw(tmp_path):
    """A pool's processes do not import a package's __main__, so what they call is elsewhere."""
    command = [
        sys.executable,
        "-m",
        program.__name__.rpartition(".")[0],
        "draws",
        "--draws",
        "1",
        "--jobs",
        "2",
        "--device",
        "cpu",
    ]
    run = subprocess.run([*command, "--seconds", "1", "--out", str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "wrong 0" in run.stdout.splitlines()[-1]


@pytest.mark.parametrize("is_even", [False, True])
def test_drawn_rows(is_even):
    case = Case("", lambda index, sizes: index, groups=3, is_even=is_even, most=40)
    for seed in range(50):
        index, sizes = draw_rows(random.Random(seed), case)
        assert sum(sizes) == len(index) <= 40 and min(index) < draws.KNOWN and max(index) < draws.POOL
        assert len(sizes) == 3 and (not is_even or len(set(sizes)) == 1)


def test_differences_of_answers():
    one = [Answer((1, 2), (-0.5, -1.0)), Answer((3, 4), (-2.0, -1.0))]
    other = [Answer((1, 2), (-0.5, -1.0)), Answer((3, 5), (-2.25, -1.0))]
    assert difference(one, one).prompts == 0
    found = difference(one, other)
    assert (found.prompts, found.tokens, found.log_probabilities, found.largest) == (1, 1, 1, 0.25)
    with pytest.raises(ValueError, match="different lengths"):
        difference(one, [other[0], Answer((3,), (-2.0,))])


def test_runs_answer_in_groups(capsys):
    prompts = random_prompts(100, 5, 20)
    assert len(prompts) == 5 and all(3 <= token < 100 for prompt in prompts for token in prompt)
    seen = []

    def answer(group, is_chunked):
        seen.append(len(group))
        return [Answer((len(group),), (0.0,)) for _ in group]

    runs = Runs("m", prompts)
    runs.run([(1, False), (2, True)], answer)
    assert seen == [1, 1, 1, 1, 1, 2, 2, 1] and runs.differs
    assert "m, batch 2, in chunks: 4 tokens and 0 log-probabilities of 5 differ" in capsys.readouterr().out
    assert json.loads(json.dumps(runs.as_dict()))["runs"]["2 in chunks"]["tokens"] == 4


def test_costs(monkeypatch, tmp_path, capsys):
    def measure(calls, num_sets, rounds):
        for call in calls.values():
            call(0)
        return {"free": Sample(10.0, 9.0, 11.0, 2), "fixed": Sample(12.0, 11.0, 13.0, 2)}

    sizes = ((128, 64),), (1, 3), {"tiny": (4, 2, 64, 64)}, (2,)
    groups = cost.groups_of_cells
    monkeypatch.setattr(cost, "measure", measure)
    monkeypatch.setattr(cost, "groups_of_cells", lambda device, given=sizes: groups(device, sizes))
    assert program.main(["cost", "--device", "cpu", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert (
        "| 128 x 64 | 1.20 | 1.20 |" in text
        and "| tiny | 1.20 |" in text
        and "6 of 6 cells cost more than 10 %" in text
    )
    assert len(json.loads((tmp_path / "cost.json").read_text())) == 6


@pytest.fixture
def packed():
    """Returns a function that makes a tiny quantized model, packed."""
    pytest.importorskip(
        "transformers", reason="transformers is not installed; make test-transformers installs it"
    )
    from tiny_models import config_of

    from nvfp4_cute.bench.invariance.packed import PackedModel
    from nvfp4_cute.bench.models.random_model import random_model

    def make(kind, way, **fields):
        torch.manual_seed(0)
        return PackedModel(random_model(config_of(kind, tie_word_embeddings=False, **fields), way, "cpu"), 64)

    return make


def test_packed_rows_are_those_of_generate(packed):
    one = packed("qwen3", "bf16")
    one.model.float()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    answers = one.answer(prompts, 4)
    one.model.set_attn_implementation("eager")
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = one.model.generate(
            torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tuple(ids[0, len(prompt) :].tolist()) == answer.tokens


@pytest.mark.parametrize(("kind", "way"), [("qwen3", "16bit"), ("qwen3_moe", "nvfp4")])
def test_answers_do_not_depend_on_the_batch(packed, monkeypatch, kind, way):
    from tiny_models import EXPERTS

    from nvfp4_cute.bench.invariance import packed as module

    monkeypatch.setattr(module, "CHUNK", 5)
    one = packed(kind, way, **(EXPERTS if kind == "qwen3_moe" else {}))
    runs = Runs(kind, random_prompts(128, 3, 12))
    runs.run([(1, False), (3, False), (3, True)], lambda group, is_chunked: one.answer(group, 2, is_chunked))
    assert not runs.differs


def test_a_difference_of_layers_is_seen(packed):
    """A layer whose results depend on the number of rows changes log-probabilities."""
    one = packed("qwen3", "16bit")
    layer = one.model.model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda x: plain(x) * (1 + 2.0**-6 * (x.shape[1] > 1))
    runs = Runs("planted", [[5], [6]])
    runs.run([(1, False), (2, False)], lambda group, is_chunked: one.answer(group, 2, is_chunked))
    assert runs.differs


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM; make test-vllm installs it")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_answers_in_chunks(tmp_path):
    from nvfp4_cute.bench.invariance.engine import Engine

    engine = Engine(
        Path(__file__).parents[1] / "data" / "checkpoints" / "ct-qwen3-nvfp4",
        "off",
        {},
        device="cpu",
        tokens=3,
    )
    rows, schedule = [], engine.core.scheduler.schedule

    def scheduled(*args, **kwargs):
        step = schedule(*args, **kwargs)
        rows.append(step.total_num_scheduled_tokens)
        return step

    engine.core.scheduler.schedule = scheduled
    runs = Runs("vllm", [list(range(3, 80)), list(range(3, 40))])
    runs.run([(2, False)], engine.answer)
    assert max(rows) == 77 + 37
    rows.clear()
    runs.run([(2, True)], engine.answer)
    assert max(rows) == 48 and not runs.differs
    engine.close()
