"""Instructions on global, shared, local and tensor memory, and their bounds."""

import numpy as np
import pytest

from nvfp4_cute.emulator import memory as memory_module
from nvfp4_cute.emulator.addresses import user_address_end
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.memory import GlobalMemory, SharedMemory, TensorMemory
from nvfp4_cute.errors import EmulatorError

LANE = "mov.u32 %r50, %tid.x;"


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes at an address that is aligned for every access width."""
    raw = np.zeros(nbytes + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:nbytes]


SHARED = ".shared .align 64 .b8 buffer[4096];"


@pytest.mark.parametrize("threads", [32, 1, 20])
@pytest.mark.parametrize("type_, count", [("b8", 1), ("b16", 1), ("b32", 1), ("b64", 1), ("b8", 4), ("b16", 2), ("b16", 4), ("b32", 2), ("b32", 4), ("b64", 2), ("b32", 8), ("b64", 4)])  # fmt: skip
@pytest.mark.parametrize("space", ["global", "shared", "generic"])
def test_copy_through_every_width(ptx_kernel, space: str, type_: str, count: int, threads: int) -> None:
    """Global -> registers -> `space` -> registers -> global keeps every byte."""
    size = int(type_[1:]) // 8
    total = size * count
    prefix = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}[size]
    registers = [f"{prefix}{10 + i}" for i in range(count)]
    again = [f"{prefix}{20 + i}" for i in range(count)]
    vector = f".v{count}" if count > 1 else ""
    group = lambda names: f"{{{', '.join(names)}}}" if count > 1 else names[0]
    place = {
        "global": "add.s64 %rd5, %rd1, %rd3;",
        "shared": "mov.b64 %rd5, buffer; add.s64 %rd5, %rd5, %rd3;",
        "generic": "mov.b64 %rd5, buffer; cvta.shared.u64 %rd5, %rd5; add.s64 %rd5, %rd5, %rd3;",
    }[space]
    where = "" if space == "generic" else f".{space}"
    body = f"""
    {LANE} mul.wide.u32 %rd3, %r50, {total};
    add.s64 %rd4, %rd0, %rd3;
    ld.global{vector}.{type_} {group(registers)}, [%rd4];
    {place}
    st{where}{vector}.{type_} [%rd5], {group(registers)};
    ld{where}{vector}.{type_} {group(again)}, [%rd5];
    add.s64 %rd6, %rd2, %rd3;
    st.global{vector}.{type_} [%rd6], {group(again)};
    """
    data, middle, out = (aligned(32 * total) for _ in range(3))
    data[:] = np.random.default_rng(0).integers(0, 256, 32 * total)
    run_ptx(ptx_kernel(body, 3, module=SHARED), None, 1, threads, [data, middle, out])
    assert (out[: threads * total] == data[: threads * total]).all()
    assert not out[threads * total :].any()


def test_narrow_loads_extend(ptx_kernel) -> None:
    data = np.array([0x80, 0xFF, 0x7F, 0x01] * 8, np.uint8)
    out = np.zeros((32, 3), np.uint32)
    body = f"""
    {LANE} cvt.u64.u32 %rd3, %r50; add.s64 %rd4, %rd0, %rd3;
    ld.global.u8 %r1, [%rd4]; ld.global.s8 %r2, [%rd4]; ld.global.s8 %rs1, [%rd4]; cvt.u32.u16 %r3, %rs1;
    mul.wide.u32 %rd5, %r50, 12; add.s64 %rd6, %rd1, %rd5;
    st.global.b32 [%rd6], %r1; st.global.b32 [%rd6+4], %r2; st.global.b32 [%rd6+8], %r3;
    """
    run_ptx(ptx_kernel(body, 2), None, 1, 32, [data, out])
    signed = data.view(np.int8).astype(np.int32).view(np.uint32)
    assert (out == np.stack([data, signed, signed & 0xFFFF], 1)).all()


def test_shared_memory_starts_as_nan(ptx_kernel) -> None:
    out = np.zeros(1, np.float32)
    run_ptx(
        ptx_kernel("ld.shared.b32 %r1, [buffer+16]; st.global.b32 [%rd0], %r1;", module=SHARED),
        None,
        1,
        1,
        [out],
    )
    assert np.isnan(out[0])


def test_shared_symbols_start_at_1024_and_carry_the_rank(ptx_kernel) -> None:
    module = ".shared .align 4 .b32 first; .shared .align 128 .b8 second[8]; .extern .shared .align 1024 .b8 dynamic[];"
    out = np.zeros((2, 3), np.uint32)
    body = """
    mov.u32 %r1, %cluster_ctarank; mad.wide.u32 %rd1, %r1, 12, %rd0;
    mov.b32 %r2, first; mov.b32 %r3, second; mov.b32 %r4, dynamic;
    st.global.b32 [%rd1], %r2; st.global.b32 [%rd1+4], %r3; st.global.b32 [%rd1+8], %r4;
    """
    run_ptx(ptx_kernel(body, module=module), None, 2, 1, [out], cluster=2, smem_bytes=64)
    assert out.tolist() == [[1024, 1152, 2048], [1 << 24 | 1024, 1 << 24 | 1152, 1 << 24 | 2048]]


def test_distributed_shared_memory(ptx_kernel) -> None:
    """Every lane stores to the CTA whose rank is the lane's parity; then both CTAs copy their memory out."""
    out = np.zeros((2, 32), np.uint32)
    body = f"""
    {LANE} mov.u32 %r1, %cluster_ctarank; and.b32 %r2, %r50, 1;
    mov.b32 %r3, buffer; mad.lo.u32 %r4, %r50, 4, %r3; shl.b32 %r5, %r1, 7; add.u32 %r4, %r4, %r5;
    mapa.shared::cluster.u32 %r6, %r4, %r2;
    getctarank.shared::cluster.u32 %r7, %r6;
    mad.lo.u32 %r8, %r1, 100, %r50; mad.lo.u32 %r8, %r7, 1000, %r8;
    st.shared::cluster.b32 [%r6], %r8;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    shl.b32 %r9, %r2, 7; mad.lo.u32 %r10, %r50, 4, %r3; 
    xor.b32 %r11, %r2, %r1; setp.eq.u32 %p1, %r11, 0; mov.b32 %r12, 0;
    @%p1 ld.shared.b32 %r12, [%r10];
    @%p1 ld.shared.b32 %r13, [%r10+128];
    @%p1 add.u32 %r12, %r12, %r13;
    mad.lo.u32 %r14, %r1, 32, %r50; mul.wide.u32 %rd1, %r14, 4; add.s64 %rd2, %rd0, %rd1; st.global.b32 [%rd2], %r12;
    """
    run_ptx(ptx_kernel(body, module=SHARED), None, 2, 32, [out], cluster=2)
    for rank in range(2):
        for lane in range(32):
            want = 2 * (1000 * rank + lane) + 100 if lane % 2 == rank else 0
            assert out[rank, lane] == want


