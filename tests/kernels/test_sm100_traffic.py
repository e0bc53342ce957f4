"""What the sm_100a kernel moves for the competition's cases, counted in its only launch on the emulator."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_cute.bench import ours
from nvfp4_cute.bench.cases import select
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.modelled import modelled_times
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.schedule import make_schedule
from nvfp4_cute.select import choose_config
from nvfp4_cute.targets import B200

FP16_BYTES = 2
# What torch does without moving a byte.
VIEWS = {"as_strided", "detach", "view"}


class TensorOperations(TorchDispatchMode):
    """Names of what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("number", "bound"),
    [
        pytest.param(0, 1.03, marks=pytest.mark.slow),
        pytest.param(1, 1.03, marks=pytest.mark.slow),
        pytest.param(2, 1.10, marks=pytest.mark.slow),
        (3, 1.10),
    ],
)
def test_device_memory_moves_little_more_than_it_must(number, bound):
    """Reads that miss in an L2 of the B200's size, and 32-byte sectors stored, over operands and outputs once each.

    The work is dealt evenly, too: K tiles of the CTA with most over the mean of the launched CTAs, and no SM has two.
    """
    (case,) = select(("competition",), f"nvfp4_group_gemm case {number}")
    operands = empty_operands(case)
    with TensorOperations() as called:
        (timing,) = modelled_times(lambda backend: ours.prepare(case, operands, backend).run(), B200)
    assert called.names <= VIEWS, "one launch, and no copies or other work besides"
    config = choose_config(GroupedProblem(case.sizes), B200.arch, B200.num_sms)
    schedule = make_schedule(case.sizes, config.work_tile_mnk, config.num_cta // config.cluster_size)
    least = schedule.hbm_bytes + sum(m * n * FP16_BYTES for m, n, _ in case.sizes)
    assert least <= timing.hbm_bytes + timing.stored_bytes <= bound * least
    assert schedule.imbalance <= 1.12
    assert sum(map(bool, timing.sm_busy)) == config.num_cta
