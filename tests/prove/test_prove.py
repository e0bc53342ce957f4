"""The verb from options to report on the emulator; verdicts that planning reads; stored jobs."""

import json

import pytest
import torch

from nvfp4_cute import cli
from nvfp4_cute.backends import emulator, installed
from nvfp4_cute.cli.options import prove as options
from nvfp4_cute.gpus import verdicts
from nvfp4_cute.prove import command, plan, probes, problems, reader
from nvfp4_cute.prove.outcome import PASSED, SKIPPED, WRONG, Outcome
from nvfp4_cute.prove.state import State

ARCH = "sm_90a"


def run(out, *options):
    """Returns exit code and report of a run on the emulator in this process."""
    code = cli.main(["prove", "--emulator", ARCH, "--quick", "--workers", "0", "--out", str(out), *options])
    return code, reader.load(out / f"prove-emulator_{ARCH}.json")


@pytest.fixture
def one_config(monkeypatch):
    """Uses only the first config of the most frequently chosen kind."""
    chosen = plan._configs(ARCH, f"emulator:{ARCH}")[:1]
    monkeypatch.setattr(plan, "_configs", lambda arch, backend: chosen)
    return chosen[0].arguments["config"]


def test_a_run_on_the_emulator(tmp_path, one_config, capsys):
    code, found = run(tmp_path, "--steps", "configs", "problems", "--fresh")
    assert code == 0 and found["summary"]["is_good"]
    assert found["correctness"]["config"]["verdicts"] == {"passed": 1}
    assert found["correctness"]["problem"]["verdicts"] == {"passed": 2}
    assert "emulator of sm_90a; no GPU was used" in (tmp_path / f"prove-emulator_{ARCH}.md").read_text()
    run(tmp_path, "--steps", "problems")
    assert "3 jobs of an earlier run are kept" in capsys.readouterr().out


def test_a_planted_wrong_kernel_is_named(tmp_path, one_config, monkeypatch):
    """Flips one bit of one result of one config."""
    right = emulator.run

    def wrong(task, **target):
        right(task, **target)
        config = getattr(task, "config", None)
        if config is not None and config.to_name() == one_config:
            task.operands.out[0].view(torch.uint8).view(-1)[6] ^= 1

    monkeypatch.setattr(emulator, "run", wrong)
    code, found = run(tmp_path, "--steps", "configs", "--fresh")
    (failure,) = found["correctness"]["config"]["failures"]
    assert code == 1 and failure["verdict"] == WRONG and one_config in failure["name"]
    assert "1 of " in failure["detail"] and "element (0, 3)" in failure["detail"]
    assert f"**wrong** {failure['name']}" in (tmp_path / f"prove-emulator_{ARCH}.md").read_text()


def test_without_a_gpu_it_says_what_it_would_do(monkeypatch, capsys):
    monkeypatch.setattr(installed, "gpus", lambda: [])
    assert cli.main(["prove"]) == 1
    told = capsys.readouterr().err
    assert (
        "500 random problems" in told and "--emulator sm_100a" in told and "no GPU that torch can use" in told
    )


def test_steps_are_those_of_the_command_line():
    assert list(command.KIND_OF_STEP) == list(plan.STEPS)
    lines = options.EXAMPLES.split("\n\n")[0].splitlines()[1:]
    for line in lines:
        cli.build_parser().parse_args(line.strip().split("  ")[0].split()[1:])


def test_a_gpu_run_has_every_config_and_500_problems():
    steps = plan.steps(ARCH, "cuda", plan.WHOLE, quick=False)
    assert list(steps) == list(plan.STEPS) and len(steps["problems"].jobs) == 500
    names = {(job.arguments["operation"], job.arguments["config"]) for job in steps["configs"].jobs}
    assert {config for _, _, _, config in problems.configs(ARCH)} == {config for _, config in names}
    assert steps["probes"].fresh and steps["timed"].workers == 1
    assert sum(plan.WHOLE.minutes.values()) <= 12 and sum(plan.QUICK.minutes.values()) <= 2.5