def test_local_memory_is_per_lane(ptx_kernel) -> None:
    out = np.zeros(32, np.uint32)
    body = f"""
    {LANE} .local .align 8 .b8 depot[16];
    mov.b64 %rd1, depot; cvta.local.u64 %rd2, %rd1;
    st.local.b32 [%rd1+4], %r50; st.b32 [%rd2+8], %r50;
    ld.b32 %r1, [%rd2+4]; ld.local.b32 %r2, [%rd1+8]; add.u32 %r3, %r1, %r2;
    mul.wide.u32 %rd3, %r50, 4; add.s64 %rd4, %rd0, %rd3; st.global.b32 [%rd4], %r3;
    """
    run_ptx(ptx_kernel(body), None, 1, 32, [out])
    assert out.tolist() == [2 * i for i in range(32)]


def test_parameters_and_module_constants(ptx_kernel) -> None:
    text = """.version 8.8
.target sm_100a
.const .align 4 .b32 table[2] = {11, 22};
.global .align 2 .u16 more[2] = {5, 6};
.visible .entry k(.param .align 8 .b8 s[12], .param .align 64 .b8 map[128], .param .u64 out) {
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b16 %rs<4>;
ld.param.v2.b32 {%r1, %r2}, [s]; ld.param.b8 %rs1, [s+8]; ld.param.u64 %rd1, [out];
mov.b64 %rd2, map; cvta.param.u64 %rd3, %rd2; ld.b32 %r3, [%rd3+124]; and.b64 %rd4, %rd3, 63; cvt.u32.u64 %r4, %rd4;
ld.const.b32 %r5, [table+4]; ld.global.u16 %rs2, [more+2];
st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4}; cvt.u32.u16 %r6, %rs1; cvt.u32.u16 %r7, %rs2;
st.global.v4.b32 [%rd1+16], {%r5, %r6, %r7, 77};
ret; }"""
    out = np.zeros(8, np.uint32)
    struct = np.array([1, 2, 200], np.uint32).tobytes()
    tensor_map = bytes(124) + (12345).to_bytes(4, "little")
    run_ptx(text, None, 1, 1, [struct, tensor_map, out])
    assert out.tolist() == [1, 2, 12345, 0, 22, 200, 6, 77]


