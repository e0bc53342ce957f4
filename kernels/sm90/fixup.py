"""Stream-K fixup through global memory: the cluster that owns a tile's first K tile adds the partial sums of the others.

A cluster sends the partial sums of at most one tile, the one that its share starts in the middle of. So every CTA has room for
one tile, and a flag for each MATH warp. MATH stores its sums and continues. The FIXUP warp sets the flags when the stores have
completed, which takes microseconds. A thread receives the sums of the thread with its own index in another CTA. They are added
in the order of K, so the result does not depend on which cluster finishes first.

Flags are 0 before a launch. Either a preceding launch has set them to 0 (``decode_tokens``), or whoever reads one does.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from nvfp4_cute.planning.arch.sm90 import FIXUP_FLAG_BYTES, MATH_WARPS, TOKEN_STEP

from ..common.global_access import global_scalar, load_acquire
from ..common.ring import arrive_warp
from ..common.split_k import CHUNK_BYTES, CHUNK_VALUES
from ..common.versions import inline_ptx
from .warp_schedule import WARP_SIZE

CHUNK_STEP = MATH_WARPS * WARP_SIZE * CHUNK_BYTES
# A chunk holds the sums of two rows of weights and two tokens; four neighbouring lanes cover eight tokens. Only whole steps of
# tokens are multiplied, so only whole steps are exchanged.
CHUNK_TOKENS = 8
STEP_VALUES = TOKEN_STEP // CHUNK_TOKENS * CHUNK_VALUES


@dataclass(frozen=True)
class Fixup:
    """Fixup memory of all CTAs of the launch.

    Attributes:
        flags: address of (CTA, WARP) int32: 1 when the CTA has stored its sums or has none to store.
        sums: address of (CTA, CHUNK of 4 sums, THREAD, 16 bytes).
    """

    flags: Int64
    sums: Int64


@cute.jit
def send(fixup: Fixup, acc: cute.Tensor, tokens: Int32, sent: cute.Pointer):
    """Stores this thread's partial sums for the CTA that owns the tile.

    Args:
        fixup: memory of all CTAs.
        acc: float32 accumulators, one chunk per eight tokens.
        tokens: number of tokens that were multiplied.
        sent: mbarrier on which MATH's warps arrive and FIXUP waits.
    """
    address = _sums(fixup, acc, cute.arch.block_idx()[0])
    for first in cutlass.range_constexpr(0, cute.size(acc), STEP_VALUES):
        if first // CHUNK_VALUES * CHUNK_TOKENS < tokens:
            for at in cutlass.range_constexpr(first, min(first + STEP_VALUES, cute.size(acc)), CHUNK_VALUES):
                inline_ptx(
                    "st.global.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
                    read_only_args=[
                        address + at // CHUNK_VALUES * CHUNK_STEP,
                        *(acc[at + i] for i in range(CHUNK_VALUES)),
                    ],
                )
    arrive_warp(sent)


@cute.jit
def run_fixup(fixup: Fixup, sent: cute.Pointer, has_launch_before: cutlass.Constexpr):
    """FIXUP role, one warp: waits until all MATH warps have stored their sums or have none, and sets this CTA's flags."""
    if cutlass.const_expr(has_launch_before):
        # It sets the flags to 0.
        cute.arch.griddepcontrol_wait()
    cute.arch.mbarrier_wait(sent, 0)
    lane = cute.arch.lane_idx()
    # The release also covers the stores of MATH's warps: releases are cumulative, and this warp has waited for them.
    inline_ptx(
        "st.release.gpu.global.b32 [{$r0}], {$r1};",
        read_only_args=[_flag(fixup, cute.arch.block_idx()[0], lane), Int32(1)],
        predicate=lane < MATH_WARPS,
    )


@cute.jit
def add(fixup: Fixup, acc: cute.Tensor, tokens: Int32, cta: Int32, resets: cutlass.Constexpr):
    """Waits for the partial sums of another CTA and adds those of this thread's index.

    acc, tokens: see ``send``. resets: whether to set the flag to 0 for the next launch.
    """
    flag = _flag(fixup, cta, cute.arch.make_warp_uniform(cute.arch.warp_idx()))
    while load_acquire(flag) == 0:
        pass
    if cutlass.const_expr(resets):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            global_scalar(Int32, flag)[0] = Int32(0)
    address = _sums(fixup, acc, cta)
    for first in cutlass.range_constexpr(0, cute.size(acc), STEP_VALUES):
        if first // CHUNK_VALUES * CHUNK_TOKENS < tokens:
            for at in cutlass.range_constexpr(first, min(first + STEP_VALUES, cute.size(acc)), CHUNK_VALUES):
                values = inline_ptx(
                    "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                    write_only_types=[Float32] * CHUNK_VALUES,
                    read_only_args=[address + at // CHUNK_VALUES * CHUNK_STEP],
                )
                for i in cutlass.range_constexpr(CHUNK_VALUES):
                    acc[at + i] = acc[at + i] + values[i]


def _sums(fixup: Fixup, acc: cute.Tensor, cta: Int32) -> Int64:
    """Returns the address of this thread's first chunk in a CTA's memory."""
    cta_bytes = cute.size(acc) // CHUNK_VALUES * CHUNK_STEP
    return fixup.sums + Int64(cta) * cta_bytes + cute.arch.thread_idx()[0] * CHUNK_BYTES


def _flag(fixup: Fixup, cta: Int32, warp: Int32) -> Int64:
    return fixup.flags + Int64(cta) * FIXUP_FLAG_BYTES + warp * 4
