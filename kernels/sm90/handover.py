"""Sums of a tile that several clusters compute, through global memory: who has the first K tile adds up what the others sent.

A cluster sends at most one tile's sums, those with which its share begins behind the waves; so every CTA has one place for
them, and a flag, which the launch before has set to 0 (``decode_tokens``). MATH stores its sums and goes on; another warp,
HANDOVER, sets the flag when they have arrived, which takes microseconds. A thread gets the sums of the same thread of another
CTA. They are added in the order of K: the result does not depend on who is first.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from nvfp4_cute.planning.arch.sm90 import HANDOVER_FLAG_BYTES, MATH_WARPS, TOKEN_STEP

from ..common.global_access import load_acquire
from ..common.ring import arrive_warp
from ..common.split_k import CHUNK_BYTES, CHUNK_VALUES
from ..common.versions import inline_ptx
from .warp_schedule import WARP_SIZE

CHUNK_STEP = MATH_WARPS * WARP_SIZE * CHUNK_BYTES
# A chunk has two weights' sums of two tokens; the four lanes beside each other have those of eight tokens. What is multiplied are
# whole steps of tokens.
CHUNK_TOKENS = 8
STEP_VALUES = TOKEN_STEP // CHUNK_TOKENS * CHUNK_VALUES


@dataclass(frozen=True)
class Handover:
    """Memory of all CTAs of the launch.

    Attributes:
        flags: address of (CTA, ``HANDOVER_FLAG_BYTES``), whose int32 is 1 where the CTA's sums are there, or never will be.
        sums: address of (CTA, CHUNK of 4 sums, THREAD, 16 bytes).
    """

    flags: Int64
    sums: Int64


@cute.jit
def send(handover: Handover, acc: cute.Tensor, tokens: Int32, sent: cute.Pointer):
    """Leave this thread's sums for the CTA that adds up.

    Args:
        handover: where.
        acc: fp32, a chunk each eight tokens.
        tokens: that are multiplied.
        sent: barrier of MATH's warps, where HANDOVER waits.
    """
    address = _sums(handover, acc, cute.arch.block_idx()[0])
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
def run_handover(handover: Handover, sent: cute.Pointer):
    """Role of a warp: wait until all warps of MATH have sent what this CTA sends, or will not send, and set its flag."""
    # The flags are set to 0 before.
    cute.arch.griddepcontrol_wait()
    cute.arch.mbarrier_wait(sent, 0)
    with cute.arch.elect_one():
        # Of what this warp has waited for, too: releases are cumulative.
        inline_ptx(
            "st.release.gpu.global.b32 [{$r0}], {$r1};",
            read_only_args=[_flag(handover, cute.arch.block_idx()[0]), Int32(1)],
        )


@cute.jit
def add(handover: Handover, acc: cute.Tensor, tokens: Int32, cta: Int32):
    """Wait for the sums of the same thread of another CTA, and add them. acc, tokens: as of ``send``."""
    flag = _flag(handover, cta)
    while load_acquire(flag) == 0:
        pass
    address = _sums(handover, acc, cta)
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


def _sums(handover: Handover, acc: cute.Tensor, cta: Int32) -> Int64:
    """Address of a CTA's first chunk of this thread's."""
    cta_bytes = cute.size(acc) // CHUNK_VALUES * CHUNK_STEP
    return handover.sums + Int64(cta) * cta_bytes + cute.arch.thread_idx()[0] * CHUNK_BYTES


def _flag(handover: Handover, cta: Int32) -> Int64:
    return handover.flags + Int64(cta) * HANDOVER_FLAG_BYTES
