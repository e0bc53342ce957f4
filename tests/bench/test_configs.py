"""Compares the committed tables of Blackwell's configs with the compiler and the emulator."""

from pathlib import Path

import pytest

from nvfp4_cute.bench import configs
from nvfp4_cute.planning.arch import family_of, sm120
from nvfp4_cute.planning.arch.sm100 import limits as sm100

TABLE, SM100_TABLE = (
    (Path(configs.__file__).parent / f"results/{name}_configs.md").read_text().splitlines()
    for name in ("sm120", "sm100")
)
CASES = [line for line in TABLE if line[2:3].isdigit()]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_no_config_spills_conflicts_or_decodes():
    lines = [cells(line) for line in TABLE if line.startswith("| t128x")]
    assert len(lines) == len(sm120.CANDIDATES)
    for name, registers, stack, smem, mmas, accesses, conflicts in lines:
        assert int(registers) <= 224 and stack == "0", f"{name} spills"
        assert int(smem) <= sm120.SMEM_CAPACITY_BYTES
        in_ptx, in_sass = mmas.split(", ")
        assert in_ptx == in_sass != "0", f"{name}: an MMA is not one instruction"
        assert int(accesses) > 0 and conflicts == "0", f"{name} has bank conflicts"


def test_the_command_prints_the_table_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(configs, "config_row", lambda config: "a config")
    monkeypatch.setattr(configs, "bytes_row", "case {}".format)
    configs.main(["sm_120"])
    assert capsys.readouterr().out.count("a config\n") == len(sm120.CANDIDATES)
    configs.main(["sm_120", "3", "0"])
    assert capsys.readouterr().out.endswith("case 3\ncase 0\n")
    with pytest.raises(SystemExit):
        configs.main(["sm_120", "4"])
    assert "4 is no case of nvfp4_group_gemm on sm_120: those are 0 to 3" in capsys.readouterr().err


def test_cases_move_what_they_must():
    assert CASES
    for case, *_, ratio in map(cells, CASES):
        assert 0.99 <= float(ratio) <= 1.05, f"case {case}"


@pytest.mark.parametrize(
    "config",
    [
        config if i == 6 else pytest.param(config, marks=pytest.mark.slow)
        for i, config in enumerate(sm120.CANDIDATES)
    ],
    ids=lambda config: config.to_name(),
)
def test_a_line_is_what_the_compiler_and_the_emulator_make(config):
    assert configs.config_row(config) in TABLE


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("line", CASES)
def test_a_case_moves_what_is_written(line):
    """The modelled time may change with the model; the traffic may not."""
    got, written = cells(configs.bytes_row(int(cells(line)[0]))), cells(line)
    assert got[:2] + got[3:] == written[:2] + written[3:]


def test_every_config_of_sm100_has_a_line_and_none_spills():
    lines = [cells(line) for line in SM100_TABLE if line.startswith("| sm_")]
    assert len(lines) == sum(len(family_of(arch).CANDIDATES) for arch in sm100.ARCHS)
    for arch, name, registers, stack, _, smem, columns in lines:
        assert arch in sm100.ARCHS and name.startswith("t128x")
        assert int(registers) <= 255 and int(stack) == 0, f"{arch} {name} spills"
        assert int(smem) <= sm100.SMEM_CAPACITY_BYTES and int(columns) <= sm100.TMEM_COLS


@pytest.mark.slow
@pytest.mark.parametrize("arch", sm100.ARCHS)
def test_the_table_of_sm100_is_what_the_compiler_makes(arch):
    assert set(configs.sm100_rows([arch])) <= set(SM100_TABLE)


def test_one_line_of_sm100_is_what_the_compiler_makes():
    assert configs.sm100_row("sm_100a", sm100.CANDIDATES[0]) in SM100_TABLE