ATOMS = {
    "add.u32": (lambda old, x: old + x, 5),
    "min.s32": (lambda old, x: min(old, x), 5),
    "max.u32": (lambda old, x: max(old, x), 5),
    "and.b32": (lambda old, x: old & x, 0xFF),
    "or.b32": (lambda old, x: old | x, 3),
    "xor.b32": (lambda old, x: old ^ x, 3),
    "exch.b32": (lambda old, x: x, 9),
    "inc.u32": (lambda old, x: 0 if old >= x else old + 1, 20),
    "dec.u32": (lambda old, x: x if old == 0 or old > x else old - 1, 20),
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("op", ATOMS)
def test_atomics_act_lane_by_lane(ptx_kernel, op: str, space: str) -> None:
    function, start = ATOMS[op]
    where = "%rd0" if space == "global" else "buffer"
    body = f"""
    {LANE} st.{space}.b32 [{where}], {start};
    atom.{space}.{op} %r1, [{where}], %r50; red.{space}.{op} [{where}], %r50;
    mul.wide.u32 %rd2, %r50, 4; add.s64 %rd3, %rd1, %rd2; st.global.b32 [%rd3], %r1;
    ld.{space}.b32 %r2, [{where}]; st.global.b32 [%rd0], %r2;
    """
    cell, out = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    run_ptx(ptx_kernel(body, 2, module=SHARED), None, 1, 32, [cell, out])
    value, seen = start, []
    for _ in range(2):
        for lane in range(32):
            seen.append(value)
            value = function(value, lane)
    assert out.tolist() == seen[:32]
    assert cell[0] == value


def test_float_atomics_and_compare_and_swap(ptx_kernel) -> None:
    cells = np.zeros(8, np.float32)
    body = f"""
    {LANE} cvt.rn.f32.u32 %r1, %r50;
    red.global.add.f32 [%rd0], %r1;
    atom.global.cas.b32 %r2, [%rd0+4], 0, %r1;
    mov.b32 %r3, 0x3C003C00; red.global.add.noftz.f16x2 [%rd0+8], %r3;
    red.global.add.v2.f32 [%rd0+16], {{%r1, %r1}};
    """
    run_ptx(ptx_kernel(body), None, 1, 32, [cells])
    assert cells[0] == sum(range(32))
    assert cells[1] == 1.0  # lane 0 swaps 0 for 0.0, so lane 1 still finds zero
    assert cells.view(np.float16)[4:6].tolist() == [32.0, 32.0]
    assert cells[4:6].tolist() == [496.0, 496.0]


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_load_and_store(ptx_kernel, count: int, trans: str) -> None:
    registers = [f"%r{i + 1}" for i in range(count)]
    body = f"""
    {LANE} mov.b32 %r40, buffer; mul.lo.u32 %r41, %r50, 16; add.u32 %r42, %r40, %r41;
    mul.wide.u32 %rd3, %r50, 16; add.s64 %rd4, %rd0, %rd3; ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd4];
    st.shared.v4.b32 [%r42], {{%r10, %r11, %r12, %r13}};
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{", ".join(registers)}}}, [%r42];
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r42+512], {{{", ".join(registers)}}};
    ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r42+512];
    add.s64 %rd5, %rd2, %rd3; st.global.v4.b32 [%rd5], {{%r20, %r21, %r22, %r23}};
    """ + "".join(
        f"mad.wide.u32 %rd6, %r50, 4, %rd1; st.global.b32 [%rd6+{128 * i}], {r};"
        for i, r in enumerate(registers)
    )
    rows = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    fragments = np.zeros((count, 32, 2), np.uint16)
    back = np.zeros((32, 8), np.uint16)
    run_ptx(ptx_kernel(body, 3, module=SHARED), None, 1, 32, [rows, fragments, back])
    for j in range(count):
        matrix = rows[8 * j : 8 * j + 8]
        matrix = matrix.T if trans else matrix
        for lane in range(32):
            assert (
                fragments[j, lane].tolist() == matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2].tolist()
            )
    assert (back[: 8 * count] == rows[: 8 * count]).all()


