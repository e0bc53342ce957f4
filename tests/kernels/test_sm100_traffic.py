"""Traffic of the sm_100a kernel for the competition's cases, counted in its only launch on the emulator."""

import pytest
import torch
from flat_parts import dual_gemm, grouped_gemm
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_cute import KernelConfig, private_api
from nvfp4_cute.bench import ours
from nvfp4_cute.bench.cases import Case, select
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.emulator.isa import tma
from nvfp4_cute.emulator.record import effects
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.planning.arch.sm100 import smem_plan
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.planning.schedule import make_schedule
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.roofline.modelled import modelled_times

FP16_BYTES = 2
# Scales of 128 rows and 64 columns of NVFP4 results share sectors; a warp with 32 of the rows fills a quarter of each.
SCALE_SHARE = 4
# Torch operations that move no bytes.
VIEWS = {"as_strided", "detach", "view"}


class TensorOperations(TorchDispatchMode):
    """Names of the torch operations called."""

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
def test_device_memory_moves_little_more_than_it_must(monkeypatch, number, bound):
    """Reads that miss in an L2 of the B200's size, and 32-byte sectors stored, relative to one pass over operands and outputs.

    Also checks that work is balanced: the largest number of K tiles per CTA relative to the mean, and at most one CTA
    per SM.
    """
    (case,) = select(("competition",), f"nvfp4_group_gemm case {number}")
    operands = empty_operands(case)
    monkeypatch.setattr(
        private_api, "is_traced", lambda: False
    )  # otherwise the mode sees only the whole operation
    with TensorOperations() as called:
        (timing,) = modelled_times(lambda backend: ours.prepare(case, operands, backend).run(), B200)
    assert called.names <= VIEWS, "one launch, and no copies or other work besides"
    config = choose_config(GroupedProblem(case.sizes), B200.arch, B200.num_sms)
    schedule = make_schedule(case.sizes, config.work_tile_mnk, config.num_cta // config.cluster_size)
    least = schedule.hbm_bytes + sum(m * n * FP16_BYTES for m, n, _ in case.sizes)
    assert least <= timing.hbm_bytes + timing.stored_bytes <= bound * least
    assert schedule.imbalance <= 1.12
    assert sum(map(bool, timing.sm_busy)) == config.num_cta


def noted_boxes(monkeypatch):
    """Records boxes, with their tensors' addresses, that later launches load and prefetch."""
    boxes = {"load": [], "prefetch": []}
    for kind, effect in (("load", tma.load_boxes), ("prefetch", tma.fetch_boxes)):
        note = effects.EFFECTS[effect]

        def noting(recorder, warp, *args, note=note, kind=kind):
            m, found = args[-2:] if kind == "prefetch" else args[1:3]
            boxes[kind] += [(m.address, box) for box in found]
            return note(recorder, warp, *args)

        monkeypatch.setitem(effects.EFFECTS, effect, noting)
    return boxes


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mmas", "name"), [(1, "2cta_swap"), (2, "2cta_swap_m2"), (2, "swap_m2"), (4, "2cta_swap_m4")]
)
def test_mmas_that_share_the_n_side_load_it_once(monkeypatch, mmas, name):
    """For a work tile of each config, every box of tokens and of their scales is loaded once for any number of MMAs."""
    boxes, config = noted_boxes(monkeypatch), KernelConfig.from_name(f"t128x128x256_s3a2_{name}")
    tokens, weights, _ = config.work_tile_mnk
    assert config.multicast_n == mmas
    operands = empty_operands(Case("x", "x", "x", "grouped_gemm", ((tokens, weights, 7 * 256),)))
    given = [list(x) for x in (operands.a, operands.b, operands.a_scale, operands.b_scale)]
    modelled_times(
        lambda backend: grouped_gemm(
            *given, out=list(operands.out), out_dtype=torch.float16, config=config, backend=backend
        )
    )
    for shared in (operands.a[0], operands.a_scale[0]):
        loaded = [box for address, box in boxes["load"] if address == shared.data_ptr()]
        assert len(loaded) == len(set(loaded)) == 7 * config.num_mma_cta
    own = [box for address, box in boxes["load"] if address == operands.b[0].data_ptr()]
    assert len(own) == len(set(own)) == 7 * config.num_m_cta


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["t128x128x256_s0a2_2cta", "t128x128x256_s0a2_2cta_swap"])
def test_every_shared_box_is_prefetched_once(monkeypatch, name):
    """In two by two tiles, one of the tiles that load a box prefetches it, unless the ring holds it from the start."""
    boxes = noted_boxes(monkeypatch)
    config = KernelConfig.from_name(name)
    rows_a, rows_b, _ = config.work_tile_mnk
    operands = empty_operands(Case("x", "x", "x", "dual_gemm", ((2 * rows_a, 2 * rows_b, 13 * 256),)))
    (a,), (b1,), (b2,), (out,) = operands.a, operands.b, operands.b2, operands.out
    scales = (operands.a_scale[0], operands.b_scale[0], operands.b2_scale[0])
    modelled_times(
        lambda backend: dual_gemm(
            a, b1, b2, *scales, out=out, out_dtype=out.dtype, config=config, backend=backend
        )
    )
    num_stages = smem_plan(config, num_b=2).num_ab_stage
    # Boxes are (k, row, batch) of data and (0, scale block along K, row block, batch) of scales.
    is_late = lambda box: (box[0] // 256 if len(box) == 3 else box[1] // 4) >= num_stages
    # A pair prefetches other boxes, the first ones, during its set-up.
    prefetched = [(m, box) for m, box in boxes["prefetch"] if is_late(box)]
    assert sorted(prefetched) == sorted({(m, box) for m, box in boxes["load"] if is_late(box)})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "n"), [("t128x64x256_s0a3_2cta", 256), ("t128x256x256_s0a2", 512)])
def test_quantized_results_fill_sectors(name, n):
    """Two slices of a row of NVFP4 results are stored together, in complete 32-byte sectors."""
    m, config = 256, KernelConfig.from_name(name)
    operands = empty_operands(Case("x", "x", "x", "grouped_gemm", ((m, n, 256),)))
    given = [list(x) for x in (operands.a, operands.b, operands.a_scale, operands.b_scale)]
    (timing,) = modelled_times(
        lambda backend: grouped_gemm(*given, out_dtype="nvfp4", config=config, backend=backend)
    )
    assert timing.stored_bytes == m * n // 2 + SCALE_SHARE * (m * n // 16)
