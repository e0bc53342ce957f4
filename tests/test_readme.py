"""Pages for people: their Python blocks run as shown, and the commands, folders, files and targets that they name exist."""

import re
import shlex
from pathlib import Path

import pytest

from nvfp4_cute import cli
from nvfp4_cute.backends import installed
from nvfp4_cute.bench.validation import published as published_kernels
from nvfp4_cute.cli import sol
from nvfp4_cute.cli.verbs import VERBS
from nvfp4_cute.gpus import targets
from nvfp4_cute.planning.arch import ARCHS, mmas_of
from nvfp4_cute.prove import silicon
from nvfp4_cute.tuning import autotune

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FOLDERS = ("nvfp4_cute", "kernels", "problems", "bench", "tests")
# All pages except results and notes, which describe the past, and the worked example, which tests/competition turns
# into a problem.
PAGES = sorted(
    page.relative_to(ROOT)
    for page in (*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")))
    if page.parent.name not in ("results", "notes")
)
ELSEWHERE = (Path("problems/README.md"),)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=str)


def blocks(page: Path, language: str) -> list[str]:
    """Returns blocks of a language, each preceded by empty lines so that line numbers are the page's."""
    text = (ROOT / page).read_text()
    return [
        "\n" * text[: match.start(2)].count("\n") + match[2]
        for match in BLOCK.finditer(text)
        if match[1] == language
    ]


def commands(page: Path) -> list[str]:
    """Returns command lines of `nvfp4-cute`: whole lines of blocks, and text in backticks."""
    text = (ROOT / page).read_text()
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    shown = [line.split("  #")[0].split(" [")[0] for line in lines if line.startswith("nvfp4-cute ")]
    prose = BLOCK.sub("", text)
    return [*shown, *re.findall(r"`(?:\.venv/bin/)?(nvfp4-cute [^`]+)`", prose)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page not in ELSEWHERE], ids=str
)
def test_python_blocks_run_in_order(page, monkeypatch):
    """All blocks run in one namespace, as if pasted in order. One block tries many configs, of which two are compiled."""
    candidates = autotune.candidates
    monkeypatch.setattr(autotune, "candidates", lambda *given: candidates(*given)[:2])
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        if "emulator" in block and installed.shim_problem():
            pytest.skip(
                f"the block on the emulator was not run; its launch shim is {installed.shim_problem()}"
            )
        exec(compile(block, ROOT / page, "exec"), namespace)


@each_page
def test_command_lines_parse(page):
    for line in commands(page):
        verb, *arguments = shlex.split(line)[1:]
        assert verb in VERBS
        if arguments:  # otherwise the text names the verb and not its use
            cli.build_parser([verb]).parse_args([verb, *arguments])


@each_page
def test_files_and_folders_exist(page):
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)", (ROOT / page).read_text())
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()]
    assert not missing


@each_page
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE)) <= targets


def test_the_readme_is_short_and_names_every_page():
    assert README.count("\n") <= 100
    guides = [
        page
        for page in PAGES
        if page.parts[0] == "nvfp4_cute" and page.name in ("GUIDE.md", "CACHES.md", "NUMERICS.md")
    ]
    assert len(guides) >= 8 and all(f"`{page}`" in README for page in guides)
    assert all(f"`{name}.md`" in README for name in ("CONTRIBUTING", "CHANGELOG"))


def test_the_readme_shows_the_verbs():
    verbs = {line.split()[1] for line in commands(Path("README.md"))}
    assert {
        "check",
        "doctor",
        "sol",
        "bench",
        "trace",
        "emulate",
        "export",
        "tune",
        "compile",
        "prove",
    } <= verbs


def test_every_page_of_results_is_listed():
    text = (ROOT / "bench/README.md").read_text()
    assert set(re.findall(r"`bench/results/(\w[\w-]*)\.md`", text)) == {
        page.stem for page in (ROOT / "bench/results").glob("*.md")
    }


