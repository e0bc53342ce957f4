"""Reported faults of public kernels: edits of sources, what counts as named, and what is skipped."""

import zipfile

import pytest

from nvfp4_cute.bench import public_bug_runs, public_bugs
from nvfp4_cute.bench.public_bug_runs import Edit
from nvfp4_cute.bench.public_bugs import Bug, Finding, Outcome, Sources

SITE = {"file": "/somewhere/gemm.py", "line": 7}
ENTRY = {
    "kind": "race",
    "severity": "error",
    "text": "st.shared (cta 0,0,0 warp 0, PTX line 9) writes smem+0x400 while TMA store (cta 0,0,0 warp 1, PTX line 8) may read it",
    "site": SITE,
    "other": {**SITE, "line": 5},
}
RACE = Finding.of(ENTRY)
WARNING = Finding.of({**ENTRY, "severity": "warning", "other": None})


@pytest.fixture
def folder(tmp_path):
    """A folder of two wheels with one kernel."""
    for version in ("1.0", "1.1"):
        with zipfile.ZipFile(tmp_path / f"pack-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("pack/kernel.py", "x = 1\n")
            wheel.writestr("pack/data.bin", "x")
            wheel.writestr("other/module.py", "x = 2\n")
    return tmp_path


def run_all(monkeypatch, folder, before, after, **changes):
    """Runs a table of one bug whose runs end as given. Returns the exit code."""
    values = {"source": "pack-1.0", "fixed": "pack-1.1"} | changes
    monkeypatch.setattr(public_bugs, "PARTS", {"pack": ("pack/",)})
    monkeypatch.setattr(
        public_bugs, "BUGS", (Bug("kernel", "Project #1", "it is wrong", r"race: st\.shared", **values),)
    )
    ends = iter((before, after))
    monkeypatch.setattr(public_bugs, "run", lambda bug, where, edits, mode: next(ends))
    return public_bugs.main([str(folder), "--save", str(folder / "page.md")])


def test_a_finding_names_instructions_and_lines():
    assert str(RACE) == "race: st.shared, TMA store (gemm.py:7, 5)"
    assert str(WARNING) == "race (warning): st.shared, TMA store (gemm.py:7)"


def test_a_bug_is_named_before_its_fix_and_not_after_it(monkeypatch, folder):
    assert run_all(monkeypatch, folder, Outcome((RACE,)), Outcome()) == 0
    page = (folder / "page.md").read_text()
    assert (
        "| Project #1 | it is wrong | pack-1.0 | race: st.shared, TMA store (gemm.py:7, 5) | pack-1.1 | clean |"
        in page
    )
    assert run_all(monkeypatch, folder, Outcome((WARNING,)), Outcome()) == 1
    assert "MISSED" in (folder / "page.md").read_text()
    assert run_all(monkeypatch, folder, Outcome((RACE,)), Outcome((RACE,))) == 1
    assert run_all(monkeypatch, folder, Outcome((RACE,)), Outcome(stopped="ImportError")) == 1
    assert run_all(monkeypatch, folder, Outcome((RACE,)), Outcome((WARNING,)), remains="harmless") == 0
    assert "gone; harmless" in (folder / "page.md").read_text()


def test_a_bug_without_its_sources_is_skipped(monkeypatch, folder, capsys):
    assert run_all(monkeypatch, folder, None, None, source="pack-0.9") == 0
    assert "skipped: pack-0.9-*.whl is not in" in capsys.readouterr().out
    assert run_all(monkeypatch, folder, None, None, source="cutlass@abc") == 0
    assert "has no commit abc" in capsys.readouterr().out


def test_only_kernels_are_unpacked(monkeypatch, folder, tmp_path):
    monkeypatch.setattr(public_bugs, "PARTS", {"pack": ("pack/",)})
    found = Sources(folder, tmp_path / "scratch").unpacked("pack-1.0")
    assert [path.relative_to(found).as_posix() for path in found.rglob("*.*")] == ["pack/kernel.py"]


def test_edits_keep_the_indentation(tmp_path):
    source = tmp_path / "kernel.py"
    source.write_text("if x:\n    store(scope=CTA)\n")
    path = public_bug_runs.edited(source, [Edit("kernel.py", 2, "barrier()\nfence()", ("CTA", "CLUSTER"))])
    assert path.read_text() == "if x:\n    barrier()\n    fence()\n    store(scope=CLUSTER)\n"
    assert public_bug_runs.edited(source, [Edit("other.py", 2, "barrier()")]) == source
    with pytest.raises(ValueError, match="does not contain 'GPU'"):
        public_bug_runs.edited(source, [Edit("kernel.py", 2, replace=("GPU", "CTA"))])
