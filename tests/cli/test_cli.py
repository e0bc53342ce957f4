"""The command line as a user sees it: help, version, exit codes."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from new_process import run_python

from nvfp4_cute import cli
from nvfp4_cute.backends import installed
from nvfp4_cute.cli import check
from nvfp4_cute.cli import sol as work
from nvfp4_cute.cli.options import sol
from nvfp4_cute.cli.verbs import VERBS
from nvfp4_cute.emulator.fronts import launch_shim
from nvfp4_cute.errors import CheckpointError, UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.prove import exact


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == installed.versions()["nvfp4-cute"]


@pytest.mark.parametrize("module", ["nvfp4_cute", "nvfp4_cute.cli"])
def test_the_command_line_is_a_module(module):
    """Exit codes are those of the verbs."""
    done = run_python("-m", module, "--version")
    assert (done.returncode, done.stdout.strip()) == (0, installed.versions()["nvfp4-cute"])
    assert run_python("-m", module, "sol", "--no-such-option").returncode == 2


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_describes_every_option(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*verb.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "usage: nvfp4-cute" in text and "%(" not in text
    if not verb:
        assert all(f"\n    {name} " in text for name in VERBS) and "examples:" in text


def test_every_verb_has_its_modules():
    """The table of verbs, the modules of options and the modules that do the work have the same names."""
    here = Path(cli.__file__).parent
    others = {"__init__", "__main__", "argument_types", "machine_checkers", "pytest_plugin", "verbs"}
    assert {path.stem for path in here.glob("*.py")} - others == set(VERBS)
    assert {path.stem for path in here.glob("options/*.py")} - {"__init__", "choices"} == set(VERBS)


def test_help_and_mistakes_in_options_need_no_torch():
    """Runs in a process that cannot import torch. Help of a verb imports neither other verbs' options nor any verb's work."""
    program = """
        import sys
        sys.modules["torch"] = None
        from nvfp4_cute import cli
        from nvfp4_cute.cli.verbs import VERBS
        calls = [[], ["--version"], ["--help"], ["polish"], ["sol", "--m", "x"], ["sol", "--help"]]
        for arguments in [*calls, *([verb, "--help"] for verb in VERBS)]:
            try:
                cli.main(arguments)
            except SystemExit as stop:
                print("exit code", stop.code)
            if arguments == ["sol", "--help"]:
                print("loaded", *sorted(name for name in sys.modules if name.startswith("nvfp4_cute.cli.")))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    codes = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert codes == [2, 0, 0, 2, 2, 0, *(0 for _ in VERBS)], done.stderr
    loaded, *_ = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert loaded == "loaded " + " ".join(
        f"nvfp4_cute.cli.{name}"
        for name in ("argument_types", "options", "options.choices", "options.sol", "verbs")
    )


