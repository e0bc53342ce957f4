"""The table of public kernels: what counts as a pass, and what is recorded.

With NVFP4_CUTE_CUTLASS set, also runs its scripts.
"""

import zipfile
from pathlib import Path

import pytest

from nvfp4_cute import env
from nvfp4_cute.bench import public_cases, public_judgements, public_kernels
from nvfp4_cute.bench.public_kernels import Result
from nvfp4_cute.bench.witnesses import table, wheels

CASES = (public_cases.Case("good.py", "sm_100a", "--mnk 1,2,3"), public_cases.Case("bad.py", "sm_90a"))
VERDICTS = {"good.py": "pass", "bad.py": "FAIL"}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of two scripts of which the second one fails. Counts runs instead of making them."""
    (tmp_path / public_cases.EXAMPLES).mkdir(parents=True)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n# 4.x\n\n## [4.7.0](https://x) (2026)\n\n## [4.6.0](y)\n"
    )
    monkeypatch.setattr(public_kernels, "CASES", CASES)
    monkeypatch.setattr(public_kernels, "MORE_CASES", ())
    return tmp_path


@pytest.fixture
def runs(monkeypatch):
    made = []

    def run_one(case, setting, *, folder, sm_count, timeout, cores, packages):
        made.append((case.script, setting))
        return Result(VERDICTS[case.script], 1.5, 1000, "what it said")

    monkeypatch.setattr(public_kernels, "run_one", run_one)
    return made


def test_a_failure_is_shown_and_makes_the_exit_code_1(checkout, runs, capsys):
    assert public_kernels.main([str(checkout)]) == 1
    assert sorted(runs) == sorted((c.script, s) for c in CASES for s in public_kernels.SETTINGS)
    out = capsys.readouterr().out
    assert "what it said" in out and "4 of 8 runs pass; 2 configurations" in out and "CUTLASS 4.7.0;" in out
    line = next(line for line in out.splitlines() if line.startswith("sm_90a   bad.py"))
    assert line.count("FAIL   1.5 s") == 4 and line.endswith("1,000")


def test_chosen_scripts_and_settings(checkout, runs, capsys):
    assert public_kernels.main([str(checkout), "--only", "sm_100a.*1,2", "--settings", "lazy+check"]) == 0
    assert runs == [("good.py", "lazy+check")]
    assert public_kernels.main([str(checkout), "--list"]) == 0
    assert "sm_90a bad.py" in capsys.readouterr().out and len(runs) == 1


def test_what_passed_is_not_repeated(checkout, runs, tmp_path):
    arguments = [str(checkout), "--settings", "eager", "--record", str(tmp_path / "runs.jsonl")]
    report = tmp_path / "report.md"
    assert public_kernels.main(arguments) == 1
    assert public_kernels.main([*arguments, "--save", str(report)]) == 1
    assert sorted(runs) == [("bad.py", "eager"), ("bad.py", "eager"), ("good.py", "eager")]
    assert "pass   1.5 s" in report.read_text() and "1 of 2 runs pass" in report.read_text()
    assert "- sm_90a bad.py, eager: FAIL: what it said" in report.read_text().splitlines()


def test_past_the_deadline_the_record_counts(checkout, runs, tmp_path, capsys):
    arguments = [str(checkout), "--record", str(tmp_path / "runs.jsonl")]
    assert public_kernels.main([*arguments, "--settings", "eager"]) == 1
    made = len(runs)
    assert public_kernels.main([*arguments, "--settings", "eager", "lazy", "--deadline", "0"]) == 1
    out = capsys.readouterr().out
    assert len(runs) == made and "1 of 2 runs pass; 2 configurations" in out.splitlines()[-1]
    assert "not run" in out


def test_runs_of_different_days_are_told_apart(checkout, runs, tmp_path, monkeypatch, capsys):
    path, settings = tmp_path / "runs.jsonl", ["--settings", "eager", "lazy"]
    for day, chosen in (("2026-01-01: x 1", ["--settings", "lazy"]), ("2026-01-02: x 2", settings)):
        assert "a: " not in capsys.readouterr().out
        monkeypatch.setattr(public_kernels, "_made_now", lambda day=day: day)
        assert public_kernels.main([str(checkout), *chosen, "--record", str(path)]) == 1
    out = capsys.readouterr().out
    assert "a: 2026-01-01: x 1; b: 2026-01-02: x 2.\n" in out
    good, bad = (line for line in out.splitlines() if line.startswith("sm_"))
    assert "pass   1.5 s b  pass   1.5 s a" in good and "FAIL   1.5 s b  FAIL   1.5 s b" in bad


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere"], "is no CUTLASS checkout"),
        (["CHECKOUT", "--only", "nothing"], "no script matches"),
        (["CHECKOUT", "--settings", "late"], "'late' is not eager, lazy, or random:SEED"),
    ],
)
def test_wrong_arguments(checkout, capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        public_kernels.main([str(checkout) if a == "CHECKOUT" else a for a in arguments])
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "script, verdict, words",
    [
        ("raise SystemExit(0)", "pass", ""),
        ("raise ValueError('wrong result')", "FAIL", "ValueError: wrong result"),
        (
            "from cutlass.cute import nothing",
            "other DSL",
            "ImportError: cannot import name 'nothing' from 'cutlass.cute'",
        ),
        (
            "import atexit; atexit.register(print, 'nvfp4-cute', 'emulate: 2 launches checked: no hazards'); 1 / 0",
            "FAIL",
            "ZeroDivisionError",
        ),
    ],
)
def test_a_script_in_a_process_of_its_own(tmp_path, script, verdict, words):
    (tmp_path / "script.py").write_text(script)
    case = public_cases.Case("script.py", "sm_100a")
    result = public_kernels.run_one(case, "eager", folder=tmp_path, sm_count=2, timeout=100)
    assert result.verdict == verdict and result.message.startswith(words) and result.seconds > 0.1
    assert bool(result.message) == bool(words)


@pytest.mark.parametrize(
    ("selection", "verdict", "count"),
    [
        ("fine or wrong", "FAIL", 3),
        pytest.param("fine", "pass", 2, marks=pytest.mark.slow),
        pytest.param("nothing", "FAIL", 0, marks=pytest.mark.slow),
    ],
)
def test_a_suite_counts_its_tests(tmp_path, selection, verdict, count):
    text = "import pytest, torch\n@pytest.mark.parametrize('n', [1, 2])\ndef test_fine(n):\n    assert torch.ones(n, device='cuda').is_cuda\n"
    (tmp_path / "test_s.py").write_text(text + "def test_wrong():\n    assert False\n")
    case = public_cases.Case("test_s.py", "sm_100a", selection, "somebody", suite=True)
    result = public_kernels.run_one(case, "lazy", folder=tmp_path, sm_count=2, timeout=100)
    assert (result.verdict, result.configurations) == (verdict, count)
    assert result.message.startswith("E  ") == (count == 3)  # the first error, not pytest's last line


def test_a_script_that_takes_too_long_is_killed(tmp_path):
    (tmp_path / "script.py").write_text("import time\ntime.sleep(1000)")
    case = public_cases.Case("script.py", "sm_100a")
    result = public_kernels.run_one(case, "eager", folder=tmp_path, sm_count=2, timeout=1)
    assert result.verdict == "killed" and "1 s" in result.message


@pytest.mark.slow
@pytest.mark.skipif(env.cutlass_checkout() is None, reason="NVFP4_CUTE_CUTLASS is not set")
def test_public_kernels_pass_and_are_clean():
    """Kernels that release stages early are the exception, which the checker reports (bench/results/public_kernels.md)."""
    clean = r"^(?!sm_120a .*--b_dtype Float8E4M3FN)"
    settings = ("eager+check", "lazy", "random:3")
    assert public_kernels.main([str(env.cutlass_checkout()), "--only", clean, "--settings", *settings]) == 0


def test_a_report_of_the_checker_is_a_hazard():
    """Errors come first; warnings of other launches, explanations and the closing line follow."""
    report = "nvfp4-cute emulate: 1 error, 2 warnings in kernel `k`:\nexit: cta 0,0,0 may exit\n"
    text = f"PASS\n{report}nvfp4-cute emulate: kernel `j`: race (warning)\nnvfp4-cute emulate: note: `x` is common\n"
    said = public_kernels._last_words(text + "nvfp4-cute emulate: 3 launches checked: 1 error\n")
    assert said.startswith(report) and public_kernels._verdict(1, said) == "hazard"
    assert public_kernels._verdict(1, "nvfp4-cute emulate: there is no file `x`") == "FAIL"


def test_the_advice_after_a_fault_is_not_quoted():
    fault = "nvfp4-cute emulate: kernel `k` cta (0, 0, 0) warp 1: PTX line 3: not allocated\n"
    assert (
        public_kernels._last_words(fault + "nvfp4-cute emulate: pass --check to look for races\n")
        == fault.strip()
    )


def test_a_failed_launch_of_a_suite_is_quoted():
    """Pytest prints it without a traceback, and thus without marks, right after the name of the test."""
    failed = "kernel `k` cta (0, 0, 0) warp 1: PTX line 3: not allocated"
    text = f"F.  [100%]\n== FAILURES ==\n____ test_a ____\n{failed}\nmore\n== summary ==\n1 failed, 1 passed in 2 s\n"
    assert public_kernels._last_words(text) == f"{failed}\nmore"


@pytest.fixture
def wheel_row(checkout, monkeypatch):
    """A wheel with one module, and a kernel of it whose file prints where the module lies."""
    for name in ("CASES", "MORE_CASES", "OLD_CASES", "SUITES"):
        monkeypatch.setattr(public_kernels, name, ())
    monkeypatch.setattr(wheels, "PACKAGES", {"pack": ("pack",)})
    monkeypatch.setattr(
        public_kernels, "WITNESSES", (public_cases.Case("run_pack.py", "sm_100a", "first", "pack"),)
    )
    monkeypatch.setenv("XDG_DATA_HOME", str(checkout / "data"))
    (checkout / "wheels").mkdir()
    return checkout


def test_kernels_of_wheels_are_called(wheel_row, monkeypatch):
    """The wheel is unpacked once, and its folder precedes the module path of the run."""
    with zipfile.ZipFile(wheel_row / "wheels/pack-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pack/__init__.py", "x = 1")
        wheel.writestr("pack/library.bin", "x")
    made = []

    def run_one(case, setting, *, folder, packages, **others):
        made.append((folder, packages))
        return Result("pass", 1.0, 10)

    monkeypatch.setattr(public_kernels, "run_one", run_one)
    page = wheel_row / "page.md"
    arguments = [
        str(wheel_row),
        "--wheels",
        str(wheel_row / "wheels"),
        "--settings",
        "eager",
        "--save",
        str(page),
    ]
    assert public_kernels.main(arguments) == 0
    ((folder, packages),) = made
    assert (folder / "run_lightmoe.py").is_file() and [path.name for path in packages] == ["pack-1.0"]
    assert [path.name for path in (packages[0] / "pack").iterdir()] == ["__init__.py"]
    path = public_kernels._environment(public_kernels.WITNESSES[0], packages)["PYTHONPATH"]
    assert path.split(":")[0] == str(packages[0])
    assert "pack-1.0" in page.read_text() and "Kernels without a row" in page.read_text()


def test_a_missing_wheel_has_no_rows(wheel_row):
    with pytest.raises(SystemExit):
        public_kernels.main([str(wheel_row), "--wheels", str(wheel_row / "wheels")])


def test_findings_are_judged():
    """A finding has the judgement of its kind. Other findings say that nobody judged them."""
    case = public_cases.Case("mla.py", "sm_100a")
    assert "CTA scope" in public_judgements.judgement(case, "hazard", "silicon: remote-arrival-scope: x")
    for message in ("something new", "Segfault encountered"):
        assert public_judgements.judgement(case, "FAIL", message) == "Not judged (FAIL)."
    old = public_cases.Case("gemm.py", "sm_100a", project="cutlass-4.3")
    assert "another version" in public_judgements.judgement(old, "FAIL", "Segfault encountered")
    suite = Result("hazard", 1.0, message="1 error in kernel `k`:\nsilicon: remote-arrival-scope: x")
    assert "CTA scope" in public_kernels.what_did_not_pass({(case, "eager+check"): suite})


def test_files_that_call_kernels_have_a_run_of_every_name():
    for case in table.WITNESSES:
        text = (Path(wheels.__file__).parent / case.script).read_text()
        names = case.arguments, case.arguments.replace("-", "_")
        assert any(f'"{name}"' in text for name in names), str(case)


def test_each_architecture_has_a_cache_of_its_own():
    """QuACK's cache returns an object regardless of the architecture that it was compiled for."""
    cases = [public_cases.Case("a.py", arch) for arch in ("sm_90a", "sm_100a")]
    places = [public_kernels._environment(case)["QUACK_CACHE_DIR"] for case in cases]
    assert [place.rsplit("/", 1)[-1] for place in places] == ["sm_90a", "sm_100a"]
