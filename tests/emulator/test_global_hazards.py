"""Hazards of global memory: small faulty kernels with the expected report, and repaired versions without one."""

import re

import numpy as np
import pytest
from hazard_checks import WORDS, assert_clean, assert_found, hazards, remarks
from small_kernels import DATA, in_thread, in_warp, init, load, wait

from nvfp4_cute.emulator.tensormap import encode


def test_output_written_by_two_ctas():
    """Different bytes are an error; bytes equal to those already there are a warning."""
    place = (
        "mov.u32 %r9, %ctaid.x;\nmad.lo.u32 %r10, %r9, {pitch}, %r0;\nmad.wide.u32 %rd10, %r10, 4, %rd2;\n"
    )
    body = place + "st.global.b32 [%rd10], {value};"
    assert_clean(body.format(pitch=64, value="%r9"), grid=2)
    found = hazards(body.format(pitch=32, value="%r9"), grid=2)
    assert [(h.kind, h.severity) for h in found] == [("double-store", "error")]
    writers = r"st\.global \(cta 1,0,0 warp 0.*`argument 1`.*st\.global \(cta 0,0,0 warp 1"
    assert re.search(writers, found[0].text) and "the same bytes" not in found[0].text
    ((severity, kind, text),) = remarks(body.format(pitch=32, value="%r10"), grid=2)
    assert (severity, kind) == ("warning", "double-store")
    assert re.search(writers, text) and text.endswith("both write the same bytes")


@pytest.mark.parametrize("value", ["7", "%r2"])
def test_shared_memory_written_by_two_warps(value):
    """Both warps write words 0..31; %r2 is the warp's index."""
    body = f"and.b32 %r9, %r0, 31;\nshl.b32 %r9, %r9, 2;\nadd.u32 %r9, %r9, %r1;\nshr.u32 %r2, %r0, 5;\nst.shared.b32 [%r9+{DATA}], {value};"
    if value == "7":
        ((severity, kind, text),) = remarks(body)
        assert (severity, kind) == ("warning", "race") and "both write the same bytes" in text
    else:
        assert_found(body, "race", r"st\.shared .* writes smem\+.* that st\.shared .* may still be writing")


def test_only_the_words_that_were_written_twice_count():
    """One warp writes words 0..31 and the other 16..47, with equal values in the common ones."""
    body = f"shr.u32 %r2, %r0, 5;\nshl.b32 %r2, %r2, 4;\nsub.u32 %r9, %r0, %r2;\nmad.lo.u32 %r10, %r9, 4, %r1;\nst.shared.b32 [%r10+{DATA}], %r9;"
    assert [severity for severity, _, _ in remarks(body)] == ["warning"]


@pytest.mark.parametrize("size", ["", ", 4"])
@pytest.mark.parametrize("same", [True, False])
def test_lanes_of_a_copy_that_meet(size, same):
    """All lanes copy to one word, from the same source or from different ones."""
    source = "" if same else "mad.wide.u32 %rd1, %r0, 4, %rd1;\n"
    body = source + f"cp.async.ca.shared.global [%r1+{DATA}], [%rd1], 4{size};\ncp.async.wait_all;\n"
    if same:
        assert_clean(body, block=32)
    else:
        assert_found(body, "race", r"lanes of cp\.async .* write different bytes to smem\+0x800", block=32)


IN_PLACE = """mov.u32 %r9, %ctaid.x;
setp.eq.u32 %p5, %r9, {reader};
mul.wide.u32 %rd3, %r0, 4;
add.u64 %rd3, %rd3, %rd2;
@%p5 ld.global.{type} {value}, [%rd3+1024];
{between}
@!%p5 st.global.{type} [%rd3+{to}], {value};
@%p5 st.global.{type} [%rd3], {value};
"""


@pytest.mark.parametrize("reader", (0, 1))
def test_written_under_a_read(reader):
    """One CTA reads what another one writes, which is a race in either order."""
    race = {"reader": reader, "type": "b32", "value": "%r10", "between": "@!%p5 mov.b32 %r10, 7;"}
    who = rf"(writes|reads) .* \(cta {reader},0,0|\(cta {reader},0,0.* (writes|reads) "
    assert_found(IN_PLACE.format(**race, to=1024), "race", who, block=32, grid=2, modes=("eager", "random:3"))
    assert_clean(IN_PLACE.format(**race, to=2048), block=32, grid=2)


