"""Weight-only grouped GEMM for few rows per group, on every GPU from sm_80 on: 16-bit tokens x quantized weights.

For every group g: C = alpha[g] * A @ (B * SFB)^T  with A (M_g, K_g) of 16 bits, K-major, C fp16, bf16 or fp32; dual GEMMs,
formats and four forms are those of ``..sm90.weight_only``. In a fifth form, "routed", a group is one token's choice of an
expert: it has one row, and an id on the device selects its weights. K is a multiple of 32.

All warps have the same role. A CTA has ``Warps.rows`` warps along weight rows times ``Warps.k`` along K. A warp multiplies 32
weight rows, the 16-row operand of ``mma.sync.m16n8k16``, by all tokens of a tile, the 8-column operand. CTAs are persistent, and
none waits for another.

A turn is two steps, each with 64 bytes of every weight row of a warp. Weights and scales are loaded from global memory to
registers one turn ahead. Tokens are loaded to registers two turns ahead, and stored to shared memory one turn ahead. All warps
with the same K read them there, with one barrier per turn.

Order of K: in a step, a lane has 16 consecutive bytes of each of its rows, and their values in the order of ``decode``. Tokens in
shared memory have the same order.

Order of summation: a warp adds up its part of K in ascending order. Then the sums of the warps with the same rows are added, then
those of the CTAs that share a tile (``sums``).

Shared memory: tokens (BYTE, STAGE, K_WARP); sums of warps; entries of groups (``places.Groups``).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32

from nvfp4_cute.formats.block_format import BFLOAT16, FP8_128x128
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.planning.arch.warp_mma import STEPS_OF_TURN, WARP_SIZE, ctas_per_sm, warps_of

from ..common import ptx
from ..common.fp32_scales import SCALE_BYTES, fma
from ..common.global_access import KEEP, load_words
from ..common.group_table import select_slot
from ..common.launch_args import read_operands, read_outputs
from ..common.output_kind import OutputKind
from ..common.output_table import OutputTable
from ..common.select import select
from ..common.shared_access import load_shared
from ..common.variant import GroupedGemmVariant
from ..common.versions import SmemAllocator
from .decode import PIECE_K, Decoding
from .operands import BANDS, OCTET, PIECE_BYTES, VECTOR_WORDS, Lane, Layout, Loads, Tokens, Weights, swizzled
from .places import Extents, Groups, Place, Shares, Sizes
from .results import Results
from .sums import MMA_M, Sums

TOKEN_BYTES = 2
# Only scales are read from L1 more than once.
SMEM_CARVEOUT_PERCENT = 100
CTA_BARRIER = 1


class WarpMmaGemm(GroupedGemmVariant):
    """One compiled variant, of a config that ``planning.arch.warp_mma`` accepts."""

    def __init__(self, **options):
        super().__init__(**options)
        self.decoding = Decoding(self.formats[1], self.formats[0] == BFLOAT16)
        self.kind = OutputKind(self.out_dtype, False, self.activation, self.weight_layout)
        self.layout = Layout(None if self.activation is None else self.weight_layout)
        self.tokens = self.config.cta_tile_shape_mnk[1]
        self.warps = warps_of(self.config)
        self.octets = self.tokens // OCTET

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches persistent CTAs.

        Args:
            table: Int64 in host memory, a header row and one row per slot: ``launch_table``.
            stream: CUstream.
        """
        # (COLUMN, ROW)
        values = cute.make_tensor(table, cute.make_layout((NUM_COLUMNS, 1 + self.num_groups)))
        rows = range(1, 1 + self.num_groups)
        weights, (tokens,) = read_operands(values, rows, self.kind.num_b, True)
        outputs = read_outputs(
            values,
            rows,
            self.form,
            self.kind.num_products if self.has_alpha else 0,
            has_limit=self.has_limit,
            bias_dtype=self.bias_dtype,
        )
        bits = self.decoding.format.element.bits
        operands = [
            Weights(
                [view.data for view in views],
                [view.scale for view in views],
                [view.pitch * bits // 8 for view in views],
                views[0].batch_pitch * bits // 8,
                views[0].sf_batch_blocks,
            )
            for views in weights
        ]
        is_routed = self.form == "routed"
        rows_of = Tokens(
            [view.data for view in tokens],
            [view.pitch * TOKEN_BYTES for view in tokens],
            tokens[0].batch_pitch * TOKEN_BYTES,
            [Int32(values[Header.CHOICES, 0])] if is_routed else [],
        )
        first_tiles = [Int32(values[Group.TILE_OFFSET, row]) for row in rows]
        extents = Extents(
            m=[view.rows for view in tokens],
            n=[view.rows for view in weights[0]],
            k=[view.k for view in weights[0]],
            tile_offsets=[*first_tiles, Int32(values[Header.NUM_TILES, 0])] if self.form == "list" else [],
            sizes=cute.make_ptr(
                Int32, values[Header.GROUP_SIZES, 0], cute.AddressSpace.gmem, assumed_align=4
            ),
            count=Int32(self.num_groups if self.form == "list" else values[Header.NUM_GROUPS, 0]),
            experts=[
                Int32(values[Header.FIRST_EXPERT, 0]),
                weights[0][0].batch,
                Int32(values[Header.ID_WORDS, 0]),
            ]
            if is_routed
            else [],
        )
        self.kernel.set_name_prefix(self.name)
        memory = values[Header.COUNTERS, 0], values[Header.WORKSPACE, 0]
        self.kernel(operands, rows_of, extents, outputs, memory).launch(
            grid=(Int32(values[Header.NUM_CTA, 0]), 1, 1),
            block=(self.warps.threads, 1, 1),
            min_blocks_per_mp=ctas_per_sm(self.config),
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, weights: list, rows: Tokens, extents: Extents, outputs: OutputTable, memory: tuple):
        """Computes the CTA's share of all positions. memory: addresses of the counters and of the workspace."""
        tidx, _, _ = cute.arch.thread_idx()
        smem, warps = SmemAllocator(), self.warps
        settings = (
            self.layout,
            self.decoding,
            warps,
            extents.n,
            extents.k,
            self.form,
            self.tokens,
        )
        loads = Loads(weights, rows, *settings)
        tokens = smem.allocate_tensor(
            Uint8, cute.make_layout(2 * loads.stage_bytes * warps.k), 128
        ).iterator.toint()
        vectors, shared = MMA_M * self.octets, None
        if cutlass.const_expr(warps.k > 1):
            layout = cute.make_layout((4, WARP_SIZE, vectors, warps.rows, warps.k - 1))
            shared = smem.allocate_tensor(Float32, layout, 128)
        step_k = self.decoding.step_k * warps.k
        sizes = Sizes(extents, self.form, self.layout.atom_units, warps.rows, self.tokens, step_k)
        groups = Groups.allocate(sizes, smem)
        groups.find(tidx, warps.threads)
        shares = Shares.of(groups.total(), cute.arch.grid_dim()[0])
        cta = cute.arch.block_idx()[0]
        sums = Sums(*memory, shared, warps, vectors)
        results = Results(outputs, self.kind.dtype, self.kind.activation, loads)
        lane = Lane.of(tidx, warps)
        first, stop = shares.first(cta), shares.first(cta + 1)
        # Without stream-K, the CTA whose share contains a tile's first position computes the whole tile.
        if cutlass.const_expr(not self.config.stream_k):
            first, stop = groups.next_tile(first), groups.next_tile(stop)
        if first < stop:
            self.run(first, stop, loads, groups, shares, sums, results, lane, tokens)

    @cute.jit
    def run(
        self,
        first: Int32,
        stop: Int32,
        loads: Loads,
        groups: Groups,
        shares: Shares,
        sums: Sums,
        results: Results,
        lane: Lane,
        tokens: Int32,
    ):
        """Computes the CTA's steps, from position ``first`` up to ``stop``."""
        now = groups.place(first, stop)
        ahead = groups.next(now, stop)
        beyond = groups.next(ahead, stop)
        begin = now.step

        acc = cute.make_rmem_tensor((4, MMA_M, self.octets), Float32)
        acc.fill(0.0)
        # (WORD, BAND, STEP), (BAND, STEP), (WORD, PIECE)
        words = cute.make_rmem_tensor((VECTOR_WORDS, BANDS, STEPS_OF_TURN), Uint32)
        scales = cute.make_rmem_tensor((BANDS, STEPS_OF_TURN), Uint32)
        x = cute.make_rmem_tensor((VECTOR_WORDS, loads.thread_pieces), Uint32)
        stage, other_stage = Int32(0), Int32(loads.stage_bytes)
        base = tokens + lane.k_warp * (2 * loads.stage_bytes)

        loads.load_tokens(x, now, lane)
        for half in cutlass.range_constexpr(STEPS_OF_TURN):
            loads.load_weights(words, scales, now, lane, half)
        loads.store_tokens(x, base, lane)
        loads.load_tokens(x, ahead, lane)
        self.wait(lane)
        while now.step < now.end:
            Loads.store_tokens(loads, x, base + other_stage, lane)
            Loads.load_tokens(loads, x, beyond, lane)
            for half in cutlass.range_constexpr(STEPS_OF_TURN):
                self.multiply(acc, words, scales, loads, base + stage, now, lane, half)
                Loads.load_weights(loads, words, scales, ahead, lane, half)
            self.wait(lane)
            if now.step + STEPS_OF_TURN >= now.end:
                self.finish(acc, shares, sums, results, now, begin, lane)
                acc.fill(0.0)
                begin = Int32(0)
            now, ahead, beyond = ahead, beyond, Groups.next(groups, beyond, stop)
            stage, other_stage = other_stage, stage

    def wait(self, lane: Lane):
        """Waits at the barrier of the warps with the same K."""
        cute.arch.barrier(barrier_id=CTA_BARRIER + lane.k_warp, number_of_threads=self.warps.rows * WARP_SIZE)

    @cute.jit
    def multiply(
        self,
        acc: Any,
        words: Any,
        scales: Any,
        loads: Loads,
        stage: Int32,
        place: Place,
        lane: Lane,
        half: cutlass.Constexpr,
    ):
        """Adds the products of a step to ``acc``."""
        decoding = self.decoding
        first_k = loads.k_step(place, lane, half) * decoding.step_k + lane.quad * decoding.lane_k
        codes = [None] * BANDS
        if cutlass.const_expr(decoding.format.scale_layout == "blocked"):
            codes = [scales[band, half] for band in range(BANDS)]
        factors = [decoding.scales(codes[band], first_k) for band in range(BANDS)]
        products = acc
        if cutlass.const_expr(decoding.promotes):
            products = cute.make_rmem_tensor(acc.shape, Float32)
            products.fill(0.0)
        pieces = decoding.lane_k // PIECE_K
        row = stage + (half * self.tokens + lane.group) * loads.row_bytes
        for p in cutlass.range_constexpr(pieces):
            first = p * decoding.words
            pairs = [
                decoding.pairs(
                    [words[w, band, half] for w in range(first, first + decoding.words)], factors[band][p]
                )
                for band in range(BANDS)
            ]
            piece = row + swizzled(lane.group, lane.quad * pieces + p) * PIECE_BYTES
            self.multiply_octet(products, pairs, piece, 0)
            for j in cutlass.range_constexpr(1, self.octets):
                # Skips octets without tokens: a tile may have fewer rows than it has room for.
                if place.rows > j * OCTET:
                    self.multiply_octet(products, pairs, piece + j * OCTET * loads.row_bytes, j)
        if cutlass.const_expr(decoding.promotes):
            self.promote(acc, products, loads, place, lane, half)

    @cute.jit
    def multiply_octet(self, acc: Any, pairs: list, address: Int32, j: cutlass.Constexpr):
        """Multiplies eight tokens by two times 16 weight rows, along eight values of K per lane."""
        x = load_shared(address, VECTOR_WORDS)
        for i in cutlass.range_constexpr(MMA_M):
            low, high = pairs[2 * i], pairs[2 * i + 1]
            for first in (0, 2):
                a = [low[first], high[first], low[first + 1], high[first + 1]]
                c = [acc[r, i, j] for r in range(4)]
                for r, value in enumerate(
                    ptx.mma_m16n8k16(a, x[first : first + 2], c, self.decoding.type_name)
                ):
                    acc[r, i, j] = value

    @cute.jit
    def promote(
        self, acc: Any, products: Any, loads: Loads, place: Place, lane: Lane, half: cutlass.Constexpr
    ):
        """Adds the products of a step, times the scale of their 128 x 128 weights, to ``acc``."""
        slot, weights = place.slot, loads.weights[0]
        n, k = select_slot(loads.n, slot), select_slot(loads.k, slot)
        tiles_k = cute.ceil_div(k, FP8_128x128.block_k)
        block = cutlass.min(
            (place.unit + lane.row_warp) // BANDS, cute.ceil_div(n, FP8_128x128.block_rows) - 1
        )
        first_k = loads.k_step(place, lane, half) * self.decoding.step_k
        row = (loads.batch(place) * weights.scale_pitch + block) * tiles_k
        index = row + cutlass.min(first_k // FP8_128x128.block_k, tiles_k - 1)
        word = load_words(select_slot(weights.scale, slot) + index * SCALE_BYTES, 1, KEEP)[0]
        # A step beyond the end has sums of 0; the scale that would be loaded for it may be infinite, and 0 * inf is NaN.
        is_there = place.step + half < place.end
        factor = ptx.float_of(select(is_there, word, Uint32(0)))
        for j in cutlass.range_constexpr(self.octets):
            for i in cutlass.range_constexpr(MMA_M):
                for r in cutlass.range_constexpr(4):
                    acc[r, i, j] = fma(products[r, i, j], factor, acc[r, i, j])

    @cute.jit
    def finish(
        self,
        acc: Any,
        shares: Shares,
        sums: Sums,
        results: Results,
        place: Place,
        begin: Int32,
        lane: Lane,
    ):
        """Adds up the tile's partial sums of warps and CTAs, and stores the results."""
        if cutlass.const_expr(self.warps.k > 1):
            sums.add_warps(acc, lane)
        if lane.k_warp == 0:
            is_complete = (begin == 0) & (place.end == place.steps)
            if cutlass.const_expr(self.config.stream_k):
                if not is_complete:
                    is_complete = Sums.add_ctas(sums, acc, shares, place, begin, lane)
            if is_complete:
                Results.store(results, acc, place, lane)
