"""Plans: what they cache, and the table that they pass to the compiled host code."""

import cases
import pytest
import torch
from list_checks import check_dual_operands, check_list_operands

from nvfp4_cute import KernelConfig, UnsupportedProblem
from nvfp4_cute.launch import plan
from nvfp4_cute.launch.plan import make_plan
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.planning.arch import base
from nvfp4_cute.problem import GroupedProblem

SIZES = ((5, 64, 256), (200, 130, 512), (0, 64, 256))


@pytest.fixture(scope="module")
def launchable():
    operands = cases.make_operands(cases.Case("table", SIZES, has_alpha=True))
    problem, checked = check_list_operands(*operands, out_dtype=torch.float16)
    return make_plan(problem, "sm_100a", 148, KernelConfig()), checked


def test_columns_are_numbered_without_gaps():
    assert [int(column) for column in Group] == list(range(NUM_COLUMNS))
    assert len(Header) <= NUM_COLUMNS


def test_table_describes_every_slot(launchable):
    plan, operands = launchable
    table = plan.table(operands)
    assert plan.schedule.order == (1, 0, 2)
    assert table[0, [Header.NUM_TILES, Header.NUM_CTA]].tolist() == [5, 5]
    assert table[0, Header.ALPHA] == operands.alpha.data_ptr()
    for row, group in zip(table[1:], plan.schedule.order, strict=True):
        a, b = operands.a[group], operands.b[group]
        pointers = [t.data_ptr() for t in (a.data, b.data, a.scale, b.scale, operands.out[group])]
        assert row[: len(pointers)].tolist() == pointers
        assert row[Group.A_PITCH] == 2 * a.data.stride(0)
        assert row[Group.OUT_PITCH] == operands.out[group].stride(0)
        assert row[[Group.M, Group.N, Group.K]].tolist() == [max(extent, 1) for extent in SIZES[group]]
        assert row[Group.GROUP_IDX] == group
    assert table[1:, Group.TILE_OFFSET].tolist() == list(plan.schedule.tile_offsets[:-1])


def test_table_describes_the_second_operand():
    first, second = (cases.make_operands(cases.Case("dual", SIZES, seed, has_alpha=True)) for seed in (1, 2))
    scales = (first.a_scale, first.b_scale, second.b_scale)
    problem, checked = check_dual_operands(
        first.a, first.b, second.b, *scales, first.alpha, second.alpha, out_dtype=torch.float16
    )
    plan = make_plan(problem, "sm_100a", 148, KernelConfig())
    table = plan.table(checked)
    assert [table[0, Header.ALPHA], table[0, Header.ALPHA2]] == [x.alpha.data_ptr() for x in (first, second)]
    for row, group in zip(table[1:], plan.schedule.order, strict=True):
        assert row[Group.B] == first.b[group].data_ptr()
        assert row[Group.B2] == second.b[group].data_ptr()
        assert row[Group.SFB2] == second.b_scale[group].data_ptr()
        assert row[Group.B2_PITCH] == 2 * checked.b2[group].data.stride(0)
        assert row[Group.B2_BATCH_PITCH] % 32 == 0 and row[Group.B2_BATCH_PITCH] > 0


def test_tables_of_two_launches_share_nothing(launchable):
    plan, operands = launchable
    first, second = plan.table(operands), plan.table(operands)
    first[:] = -1
    assert (second == plan.table(operands)).all()


def test_plans_are_remembered_by_problem_and_config(launchable):
    plan, _ = launchable
    assert make_plan(plan.problem, "sm_100a", 148, KernelConfig()) is plan
    other = make_plan(plan.problem, "sm_100a", 148, KernelConfig(num_cta=2))
    assert other is not plan and other.schedule.num_cta == 2 and other.kernel is plan.kernel


def test_a_problem_without_tiles_is_not_launched(launchable):
    plan, operands = launchable
    empty = make_plan(
        GroupedProblem(((0, 64, 256),) * 3, has_alpha=True, out_dtype=torch.float16), "sm_100a", 148
    )
    empty.launch(operands)  # there is no device, so a launch would fail


def test_more_groups_than_parameters_hold_are_refused():
    count = base.MAX_LIST_GROUPS + 1
    with pytest.raises(UnsupportedProblem, match=f"{count} groups.*calls of at most {count - 1}"):
        make_plan(GroupedProblem(((1, 1, 32),) * count), "sm_100a", 148)


def test_a_config_is_estimated_once_for_equal_problems(monkeypatch):
    """Calls that are not prepared, such as those with concatenated weights, look up the estimate every time."""
    estimated = []
    monkeypatch.setattr(plan, "choose_config", lambda *args: estimated.append(args) or KernelConfig())
    plan.config_of.cache_clear()
    for n in (256, 256, 512):
        plan.config_of(GroupedProblem(((4, n, 512),) * 3, "ragged"), "sm_90a", 132)
    plan.config_of.cache_clear()
    assert len(estimated) == 2
