"""Groups of one launch that read each other's results: one layer after another, without leaving the kernel.

One counter per layer counts stored parts of tiles. A warp adds 1 after storing its part; before loading a tile, a warp waits
until the previous layer is complete. Stores use the generic proxy and TMA reads use the async proxy, so both sides fence. All
CTAs of the grid must be resident. Each takes its tiles in ascending order, so a tile that somebody waits for is always being
computed. The last CTA to finish resets all counters for the next launch.
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
        counters: address of int32 [num_layers]: stored parts per layer; for the last layer, CTAs that have finished.
        num_layers: groups of the launch.
        num_parts: parts per layer: tiles times the warps that store one.
    """

    counters: Int64
    num_layers: int
    num_parts: Int32

    @cute.jit
    def wait_for_layer_before(self, layer: Int32):
        """Waits until the previous layer has stored everything; called before a layer's first load of its input."""
        if layer > 0:
            counter = self.counters + (layer - 1) * COUNTER_BYTES
            stored = load_acquire(counter)
            while stored < self.num_parts:
                stored = load_acquire(counter)
            _fence_proxies()

    @cute.jit
    def signal_stored(self, layer: Int32):
        """Signals that the calling warp has stored its part of a tile. Nobody waits for the last layer."""
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
        """Counts a finished CTA; called by one thread per CTA after its last tile. The last CTA resets all counters."""
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
