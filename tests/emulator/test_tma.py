"""Bulk and tensor copies, cp.async, and tensor-map edits, in small kernels."""

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.tensormap import TensorMap, encode
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.timing.clock import time_ptx

B200 = constants_of(lookup("B200"))
HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
REGS = ".reg .pred %p<8>;\n.reg .b16 %h<8>;\n.reg .b32 %r<64>;\n.reg .b64 %rd<32>;\n"
TILE = 128  # offset of the data in dynamic shared memory, after the barriers


def kernel(params: str, body: str) -> str:
    """A kernel with shared memory from %r1 on (= smem), thread index %r0 and `elected` in %p0."""
    prologue = "mov.u32 %r1, smem;\nmov.u32 %r0, %tid.x;\nsetp.eq.u32 %p0, %r0, 0;\n"
    return f"{HEAD}.visible .entry k({params})\n{{\n{REGS}{prologue}{body}\nret;\n}}\n"


MAP = ".param .align 64 .b8 map[128]"
OUT = ".param .u64 out"
INIT = "@%p0 mbarrier.init.shared.b64 [%r1], {count};\nfence.mbarrier_init.release.cluster;\nbar.sync 0;\n"
WAIT = """{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [%r1], 0, 10000000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}
"""


def copy_out(nbytes: int, offset: int = TILE, base: str = "%rd9") -> str:
    """Each of 32 threads copies its 4-byte words of shared memory to [base] + the offset in the tile."""
    lines = ["ld.param.u64 %rd9, [out];", f"mad.lo.u32 %r9, %r0, 4, {offset};", "add.u32 %r9, %r9, %r1;"]
    lines += ["mul.wide.u32 %rd10, %r0, 4;", f"add.u64 %rd10, %rd10, {base};"]
    for i in range(nbytes // 128):
        lines += [f"ld.shared.b32 %r8, [%r9+{128 * i}];", f"st.global.b32 [%rd10+{128 * i}], %r8;"]
    return "\n".join(lines)


def load_kernel(instruction: str, nbytes: int, expect: int | None = None) -> str:
    body = INIT.format(count=1)
    body += f"@!%p0 bra SKIP;\nmov.b64 %rd1, map;\nmbarrier.arrive.expect_tx.shared.b64 _, [%r1], {expect or nbytes};\n"
    body += instruction + "\nSKIP:\n" + WAIT + copy_out(nbytes)
    return kernel(f"{MAP}, {OUT}", body)


def tensor(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 100, shape).astype(dtype)


def row_strides(array: np.ndarray) -> tuple[int, ...]:
    return array.strides[-2::-1]


def map_of(array: np.ndarray, element: str, box: tuple[int, ...], **kwargs) -> bytes:
    """Tensor map of a C-contiguous array; box innermost first."""
    return encode(array.ctypes.data, element, array.shape[::-1], row_strides(array), box, **kwargs)


def emulate(ptx, args, arrays=(), **kwargs):
    """Runs with `arrays`, which only descriptors reference, registered as live memory."""
    machine = Machine()
    for i, array in enumerate(arrays):
        machine.memory.add_range(f"tensor {i}", array.ctypes.data, array.nbytes, array.flags.writeable)
    return run_ptx(ptx, args=args, machine=machine, smem_bytes=32768, **kwargs)


LOAD = "cp.async.bulk.tensor.{d}d.{space}.global{mode}.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize(
    "space,hint,operand",
    [("shared::cta", "", ""), ("shared::cta", ".L2::cache_hint", ", %rd7"), ("shared::cluster", "", "")],
)
@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_tensor_load(space, hint, operand, swizzle):
    source, out = tensor((40, 64), np.float32), np.zeros(32 * 128 // 4, np.float32)
    descriptor = map_of(source, "f32", (32, 32), swizzle=swizzle)
    name = LOAD.format(d=2, space=space, mode=".tile") + hint
    code = f"mov.b32 %r2, 16;\nmov.b32 %r3, -3;\nmov.b64 %rd7, 0;\n{name} [%r1+{TILE + 896}], [%rd1, {{%r2, %r3}}], [%r1]{operand};"
    ptx = load_kernel(code, 4096).replace(f"4, {TILE};", f"4, {TILE + 896};")
    stats = emulate(ptx, [descriptor, out], [source])
    want = np.zeros((32, 32), np.float32)
    want[3:] = source[:29, 16:48]
    got = out.reshape(32, 8, 4)
    if swizzle == "128B":  # the tile starts at a multiple of 1024
        got = np.stack([row[np.arange(8) ^ i % 8] for i, row in enumerate(got)])
    assert (got.reshape(32, 32) == want).all()
    assert stats.tma_load_bytes == 4096


@pytest.mark.parametrize("rank", [1, 3, 4, 5])
def test_ranks(rank):
    shape = (3, 4, 5, 6, 32)[5 - rank :]
    source = tensor(shape, np.float32)
    box = (32, 3, 2, 2, 2)[:rank]
    count = int(np.prod(box))
    out = np.zeros(count, np.float32)
    coords = [0, 2, 1, 1, 1][:rank]
    code = "".join(f"mov.b32 %r{10 + i}, {c};\n" for i, c in enumerate(coords))
    registers = ", ".join(f"%r{10 + i}" for i in range(rank))
    code += (
        LOAD.format(d=rank, space="shared::cta", mode="") + f" [%r1+{TILE}], [%rd1, {{{registers}}}], [%r1];"
    )
    emulate(load_kernel(code, 4 * count), [map_of(source, "f32", box), out], [source])
    want = source[tuple(slice(c, c + b) for c, b in zip(coords[::-1], box[::-1], strict=True))]
    assert (out == want.reshape(-1)).all()


def test_gather4():
    source, out = tensor((64, 32), np.float32), np.zeros((4, 32), np.float32)
    code = "mov.b32 %r2, 0;\nmov.b32 %r3, 9;\nmov.b32 %r4, 63;\nmov.b32 %r5, 0;\nmov.b32 %r6, 64;\n"
    name = LOAD.format(d=2, space="shared::cta", mode=".tile::gather4")
    code += f"{name} [%r1+{TILE}], [%rd1, {{%r2, %r3, %r4, %r5, %r6}}], [%r1];"
    emulate(load_kernel(code, 512), [map_of(source, "f32", (32, 1)), out], [source])
    assert (out[:3] == source[[9, 63, 0]]).all() and (out[3] == 0).all()


def test_a_load_signals_the_whole_box():
    """If fewer bytes than the box are expected, the phase stays open: a hang, whose report states the cause."""
    source, out = tensor((4, 32), np.float32), np.zeros(128, np.float32)
    code = f"mov.b32 %r2, 0;\n{LOAD.format(d=2, space='shared::cta', mode='')} [%r1+{TILE}], [%rd1, {{%r2, %r2}}], [%r1];"
    ptx = load_kernel(code, 512, expect=256)
    with pytest.raises(EmulatorError, match=r"hangs(.|\n)*-256 tx bytes"):
        emulate(ptx, [map_of(source, "f32", (32, 4)), out], [source])


def test_a_prefetched_box_is_there_sooner_and_is_the_same():
    source, out = tensor((40, 64), np.float32), np.zeros(1024, np.float32)
    descriptor = map_of(source, "f32", (32, 32))
    load = f"{LOAD.format(d=2, space='shared::cta', mode='.tile')} [%r1+{TILE}], [%rd1, {{%r2, %r2}}], [%r1];"
    prefetch = "cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint [%rd1, {%r2, %r2}], %rd7;\n"
    cycles = []
    for first in ("", prefetch):
        code = f"mov.b32 %r2, 8;\nmov.b64 %rd7, 0;\n{first}nanosleep.u32 2000;\n{load}"
        ptx = load_kernel(code, 4096)
        emulate(ptx, [descriptor, out], [source])
        assert (out.reshape(32, 32) == source[8:, 8:40]).all()
        cycles.append(time_ptx(B200, ptx, args=[descriptor, out], smem_bytes=32768).cycles)
    assert cycles[0] - cycles[1] >= B200.hbm_latency - B200.l2_latency


def test_loads_outside_live_memory_are_refused():
    source, out = tensor((4, 32), np.float32), np.zeros(128, np.float32)
    code = f"mov.b32 %r2, 0;\n{LOAD.format(d=2, space='shared::cta', mode='')} [%r1+{TILE}], [%rd1, {{%r2, %r2}}], [%r1];"
    with pytest.raises(EmulatorError, match="outside every live range"):
        emulate(load_kernel(code, 512), [map_of(source, "f32", (32, 4)), out], [source[:3]])


def test_a_box_outside_its_tensor_is_zeros_to_the_checker_too():
    source, out = tensor((4, 32), np.float32), np.full(128, 7, np.float32)
    code = "ld.param.u64 %rd9, [out];\nst.global.b32 [%rd9], %r0;\nmov.b32 %r2, 0;\nmov.b32 %r3, 4;\n"
    code += LOAD.format(d=2, space="shared::cta", mode="") + f" [%r1+{TILE}], [%rd1, {{%r2, %r3}}], [%r1];"
    machine = Machine(check=True)
    machine.memory.add_range("source", source.ctypes.data, source.nbytes, False)
    args = [map_of(source, "f32", (32, 4)), out]
    run_ptx(load_kernel(code, 512), args=args, machine=machine, smem_bytes=32768)
    assert (out == 0).all() and machine.checker.hazards == []


# ---- clusters ----------------------------------------------------------------------------------------------------
CLUSTER_SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


def cluster_kernel(load: str, expect: str, waits: str = WAIT) -> str:
    """Both CTAs initialise a barrier. One elected thread of each runs `load`, and every CTA copies its tile out."""
    body = "mov.u32 %r20, %cluster_ctarank;\n" + INIT.format(count=1) + CLUSTER_SYNC
    body += f"@!%p0 bra SKIP;\nmov.b64 %rd1, map;\nmov.b32 %r2, 0;\n{expect}\n{load}\nSKIP:\n{waits}{CLUSTER_SYNC}"
    body += copy_out(512, base="%rd11").replace(
        "ld.param.u64 %rd9, [out];",
        "ld.param.u64 %rd9, [out];\nmul.wide.u32 %rd11, %r20, 512;\nadd.u64 %rd11, %rd11, %rd9;",
    )
    return kernel(f"{MAP}, {OUT}", body)


def test_multicast():
    """Rank r loads row block r into the r-th quarter of both CTAs' tiles; each barrier expects both."""
    source, out = tensor((8, 32), np.float32), np.zeros((2, 4, 32), np.float32)
    name = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    )
    load = f"""mul.lo.u32 %r3, %r20, 2;
    mad.lo.u32 %r4, %r20, 256, %r1;
    mov.b16 %h1, 3;
    {name} [%r4+{TILE}], [%rd1, {{%r2, %r3}}], [%r1], %h1;"""
    expect = "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;"
    ptx = cluster_kernel(load, expect)
    emulate(ptx, [map_of(source, "f32", (32, 2)), out], [source], grid=2, cluster=2)
    assert (out[0] == source[:4]).all() and (out[1] == source[:4]).all()


