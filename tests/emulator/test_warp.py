"""Operations of several lanes: election, shuffles, votes, matches, reductions, and the wait for missing lanes."""

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.errors import EmulatorError

ADDRESS = "mov.u32 %r50, %tid.x; mul.wide.u32 %rd50, %r50, 4; add.s64 %rd51, %rd0, %rd50;"


def run_lanes(ptx_kernel, body: str, threads: int = 32) -> list[int]:
    """Returns one word per lane, which `body` leaves in %r0."""
    out = np.zeros(threads, np.uint32)
    run_ptx(ptx_kernel(f"{ADDRESS}{body} st.global.b32 [%rd51], %r0;"), None, 1, threads, [out])
    return out.tolist()


def test_elect_takes_the_lowest_active_lane(ptx_kernel) -> None:
    body = "mov.b32 %r0, 0; elect.sync %r1|%p1, -1; @%p1 mov.b32 %r0, 1; add.u32 %r0, %r0, %r1;"
    assert run_lanes(ptx_kernel, body) == [1] + [0] * 31


def test_elect_honours_the_mask(ptx_kernel) -> None:
    body = "mov.b32 %r0, 0; elect.sync %r1|%p1, 0xF0; @%p1 mov.b32 %r0, 10; add.u32 %r0, %r0, %r1;"
    assert run_lanes(ptx_kernel, body) == [4] * 4 + [14] + [4] * 27


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The pseudocode of the PTX manual."""
    segment, clamp = c >> 8 & 31, c & 31
    most, least = (lane & segment) | (clamp & ~segment & 31), lane & segment
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": least | (b & ~segment & 31)}[mode]
    inside = j >= most if mode == "up" else j <= most
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("b", [0, 1, 5, 16])
@pytest.mark.parametrize("c", [0, 31, 0x181F, 0x1C1F, 0x1800])
def test_shuffle(ptx_kernel, mode: str, b: int, c: int) -> None:
    body = f"""
    mul.lo.u32 %r1, %r50, 3;
    shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, -1;
    selp.b32 %r3, 1000, 0, %p1;
    add.u32 %r0, %r2, %r3;
    """
    want = [3 * j + 1000 * inside for j, inside in (shuffled(mode, lane, b, c) for lane in range(32))]
    assert run_lanes(ptx_kernel, body) == want


def test_shuffle_with_an_index_per_lane(ptx_kernel) -> None:
    body = "xor.b32 %r1, %r50, 31; mul.lo.u32 %r2, %r50, 2; shfl.sync.idx.b32 %r0, %r2, %r1, 31, -1;"
    assert run_lanes(ptx_kernel, body) == [2 * (31 - i) for i in range(32)]


def test_shuffle_with_a_limit_per_lane(ptx_kernel) -> None:
    """Odd lanes shuffle within half warps, even ones within the whole warp."""
    body = """and.b32 %r1, %r50, 1; mul.lo.u32 %r1, %r1, 0x1000; or.b32 %r1, %r1, 31;
    mov.b32 %r2, 3; shfl.sync.idx.b32 %r0, %r50, %r2, %r1, -1;"""
    assert run_lanes(ptx_kernel, body) == [3 + (16 if i % 2 and i >= 16 else 0) for i in range(32)]


def test_votes(ptx_kernel) -> None:
    body = """
    setp.lt.u32 %p1, %r50, 5;
    vote.sync.ballot.b32 %r1, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, %p1, -1;
    vote.sync.all.pred %p4, !%p1, 0xFFFFFFE0;
    vote.sync.uni.pred %p5, %p1, -1;
    mov.b32 %r0, %r1;
    @%p2 add.u32 %r0, %r0, 1000;
    @%p3 add.u32 %r0, %r0, 2000;
    @%p4 add.u32 %r0, %r0, 4000;
    @%p5 add.u32 %r0, %r0, 8000;
    """
    assert run_lanes(ptx_kernel, body) == [31 + 1000 + 4000] * 32


def test_match(ptx_kernel) -> None:
    body = "shr.u32 %r1, %r50, 3; match.any.sync.b32 %r0, %r1, -1;"
    assert run_lanes(ptx_kernel, body) == [0xFF << 8 * (i // 8) for i in range(32)]
    body = "match.all.sync.b32 %r1|%p1, %r50, -1; match.all.sync.b32 %r2|%p2, 7, -1; selp.b32 %r0, 1, %r1, %p1; add.u32 %r0, %r0, %r2;"
    assert run_lanes(ptx_kernel, body) == [0xFFFFFFFF] * 32


@pytest.mark.parametrize(
    "op, want",
    [("add.u32", sum(range(32))), ("min.s32", 0x80000000), ("max.u32", 0x80000003), ("and.b32", 0), ("or.b32", 0x8000001F), ("xor.b32", 0x80000000)],
)  # fmt: skip
def test_redux(ptx_kernel, op: str, want: int) -> None:
    values = "mov.b32 %r1, %r50; setp.eq.u32 %p1, %r50, 0; @%p1 mov.b32 %r1, 0x80000000;"
    if op == "add.u32":
        values = "mov.b32 %r1, %r50;"
    if op == "max.u32":
        values = "mov.b32 %r1, %r50; setp.eq.u32 %p1, %r50, 3; @%p1 or.b32 %r1, %r1, 0x80000000;"
    assert run_lanes(ptx_kernel, f"{values} redux.sync.{op} %r0, %r1, -1;") == [want] * 32


def test_redux_float_ignores_nan_unless_asked(ptx_kernel) -> None:
    body = """
    cvt.rn.f32.u32 %r1, %r50; setp.eq.u32 %p1, %r50, 9; @%p1 mov.b32 %r1, 0f7FC00000;
    redux.sync.max.f32 %r2, %r1, -1; redux.sync.max.NaN.f32 %r3, %r1, -1;
    setp.eq.u32 %p2, %r50, 0; selp.b32 %r0, %r2, %r3, %p2;
    """
    assert run_lanes(ptx_kernel, body) == [0x41F80000] + [0x7FFFFFFF] * 31


def test_activemask_in_a_branch(ptx_kernel) -> None:
    body = "activemask.b32 %r0; setp.gt.u32 %p1, %r50, 3; @%p1 bra END; activemask.b32 %r0; END:"
    assert run_lanes(ptx_kernel, body) == [0xF] * 4 + [0xFFFFFFFF] * 28


def test_sync_instruction_waits_for_lanes_on_another_path(ptx_kernel) -> None:
    """Lanes that reach a shuffle first wait; the others run first although their code is at a higher address."""
    body = """
    mov.b32 %r1, %r50;
    setp.lt.u32 %p1, %r50, 16;
    @!%p1 bra FAR;
    BACK: shfl.sync.bfly.b32 %r0, %r1, 31, 31, -1;
    bra END;
    FAR: add.u32 %r1, %r1, 100;
    bra BACK;
    END:
    """
    values = [i if i < 16 else i + 100 for i in range(32)]
    assert run_lanes(ptx_kernel, body) == values[::-1]


def test_exited_lanes_are_not_waited_for(ptx_kernel) -> None:
    body = "setp.gt.u32 %p1, %r50, 7; @%p1 exit; bar.warp.sync -1; vote.sync.ballot.b32 %r0, %p1, -1; add.u32 %r0, %r0, 1;"
    assert run_lanes(ptx_kernel, body) == [1] * 8 + [0] * 24


def test_lanes_that_never_come_are_reported(ptx_kernel) -> None:
    body = """
    setp.lt.u32 %p1, %r50, 4;
    @%p1 bra A;
    bar.warp.sync -1;
    bra END;
    A: bar.warp.sync 0xF0;
    END: mov.b32 %r0, 0;
    """
    with pytest.raises(EmulatorError, match="hangs") as caught:
        run_lanes(ptx_kernel, body)
    assert "lanes 0x0000000f" in str(caught.value) and "have not arrived" in str(caught.value)
