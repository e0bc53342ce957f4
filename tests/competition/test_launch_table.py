"""Exported host code fills the launch table by itself. It must agree with the package's own host code."""

import numpy as np
import pytest
import torch

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.launch import plan as launch_plan
from nvfp4_cute.launch.simt import GemvTask
from nvfp4_cute.launch_table import NUM_COLUMNS, Gemv, Group
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.operands.products import check_gemv
from nvfp4_cute.operands.whole import Parts
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.problems import grouped_submission
from nvfp4_cute.problems.grouped_submission import GroupTensors
from nvfp4_cute.problems.nvfp4_dual_gemm import spec as dual_spec
from nvfp4_cute.problems.nvfp4_dual_gemm.inputs import make_inputs as make_dual_inputs
from nvfp4_cute.problems.nvfp4_gemv import spec as gemv_spec
from nvfp4_cute.problems.nvfp4_gemv import submission as gemv_submission
from nvfp4_cute.problems.nvfp4_gemv.inputs import make_inputs as make_gemv_inputs
from nvfp4_cute.problems.nvfp4_group_gemm import spec
from nvfp4_cute.problems.nvfp4_group_gemm.inputs import make_inputs
from nvfp4_cute.problems.submission_parts import scale_address

# Pitches of the only batch are never used. Both tables hold valid but different values there.
UNUSED = (Group.A_BATCH_PITCH, Group.B_BATCH_PITCH, Group.B2_BATCH_PITCH)


class Uncompiled:
    """A stand-in for the compiled kernel, of which a plan's table reads only the config."""

    def __init__(self, key):
        self.key = key


def check_table(monkeypatch, config, groups, operands, problem):
    """Compares the exported host code's table with that of a plan."""
    monkeypatch.setattr(launch_plan, "get_kernel", lambda key, for_emulator: Uncompiled(key))
    plan = launch_plan.make_plan.__wrapped__(problem, "sm_100a", 148, config)
    schedule = grouped_submission.make_schedule(
        problem.sizes, config.work_tile_mnk, (config.num_cta or 148) // config.cluster_size
    )
    assert tuple(group.size(NVFP4) for group in groups) == problem.sizes
    table = np.array(grouped_submission._launch_table(schedule, config, groups, problem.sizes)).reshape(
        -1, NUM_COLUMNS
    )
    expected = plan.table(operands)
    assert (table[1:, UNUSED] > 0).all() and (expected[1:, UNUSED] > 0).all()
    table[1:, UNUSED] = expected[1:, UNUSED]
    np.testing.assert_array_equal(table, expected)


def plain(tensor, scale):
    data = tensor[:, :, 0].view(torch.uint8)
    return Operand(data, scale, NVFP4, len(data), NVFP4.elements(data.shape[1]))


@pytest.mark.parametrize("name", ["t128x128x256_s4a2", "t128x64x256_s4a2_2cta_swap", "t128x128x256_s4a2_p7"])
def test_grouped_gemm(monkeypatch, name):
    case = spec.GroupCase((40, 264, 72), (512, 384, 128), (256, 768, 512))
    abc, _, permuted, _ = make_inputs(case)
    groups = [GroupTensors(a, b, sfa, sfb, c) for (a, b, c), (sfa, sfb) in zip(abc, permuted, strict=True)]
    operands = GroupedOperands(
        tuple(plain(g.a, g.sfa) for g in groups),
        tuple(plain(g.b, g.sfb) for g in groups),
        tuple(g.c[:, :, 0] for g in groups),
    )
    problem = GroupedProblem(case.sizes, out_dtype=torch.float16)
    check_table(monkeypatch, KernelConfig.from_name(name), groups, operands, problem)


@pytest.mark.parametrize("name", ["t128x128x256_s4a2", "t128x64x256_s3a3_2cta_swap"])
def test_dual_gemm(monkeypatch, name):
    case = dual_spec.DualGemmCase(256, 384, 512)
    a, b1, b2, _, _, _, sfa, sfb1, sfb2, c = make_dual_inputs(case)
    weights = plain(b1, sfb1), plain(b2, sfb2)
    operands = GroupedOperands((plain(a, sfa),), weights[:1], (c[:, :, 0],), b2=weights[1:])
    problem = GroupedProblem(((256, 384, 512),), out_dtype=torch.float16, activation="silu")
    groups = [GroupTensors(a, b1, sfa, sfb1, c, b2, sfb2)]
    check_table(monkeypatch, KernelConfig.from_name(name), groups, operands, problem)


def test_scales_that_do_not_lie_as_prescribed_are_refused():
    case = spec.GroupCase((128,), (128,), (256,))
    _, _, ((sfa, _),), _ = make_inputs(case)
    assert scale_address(sfa) == sfa.data_ptr()
    with pytest.raises(ValueError, match=r"strides .*; pass the \(32, 4, rm, 4, rk, L\) view"):
        scale_address(sfa.contiguous())


@pytest.mark.parametrize("m, k, l", [(256, 7168, 1), (384, 512, 3)])
def test_gemv(m, k, l):
    data = make_gemv_inputs(gemv_spec.GemvCase(m, k, l))
    a, b, _, _, sfa, sfb, c = data
    product, _ = check_gemv(Parts(a, sfa), Parts(b[0], sfb), None, c[:, 0], torch.float16, "blocked")
    table, expected = np.array(gemv_submission._launch_table(data)), GemvTask(product).table(B200.gpu)
    table[Gemv.NUM_SMS] = expected[Gemv.NUM_SMS]  # for persistent CTAs, which the submission does not use
    if l == 1:  # strides of the only batch are never used
        table[[Gemv.SFA_BATCH, Gemv.SFB_BATCH]] = expected[[Gemv.SFA_BATCH, Gemv.SFB_BATCH]]
    np.testing.assert_array_equal(table, expected)
