"""Compares the committed tables of the sm_120a kernel's resources and traffic with the compiler and the emulator."""

from pathlib import Path

import pytest

from nvfp4_cute.bench import sm120_configs
from nvfp4_cute.planning.arch import sm120

TABLE = (
    Path(sm120_configs.__file__).with_name("results").joinpath("sm120_configs.md").read_text().splitlines()
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
    monkeypatch.setattr(sm120_configs, "config_row", lambda config: "a config")
    monkeypatch.setattr(sm120_configs, "bytes_row", "case {}".format)
    sm120_configs.main([])
    assert capsys.readouterr().out.count("a config\n") == len(sm120.CANDIDATES)
    sm120_configs.main(["3", "0"])
    assert capsys.readouterr().out.endswith("case 3\ncase 0\n")
    with pytest.raises(SystemExit):
        sm120_configs.main(["4"])
    assert "4 is no case of nvfp4_group_gemm: those are 0 to 3" in capsys.readouterr().err


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
    assert sm120_configs.config_row(config) in TABLE


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("line", CASES)
def test_a_case_moves_what_is_written(line):
    """The modelled time may change with the model; the traffic may not."""
    got, written = cells(sm120_configs.bytes_row(int(cells(line)[0]))), cells(line)
    assert got[:2] + got[3:] == written[:2] + written[3:]
