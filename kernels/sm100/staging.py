"""Stores a slice of 16-bit results through shared memory, as contiguous runs of the output.

A warp holds 32 x 32 results, one row of the MMA's M side per lane. The output is contiguous along one of the two sides: 32 runs
of 64 bytes. They pass through 2 KB of the warp's own shared memory, so that four lanes store a run in 16-byte units; if every
lane stored its own run, a store would touch 32 lines for 32 bytes each. Lanes write their rows. Runs along the N side are read
back as they are, runs along the M side as 8 x 8 matrices that the load transposes. Units are swizzled by the row, which avoids
bank conflicts.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from ..common.global_access import store_half, store_words
from ..common.group_table import WorkTile
from ..common.output_table import OutputTable, group_output
from ..common.sides import TileSide
from ..common.versions import inline_ptx

SLICE = 32  # rows and columns
ITEM_BYTES = 2
UNIT_VALUES, UNIT_BYTES = 8, 16
RUN_BYTES = SLICE * ITEM_BYTES
UNITS = RUN_BYTES // UNIT_BYTES
WARP_BYTES = SLICE * RUN_BYTES
# Runs that a warp stores at once, and number of such stores.
RUNS_AT_ONCE = 32 // UNITS
NUM_ROUNDS = SLICE // RUNS_AT_ONCE
ROUND_BYTES = RUNS_AT_ONCE * RUN_BYTES


@dataclass(frozen=True)
class StagedTarget:
    """Destination of a warp's part of a tile, as one lane stores it: unit ``lane % 4`` of every eighth run.

    Attributes:
        address: address of the lane's first unit.
        pitch_bytes: bytes between runs.
        num_runs, num_values: remaining runs, and values per run, of the group from the lane's first unit.
        is_aligned: whether every run of the tile starts at a unit.
    """

    address: Int64
    pitch_bytes: Int64
    num_runs: Int32
    num_values: Int32
    is_aligned: Boolean


@cute.jit
def staged_target(
    outputs: OutputTable,
    tile: WorkTile,
    m_row: Int32,
    m_side: TileSide,
    n_side: TileSide,
    dtype: cutlass.Constexpr,
    out_m_major: cutlass.Constexpr,
    swap_ab: cutlass.Constexpr,
) -> StagedTarget:
    """Returns the destination of the warp whose first row of the M side is ``m_row``."""
    lane = cute.arch.lane_idx()
    run, first_value = lane // UNITS, lane % UNITS * UNIT_VALUES
    origin, row_pitch, column_pitch = group_output(outputs, tile, dtype, out_m_major)
    pitch_m, pitch_n = (column_pitch, row_pitch) if swap_ab else (row_pitch, column_pitch)
    start = origin + (Int64(m_row) * pitch_m + Int64(n_side.first_row) * pitch_n) * ITEM_BYTES
    rows_m, rows_n = m_side.extent - m_row, n_side.extent - n_side.first_row
    num_runs, num_values, pitch_bytes = rows_m, rows_n, pitch_m * ITEM_BYTES
    if cutlass.const_expr(out_m_major != swap_ab):
        num_runs, num_values, pitch_bytes = rows_n, rows_m, pitch_n * ITEM_BYTES
    return StagedTarget(
        start + run * pitch_bytes + first_value * ITEM_BYTES,
        pitch_bytes,
        num_runs - run,
        num_values - first_value,
        (start | pitch_bytes) % UNIT_BYTES == 0,
    )


@cute.jit
def store_staged(
    words: list,
    target: StagedTarget,
    column: Int32,
    is_slice: Boolean,
    across_lanes: cutlass.Constexpr,
    staging: Int32,
):
    """Stores a slice, clipped to the group. All lanes of a warp must call it.

    Args:
        words: 32 results of this lane's row, two per word.
        column: first column of the slice in the tile.
        is_slice: whether there is a slice; otherwise nothing is stored.
        across_lanes: whether runs of the output are along the M side, so that a lane's results belong to 32 runs.
        staging: shared address of the warp's buffer.
    """
    lane = cute.arch.lane_idx()
    address, num_runs, num_values = target.address, target.num_runs, target.num_values
    # Wait until the previous slice has been read.
    cute.arch.sync_warp()
    swizzle = _swizzle(lane, across_lanes)
    for i in cutlass.range_constexpr(UNITS):
        place = staging + lane * RUN_BYTES + (i ^ swizzle) * UNIT_BYTES
        inline_ptx(
            "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[place, *words[4 * i : 4 * i + 4]],
        )
    cute.arch.sync_warp()
    if cutlass.const_expr(across_lanes):
        address += Int64(column) * target.pitch_bytes
        num_runs -= column
        # Lane 8i + r passes the address of row r of matrix i, so that lane 4g + t gets rows 8t + 2i and 8t + 2i + 1 of a column.
        row = lane % 8 // 2 * UNIT_VALUES + lane // 8 * 2 + lane % 2
        source, swizzle = staging + row * RUN_BYTES, _swizzle(row, across_lanes)
        units = [_load_transposed(source + (i ^ swizzle) * UNIT_BYTES) for i in range(NUM_ROUNDS)]
    else:
        address += column * ITEM_BYTES
        num_values -= column
        source = staging + lane // UNITS * RUN_BYTES + ((lane % UNITS) ^ (lane // (2 * UNITS))) * UNIT_BYTES
        units = [_load_unit(source + i * ROUND_BYTES) for i in range(NUM_ROUNDS)]
    num_runs = num_runs if is_slice else Int32(0)
    step = RUNS_AT_ONCE * target.pitch_bytes
    if target.is_aligned and num_values >= UNIT_VALUES and num_runs > SLICE - RUNS_AT_ONCE:
        for i in cutlass.range_constexpr(NUM_ROUNDS):
            store_words(address + i * step, units[i])
    elif target.is_aligned and num_values >= UNIT_VALUES:
        for i in cutlass.range_constexpr(NUM_ROUNDS - 1):
            if i * RUNS_AT_ONCE < num_runs:
                store_words(address + i * step, units[i])
    else:
        for i in cutlass.range_constexpr(NUM_ROUNDS):
            if i * RUNS_AT_ONCE < num_runs:
                _store_values(address + i * step, units[i], num_values)


def _swizzle(row: Int32, across_lanes: bool) -> Int32:
    """Returns the XOR mask of a row's units. Lanes write 8 consecutive rows, and read 2 of those or every eighth row."""
    return (row // 2 ^ row // 8) % UNITS if across_lanes else row // 2 % UNITS


def _load_unit(address: Int32) -> list:
    """Loads a unit of the warp's buffer as four words."""
    return list(
        inline_ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def _load_transposed(address: Int32) -> list:
    """Loads four transposed 8 x 8 matrices of 16-bit values; lane 4g + t gets rows 2t and 2t + 1 of column g, one word each."""
    return list(
        inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


@cute.jit
def _store_values(address: Int64, unit: list, num_values: Int32):
    """Stores the first ``num_values`` of a unit one by one."""
    for i in cutlass.range_constexpr(UNIT_VALUES):
        if i < num_values:
            store_half(address + i * ITEM_BYTES, unit[i // 2] >> (16 * (i % 2)))