def test_a_pair_signals_the_leader():
    """With cta_group::2 both CTAs name the leader's barrier by clearing the rank bit; only it expects bytes."""
    source, out = tensor((8, 32), np.float32), np.zeros((2, 4, 32), np.float32)
    name = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
    load = f"""mul.lo.u32 %r3, %r20, 4;
    and.b32 %r5, %r1, 0xFEFFFFFF;
    {name} [%r1+{TILE}], [%rd1, {{%r2, %r3}}], [%r5];"""
    expect = "setp.eq.u32 %p1, %r20, 0;\n@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;"
    waits = "setp.eq.u32 %p1, %r20, 1;\n@%p1 bra.uni OTHER;\n" + WAIT + "OTHER:\n"
    emulate(
        cluster_kernel(load, expect, waits),
        [map_of(source, "f32", (32, 4)), out],
        [source],
        grid=2,
        cluster=2,
    )
    assert (out.reshape(8, 32) == source).all()
    with pytest.raises(EmulatorError, match=r"without \.cta_group::2"):
        emulate(
            cluster_kernel(load, expect, waits).replace(".cta_group::2", ""),
            [map_of(source, "f32", (32, 4)), out], [source], grid=2, cluster=2,
        )  # fmt: skip


def test_bulk_copy_to_the_peer():
    """Each CTA writes its rank's pattern to the peer, which a barrier of the peer signals."""
    source, out = tensor((8, 32), np.float32), np.zeros((2, 4, 32), np.float32)
    name = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    load = f"""cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+8192], [%rd12], 512, [%r1];
    {WAIT}
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    xor.b32 %r21, %r20, 1;
    mapa.shared::cluster.u32 %r22, %r1, %r21;
    {name} [%r22+{TILE}], [%r1+8192], 512, [%r22];"""
    expect = "ld.param.u64 %rd12, [src];\nmul.wide.u32 %rd13, %r20, 512;\nadd.u64 %rd12, %rd12, %rd13;\n"
    expect += "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;"
    ptx = cluster_kernel(load, expect, WAIT.replace("[%r1], 0", "[%r1], 1")).replace(MAP, ".param .u64 src")
    emulate(ptx.replace("mov.b64 %rd1, map;", ""), [source, out], grid=2, cluster=2)
    assert (out[0] == source[4:]).all() and (out[1] == source[:4]).all()