# ---- problems --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(40))
def test_problems_are_equal_to_themselves(seed):
    """The reference agrees with the expected results of each problem, so a kernel that also does passes."""
    assert problems.draw(seed, small=True).failure("reference", "cpu") is None


def test_problems_are_of_every_operation_and_kind():
    texts = [problems.draw(seed, small=True).text for seed in range(120)]
    for word in (
        "list",
        "ragged",
        "masked",
        "gemm of",
        "gemv",
        "quantize",
        "grouped_quantize",
        "relu2",
        "silu",
        "nvfp4",
    ):
        assert any(word in text for text in texts), word


def test_a_row_that_is_nobodys_is_compared(monkeypatch):
    """A write after the last group is an error."""
    from nvfp4_cute.prove.problems import Dice, grouped_problem

    problem = grouped_problem(Dice(0), "ragged", ((3, 16, 32), (2, 16, 32)), torch.float32)
    real = problems.grouped_gemm

    def spilling(*given, out=None, **options):
        real(*given, out=out, **options)
        if options["backend"] == "auto":
            out[-1, -1] = 0

    monkeypatch.setattr(problems, "grouped_gemm", spilling)
    assert "element (9, 15)" in problem.failure("auto", "cpu")
    assert problem.failure("reference", "cpu") is None


# ---- what is kept ----------------------------------------------------------------------------------------------
def test_state_is_kept_and_begun_anew(tmp_path):
    file, identity = tmp_path / "state.jsonl", {"sources": "1"}
    state = State(file, identity)
    state.add(Outcome("problem", "a", PASSED, numbers={"x": 1.5}))
    state.add(Outcome("problem", "b", SKIPPED))
    file.write_text(file.read_text() + '{"kind": "prob')  # cut off
    again = State(file, identity)
    assert again.resumed == 1 and again.of("problem") == state.of("problem") and not again.has("problem", "b")
    assert State(file, {"sources": "2"}).resumed == 0
    assert State(file, {"sources": "2"}, fresh=True).resumed == 0
    assert State(None, identity).resumed == 0


def test_forms_are_proven_by_all_their_probes(monkeypatch, tmp_path):
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(tmp_path))
    assert not verdicts.is_proven("sm_120a", "split_k")
    every = dict.fromkeys(verdicts.FORMS["split_k"], PASSED)
    verdicts.store("RTX 5090", "sm_120a", {**every, "pdl_cluster": WRONG})
    assert not verdicts.is_proven("sm_120a", "split_k")
    verdicts.store("RTX 5090", "sm_120a", {"pdl_cluster": PASSED})
    assert verdicts.is_proven("sm_120a", "split_k") and verdicts.is_proven("RTX 5090", "split_k")
    assert not verdicts.is_proven("sm_90a", "split_k") and not verdicts.is_proven("RTX PRO 6000", "split_k")
    verdicts.path().write_text("damaged")
    assert not verdicts.is_proven("sm_120a", "split_k")
    with pytest.raises(ValueError, match="form='x' is unknown; use one of split_k"):
        verdicts.is_proven("sm_120a", "x")
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", "off")
    verdicts.store("RTX 5090", "sm_120a", every)
    assert verdicts.path() is None and not verdicts.is_proven("sm_120a", "split_k")


def test_every_form_names_probes_that_exist():
    assert {name for names in verdicts.FORMS.values() for name in names} <= set(probes.PROBES)


# ---- on a GPU --------------------------------------------------------------------------------------------------
@pytest.mark.gpu("sm_90a")
def test_a_quick_run_on_a_gpu(tmp_path):
    command.run(quick=True, fresh=True, out=tmp_path)
    found = json.loads(next(tmp_path.glob("prove-*.json")).read_text())
    assert not found["correctness"]["config"]["failures"] and not found["correctness"]["problem"]["failures"]
    assert not any(p["verdict"] in ("broken", "hang") for p in found["probes"])
    assert found["constants"] and found["timed"]
