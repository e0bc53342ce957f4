"""Instructions and small steps from which the kernels of this folder are built.

Kernels use addresses in shared memory, so each copy and barrier operation is one plain instruction.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.arch import inline_ptx

from nvfp4_cute.emulator.tensormap import encode

WARP = 32
NBYTES = 1024
"""Bytes of one stage."""
MAP = encode(0, "s32", (64, 8), (256,), (64, 1))
"""A tensor of 8 rows of 64 words, and a box of one row; the address is filled in by a kernel."""


@cute.jit
def shared(nbytes: cutlass.Constexpr, align: cutlass.Constexpr = 128):
    """Address of new shared memory."""
    return cutlass.memory.SmemAllocator().allocate(nbytes, align).toint()


@cute.jit
def address(tensor: cute.Tensor, words):
    """Returns the global address of an element."""
    return tensor.iterator.toint() + Int64(words) * 4


@cute.jit
def put(at, value):
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[Int32(at), Int32(value)])


@cute.jit
def get(at):
    return inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(at)])


@cute.jit
def init(bar, count: cutlass.Constexpr):
    inline_ptx(f"mbarrier.init.shared.b64 [{{$r0}}], {count};", read_only_args=[Int32(bar)])


@cute.jit
def fence_init():
    inline_ptx("fence.mbarrier_init.release.cluster;")


@cute.jit
def arrive(bar):
    inline_ptx("mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[Int32(bar)])


@cute.jit
def wait(bar, parity):
    inline_ptx(
        "{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared.b64 P, [{$r0}], {$r1}, 1000000; @P bra.uni DONE; bra.uni AGAIN; DONE: }",
        read_only_args=[Int32(bar), Int32(parity)],
    )


@cute.jit
def load(to, source, bar, nbytes: cutlass.Constexpr = NBYTES):
    """Issues a bulk copy from global memory that signals an mbarrier."""
    inline_ptx(
        f"mbarrier.arrive.expect_tx.shared.b64 _, [{{$r2}}], {nbytes};\n"
        f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{{$r0}}], [{{$r1}}], {nbytes}, [{{$r2}}];",
        read_only_args=[Int32(to), Int64(source), Int32(bar)],
    )


@cute.jit
def store(to, source, nbytes: cutlass.Constexpr = NBYTES):
    """Issues a bulk copy to global memory in its own group."""
    inline_ptx(
        f"cp.async.bulk.global.shared::cta.bulk_group [{{$r0}}], [{{$r1}}], {nbytes};\ncp.async.bulk.commit_group;",
        read_only_args=[Int64(to), Int32(source)],
    )


@cute.jit
def stored(groups: cutlass.Constexpr = 0, read: cutlass.Constexpr = ".read"):
    inline_ptx(f"cp.async.bulk.wait_group{read} {groups};")


@cute.jit
def fence_async():
    inline_ptx("fence.proxy.async.shared::cta;")


@cute.jit
def sync(number: cutlass.Constexpr, threads: cutlass.Constexpr):
    inline_ptx(f"barrier.sync {number}, {threads};")


@cute.jit
def remote(at, rank):
    """Returns the shared::cluster address of the same place in another CTA."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(at), Int32(rank)],
    )


@cute.jit
def place():
    """Returns thread, warp and lane."""
    tidx = cute.arch.thread_idx()[0]
    return tidx, tidx // WARP, tidx % WARP


@cute.jit
def barriers(count: cutlass.Constexpr, arrivals: cutlass.Constexpr):
    """Allocates mbarriers that thread 0 initialises and makes visible to the CTA. Returns their addresses."""
    first = shared(8 * count, 8)
    if cute.arch.thread_idx()[0] == 0:
        for i in cutlass.range_constexpr(count):
            init(first + 8 * i, arrivals[i])
        fence_init()
    cute.arch.sync_threads()
    return first


@cute.jit
def allocate(at, columns: cutlass.Constexpr = 32):
    inline_ptx(
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {columns};",
        read_only_args=[Int32(at)],
    )


@cute.jit
def free(tmem, columns: cutlass.Constexpr = 32):
    inline_ptx(
        f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {columns};", read_only_args=[Int32(tmem)]
    )


@cute.jit
def write_tmem(tmem, value):
    inline_ptx(
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [{$r0}], {{$r1}};", read_only_args=[Int32(tmem), Int32(value)]
    )
    inline_ptx("tcgen05.wait::st.sync.aligned;")


@cute.jit
def read_tmem(tmem):
    return inline_ptx(
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{$w0}}, [{$r0}];\ntcgen05.wait::ld.sync.aligned;",
        write_only_types=[Int32],
        read_only_args=[Int32(tmem)],
    )


@cute.jit
def poll(flag):
    """Spin until a word of global memory is set (acquire)."""
    inline_ptx(
        "{ .reg .pred P; .reg .b32 V; POLL: ld.acquire.gpu.global.b32 V, [{$r0}]; setp.eq.u32 P, V, 0; @P bra POLL; }",
        read_only_args=[Int64(flag)],
    )


@cute.jit
def cluster_barrier():
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def make_map(at, tensor, row, encoded: cutlass.Constexpr = MAP):
    """Thread 0 writes a tensor map of rows of `tensor`, from `row` on, to shared memory."""
    words = [int.from_bytes(encoded[i : i + 4], "little", signed=True) for i in range(0, 128, 4)]
    for i in cutlass.range_constexpr(32):
        put(at + 4 * i, words[i])
    inline_ptx(
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [{$r0}], {$r1};",
        read_only_args=[Int32(at), address(tensor, 64 * row)],
    )


@cute.jit
def publish_map(to, at):
    inline_ptx(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [{$r0}], [{$r1}], 128;",
        read_only_args=[Int64(to), Int32(at)],
    )


@cute.jit
def acquire_map(at):
    inline_ptx("fence.proxy.tensormap::generic.acquire.gpu [{$r0}], 128;", read_only_args=[Int64(at)])


@cute.jit
def load_row(to, tensor_map, bar):
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared.b64 _, [{$r2}], 256;\n"
        "{ .reg .b32 Z; mov.b32 Z, 0;\n"
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}, {Z, Z}], [{$r2}]; }",
        read_only_args=[Int32(to), Int64(tensor_map), Int32(bar)],
    )
