"""out[m, n] = alpha[g] * sum over k of x[m, k] (B[g] * SFB[g])[n, k], 1 to some 64 rows a group, on every GPU from sm_80 on."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch_table import WarpMma

from ..common import ptx
from ..common.global_access import global_scalar, store_words
from ..common.select import select
from ..common.shared_access import load_shared
from ..common.versions import SmemAllocator, inline_ptx
from .decode import EXPONENTS, decode_e2m1, decode_e4m3_scales
from .places import STEPS_OF_TURN, Groups, Place, Shares, divide, next_place, turns

WARP_SIZE = 32
# A warp's weight rows: r, r + 32, r + 64, r + 96 for eight consecutive r, whose scales lie beside each other.
BANDS, BAND_ROWS, UNIT_ROWS, OCTET = 4, 32, 32, 8
MMA_M, WORDS = 2, 4
STEP_K, LANE_K = 128, 32
STEP_BYTES, LANE_BYTES = 64, 16
# Of a row of tokens in a step: 16 bytes are eight values.
PIECES, PIECE_BYTES = 16, 16
TOKEN_BYTES = PIECES * PIECE_BYTES
ATOM_ROWS, ATOM_BYTES, ATOM_K = 128, 512, 64
# CTAs whose sums of a tile are on their way at once.
ADDED_AT_ONCE = 4
# Nothing is read from L1 twice.
SMEM_CARVEOUT_PERCENT = 100


@dataclass(frozen=True)
class Variant:
    """What changes the code, beside types.

    Attributes:
        tokens: rows of a tile, a multiple of 8.
        row_warps, k_warps: warps beside each other along the weight rows, and along K.
        ctas_per_sm: that registers must allow.
        skips: whether eights of tokens without rows are not multiplied.
    """

    tokens: int
    row_warps: int
    k_warps: int
    ctas_per_sm: int
    skips: bool = False
    hint: str = ""
    prefetches: bool = False

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.row_warps * self.k_warps * WARP_SIZE

    @property
    def step_k(self) -> int:
        """Of all warps."""
        return STEP_K * self.k_warps

    def to_name(self) -> str:
        """Readable."""
        options = "s" * self.skips + f"h{self.hint}" * bool(self.hint) + "p" * self.prefetches
        return f"t{self.tokens}r{self.row_warps}k{self.k_warps}c{self.ctas_per_sm}{options}"

    def partial_bytes(self, num_cta: int) -> int:
        """Of sums that CTAs hand over."""
        return 2 * num_cta * self.row_warps * UNIT_ROWS * self.tokens * 4

    def counter_bytes(self, num_cta: int) -> int:
        """Of their counters."""
        return num_cta * self.row_warps * 4


@dataclass(frozen=True)
class Operands:
    """Addresses and byte strides Int64, extents Int32."""

    x: Int64
    b: Int64
    sfb: Int64
    sizes: Int64
    x_pitch: Int64
    x_batch: Int64
    b_pitch: Int64
    b_batch: Int64
    sfb_batch: Int64
    m: Int32
    n: Int32
    k: Int32
    count: Int32


@dataclass(frozen=True)
class Output:
    """Where results go, strides in elements, and sums that are handed over."""

    address: Int64
    alpha: Int64
    pitch: Int64
    batch: Int64
    partials: Int64
    counters: Int64


@dataclass(frozen=True)
class Lane:
    """Which warp and lane this is: of the CTA's warps, g and t of lane 4 g + t, and the thread among those of its K."""

    row_warp: Int32
    k_warp: Int32
    lane: Int32
    group: Int32
    quad: Int32
    thread: Int32