def test_a_read_that_is_over_may_be_written():
    count = "@%p5 bra READ;\nPOLL:\nld.acquire.gpu.global.b32 %r11, [%rd2+4096];\nsetp.eq.u32 %p6, %r11, 0;\n@%p6 bra POLL;\nREAD:\n"
    count = "@%p5 st.release.gpu.global.b32 [%rd2+4096], 1;\n" + count
    body = IN_PLACE.format(reader=0, type="b32", value="%r10", between=count, to=1024)
    assert_clean(body, block=32, grid=2)
    assert_clean(
        IN_PLACE.format(reader=0, type="b16", value="%h1", between="", to=1026), block=32, grid=2
    )  # neighbours


def test_all_write_and_read_the_same_bytes():
    """Every CTA computes and stores the same bytes, so a reader gets them in any order, and nothing is an error."""
    body = "st.global.b32 [%rd2], {value};\nld.global.b32 %r10, [%rd2];\n"
    kinds = {(severity, kind) for severity, kind, _ in remarks(body.format(value=7), block=32, grid=2)}
    assert kinds == {("warning", "double-store"), ("warning", "race")}
    different = "mov.u32 %r9, %ctaid.x;\n" + body.format(value="%r9")
    assert_found(different, "race", "may still read it", block=32, grid=2, modes=("eager",))


def test_loaded_bytes_may_be_written_when_they_are_there():
    """In-place update: TMA's read is complete for a thread that waited for its barrier."""
    store = "mul.wide.u32 %rd3, %r0, 4;\nadd.u64 %rd3, %rd3, %rd1;\nst.global.b32 [%rd3], 7;\n"
    loaded, own = init(1) + in_thread(0, load(256)), {"src": WORDS.copy()}
    assert_clean(loaded + wait(0) + store, **own)
    either = r"st\.global .* while bulk load .* may still read it|bulk load .* reads .* that st\.global"
    assert_found(loaded + in_warp(0, wait(0)) + store, "race", either, **own)


def test_a_map_may_be_edited_when_it_was_read():
    """A multicast copy reads its map once.

    CTA 0 waits for its own part or for a group committed after the copy, then edits the map.
    """
    src = WORDS.copy()
    at = -src.ctypes.data % 128
    src[at // 4 : at // 4 + 32] = np.frombuffer(
        encode(src.ctypes.data + 2048, "u32", (64,), (), (64,)), np.uint32
    )
    copy = f"""mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
    mov.b32 %r12, 0;
    mov.b16 %h1, 3;
    @%p5 cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r1+{DATA}],
    [%rd3, {{%r12}}], [%r1], %h1;"""
    meet = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    copied = init(1) + meet + f"setp.eq.u32 %p5, %r6, 0;\nadd.u64 %rd3, %rd1, {at};\n" + in_thread(0, copy)
    edit = in_thread(0, "@%p5 tensormap.replace.tile.global_address.global.b1024.b64 [%rd3], %rd1;")
    group = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read {};"
    launch = {"src": src, "grid": 2, "cluster": 2, "modes": ("eager",)}
    assert_clean(copied + wait(0) + edit + meet, **launch)
    assert_clean(copied + in_thread(0, group.format(0)) + edit + wait(0) + meet, **launch)
    early = "edits the tensor map .* TMA load .* may still use it"
    for between in ("", in_thread(0, group.format(1)), in_thread(1, group.format(0))):
        assert_found(copied + between + edit + wait(0) + meet, "race", early, **launch)


def test_warps_may_edit_a_map_alike():
    """Each warp writes an address into the map. The second one either finds the same value there or a different one."""
    src = WORDS.copy()
    at = -src.ctypes.data % 128
    src[at // 4 : at // 4 + 32] = np.frombuffer(
        encode(src.ctypes.data + 2048, "u32", (64,), (), (64,)), np.uint32
    )
    body = f"""shr.u32 %r9, %r0, 5;
    mul.wide.u32 %rd10, %r9, {{step}};
    add.u64 %rd10, %rd10, %rd1;
    and.b32 %r9, %r0, 31;
    setp.eq.u32 %p5, %r9, 0;
    add.u64 %rd3, %rd1, {at};
    @%p5 tensormap.replace.tile.global_address.global.b1024.b64 [%rd3], %rd10;
    """
    launch = {"src": src, "modes": ("eager",)}
    assert_clean(body.format(step=0), **launch)
    assert_found(body.format(step=2048), "double-store", "tensormap.replace .* writes too", **launch)