# ---- stores ------------------------------------------------------------------------------------------------------
def store_kernel(instruction: str, words: int, params: str) -> str:
    """Fills `words` words of shared memory with 0, 1, 2, ... and runs one instruction in one thread."""
    body = f"mad.lo.u32 %r9, %r0, 4, {TILE};\nadd.u32 %r9, %r9, %r1;\n"
    for i in range(words // 32):
        body += (
            f"add.u32 %r8, %r0, {32 * i};\ncvt.rn.f32.u32 %f1, %r8;\nst.shared.f32 [%r9+{128 * i}], %f1;\n"
        )
    body += "fence.proxy.async.shared::cta;\nbar.sync 0;\n@!%p0 bra SKIP;\n" + instruction
    body += "\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;\nSKIP:\n"
    return kernel(params, ".reg .f32 %f<4>;\n" + body)


@pytest.mark.parametrize("reduce", [None, "add", "max"])
def test_tensor_store(reduce):
    target = np.full((10, 40), 5.0, np.float32)
    name = "cp.reduce.async.bulk.tensor" if reduce else "cp.async.bulk.tensor"
    op = f".{reduce}" if reduce else ""
    code = f"""mov.b64 %rd1, map;
    mov.b32 %r2, 24;
    mov.b32 %r3, 8;
    {name}.2d.global.shared::cta{op}.tile.bulk_group [%rd1, {{%r2, %r3}}], [%r1+{TILE}];"""
    stats = emulate(store_kernel(code, 128, MAP), [map_of(target, "f32", (32, 4))], [target])
    want = np.full((10, 40), 5.0, np.float32)
    tile = np.arange(128, dtype=np.float32).reshape(4, 32)[:2, :16]
    part = want[8:, 24:]
    part[...] = {None: tile, "add": part + tile, "max": np.maximum(part, tile)}[reduce]
    assert (target == want).all() and stats.tma_store_bytes == 512


@pytest.mark.parametrize(
    "code,want",
    [
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 512;", lambda old, new: new),
        (
            "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%rd1], [%r2], 512, %rd3;",
            lambda old, new: new,
        ),
        (
            "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r2], 512, %h1;",
            lambda old, new: np.where(np.arange(128) % 4 == 1, new, old),
        ),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r2], 512;", np.add),
    ],
)
def test_bulk_stores(code, want):
    target = np.full(128, 7, np.float32)
    setup = f"ld.param.u64 %rd1, [out];\nadd.u32 %r2, %r1, {TILE};\nmov.b64 %rd3, 0;\nmov.b16 %h1, 0x00F0;\n"
    emulate(store_kernel(setup + code, 128, OUT), [target])
    assert (target == want(np.full(128, 7, np.float32), np.arange(128, dtype=np.float32))).all()