def test_what_ran_on_silicon_is_what_the_reports_say():
    """Two lines, as `python -m nvfp4_cute.prove.silicon` prints them."""
    ran, missing = silicon.lines()
    assert f"{ran}\n{missing}\n" in README


def test_contributing_has_a_row_for_every_folder():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(
        re.findall(r"`nvfp4_cute/(\w+)/`", page.split("## Where to change what")[1].split("\n## ")[0])
    )
    assert named == {path.parent.name for path in (ROOT / "nvfp4_cute").glob("*/__init__.py")}


def test_every_target_with_a_kernel_is_in_the_table():
    header = next(line for line in README.splitlines() if line.startswith("| `a` x `b` |"))
    assert set(re.findall(r"sm_\d+a", header)) == set(ARCHS)


def test_speed_of_light_table_is_what_the_command_prints():
    page = (ROOT / "nvfp4_cute/roofline/GUIDE.md").read_text()
    shown = [line.split("|")[2:8] for line in page.splitlines() if "groups, sum of M" in line]
    rows = sol.competition_rows(targets.B200, "nvfp4_group_gemm")
    assert len(shown) == len(rows)
    for cells, row in zip(shown, rows, strict=True):
        computed = [row.published_us, row.competition_us, row.floor.us]
        expected = [f"{row.work.bytes / 1e6:.2f}", f"{row.work.flops / 1e9:.2f}"]
        expected += [f"{us:.3f}" for us in computed]
        assert [cell.strip() for cell in cells] == [*expected, row.floor.bound]
    assert f"one of {len(targets.TARGETS)} GPUs" in page


def test_times_are_those_of_the_committed_results():
    """Columns: floor, modelled, published, measured on the H200. The torch column is in a note of that page."""
    pages = {name: (ROOT / "bench" / "results" / f"{name}.md").read_text() for name in ("b200", "h200")}
    bench = (ROOT / "bench" / "README.md").read_text()
    shown = [line.split("|")[1:7] for line in bench.splitlines() if re.match(r"\| case \d:", line)]
    assert len(shown) == 4
    for case, floor, modelled, published, here, bf16 in ([cell.strip() for cell in row] for row in shown):
        name = case.split(":")[0]
        b200, h200 = (
            next(
                line for line in page.splitlines() if line.startswith("nvfp4_group_gemm") and name in line
            ).split()
            for page in pages.values()
        )
        assert (b200[5], b200[6], b200[7]) == (floor, modelled, "modelled")
        assert float(b200[11]) == pytest.approx(float(published), abs=0.006)
        assert h200[6] == here and f"nvfp4_group_gemm {name} {bf16};" in pages["h200"]
    model = (ROOT / "bench" / "results" / "timing_model.md").read_text()
    stated = re.search(r"Median error ([\d.]+ %), worst ([\d.]+ %)", model)
    assert stated and all(stated[1] in page and stated[2] in page for page in (README, bench))
    assert published_kernels.table() in model


def test_the_table_of_formats_says_what_families_multiply():
    """One row per pair or two, one column per family, and a word in every cell that has a kernel."""
    table = re.search(r"^\| `a` x `b` \|(.*)\n\|.*\n((?:\|.*\n)+)", README, re.MULTILINE)
    archs = [re.search(r"sm_\d+a", column)[0] for column in table[1].strip(" |").split("|")]
    told = {}
    for line in table[2].splitlines():
        pair, *cells = (cell.strip() for cell in line.strip()[1:-1].split("|"))
        told |= dict.fromkeys(
            re.findall(r"(\w+) x (\w+)", pair.split("(")[0]), [bool(cell) for cell in cells]
        )
    found = [
        {tuple(str(f).replace("_e4m3", "").replace("_e5m2", "") for f in pair) for pair in mmas_of(arch)}
        for arch in archs
    ]
    assert told == {pair: [pair in pairs for pairs in found] for pair in set().union(*found)}