class WarpMmaKernel:
    """One compiled variant.

    Warps: ``row_warps`` with 32 weight rows each, times ``k_warps`` with 128 values of K each in a step. All are alike.
    Weights and scales go from global memory to registers, a turn of two steps ahead; tokens to registers two turns ahead, to
    shared memory one turn ahead, where all warps of the same K read them: a barrier a turn.

    Order of K: lane t of a quad has 32 consecutive k of each of its rows in a step, word w eight of them, in pairs (0, 4), (1, 5),
    (2, 6), (3, 7), of which an MMA takes two. Tokens lie in shared memory in that order.

    Order of summation: a warp adds its K in ascending order; warps of other K are added in ascending order in the end, then the
    CTAs that share a tile in ascending order of K, by the one that comes last.

    Shared memory: tokens (BYTE, TOKEN, STEP, STAGE, K_WARP); sums of warps (VECTOR, LANE, ROW_WARP, K_WARP - 1); of groups the
    ends, starts and counts.

    Args:
        form: "one", "ragged", "masked" or "batched".
        variant: how.
        is_bf16: whether tokens are bfloat16, else float16.
        out_dtype: cutlass.Float16, BFloat16 or Float32.
        has_alpha: whether results are multiplied by a factor a group.
        has_fp8_convert: whether the architecture converts e4m3.
        most_groups: room for groups.
        name: what the kernel is called.
        weights: their format.
    """

    def __init__(
        self,
        form: str,
        variant: Variant,
        is_bf16: bool,
        out_dtype: type,
        has_alpha: bool,
        has_fp8_convert: bool,
        most_groups: int,
        name: str,
        weights: BlockFormat,
    ):
        self.form = form
        self.variant = variant
        self.type_name = "bf16" if is_bf16 else "f16"
        self.out_dtype = out_dtype
        self.has_alpha = has_alpha
        self.has_fp8_convert = has_fp8_convert
        self.most_groups = most_groups
        self.name = name
        self.weights = weights
        self.octets = variant.tokens // OCTET
        self.row_threads = variant.row_warps * WARP_SIZE
        self.pieces = max(STEPS_OF_TURN * variant.tokens * PIECES // self.row_threads, 1)
        self.has_idle_threads = self.row_threads > STEPS_OF_TURN * variant.tokens * PIECES
        self.load_opcode = "ld.global.nc.L1::no_allocate" + (f".L2::{variant.hint}B" if variant.hint else "")
        # Float vectors of a lane's sums.
        self.vectors = MMA_M * self.octets
        self.stage_bytes = STEPS_OF_TURN * variant.tokens * TOKEN_BYTES

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launch persistent CTAs.

        Args:
            table: Int64 in host memory: ``launch_table.WarpMma``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(WarpMma)))
        wide = ("X", "B", "SFB", "SIZES", "X_PITCH", "X_BATCH", "B_PITCH", "B_BATCH", "SFB_BATCH")
        operands = Operands(
            *(t[WarpMma[name]] for name in wide), *(Int32(t[WarpMma[name]]) for name in ("M", "N", "K", "GROUPS"))
        )
        output = Output(
            *(t[WarpMma[name]] for name in ("OUT", "ALPHA", "OUT_PITCH", "OUT_BATCH", "PARTIALS", "COUNTERS"))
        )
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, output).launch(
            grid=(Int32(t[WarpMma.NUM_CTA]), 1, 1),
            block=(self.variant.threads, 1, 1),
            min_blocks_per_mp=self.variant.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: Operands, output: Output):
        """Find the CTA's share, and go through it."""
        variant = self.variant
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP_SIZE), tidx % WARP_SIZE
        smem = SmemAllocator()
        room = STEPS_OF_TURN * self.stage_bytes * variant.k_warps
        tokens = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(room), 128)
        handed = None
        if cutlass.const_expr(variant.k_warps > 1):
            size = (variant.k_warps - 1) * variant.row_warps * self.vectors * WARP_SIZE * 4
            handed = smem.allocate_tensor(Float32, cute.make_layout(size), 128)
        groups = self.find_groups(operands, smem, tidx)
        shares_tile = cute.ceil_div(operands.k, variant.step_k)
        cta, num_cta = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        total = groups.tiles() * shares_tile
        base = divide(total, num_cta)
        shares = Shares(shares_tile, base, total - base * num_cta)
        me = Lane(
            warp % variant.row_warps,
            warp // variant.row_warps,
            lane,
            lane // 4,
            lane % 4,
            tidx % self.row_threads,
        )
        if shares.first(cta) < shares.first(cta + 1):
            self.work(operands, output, groups, shares, me, tokens.iterator.toint(), handed)

    @cute.jit
    def find_groups(self, operands: Operands, smem: Any, tidx: Int32) -> Groups:
        """Count the tiles of all groups."""
        variant = self.variant
        ends = starts = counts = None
        if cutlass.const_expr(self.form != "one"):
            room = self.most_groups
            ends, starts, counts = (smem.allocate_tensor(Int32, cute.make_layout(room), 16) for _ in range(3))
            self.scan_groups(operands, ends, starts, counts, tidx)
        unit_tiles = cute.ceil_div(cute.ceil_div(operands.n, ATOM_ROWS) * BANDS, variant.row_warps)
        return Groups(
            self.form, ends, starts, counts, operands.m, operands.count, variant.row_warps, unit_tiles, variant.tokens
        )

    @cute.jit
    def scan_groups(self, operands: Operands, ends: Any, starts: Any, counts: Any, tidx: Int32):
        """Fill in what is known of groups: all threads read, a warp scans."""
        sizes = cute.make_tensor(
            cute.make_ptr(Int32, operands.sizes, cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout(operands.count),
        )
        for group in cutlass.range(tidx, operands.count, self.variant.threads, unroll=1):
            start, rows = Int32(0), operands.m
            if cutlass.const_expr(self.form == "ragged"):
                if group > 0:
                    start = cutlass.max(sizes[group - 1], 0)
                rows = cutlass.min(sizes[group], operands.m) - start
            elif cutlass.const_expr(self.form == "masked"):
                rows = cutlass.min(sizes[group], operands.m)
            rows = cutlass.max(rows, 0)
            starts[group], counts[group] = start, rows
            ends[group] = cute.ceil_div(rows, self.variant.tokens)
        cute.arch.sync_threads()
        if tidx < WARP_SIZE:
            before = Int32(0)
            for first in cutlass.range(0, operands.count, WARP_SIZE, unroll=1):
                group = first + tidx
                own = Int32(0)
                if group < operands.count:
                    own = ends[group]
                total = before + _inclusive_sum(own, tidx)
                if group < operands.count:
                    ends[group] = total
                before = cute.arch.shuffle_sync(total, WARP_SIZE - 1)
        cute.arch.sync_threads()

    @cute.jit
    def work(
        self,
        operands: Operands,
        output: Output,
        groups: Groups,
        shares: Shares,
        me: Lane,
        tokens: Int32,
        handed: Any,
    ):
        """Go through the CTA's steps."""
        cta = cute.arch.block_idx()[0]
        first, stop, steps = shares.first(cta), shares.first(cta + 1), shares.steps
        tile = divide(first, steps)
        begin = first - tile * steps
        now = groups.place(tile, begin, cutlass.min(steps, stop - tile * steps))
        ahead = next_place(now, groups, steps, stop)
        beyond = next_place(ahead, groups, steps, stop)
        first_tile, first_begin = tile, begin

        acc = cute.make_rmem_tensor((4, MMA_M, self.octets), Float32)
        acc.fill(0.0)
        # (WORD, BAND, STEP), (BAND, STEP)
        weights = cute.make_rmem_tensor((WORDS, BANDS, STEPS_OF_TURN), Uint32)
        scales = cute.make_rmem_tensor((BANDS, STEPS_OF_TURN), Uint32)
        x = cute.make_rmem_tensor((4, self.pieces), Uint32)
        stage = tokens + me.k_warp * (STEPS_OF_TURN * self.stage_bytes)

        self.load_tokens(x, operands, now, me)
        for half in cutlass.range_constexpr(STEPS_OF_TURN):
            self.load_weights(weights, scales, operands, now, me, half)
        self.store_tokens(x, stage, me)
        self.load_tokens(x, operands, ahead, me)
        self.wait(me)
        for turn in cutlass.range(turns(first, stop, steps), unroll=1):
            here, there = turn % 2 * self.stage_bytes, (turn + 1) % 2 * self.stage_bytes
            self.store_tokens(x, stage + there, me)
            self.load_tokens(x, operands, beyond, me)
            if cutlass.const_expr(self.variant.prefetches):
                self.prefetch_weights(operands, beyond, me)
            for half in cutlass.range_constexpr(STEPS_OF_TURN):
                self.multiply(acc, weights, scales, stage + here, now.rows, me, half)
                self.load_weights(weights, scales, operands, ahead, me, half)
            self.wait(me)
            if now.step + STEPS_OF_TURN >= now.end:
                begin = select(now.tile == first_tile, first_begin, Int32(0))
                self.finish(acc, operands, output, shares, now, begin, me, handed)
                acc.fill(0.0)
            now, ahead, beyond = ahead, beyond, next_place(beyond, groups, steps, stop)

    @cute.jit
    def wait(self, me: Lane):
        """For the warps of the same K."""
        cute.arch.barrier(barrier_id=me.k_warp + 1, number_of_threads=self.row_threads)

    @cute.jit
    def load_tokens(self, x: Any, operands: Operands, place: Place, me: Lane):
        """A thread's pieces of a turn's tokens; zeros where there are none."""
        tokens = self.variant.tokens
        batch = Int64(0)
        if cutlass.const_expr(self.form in ("masked", "batched")):
            batch = Int64(place.group) * operands.x_batch
        for i in cutlass.range_constexpr(self.pieces):
            half, token, piece = self.piece_of(me, i)
            k_piece = ((place.step + half) * self.variant.k_warps + me.k_warp) * PIECES + piece
            is_there = (place.step + half < place.end) & (token < place.rows) & (k_piece * 8 < operands.k)
            if cutlass.const_expr(self.has_idle_threads):
                is_there = is_there & (half < STEPS_OF_TURN)
            address = (
                operands.x + batch + Int64(place.row + token) * operands.x_pitch + Int64(k_piece * PIECE_BYTES)
            )
            words = load_or_zeros(address, is_there, "ld.global.nc")
            for w in cutlass.range_constexpr(4):
                x[w, i] = words[w]

    def piece_of(self, me: Lane, i: int) -> tuple:
        """Step of the turn, token, and place in its row, of a thread's piece."""
        index = me.thread + i * self.row_threads
        return (
            index // (self.variant.tokens * PIECES),
            index // PIECES % self.variant.tokens,
            index % PIECES,
        )

    @cute.jit
    def store_tokens(self, x: Any, stage: Int32, me: Lane):
        """Have tokens in shared memory, in pairs of values four apart."""
        for i in cutlass.range_constexpr(self.pieces):
            half, token, piece = self.piece_of(me, i)
            words = [x[w, i] for w in range(4)]
            pairs = [
                ptx.prmt(words[j], words[j + 2], Uint32(selector))
                for j in range(2)
                for selector in (0x5410, 0x7632)
            ]
            address = stage + half * (self.variant.tokens * TOKEN_BYTES) + token * TOKEN_BYTES
            address += swizzled(token, piece) * PIECE_BYTES
            inline_ptx(
                "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[address, *pairs],
                predicate=half < STEPS_OF_TURN if self.has_idle_threads else None,
            )

    @cute.jit
    def load_weights(
        self,
        weights: Any,
        scales: Any,
        operands: Operands,
        place: Place,
        me: Lane,
        half: cutlass.Constexpr,
    ):
        """A lane's words of a step, of four rows, and their scales; zeros where there are none."""
        unit = place.unit + me.row_warp
        atom, first = unit // BANDS, unit % BANDS * OCTET + me.group
        k_step = (place.step + half) * self.variant.k_warps + me.k_warp
        k = k_step * STEP_K + me.quad * LANE_K
        is_inside = (place.step + half < place.end) & (k < operands.k)
        row = atom * ATOM_ROWS + first
        address = (
            operands.b
            + Int64(place.group) * operands.b_batch
            + Int64(row) * operands.b_pitch
            + Int64(k_step * STEP_BYTES + me.quad * LANE_BYTES)
        )
        for band in cutlass.range_constexpr(BANDS):
            is_there = is_inside & (row + band * BAND_ROWS < operands.n)
            words = load_or_zeros(
                address + band * BAND_ROWS * operands.b_pitch, is_there, self.load_opcode
            )
            for w in cutlass.range_constexpr(WORDS):
                weights[w, band, half] = words[w]
        atoms_k = cute.ceil_div(operands.k, ATOM_K)
        scale_address = (
            operands.sfb
            + Int64(place.group) * operands.sfb_batch
            + Int64(atom * atoms_k + k // ATOM_K) * ATOM_BYTES
            + Int64(first * 16)
        )
        words = load_or_zeros(scale_address, is_inside & (row < operands.n), "ld.global.nc")
        for band in cutlass.range_constexpr(BANDS):
            scales[band, half] = words[band]

    @cute.jit
    def prefetch_weights(self, operands: Operands, place: Place, me: Lane):
        """Ask for a turn's weights, a row a lane, into L2."""
        unit = place.unit + me.row_warp
        row = unit // BANDS * ATOM_ROWS + unit % BANDS * OCTET + me.lane % OCTET + me.lane // OCTET * BAND_ROWS
        step = place.step * self.variant.k_warps + me.k_warp
        is_there = (place.step < place.end) & (row < operands.n)
        address = (
            operands.b
            + Int64(place.group) * operands.b_batch
            + Int64(row) * operands.b_pitch
            + Int64(step * STEP_BYTES)
        )
        inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address], predicate=is_there)

    @cute.jit
    def multiply(
        self,
        acc: Any,
        weights: Any,
        scales: Any,
        stage: Int32,
        rows: Int32,
        me: Lane,
        half: cutlass.Constexpr,
    ):
        """Add a step."""
        shift = Uint32(me.quad % 2 * 16)
        factors = [
            decode_e4m3_scales(scales[band, half] >> shift, self.type_name, self.has_fp8_convert)
            for band in range(BANDS)
        ]
        base = stage + half * (self.variant.tokens * TOKEN_BYTES) + me.group * TOKEN_BYTES
        for w in cutlass.range_constexpr(WORDS):
            pairs = [
                decode_e2m1(weights[w, band, half], factors[band][w // 2], self.type_name) for band in range(BANDS)
            ]
            piece = swizzled(me.group, me.quad * WORDS + w) * PIECE_BYTES
            for j in cutlass.range_constexpr(self.octets):
                if cutlass.const_expr(self.variant.skips and j > 0):
                    if rows > j * OCTET:
                        self.multiply_octet(acc, pairs, base + piece + j * OCTET * TOKEN_BYTES, j)
                else:
                    self.multiply_octet(acc, pairs, base + piece + j * OCTET * TOKEN_BYTES, j)

    @cute.jit
    def multiply_octet(self, acc: Any, pairs: list, address: Int32, j: cutlass.Constexpr):
        """Eight tokens."""
        x = load_shared(address, 4)
        for i in cutlass.range_constexpr(MMA_M):
            low, high = pairs[2 * i], pairs[2 * i + 1]
            for first in (0, 2):
                a = [low[first], high[first], low[first + 1], high[first + 1]]
                c = [acc[r, i, j] for r in range(4)]
                for r, value in enumerate(ptx.mma_m16n8k16(a, x[first : first + 2], c, self.type_name)):
                    acc[r, i, j] = value

    @cute.jit
    def finish(
        self,
        acc: Any,
        operands: Operands,
        output: Output,
        shares: Shares,
        place: Place,
        begin: Int32,
        me: Lane,
        handed: Any,
    ):
        """Add up warps, then CTAs, and store."""
        if cutlass.const_expr(self.variant.k_warps > 1):
            self.add_warps(acc, me, handed)
        if me.k_warp == 0:
            is_whole = (begin == 0) & (place.end == shares.steps)
            is_last = Boolean(True)
            if not is_whole:
                is_last = self.add_ctas(acc, output, shares, place, begin, me)
            if is_last:
                self.store(acc, operands, output, place, me)

    @cute.jit
    def add_warps(self, acc: Any, me: Lane, handed: Any):
        """Sums of the warps of other K, to those of the first."""
        span = self.variant.row_warps * self.vectors * WARP_SIZE * 4
        own = (me.row_warp * self.vectors * WARP_SIZE + me.lane) * 4
        if me.k_warp > 0:
            base = (me.k_warp - 1) * span + own
            for v in cutlass.range_constexpr(self.vectors):
                for r in cutlass.range_constexpr(4):
                    handed[base + v * (WARP_SIZE * 4) + r] = acc[r, v % MMA_M, v // MMA_M]
        cute.arch.sync_threads()
        if me.k_warp == 0:
            for other in cutlass.range_constexpr(self.variant.k_warps - 1):
                for v in cutlass.range_constexpr(self.vectors):
                    for r in cutlass.range_constexpr(4):
                        place = other * span + own + v * (WARP_SIZE * 4) + r
                        acc[r, v % MMA_M, v // MMA_M] = acc[r, v % MMA_M, v // MMA_M] + handed[place]
        cute.arch.sync_threads()

    @cute.jit
    def add_ctas(self, acc: Any, output: Output, shares: Shares, place: Place, begin: Int32, me: Lane):
        """Leave sums for the CTA that is last to come here; whether that is this one, which then has all."""
        first_step = place.tile * shares.steps
        first, last = shares.owner(first_step), shares.owner(first_step + shares.steps - 1)
        cta = cute.arch.block_idx()[0]
        unit_bytes = self.vectors * WARP_SIZE * 16
        base = output.partials + Int64(me.row_warp * unit_bytes + me.lane * 16)
        span = self.variant.row_warps * unit_bytes
        # A CTA may have the end of one tile and the beginning of another.
        own = base + Int64(2 * cta + select(begin == 0, Int32(1), Int32(0))) * span
        for v in cutlass.range_constexpr(self.vectors):
            words = [ptx.bits_of(acc[r, v % MMA_M, v // MMA_M]) for r in range(4)]
            store_words(own + v * (WARP_SIZE * 16), words)
        counter = output.counters + Int64(first * self.variant.row_warps + me.row_warp) * 4
        cute.arch.sync_warp()
        before = Int32(0)
        if me.lane == 0:
            before = inline_ptx(
                "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1;",
                write_only_types=[Int32],
                read_only_args=[counter],
            )
        cute.arch.sync_warp()
        is_last = cute.arch.shuffle_sync(before, 0) == last - first
        if is_last:
            if me.lane == 0:
                global_scalar(Int32, counter)[0] = Int32(0)
            acc.fill(0.0)
            for batch in cutlass.range(first, last + 1, ADDED_AT_ONCE, unroll=1):
                loaded = []
                for i in cutlass.range_constexpr(ADDED_AT_ONCE):
                    other = batch + i
                    source = base + Int64(2 * other + select(other == first, Int32(1), Int32(0))) * span
                    there = other <= last
                    loaded.append(
                        [load_or_zeros(source + v * WARP_SIZE * 16, there, "ld.global") for v in range(self.vectors)]
                    )
                for i in cutlass.range_constexpr(ADDED_AT_ONCE):
                    for v in cutlass.range_constexpr(self.vectors):
                        for r in cutlass.range_constexpr(4):
                            more = ptx.float_of(loaded[i][v][r])
                            acc[r, v % MMA_M, v // MMA_M] = acc[r, v % MMA_M, v // MMA_M] + more
        return is_last

    @cute.jit
    def store(self, acc: Any, operands: Operands, output: Output, place: Place, me: Lane):
        """Results of a warp's 32 weight rows."""
        unit = place.unit + me.row_warp
        first = unit // BANDS * ATOM_ROWS + unit % BANDS * OCTET
        factor = Float32(2.0 ** EXPONENTS[self.type_name])
        if cutlass.const_expr(self.has_alpha):
            factor = factor * global_scalar(Float32, output.alpha + Int64(place.group) * 4)[0]
        batch = Int64(0)
        if cutlass.const_expr(self.form in ("masked", "batched")):
            batch = Int64(place.group) * output.batch
        is_wide = self.out_dtype.width == 32
        nbytes = self.out_dtype.width // 8
        for j in cutlass.range_constexpr(self.octets):
            # A transposed matrix of pairs has a token in each row of lanes, and two weight rows in each lane.
            token = j * OCTET + me.group
            column = first + 2 * me.quad
            address = output.address + (batch + Int64(place.row + token) * output.pitch + column) * nbytes
            for i in cutlass.range_constexpr(MMA_M):
                for r in cutlass.range_constexpr(2):
                    values = [acc[2 * r + c, i, j] * factor for c in range(2)]
                    band = (2 * i + r) * BAND_ROWS
                    if cutlass.const_expr(is_wide):
                        words = transposed_floats(values)
                    else:
                        words = [ptx.transpose_8x8(ptx.pack_16x2(*values, self.out_dtype is cutlass.BFloat16))]
                    is_there = (token < place.rows) & (column + band < operands.n)
                    store_words(address + band * nbytes, words, predicate=is_there)


def transposed_floats(values: list) -> list:
    """Two floats of a lane, as ``ptx.transpose_8x8`` moves two halves: of their upper halves and of their lower ones."""
    bits = [ptx.bits_of(value) for value in values]
    lower, upper = (ptx.transpose_8x8(ptx.prmt(*bits, Uint32(selector))) for selector in (0x5410, 0x7632))
    return [ptx.prmt(lower, upper, Uint32(selector)) for selector in (0x5410, 0x7632)]


def swizzled(token: Int32, piece: Int32) -> Int32:
    """Where in its row a piece of a token lies: eight lanes that read at once take all banks."""
    return piece ^ (piece // 8 % 2 * 2) ^ (token % 2)


def load_or_zeros(address: Int64, is_there: Boolean, opcode: str) -> list:
    """Four words, or zeros."""
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(4))
    return list(
        inline_ptx(
            f"{{ .reg .pred p; .reg .b32 t; mov.b32 t, {{$r1}}; setp.ne.b32 p, t, 0; {zeros} "
            f"@p {opcode}.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}]; }}",
            write_only_types=[Uint32] * 4,
            read_only_args=[address, select(is_there, Int32(1), Int32(0))],
        )
    )


@cute.jit
def _inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """Over the lanes of a warp."""
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        value = value + other if lane >= (1 << step) else value
    return value