@pytest.mark.parametrize("reduce,times", [("", 1), (".add", 32)])
def test_a_store_by_a_whole_warp(reduce, times):
    """Every thread executes it: 32 equal stores are one, 32 reductions are 32."""
    target = np.zeros((4, 32), np.float32)
    name = f"cp{'.reduce' if reduce else ''}.async.bulk.tensor.2d.global.shared::cta{reduce}.tile.bulk_group"
    code = f"mov.b64 %rd1, map;\nmov.b32 %r2, 0;\n{name} [%rd1, {{%r2, %r2}}], [%r1+{TILE}];"
    ptx = store_kernel(code, 128, MAP).replace("@!%p0 bra SKIP;", "")
    stats = emulate(ptx, [map_of(target, "f32", (32, 4))], [target])
    assert (target == times * np.arange(128, dtype=np.float32).reshape(4, 32)).all()
    assert stats.tma_store_bytes == 512 * times


# ---- cp.async ----------------------------------------------------------------------------------------------------
def test_cp_async():
    source, out = tensor(32 * 4, np.uint32), np.zeros(32 * 4, np.uint32)
    body = (
        INIT.format(count=32)
        + f"""ld.param.u64 %rd1, [src];
    mul.wide.u32 %rd2, %r0, 16;
    add.u64 %rd1, %rd1, %rd2;
    mad.lo.u32 %r2, %r0, 16, %r1;
    and.b32 %r3, %r0, 3;
    mul.lo.u32 %r3, %r3, 4;
    cp.async.cg.shared.global.L2::128B [%r2+{TILE}], [%rd1], 16;
    cp.async.ca.shared.global [%r2+{TILE}], [%rd1], 16, %r3;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];
    cp.async.commit_group;
    cp.async.wait_group 0;
    cp.async.wait_all;
    {WAIT}bar.sync 0;
    """
    )
    emulate(kernel(f".param .u64 src, {OUT}", body + copy_out(512)), [source, out])
    want = source.reshape(32, 4).copy()
    for i in range(32):
        want[i, i % 4 :] = 0
    assert (out.reshape(32, 4) == want).all()
    whole = body.replace(f"cp.async.ca.shared.global [%r2+{TILE}], [%rd1], 16, %r3;", "")
    emulate(kernel(f".param .u64 src, {OUT}", whole + copy_out(512)), [source, out])
    assert (out == source).all()