@pytest.mark.parametrize("threads", [1, 32])
@pytest.mark.parametrize(
    "body, message",
    [
        ("ld.global.b32 %r1, [%rd1+64];", r"load of 4 bytes at .* outside every live range; nearest: \+64 bytes from the start of `argument 0` \(64 bytes\)"),
        ("st.global.b32 [%rd1+-4], %r50;", "store .* outside every live range; nearest: -4 bytes"),
        ("ld.global.b32 %r1, [%rd1+2];", "not aligned to the 4 bytes"),
        ("ld.shared.v4.b64 {%rd2, %rd3, %rd4, %rd5}, [%r51+16];", "not aligned to the 32 bytes"),
        ("ld.shared.b32 %r1, [%r51+4096];", "shared access of 4 bytes at offset 0x1400 is outside"),
        ("ld.shared.b32 %r1, [%r51+-1024];", "shared access of 4 bytes at offset 0x0 is outside"),
        ("ld.shared.b32 %r1, [%r51+16777216];", "belongs to rank 1"),
        ("ld.shared::cluster.b32 %r1, [%r51+16777216];", "names rank 1 of a cluster of 1 CTAs"),
    ],
)  # fmt: skip
def test_bad_addresses(ptx_kernel, body: str, message: str, threads: int) -> None:
    data = np.zeros(16, np.uint32)
    spread = "shr.u32 %r52, %r50, 5; cvt.u64.u32 %rd9, %r52; add.s64 %rd1, %rd0, %rd9; mov.b32 %r51, buffer; add.u32 %r51, %r51, %r52;"
    with pytest.raises(EmulatorError, match=message):
        run_ptx(ptx_kernel(f"{LANE}{spread}{body}", module=SHARED), None, 1, threads, [data])


def test_the_last_lane_out_of_bounds_is_found(ptx_kernel) -> None:
    data = np.zeros(31, np.uint32)
    body = f"{LANE} mul.wide.u32 %rd1, %r50, 4; add.s64 %rd2, %rd0, %rd1; st.global.b32 [%rd2], %r50;"
    with pytest.raises(EmulatorError, match=r"kernel k cta \(0, 0, 0\) warp 0: PTX line \d+ `st.global"):
        run_ptx(ptx_kernel(body), None, 1, 32, [data])
    assert not data.any()


def test_masked_lanes_may_have_bad_addresses(ptx_kernel) -> None:
    data = np.zeros(16, np.uint32)
    body = f"{LANE} mul.wide.u32 %rd1, %r50, 4; add.s64 %rd2, %rd0, %rd1; setp.lt.u32 %p1, %r50, 16; @%p1 st.global.b32 [%rd2], %r50;"
    run_ptx(ptx_kernel(body), None, 1, 32, [data])
    assert data.tolist() == list(range(16))


def test_read_only_arguments(ptx_kernel) -> None:
    data = np.zeros(4, np.uint32)
    data.setflags(write=False)
    with pytest.raises(EmulatorError, match="`argument 0` is read-only"):
        run_ptx(ptx_kernel("st.global.b32 [%rd0], 1;"), None, 1, 1, [data])


