"""Compares the committed table of every config's resources with the compiler."""

from pathlib import Path

import pytest

from nvfp4_cute.bench import sm100_configs
from nvfp4_cute.planning.arch import family_of
from nvfp4_cute.planning.arch.sm100 import limits as sm100

TABLE = (
    Path(sm100_configs.__file__).with_name("results").joinpath("sm100_configs.md").read_text().splitlines()
)


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_config_has_a_line_and_none_spills():
    lines = [cells(line) for line in TABLE if line.startswith("| sm_")]
    assert len(lines) == sum(len(family_of(arch).CANDIDATES) for arch in sm100.ARCHS)
    for arch, name, registers, stack, _, smem, columns in lines:
        assert arch in sm100.ARCHS and name.startswith("t128x")
        assert int(registers) <= 255 and int(stack) == 0, f"{arch} {name} spills"
        assert int(smem) <= sm100.SMEM_CAPACITY_BYTES and int(columns) <= sm100.TMEM_COLS


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=pytest.mark.slow) for arch in sm100.ARCHS])
def test_the_table_is_what_the_compiler_makes(arch):
    assert set(sm100_configs.rows([arch])) <= set(TABLE)


def test_one_line_is_what_the_compiler_makes():
    assert sm100_configs.row("sm_100a", sm100.CANDIDATES[0]) in TABLE
