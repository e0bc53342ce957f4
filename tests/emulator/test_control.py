"""Branches: uniform, divergent and nested ones, loops with different trip counts per lane, exits, and branch tables."""

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.errors import EmulatorError

LANE_ADDRESS = "mov.u32 %r50, %tid.x; mul.wide.u32 %rd50, %r50, 4; add.s64 %rd51, %rd0, %rd50;"


def run_lanes(ptx_kernel, body: str, threads: int = 32) -> np.ndarray:
    """Run `body` with the lane index in %r50; it leaves its result in %r0, which is stored at the end."""
    out = np.zeros(threads, np.uint32)
    run_ptx(ptx_kernel(f"{LANE_ADDRESS}\n{body}\nst.global.b32 [%rd51], %r0;"), None, 1, threads, [out])
    return out


def test_if_else_writes_one_register_on_both_sides(ptx_kernel) -> None:
    body = """
    setp.lt.u32 %p1, %r50, 10;
    @%p1 bra THEN;
    mov.b32 %r0, 7;
    bra JOIN;
    THEN: mov.b32 %r0, 3;
    JOIN: add.u32 %r0, %r0, 100;
    """
    assert run_lanes(ptx_kernel, body).tolist() == [103] * 10 + [107] * 22


def test_a_value_from_before_survives_in_lanes_that_skip_the_write(ptx_kernel) -> None:
    body = """
    mov.b32 %r0, 5;
    setp.ne.u32 %p1, %r50, 3;
    @%p1 bra SKIP;
    mov.b32 %r0, 9;
    add.u32 %r0, %r0, 1;
    SKIP:
    """
    assert run_lanes(ptx_kernel, body).tolist() == [5, 5, 5, 10] + [5] * 28


def test_predicated_write_merges(ptx_kernel) -> None:
    body = "setp.gt.u32 %p1, %r50, 29; mov.b32 %r0, 1; @%p1 add.u32 %r0, %r50, 0; @!%p1 sub.u32 %r0, %r0, 1;"
    assert run_lanes(ptx_kernel, body).tolist() == [0] * 30 + [30, 31]