def test_examples_of_the_help_text_parse():
    lines = [*cli.EXAMPLES.splitlines()[1:], *sol.EXAMPLES.split("\n\n")[0].splitlines()[1:]]
    commands = [line.strip().split("  ")[0] for line in lines]
    assert len(commands) >= 9
    for command in commands:
        program, *arguments = command.split()
        assert program == "nvfp4-cute"
        cli.build_parser().parse_args(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["polish"],
        ["check", "--count", "0"],
        ["check", "--backend", "gpu"],
        ["check", "--max-m", "x"],
        ["sol", "--m", "1,0"],
        ["sol", "--problem", "nvfp4"],
    ],
)
def test_arguments_that_make_no_sense_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: nvfp4-cute" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check --seed x", "argument --seed: 'x' is not a whole number"),
        ("sol --m 8,a --n 16 --k 16", "argument --m: 'a' is not a whole number"),
        ("tune --m 8,-1 --n 16 --k 16", "argument --m: -1 is negative"),
        ("tune --m 0 --n 16 --k 16", "argument --m: 0 has no row at all"),
        ("trace nvfp4_gemm -o nowhere/t.json", "argument -o/--out: there is no folder nowhere"),
        ("export nvfp4_gemm -o .", "argument -o/--output: . is a folder; name a file"),
        ("bench --target B200 --results nowhere/r.json", "argument --results: there is no folder nowhere"),
        (
            f"bench --predict p.json --recordings {__file__}",
            f"argument --recordings: {__file__} is a file; name a folder",
        ),
        (f"quantize m --out {__file__}", f"argument --out: {__file__} is a file; name a folder"),
        ("eval submission.py --task nowhere.yml", "argument --task: there is no file nowhere.yml"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said_before_any_work(command, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(command.split())
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_check_on_a_gpu_needs_one(monkeypatch, capsys):
    monkeypatch.setattr(installed, "gpus", list)
    assert cli.main(["check", "--backend", "cuda"]) == 1
    assert "no GPU that torch can use; take --backend emulator" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_the_program_quietly():
    command = f"{sys.executable} -m nvfp4_cute.cli sol --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "{" and done.stderr == ""


def test_check_passes_its_options_on(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        check,
        "run_problems",
        lambda backend, limits, **rest: seen.update(rest, backend=backend, limits=limits),
    )
    cli.main("check --backend cuda --seed 9 --count 3 --groups 2 --max-m 5 --max-n 6 --max-k 64".split())
    assert seen == {"backend": "cuda", "limits": exact.Limits(2, 5, 6, 64), "seed": 9, "count": 3}
    cli.main(["check", "--arch", "sm_120a"])
    assert seen["backend"] == "emulator:sm_120a"
    assert cli.main("check --arch sm_120a --backend cuda".split()) == 2
    cli.main(["check"])
    assert seen["backend"] is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnsupportedTarget("no kernel for sm_90a"), 1),
        (UnsupportedProblem("K=3 is odd; pad it"), 2),
        (OSError(13, "no", "/x"), 1),
        (CheckpointError("x is cut"), 1),
    ],
)
def test_refusals_are_one_line_not_a_traceback(monkeypatch, capsys, error, code):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(check, "run_problems", refuse)
    assert cli.main(["check"]) == code
    assert capsys.readouterr().err == f"nvfp4-cute check: {error}\n"


@pytest.mark.parametrize("arguments", [["demo"], ["check", "--backend", "emulator"]])
def test_without_the_launch_shim_emulation_is_refused_at_once(monkeypatch, capsys, arguments):
    monkeypatch.setattr(launch_shim.importlib.util, "find_spec", lambda name: None)
    assert cli.main(arguments) == 1
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    assert "no C compiler was found" in streams.err


def test_module_runs_as_a_program():
    done = run_python("-m", "nvfp4_cute.cli", "doctor")
    assert done.returncode in (0, 1), done.stderr
    assert "versions" in done.stdout


@pytest.mark.parametrize(
    ("suite", "own", "others"),
    [
        ("ep", ["--tokens", "--ranks", "nvfp4-cute bench ep"], ["--target", "--jobs", "--predict", "bench layers --"]),
        ("layers", ["--jobs", "--target", "nvfp4-cute bench layers"], ["--tokens", "--plot", "--explain", "bench ep --"]),
        ("dense", ["--explain", "--like-harness", "--plot"], ["--tokens", "--jobs", "--html", "bench ep --"]),
    ],
)  # fmt: skip
def test_a_suite_of_bench_shows_its_own_options(suite, own, others, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", suite, "--help"])
    text = capsys.readouterr().out
    assert not ended.value.code and all(word in text for word in own)
    assert not [word for word in others if word in text]


def test_an_argument_that_the_verb_does_not_know(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["sol", "nvfp4_gemm", "--gpu", "H100"])
    assert stopped.value.code == 2
    said = "nvfp4-cute sol: unrecognized arguments: nvfp4_gemm --gpu H100; see nvfp4-cute sol --help\n"
    assert capsys.readouterr().err == said


def test_an_interruption_is_one_line(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "run", interrupted)
    assert cli.main(["sol"]) == 130
    assert capsys.readouterr().err == "\nnvfp4-cute sol: interrupted\n"
    monkeypatch.setattr(cli, "build_parser", interrupted)  # types of options import torch
    assert cli.main(["quantize", "model"]) == 130
    assert capsys.readouterr().err == "\nnvfp4-cute quantize: interrupted\n"
