"""The README's Python runs as shown, and its commands, folders and targets exist."""

import re
from pathlib import Path

import pytest

from nvfp4_cute import cli
from nvfp4_cute.bench import published_kernels
from nvfp4_cute.cli import doctor, sol
from nvfp4_cute.gpus import targets
from nvfp4_cute.planning.arch import ARCHS
from nvfp4_cute.prove import silicon

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Blocks of a language, each behind as many empty lines as give it the README's line numbers."""
    return [
        "\n" * README[: match.start(2)].count("\n") + match[2]
        for match in BLOCK.finditer(README)
        if match[1] == language
    ]


def test_python_blocks_run_in_order():
    """One after the other in one namespace, as a reader would paste them."""
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks("python"):
        if "emulator" in block and doctor.shim_problem():
            pytest.skip(f"the block on the emulator was not run; its launch shim is {doctor.shim_problem()}")
        exec(compile(block, ROOT / "README.md", "exec"), namespace)
    assert "emulated" in namespace


def test_what_ran_on_silicon_is_what_the_reports_say():
    """Two lines, as `python -m nvfp4_cute.prove.silicon` prints them."""
    ran, missing = silicon.lines()
    assert f"{ran}\n{missing}\n" in README


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_command_lines_parse():
    named = re.findall(r"`(?:\.venv/bin/)?nvfp4-cute ([^`]+)`", README)
    verbs = {line.split()[0] for line in named}
    assert {"demo", "check", "doctor", "sol", "bench", "trace", "emulate", "export", "eval"} <= verbs
    for line in named:
        cli.build_parser().parse_args(line.split())


def test_map_matches_the_tree():
    tree = next(block for block in blocks("") if "kernels/" in block)
    named = re.findall(r"^( *)([a-z0-9_]+)/", tree, re.MULTILINE)
    assert len(named) == 20
    for indent, folder in named:
        assert (ROOT / ("nvfp4_cute" if indent else "") / folder).is_dir(), folder


def test_every_target_with_a_kernel_is_in_the_table():
    rows = {
        cells[1].strip(): cells[3]
        for cells in (line.split("|") for line in README.splitlines())
        if len(cells) > 4
    }
    with_kernel = {name for name, form in rows.items() if "list form" in form}
    assert with_kernel == set(ARCHS)


def test_speed_of_light_table_is_what_the_command_prints():
    shown = [line.split("|")[2:8] for line in README.splitlines() if "groups, sum of M" in line]
    rows = sol.competition_rows(targets.B200, "nvfp4_group_gemm")
    assert len(shown) == len(rows)
    for cells, row in zip(shown, rows, strict=True):
        computed = [row.published_us, row.competition_us, row.floor.us]
        expected = [f"{row.work.bytes / 1e6:.2f}", f"{row.work.flops / 1e9:.2f}"]
        expected += [f"{us:.3f}" for us in computed]
        assert [cell.strip() for cell in cells] == [*expected, row.floor.bound]
    assert f"one of {['nine', 'ten', 'eleven'][len(targets.TARGETS) - 9]} GPUs" in README


def test_times_are_those_of_the_committed_results():
    """Columns: floor, modelled, published, measured on the H200; the torch column stands in a note of that page."""
    pages = {name: (ROOT / "bench" / "results" / f"{name}.md").read_text() for name in ("b200", "h200")}
    shown = [line.split("|")[1:7] for line in README.splitlines() if re.match(r"\| case \d:", line)]
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
    model = (ROOT / "bench/results/timing_model.md").read_text()
    later = re.search(r"take ([\d.]+) and ([\d.]+) us .*modelled\sat ([\d.]+) and ([\d.]+)\.", model, re.S)
    assert later
    took, modelled_at = ([float(us) for us in pair] for pair in (later.groups()[:2], later.groups()[2:]))
    assert f"case 2 {took[0]:.2f}, case 3 {took[1]:.2f}," in pages["h200"]
    off = [round(100 * (1 - m / t)) for m, t in zip(modelled_at, took, strict=True)]
    assert f"modelled {off[0]} and {off[1]} % too fast in cases 2 and 3" in " ".join(README.split())
    stated = re.search(r"Median error ([\d.]+ %), worst ([\d.]+ %)", model)
    assert stated and stated[1] in README and stated[2] in README
    assert published_kernels.table() in model