# ---- editing tensor maps -----------------------------------------------------------------------------------------
def test_tensormap_replace():
    """Turns one map into another field by field, publishes it, and loads with it."""
    source, out = tensor((3, 20, 32), np.float32), np.zeros((2, 4, 32), np.float32)
    before = encode(0x10000, "u8", (64,), (), (16,), nan_fill=False)
    published = np.zeros(128 + 64, np.uint8)
    start = -published.ctypes.data % 64
    fields = """global_address.shared::cta.b1024.b64 [%r2], %rd5
    rank.shared::cta.b1024.b32 [%r2], 2
    elemtype.shared::cta.b1024.b32 [%r2], 7
    global_dim.shared::cta.b1024.b32 [%r2], 0, 32
    global_dim.shared::cta.b1024.b32 [%r2], 1, 20
    global_dim.shared::cta.b1024.b32 [%r2], 2, 3
    global_stride.shared::cta.b1024.b64 [%r2], 0, %rd6
    global_stride.shared::cta.b1024.b64 [%r2], 1, %rd7
    box_dim.shared::cta.b1024.b32 [%r2], 0, 32
    box_dim.shared::cta.b1024.b32 [%r2], 1, 4
    box_dim.shared::cta.b1024.b32 [%r2], 2, 2
    element_stride.shared::cta.b1024.b32 [%r2], 1, 2
    swizzle_mode.shared::cta.b1024.b32 [%r2], 0
    interleave_layout.shared::cta.b1024.b32 [%r2], 0
    fill_mode.shared::cta.b1024.b32 [%r2], 1"""
    edits = "\n".join(f"@%p0 tensormap.replace.tile.{line.strip()};" for line in fields.splitlines())
    body = (
        INIT.format(count=1)
        + f"""
    mov.b64 %rd4, map;
    ld.param.u64 %rd5, [src];
    ld.param.u64 %rd8, [copy];
    mov.b64 %rd6, 128;
    mov.b64 %rd7, 2560;
    mad.lo.u32 %r3, %r0, 4, %r1;
    mul.wide.u32 %rd3, %r0, 4;
    add.u64 %rd4, %rd4, %rd3;
    ld.param.b32 %r4, [%rd4];
    st.shared.b32 [%r3+16384], %r4;
    bar.sync 0;
    add.u32 %r2, %r1, 16384;
    {edits}
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd8], [%r2], 128;
    fence.proxy.tensormap::generic.acquire.gpu [%rd8], 128;
    @!%p0 bra SKIP;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    mov.b32 %r5, 0;
    mov.b32 %r6, 18;
    mov.b32 %r7, 1;
    {LOAD.format(d=3, space="shared::cta", mode="")} [%r1+{TILE}], [%rd8, {{%r5, %r6, %r7}}], [%r1];
    SKIP:
    """
    )
    ptx = kernel(f"{MAP}, .param .u64 src, .param .u64 copy, {OUT}", body + WAIT + copy_out(512))
    emulate(ptx, [before, source, published[start : start + 128], out], [source])
    m = TensorMap.decode(published[start : start + 128].tobytes())
    assert (m.dims, m.box, m.element_strides) == ((32, 20, 3), (32, 4, 2), (1, 2, 1))
    got = out.reshape(-1)[:128].reshape(2, 2, 32)
    assert (got[:, 0] == source[1:, 18]).all() and np.isnan(got[:, 1]).all()


