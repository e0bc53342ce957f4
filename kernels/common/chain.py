"""Groups of one launch that read each other's results: layer after layer, without leaving the kernel.

A counter a layer counts what has been stored: whoever has stored a part of a tile adds 1, and whoever is about to load
a tile waits until the layer before is complete. Stores go through the generic proxy and TMA reads through the async one,
so both sides fence. All CTAs of the grid have to run at the same time; each takes its tiles in ascending order, so the
tile that somebody waits for is always under way. The last CTA to finish sets every counter to zero for the next launch.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .global_access import load_acquire, store_word
from .versions import inline_ptx

COUNTER_BYTES = 4


@dataclass(frozen=True)
class Chain:
    """Counters in global memory, zero between launches.

    Attributes:
        counters: address of int32 [num_layers]: parts that are stored, of the last layer CTAs that have finished.
        num_layers: groups of the launch.
        num_parts: parts of a layer: tiles times the warps that store one.
    """

    counters: Int64
    num_layers: int
    num_parts: Int32

    @cute.jit
    def wait_for_layer_before(self, layer: Int32):
        """Before the layer's first load of its input: everything that the layer before stores has been stored."""
        if layer > 0:
            counter = self.counters + (layer - 1) * COUNTER_BYTES
            stored = load_acquire(counter)
            while stored < self.num_parts:
                stored = load_acquire(counter)
            _fence_proxies()

    @cute.jit
    def signal_stored(self, layer: Int32):
        """The calling warp has stored its part of a tile. Nobody waits for the last layer."""
        if layer < self.num_layers - 1:
            _fence_proxies()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                inline_ptx(
                    "red.release.gpu.global.add.u32 [{$r0}], 1;",
                    read_only_args=[self.counters + layer * COUNTER_BYTES],
                )

    @cute.jit
    def leave(self, num_cta: Int32):
        """One thread of every CTA, when it has stored its last tile. The last one resets: all counts were waited for."""
        finished = self.counters + (self.num_layers - 1) * COUNTER_BYTES
        before = inline_ptx(
            "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1;",
            write_only_types=[Uint32],
            read_only_args=[finished],
        )
        if before == num_cta - 1:
            for layer in range(self.num_layers):
                store_word(self.counters + layer * COUNTER_BYTES, Uint32(0))


def _fence_proxies() -> None:
    inline_ptx("fence.proxy.async.global;")