def test_unregistered_memory_is_trusted_until_a_range_is_registered() -> None:
    data = np.arange(8, dtype=np.uint8)
    memory = GlobalMemory()
    assert memory.view(data.ctypes.data + 2, 3, write=False).tolist() == [2, 3, 4]
    other = np.zeros(4096, np.uint8)
    memory.add_range("other", other.ctypes.data, other.size)
    with pytest.raises(EmulatorError, match="`other`"):
        memory.view(data.ctypes.data, 1, write=False)
    memory.clear_ranges()
    assert memory.view(data.ctypes.data, 1, write=True)[0] == 0
    with pytest.raises(EmulatorError, match="not an address"):
        memory.view(16, 4, write=False)


@pytest.mark.parametrize("start", [1 << 30, 1 << 40])
def test_an_offset_that_overflowed_is_named_wherever_the_tensor_lies(start):
    """Addresses before 0 wrap, as from a tensor in the heap of a program at low addresses."""
    memory = GlobalMemory()
    memory.add_range("rows", start, 4096)
    with pytest.raises(
        EmulatorError, match=r"-4 x 2\^32 bytes from a place in `rows`: an offset that overflowed"
    ):
        memory.view((start + 64 - (4 << 32)) % (1 << 64), 4, write=False)


@pytest.mark.parametrize("machine, bits", [("x86_64", 47), ("AMD64", 47), ("aarch64", 52), ("arm64", 52)])
def test_user_addresses_end_where_the_processor_ends_them(machine, bits, monkeypatch) -> None:
    """64-bit Arm gives processes addresses above 2**47, up to 2**52 with some kernels. The test reads no memory there."""
    end = user_address_end(machine)
    assert end == 1 << bits
    monkeypatch.setattr(memory_module, "USER_END", end)
    trusting, checked = GlobalMemory(), GlobalMemory()
    assert trusting.view(end - 64, 64, write=False).ctypes.data == end - 64
    for address in (end - 63, end):
        with pytest.raises(EmulatorError, match="not an address"):
            trusting.view(address, 64, write=False)
    checked.add_range("high", end - 4096, 4096)
    view, index = checked.lanes(np.array([end - 64, end - 4096], np.uint64), 16, write=True)
    assert view.ctypes.data + 16 * index[0] == end - 64 and index[1] == 0
    with pytest.raises(EmulatorError, match="`high`"):
        checked.view(end - 4097, 4, write=False)


class Later:
    """Deferred work that writes a number to its columns."""

    def __init__(self, tmem, first, last, value):
        self.tmem, self.first, self.last, self.value = tmem, first, last, value

    def settle(self):
        self.tmem.columns(self.first, self.last - self.first)[:, self.first : self.last] = self.value


@pytest.mark.parametrize("seed", range(4))
def test_what_was_put_off_is_done_when_somebody_looks(seed) -> None:
    """Deferred products and copies to overlapping columns give the same results as immediate ones, in any order."""
    rng, tmem = np.random.default_rng(seed), TensorMemory()
    want = tmem.words.copy()
    kept = 0
    for value in range(300):
        first, count = int(rng.integers(0, 24)), int(rng.integers(1, 8))
        action = rng.integers(0, 4)
        if action == 0:
            tmem.put_off(Later(tmem, first, first + count, value))
            want[:, first : first + count] = value
        elif action == 1:
            first = first & ~1
            rows = rng.integers(0, 1 << 32, (32, 4), dtype=np.uint32)
            tmem.copy_scales(first, rows)
            want[:, first : first + 4] = np.tile(rows, (4, 1))
        elif action == 2:
            found = tmem.copied_scales(first, count)
            if found is not None:
                kept += 1
                blocks = np.concatenate(found, axis=1)
                assert (np.tile(blocks, (4, 1))[:, :count] == want[:, first : first + count]).all()
        elif rng.random() < 0.3:
            assert (
                tmem.columns(first, count)[:, first : first + count] == want[:, first : first + count]
            ).all()
    assert kept and (tmem.words == want).all() and not tmem.later