# ---- refusals ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "code,words",
    [
        ("cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r2, %r2}], [%r1], {%h1};", "im2col"),
        ("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes.nonsense [%r1], [%rd1, {%r2, %r2}], [%r1];", "nonsense"),
        ("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r1];", "2 coordinates"),
        ("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r2}];", "2 operands"),
        ("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r2, %r2, %r2}];", "2 coordinates"),
        ("cp.async.bulk.prefetch.tensor.2d.L2.global.nonsense [%rd1, {%r2, %r2}];", "nonsense"),
        ("cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r1], 16, [%r1];", "copy .shared::cta"),
        ("cp.async.ca.shared.global [%r1], [%rd1], 12;", "12 bytes"),
        ("tensormap.replace.tile.nonsense.shared::cta.b1024.b32 [%r1], 0;", "unknown field"),
    ],
)  # fmt: skip
def test_refusals_name_instruction_and_line(code, words):
    body = f"ld.param.u64 %rd1, [out];\nmov.b32 %r2, 0;\n{code}"
    ptx = kernel(OUT, body)
    line = ptx[: ptx.index(code)].count("\n") + 1
    with pytest.raises(EmulatorError, match=words) as error:
        run_ptx(ptx, args=[np.zeros(64, np.uint32)], smem_bytes=4096)
    assert f"line {line}" in str(error.value) and code.split()[0] in str(error.value)


def test_misaligned_bulk_copy():
    body = INIT.format(count=1) + "ld.param.u64 %rd1, [out];\n"
    body += "@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+24], [%rd1], 16, [%r1];"
    with pytest.raises(EmulatorError, match="multiple of 16"):
        run_ptx(kernel(OUT, body), args=[np.zeros(64, np.uint32)], smem_bytes=4096)