def test_atomics_do_not_race():
    assert_clean("red.global.add.u32 [%rd2], 1;", grid=4)
    assert_found(
        "red.global.add.u32 [%rd2], 1;\n@%p0 st.global.b32 [%rd2], 7;", "double-store", "writes too", grid=2
    )


def test_a_result_handed_over_through_a_counter():
    """Split-K: the last CTA to count reads the results of the others."""
    body = """mov.u32 %r9, %ctaid.x;
    mad.wide.u32 %rd10, %r9, 4, %rd2;
    @%p0 st.global.b32 [%rd10+64], %r9;
    @!%p0 bra END;
    {count}
    setp.ne.u32 %p5, %r9, 3;
    @%p5 bra END;
    ld.global.b32 %r11, [%rd2+64];
    END:
    """
    assert_clean(body.format(count="atom.acq_rel.gpu.global.add.u32 %r12, [%rd2], 1;"), grid=4, block=32)
    fence, count = "fence.acq_rel.gpu;\n", "atom.{sem}gpu.global.add.u32 %r12, [%rd2], 1;\n"
    assert_clean(body.format(count=fence + count.format(sem="relaxed.") + fence), grid=4, block=32)
    race = r"ld\.global .*cta 3.* reads .* that st\.global .*cta 0"
    assert_found(body.format(count=""), "race", race, grid=4, block=32)
    for faulty in (
        "atom.global.add.u32 %r12, [%rd2], 1;",
        count.format(sem="relaxed.") + fence,
        fence + count.format(sem="relaxed."),
        count.format(sem="acquire."),
        count.format(sem="release."),
    ):
        assert_found(body.format(count=faulty), "race", race, grid=4, block=32)


def test_accesses_of_different_widths():
    """CTA 0 stores 16 bytes and CTA 1 one byte of them. The report names the byte."""
    body = "mov.u32 %r9, %ctaid.x;\nsetp.eq.u32 %p4, %r9, 0;\nmov.b16 %h1, 7;\n" + in_thread(
        0, "@%p4 st.global.v4.b32 [%rd2+32], {{%r1, %r1, %r1, %r1}};\n@!%p4 st.global.b8 [%rd2+{at}], %h1;"
    )
    for beside in (31, 48):
        assert_clean(body.format(at=beside), grid=2)
    for inside in (32, 37, 47):
        (found,) = hazards(body.format(at=inside), grid=2)
        assert int(re.search(r"at 0x([0-9a-f]+)", found.text)[1], 16) % 16 == inside % 16


def test_a_byte_is_stored_while_a_bulk_store_is_under_way():
    """CTA 1 reads what both stored, after CTA 0 has waited and raised a counter."""
    body = """mov.u32 %r9, %ctaid.x;
    @!%p0 bra END;
    setp.ne.u32 %p5, %r9, 0;
    @%p5 bra READ;
    st.shared.b32 [%r1+1024], %r9;
    st.shared.b32 [%r1+1028], %r9;
    st.shared.b32 [%r1+1032], %r9;
    st.shared.b32 [%r1+1036], %r9;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2+64], [%r1+1024], 16;
    cp.async.bulk.commit_group;
    mov.b16 %h1, 7;
    st.global.b8 [%rd2+81], %h1;
    {wait}
    st.release.gpu.global.b32 [%rd2], 1;
    bra END;
    READ:
    ld.acquire.gpu.global.b32 %r10, [%rd2];
    ld.global.b32 %r11, [%rd2+72];
    ld.global.b32 %r11, [%rd2+80];
    END:
    """
    assert_clean(body.format(wait="cp.async.bulk.wait_group 0;"), grid=2)
    bulk = r"ld\.global .* reads global memory at 0x[0-9a-f]*8 .* that bulk store"
    late = body.format(wait="").replace(
        "bra END;\n    READ", "cp.async.bulk.wait_group 0;\n    bra END;\n    READ"
    )
    assert_found(late, "race", bulk, grid=2)


def test_outside_the_output():
    body = "mad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10+{at}], %r0;"
    assert_clean(body.format(at=0))
    assert_found(body.format(at=8192), "out-of-bounds", r"outside every live range; nearest.*`argument 1`")