def test_loop_with_a_trip_count_per_lane(ptx_kernel) -> None:
    body = """
    mov.b32 %r0, 0;
    mov.b32 %r1, 0;
    LOOP: setp.ge.u32 %p1, %r1, %r50;
    @%p1 bra DONE;
    add.u32 %r1, %r1, 1;
    add.u32 %r0, %r0, %r1;
    bra LOOP;
    DONE:
    """
    assert run_lanes(ptx_kernel, body).tolist() == [n * (n + 1) // 2 for n in range(32)]


def test_nested_divergence(ptx_kernel) -> None:
    body = """
    and.b32 %r1, %r50, 1;
    and.b32 %r2, %r50, 2;
    setp.eq.u32 %p1, %r1, 0;
    setp.eq.u32 %p2, %r2, 0;
    mov.b32 %r0, 0;
    @%p1 bra EVEN;
    @%p2 bra ODD_A;
    add.u32 %r0, %r0, 30;
    bra ODD_END;
    ODD_A: add.u32 %r0, %r0, 10;
    ODD_END: add.u32 %r0, %r0, 1;
    bra END;
    EVEN: @%p2 bra END;
    mov.b32 %r0, 20;
    END: add.u32 %r0, %r0, 1000;
    """
    assert run_lanes(ptx_kernel, body).tolist() == [1000, 1011, 1020, 1031] * 8


def test_backward_join_below_the_branch(ptx_kernel) -> None:
    """Both sides meet at a lower program counter than that of the branch."""
    body = """
    mov.b32 %r1, 0;
    mov.b32 %r0, 0;
    TOP: add.u32 %r1, %r1, 1;
    setp.eq.u32 %p3, %r1, 4;
    @%p3 bra END;
    and.b32 %r2, %r50, 1;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra A;
    add.u32 %r0, %r0, 1;
    bra TOP;
    A: add.u32 %r0, %r0, 100;
    bra TOP;
    END:
    """
    assert run_lanes(ptx_kernel, body).tolist() == [300, 3] * 16


def test_some_lanes_exit_early(ptx_kernel) -> None:
    body = "setp.lt.u32 %p1, %r50, 8; @%p1 exit; mov.b32 %r0, 1;"
    assert run_lanes(ptx_kernel, body).tolist() == [0] * 8 + [1] * 24


def test_exit_in_a_divergent_branch(ptx_kernel) -> None:
    body = "setp.lt.u32 %p1, %r50, 8; @!%p1 bra GO; ret; GO: mov.b32 %r0, %r50;"
    assert run_lanes(ptx_kernel, body).tolist() == [0] * 8 + list(range(8, 32))


def test_branch_table(ptx_kernel) -> None:
    body = """
    and.b32 %r1, %r50, 3;
    T: .branchtargets A, B, C, A;
    brx.idx %r1, T;
    A: mov.b32 %r0, 1; bra END;
    B: mov.b32 %r0, 2; bra END;
    C: mov.b32 %r0, 3;
    END:
    """
    assert run_lanes(ptx_kernel, body).tolist() == [1, 2, 3, 1] * 8


def test_partial_last_warp(ptx_kernel) -> None:
    assert run_lanes(ptx_kernel, "add.u32 %r0, %r50, 1;", threads=40).tolist() == list(range(1, 41))


def test_special_registers(ptx_kernel) -> None:
    body = """
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r3, %laneid; mov.u32 %r4, %warpid;
    mov.u32 %r5, %ntid.x; mov.u32 %r6, %tid.y; mov.u32 %r7, %tid.x; mov.u32 %r8, %lanemask_lt;
    mov.u32 %r9, %cluster_ctarank; mov.u32 %r10, %clusterid.x; mov.u32 %r11, %cluster_nctarank; mov.u32 %r12, %smid;
    mad.lo.u32 %r20, %r6, %r5, %r7;
    mad.lo.u32 %r21, %r1, 64, %r20;
    mul.wide.u32 %rd1, %r21, 48;
    add.u64 %rd2, %rd0, %rd1;
    """ + "".join(f"st.global.b32 [%rd2+{4 * i}], %r{i + 1};" for i in range(12))
    out = np.zeros((4, 64, 12), np.uint32)
    run_ptx(ptx_kernel(body), None, 4, (16, 4), [out], cluster=2, sm_count=3)
    for cta in range(4):
        for thread in range(64):
            lane = thread % 32
            want = [
                cta,
                4,
                lane,
                thread // 32,
                16,
                thread // 16,
                thread % 16,
                (1 << lane) - 1,
                cta % 2,
                cta // 2,
                2,
                cta % 3,
            ]
            assert out[cta, thread].tolist() == want


def test_clock_advances(ptx_kernel) -> None:
    out = np.zeros(2, np.uint64)
    body = "mov.u64 %rd1, %clock64; mov.u64 %rd2, %clock64; st.global.b64 [%rd0], %rd1; st.global.b64 [%rd0+8], %rd2;"
    run_ptx(ptx_kernel(body), None, 1, 1, [out])
    assert out[1] > out[0]


def test_ignored_instructions_change_nothing(ptx_kernel) -> None:
    body = """
    griddepcontrol.wait; griddepcontrol.launch_dependents; setmaxnreg.inc.sync.aligned.u32 208; membar.gl;
    fence.proxy.async.shared::cta; fence.mbarrier_init.release.cluster; nanosleep.u32 20;
    prefetch.global.L2 [%rd0]; mov.b32 %r0, 5;
    """
    assert set(run_lanes(ptx_kernel, body).tolist()) == {5}


def test_trap(ptx_kernel) -> None:
    with pytest.raises(EmulatorError, match="kernel k cta .* warp 0: PTX line .* `trap`.*trap"):
        run_ptx(ptx_kernel("trap;", 0))


def test_an_undefined_register_is_poison(ptx_kernel) -> None:
    """The register reads as all ones, the rest of the block is executed once, and a predicate is false."""
    body = "mov.u32 %r0, 5;\nadd.u32 %r0, %r0, 1;\nadd.u32 %r2, %r7, 3;\n@%p3 mov.u32 %r0, 9;\nadd.u32 %r0, %r0, %r2;"
    assert set(run_lanes(ptx_kernel, body).tolist()) == {6 + 2}
