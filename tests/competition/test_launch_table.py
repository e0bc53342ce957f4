"""Exported host code fills the launch table by itself: it must say what the package's own host code says."""

import numpy as np
import pytest
import torch

from nvfp4_cute import launch
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.launch_table import NUM_COLUMNS, Gemv, Group
from nvfp4_cute.ops import gemv
from nvfp4_cute.problem import GroupedOperands, GroupedProblem
from nvfp4_cute.problems.nvfp4_gemv import spec as gemv_spec
from nvfp4_cute.problems.nvfp4_gemv import submission as gemv_submission
from nvfp4_cute.problems.nvfp4_gemv.inputs import make_inputs as make_gemv_inputs
from nvfp4_cute.problems.nvfp4_group_gemm import spec, submission
from nvfp4_cute.problems.nvfp4_group_gemm.inputs import make_inputs

# Of the only batch: never used, well formed in both, but not the same.
UNUSED = (Group.A_BATCH_PITCH, Group.B_BATCH_PITCH)
# Of the second b of a dual GEMM: the kernel of one product does not read it.
NOT_READ = (Group.B2_BATCH_PITCH,)


class Uncompiled:
    """Stands for the compiled kernel, of which a plan's table only asks the config."""

    def __init__(self, key):
        self.key = key


@pytest.mark.parametrize("name", ["t128x128x256_s4a2", "t128x64x256_s4a2_2cta_swap", "t128x128x256_s4a2_p7"])
def test_grouped_gemm(monkeypatch, name):
    config = KernelConfig.from_name(name)
    monkeypatch.setattr(launch, "get_kernel", lambda key, for_emulator: Uncompiled(key))
    case = spec.GroupCase((40, 264, 72), (512, 384, 128), (256, 768, 512))
    abc, _, permuted, sizes = make_inputs(case)
    a, b, c = zip(*abc, strict=True)
    a_scale, b_scale = zip(*permuted, strict=True)
    operands = GroupedOperands(
        *(tuple(t[:, :, 0].view(torch.uint8) for t in side) for side in (a, b)),
        tuple(a_scale),
        tuple(b_scale),
        None,
        tuple(t[:, :, 0] for t in c),
    )
    problem = GroupedProblem(case.sizes, out_dtype=torch.float16)
    plan = launch.make_plan.__wrapped__(problem, "sm_100a", 148, config)
    schedule = submission.make_schedule(
        case.sizes, config.work_tile_mnk, (config.num_cta or 148) // config.cluster_size
    )
    table = np.array(submission._launch_table(schedule, config, abc, permuted)).reshape(-1, NUM_COLUMNS)
    expected = plan.table(operands)
    assert (table[1:, UNUSED] > 0).all()
    for columns in (UNUSED, NOT_READ):
        table[1:, columns] = expected[1:, columns]
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("m, k, l", [(256, 7168, 1), (384, 512, 3)])
def test_gemv(m, k, l):
    data = make_gemv_inputs(gemv_spec.GemvCase(m, k, l))
    a, b, _, _, sfa, sfb, c = data
    task, _ = gemv._check(a, b[0], sfa, sfb, None, c[:, 0], torch.float16, "blocked")
    table, expected = np.array(gemv_submission._launch_table(data)), task.table()
    if l == 1:  # strides of the only batch: never used
        table[[Gemv.SFA_BATCH, Gemv.SFB_BATCH]] = expected[[Gemv.SFA_BATCH, Gemv.SFB_BATCH]]
    np.testing.assert_array_equal(table, expected)