def test_a_launch_leaves_no_ranges_behind(ptx_kernel) -> None:
    machine, data = Machine(), np.zeros(4, np.uint32)
    run_ptx(ptx_kernel("ld.global.b32 %r1, [%rd0];"), None, 1, 1, [data], machine=machine)
    machine.memory.remove_range(data.ctypes.data)
    assert machine.memory.ranges == ()


def test_lanes_of_an_unaligned_range() -> None:
    raw = np.arange(256, dtype=np.uint8)
    start = raw.ctypes.data + (-raw.ctypes.data % 16) + 4  # 4 modulo 16: wider items begin inside the range
    memory = GlobalMemory()
    memory.add_range("odd", start, 100)
    addresses = np.array([start + 12, start + 28], np.uint64)
    for _ in range(2):  # the second call uses the cached range
        view, index = memory.lanes(addresses, 8, False)
        first = int(addresses[0]) - raw.ctypes.data
        assert view[index].view(np.uint8)[:8].tolist() == list(range(first, first + 8))


def test_shared_memory_object() -> None:
    smem = SharedMemory(100)
    smem.write(1024, np.arange(4, dtype=np.uint8))
    assert smem.read(1024, 5).tolist() == [0, 1, 2, 3, 255]
    for offset, size in ((1023, 2), (1024 + 99, 2)):
        with pytest.raises(EmulatorError, match="outside"):
            smem.check(offset, size)


def test_tensor_memory_object() -> None:
    tmem = TensorMemory()
    assert (tmem.alloc(128), tmem.alloc(256), tmem.alloc(256)) == (0, 128, None)
    assert (tmem.words == 0xFFFFFFFF).all()
    tmem.check(0, 128, 0, 384)
    with pytest.raises(EmulatorError, match="columns 384..415: not allocated"):
        tmem.check(0, 1, 384, 32)
    with pytest.raises(EmulatorError, match="outside 128 x 512"):
        tmem.check(127, 2, 0, 1)
    with pytest.raises(EmulatorError, match="live allocations are"):
        tmem.dealloc(0, 64)
    tmem.dealloc(0, 128)
    tmem.dealloc(0, 128)  # a second time
    assert tmem.alloc(32) == 0
    with pytest.raises(EmulatorError, match="live allocations are"):
        tmem.dealloc(0, 128)
    with pytest.raises(EmulatorError, match="power of two"):
        tmem.alloc(48)
    tmem.may_allocate = False
    with pytest.raises(EmulatorError, match="relinquish"):
        tmem.alloc(32)


def test_lanes_of_one_access_may_lie_in_several_tensors(ptx_kernel) -> None:
    """Odd lanes copy within the second pair of arrays. A lane outside both is still an error."""
    buffer = np.arange(256, dtype=np.uint32)
    sources, outs = (buffer[:32], buffer[64:96]), (buffer[128:160], buffer[192:224])
    for array in outs:
        array[:] = 0
    body = """and.b32 %r1, %r50, 1; mul.lo.u32 %r1, %r1, {step}; mad.lo.u32 %r1, %r50, 4, %r1;
    cvt.u64.u32 %rd10, %r1; add.u64 %rd11, %rd0, %rd10; add.u64 %rd12, %rd2, %rd10;
    ld.global.b32 %r2, [%rd11]; st.global.b32 [%rd12], %r2;"""
    module = ptx_kernel("mov.u32 %r50, %tid.x; " + body.format(step=256), 4)
    run_ptx(module, None, 1, 32, [*sources, *outs])
    odd = np.arange(32) % 2 == 1
    np.testing.assert_array_equal(outs[0], np.where(odd, 0, sources[0]))
    np.testing.assert_array_equal(outs[1], np.where(odd, sources[1], 0))
    module = ptx_kernel("mov.u32 %r50, %tid.x; " + body.format(step=140), 4)
    with pytest.raises(EmulatorError, match="outside every live range"):
        run_ptx(module, None, 1, 32, [*sources, *outs])
