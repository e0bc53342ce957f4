"""The order of rows by expert: a stable counting sort of (token, k) pairs, called slots, by the experts they chose.

ids int32 or int64 (num_slots). Outputs: offs int32 (experts), the end of each expert's rows; slots int32, the slot of
every row; rows and places int32, the row of every slot, and its row if every expert's rows start at a block of 128: -1
for ids that are not among the experts from ``first_expert`` on. Rows of an expert are in the order of slots, so by
token, then k.

A warp counts a contiguous part of the slots, 32 at a time. Lanes with equal ids find each other by ``match``, and the
lowest lane adds their number to the warp's own count of that expert. Sums over warps, then over experts, give the first
row of each expert in each warp's part; then the warp processes its part again. Nothing is atomic, so every run gives
the same bits.

If there are too many slots for one CTA, several CTAs count their parts and exchange the counts through global memory.
Each CTA adds up all counts, and places its own slots. The CTAs of a cluster wait for each other at its barrier; more
CTAs need two launches.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvfp4_cute.formats.scale_layout import ATOM_ROWS
from nvfp4_cute.launch_table import PeerHeader, Permute
from nvfp4_cute.planning.arch.simt import PERMUTE_CLUSTER, PERMUTE_THREADS, PERMUTE_WARPS, WARP_SIZE

from ..common.device_groups import inclusive_sum
from ..common.global_access import global_scalar
from ..common.launch_record import read_record
from ..common.select import select
from ..common.signals import Signals, signals_of
from ..common.versions import SmemAllocator

FULL = 0xFFFFFFFF
# Counts that a thread loads before it adds the first one. ``cutlass.range(unroll=8)`` would wait for each load.
AT_ONCE = 8


@dataclass(frozen=True)
class PermuteOperands:
    """Addresses are Int64, extents Int32."""

    ids: Int64
    offs: Int64
    slots: Int64
    rows: Int64
    places: Int64
    counts: Int64
    id_bytes: Int32
    num_slots: Int32
    first_expert: Int32
    experts: Int32
    ctas: Int32
    slots_per_cta: Int32


@dataclass(frozen=True)
class Part:
    """The slots of a warp."""

    first: Int32
    end: Int32


class PermuteKernel:
    """One compiled variant.

    Args:
        capacity: number of experts whose counts shared memory holds.
        phase: "whole": one CTA does everything; "cluster": a cluster does; "count": CTAs count; "place": CTAs place the
            counted slots.
        waits: whether other ranks are storing ids, so that the kernel waits for them first.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(self, capacity: int, phase: str, waits: bool, name: str):
        self.capacity = capacity
        self.warps = PERMUTE_WARPS[capacity]
        self.phase = phase
        self.waits = waits
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one CTA, one cluster, or the table's number of CTAs.

        Args:
            table: Int64 in host memory: ``launch_table.Permute``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Permute)))
        operands = read_record(PermuteOperands, Permute, t)
        signals = None
        if cutlass.const_expr(self.waits):
            signals = signals_of(t, Permute, PeerHeader.DISPATCHED)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, signals).launch(
            grid=(operands.ctas, 1, 1),
            block=(PERMUTE_THREADS, 1, 1),
            cluster=(PERMUTE_CLUSTER, 1, 1) if self.phase == "cluster" else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: PermuteOperands, signals: Signals | None):
        """Counts, adds up, and places."""
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        smem = SmemAllocator()
        # (EXPERT, WARP): slots of an expert in a warp's part; later the row of the next one.
        counts = smem.allocate_tensor(Int32, cute.make_layout((self.capacity, self.warps)), 16)
        # (EXPERT): places minus rows.
        shifts = smem.allocate_tensor(Int32, cute.make_layout(self.capacity), 16)
        # (WARP, ROWS OR BLOCKS): sums over the experts of a warp's lanes.
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARP_SIZE, 2)), 16)

        if cutlass.const_expr(self.waits):
            signals.wait()
        first, end = Int32(0), operands.num_slots
        if cutlass.const_expr(self.phase != "whole"):
            first = cutlass.min(cta * operands.slots_per_cta, end)
            end = cutlass.min(first + operands.slots_per_cta, end)
        per_warp = cute.ceil_div(cute.ceil_div(end - first, self.warps), WARP_SIZE) * WARP_SIZE
        active = cute.ceil_div(end - first, cutlass.max(per_warp, 1))
        start = first + warp_idx * per_warp
        part = Part(start, cutlass.min(start + per_warp, end))
        # Both passes start with these slots, so their ids are read once, before the first barrier.
        own = self.local_expert(operands, part.first + cute.arch.lane_idx(), part.end)

        for i in cutlass.range(tidx, active * self.capacity, PERMUTE_THREADS, unroll=1):
            counts[i % self.capacity, i // self.capacity] = Int32(0)
        cute.arch.sync_threads()
        if warp_idx < active:
            self.count(operands, part, own, counts, warp_idx)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.phase in ("count", "cluster")):
            self.hand_over(operands, cta, tidx, active, counts)
        if cutlass.const_expr(self.phase == "cluster"):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if cutlass.const_expr(self.phase != "count"):
            self.add_up(operands, cta, tidx, active, counts, shifts, sums)
            cute.arch.sync_threads()
            if warp_idx < active:
                self.place(operands, part, own, counts, shifts, warp_idx)

    @cute.jit
    def local_expert(self, operands: PermuteOperands, slot: Int32, end: Int32) -> Int32:
        """Returns the expert of a slot, counted from ``first_expert``; ``capacity`` for none."""
        expert = Int32(self.capacity)
        if slot < end:
            local = (
                global_scalar(Int32, operands.ids + Int64(slot) * operands.id_bytes)[0]
                - operands.first_expert
            )
            if local >= 0 and local < operands.experts:
                expert = local
        return expert

    @cute.jit
    def count(self, operands: PermuteOperands, part: Part, own: Int32, counts: cute.Tensor, warp_idx: Int32):
        """Counts the slots of a warp's part, by expert. own: expert of the lane's first slot."""
        lane, expert = cute.arch.lane_idx(), own
        for base in cutlass.range(part.first, part.end, WARP_SIZE, unroll=1):
            ahead = self.local_expert(operands, base + WARP_SIZE + lane, part.end)
            mates = cute.arch.match_sync(FULL, expert, "any")
            if expert < self.capacity and before(mates, lane) == 0:
                counts[expert, warp_idx] = counts[expert, warp_idx] + Int32(cute.arch.popc(mates))
            cute.arch.sync_warp()
            expert = ahead

    @cute.jit
    def hand_over(
        self, operands: PermuteOperands, cta: Int32, tidx: Int32, active: Int32, counts: cute.Tensor
    ):
        """Writes the CTA's counts for the others."""
        if tidx < operands.experts:
            total = Int32(0)
            for w in cutlass.range(active, unroll=1):
                total = total + counts[tidx, w]
            place = (Int64(cta) * operands.experts + tidx) * 4
            global_scalar(Int32, operands.counts + place)[0] = total

    @cute.jit
    def add_up(
        self,
        operands: PermuteOperands,
        cta: Int32,
        tidx: Int32,
        active: Int32,
        counts: cute.Tensor,
        shifts: cute.Tensor,
        sums: cute.Tensor,
    ):
        """Computes each expert's first row in every warp's part, and its end, with one thread per expert."""
        lane, warp_idx = cute.arch.lane_idx(), tidx // WARP_SIZE
        earlier, total = Int32(0), Int32(0)
        if tidx < operands.experts:
            if cutlass.const_expr(self.phase != "whole"):
                for first in cutlass.range(0, operands.ctas, AT_ONCE, unroll=1):
                    numbers = self.numbers_of_ctas(operands, tidx, first)
                    for i in cutlass.range_constexpr(AT_ONCE):
                        earlier = earlier + select(first + i < cta, numbers[i], Int32(0))
                        total = total + numbers[i]
            else:
                for first in cutlass.range(0, active, AT_ONCE, unroll=1):
                    for number in self.numbers_of_warps(counts, tidx, first, active):
                        total = total + number
        end, block_end = inclusive_sum(total), inclusive_sum(blocks(total))
        if lane == WARP_SIZE - 1:
            sums[warp_idx, 0], sums[warp_idx, 1] = end, block_end
        cute.arch.sync_threads()
        of_earlier = [select(lane < warp_idx, sums[lane, i], Int32(0)) for i in range(2)]
        end = end + cute.arch.warp_redux_sync(of_earlier[0], "add")
        block_end = block_end + cute.arch.warp_redux_sync(of_earlier[1], "add")
        if tidx < operands.experts:
            start = end - total
            shifts[tidx] = (block_end - blocks(total)) * ATOM_ROWS - start
            row = start + earlier
            for first in cutlass.range(0, active, AT_ONCE, unroll=1):
                numbers = self.numbers_of_warps(counts, tidx, first, active)
                for i in cutlass.range_constexpr(AT_ONCE):
                    if first + i < active:
                        counts[tidx, first + i] = row
                    row = row + numbers[i]
            if cta == 0:
                global_scalar(Int32, operands.offs + Int64(tidx) * 4)[0] = end

    def numbers_of_ctas(self, operands: PermuteOperands, expert: Int32, first: Int32) -> list:
        """Loads the number of an expert's slots in CTA ``first`` and the following ones at once; 0 after the last CTA."""
        last = operands.ctas - 1
        places = [
            (Int64(cutlass.min(first + i, last)) * operands.experts + expert) * 4 for i in range(AT_ONCE)
        ]
        numbers = [global_scalar(Int32, operands.counts + place)[0] for place in places]
        return [select(first + i <= last, number, Int32(0)) for i, number in enumerate(numbers)]

    def numbers_of_warps(self, counts: cute.Tensor, expert: Int32, first: Int32, active: Int32) -> list:
        """Loads an expert's counts of warp ``first`` and the following ones at once; 0 after the last active warp."""
        numbers = [counts[expert, cutlass.min(first + i, active - 1)] for i in range(AT_ONCE)]
        return [select(first + i < active, number, Int32(0)) for i, number in enumerate(numbers)]

    @cute.jit
    def place(
        self,
        operands: PermuteOperands,
        part: Part,
        own: Int32,
        counts: cute.Tensor,
        shifts: cute.Tensor,
        warp_idx: Int32,
    ):
        """Places the rows of a warp's part. own: expert of the lane's first slot."""
        lane, expert = cute.arch.lane_idx(), own
        for base in cutlass.range(part.first, part.end, WARP_SIZE, unroll=1):
            slot = base + lane
            ahead = self.local_expert(operands, slot + WARP_SIZE, part.end)
            mates = cute.arch.match_sync(FULL, expert, "any")
            row, place = Int32(-1), Int32(-1)
            if expert < self.capacity:
                first_row = counts[expert, warp_idx]
                row = first_row + before(mates, lane)
                place = row + shifts[expert]
                global_scalar(Int32, operands.slots + Int64(row) * 4)[0] = slot
            cute.arch.sync_warp()
            if expert < self.capacity and before(mates, lane) == 0:
                counts[expert, warp_idx] = row + Int32(cute.arch.popc(mates))
            cute.arch.sync_warp()
            if slot < part.end:
                global_scalar(Int32, operands.rows + Int64(slot) * 4)[0] = row
                global_scalar(Int32, operands.places + Int64(slot) * 4)[0] = place
            expert = ahead


@cute.jit
def before(mates: Uint32, lane: Int32) -> Int32:
    """Returns the number of lanes of a mask before this one."""
    return Int32(cute.arch.popc(mates & ((Uint32(1) << Uint32(lane)) - 1)))


@cute.jit
def blocks(rows: Int32) -> Int32:
    """Returns the number of blocks of 128 rows for these rows."""
    return (rows + (ATOM_ROWS - 1)) // ATOM_ROWS
