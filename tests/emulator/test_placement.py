"""Device addresses replace the host's, so that modelled times do not depend on the host's allocator."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from flat_parts import gemv

from nvfp4_cute.bench import ours
from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.emulator.memory import GlobalMemory, Range
from nvfp4_cute.emulator.record.placement import FIRST, Placement
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.roofline.modelled import modelled_times
from nvfp4_cute.timing.clock import time_ptx
from nvfp4_cute.timing.memory import LAYOUTS, PAGE_BYTES, Memory


def ranges(*places: tuple[int, int]) -> Iterator[Range]:
    return (Range(start, nbytes, "x", True) for start, nbytes in places)


def test_memory_lies_in_the_order_of_allocation_without_gaps():
    placement = Placement(ranges((9000, 513), (64, 100), (5000, 512)))
    assert [placement.of(address) for address in (9000, 9512, 64, 163, 5000)] == [
        FIRST, FIRST + 512, FIRST + 1024, FIRST + 1123, FIRST + 1536,
    ]  # fmt: skip


def test_ranges_that_overlap_move_together_and_other_addresses_stay():
    placement = Placement(ranges((4096, 64), (1200, 100), (1000, 300), (1299, 10)))
    assert [placement.of(address) for address in (1000, 1200, 1308)] == [
        FIRST + 512,
        FIRST + 712,
        FIRST + 820,
    ]
    assert [placement.of(address) for address in (999, 1309, 4095, 4160)] == [999, 1309, 4095, 4160]
    assert Placement().of(77) == 77


def test_lanes_move_as_single_addresses_do():
    placement = Placement(ranges((4096, 64), (1000, 300)))
    for addresses in ([4096, 4100, 4159], [1000, 4096, 1300, 8], [8, 4096]):
        moved = placement.of_lanes(np.array(addresses))
        assert moved.tolist() == [placement.of(address) for address in addresses]


def test_memory_remembers_in_which_order_ranges_came():
    memory = GlobalMemory()
    for start in (3000, 1000, 2000, 3000):
        memory.add_range("x", start, 8)
    memory.remove_range(1000)
    assert [found.start for found in memory.registered] == [2000, 3000]
    memory.clear_ranges()
    assert memory.registered == ()


def test_layouts_begin_in_other_places_of_a_page():
    """Counts layouts in which a byte of the first allocation is in another page than its first byte."""
    constants = constants_of(lookup("B200"))
    for place, crossing in (
        (128, 0),
        (PAGE_BYTES // 2, 2),
        (PAGE_BYTES - 32, LAYOUTS - 1),
        (PAGE_BYTES, LAYOUTS),
    ):
        late = 0
        for layout in range(LAYOUTS):
            memory = Memory(constants, layout=layout)
            memory.read((FIRST, 32), 0.0, 0)
            known, other = (memory.read((FIRST + at, 32), 1e6, 0).time for at in (64, place))
            late += other > known + constants.page_latency / 2
        assert late == crossing


def test_what_all_lanes_load_lies_in_the_sectors_of_the_device(ptx_kernel):
    kernel = ptx_kernel("ld.global.b32 %r1, [%rd0];\nld.global.b32 %r2, [%rd0+28];")
    memory = np.zeros(1024, np.uint8)
    for offset in (0, 16):
        start = -memory.ctypes.data % 32 + offset
        timing = time_ptx(constants_of(lookup("B200")), kernel, args=[memory[start : start + 64]])
        assert timing.hbm_bytes == 32


SIZES = ((200, 1024, 256), (40, 1024, 1024))
Move = Callable[[torch.Tensor], torch.Tensor]


def lists(move: Move) -> Callable[[str], object]:
    case = Case("x", "x", "x", "grouped_gemm", SIZES)
    operands = empty_operands(case)
    names = ("a", "b", "a_scale", "b_scale", "out")
    placed = replace(operands, **{name: tuple(map(move, getattr(operands, name))) for name in names})
    return lambda backend: ours.prepare(case, placed, backend).run()


def column(move: Move) -> Callable[[str], object]:
    a, b, a_scale, b_scale = (
        move(torch.empty(2, *shape, dtype=torch.uint8))
        for shape in ((1024, 512), (1, 512), (8, 16, 32, 4, 4), (1, 16, 32, 4, 4))
    )
    out = move(torch.empty(2, 1024, dtype=torch.float16))
    return lambda backend: gemv(
        a.permute(1, 2, 0), b[:, 0].T, a_scale, b_scale, out=out.T, out_dtype=out.dtype, backend=backend
    )


def elsewhere() -> Move:
    """Places each tensor at an odd multiple of 64 bytes, after a different gap."""
    gaps = itertools.count(0, 3 * PAGE_BYTES // 8)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        nbytes, gap = tensor.numel() * tensor.element_size(), next(gaps)
        memory = torch.empty(gap + nbytes + 256, dtype=torch.uint8)
        start = -memory.data_ptr() % 128 + 64 + gap
        return memory[start : start + nbytes].view(tensor.dtype).view(tensor.shape)

    return move


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by_representatives", [False, True])
@pytest.mark.parametrize("target, operation", [("B200", lists), ("RTX 5090", lists), ("B200", column)])
def test_times_do_not_say_where_the_host_has_tensors(target, operation, by_representatives):
    timed = lambda move: modelled_times(
        operation(move), lookup(target), all_layouts=True, by_representatives=by_representatives
    )[-1]
    one, other = timed(lambda tensor: tensor), timed(elsewhere())
    assert one.us_by_layout == other.us_by_layout and one.critical == other.critical
    assert len(one.us_by_layout) == LAYOUTS and one.us_by_layout[0] == one.us
