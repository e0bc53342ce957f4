"""Routing: the experts of each token, and their weights. One warp per token; every operation is one float32 operation.

logits (tokens, experts) fp32, fp16 or bf16; ids int32 and weights fp32 (tokens, top_k). Lane e % 32 holds expert e. The
choice compares integers in the order of the numbers: one instruction finds the largest of a warp, and among equal ones the
lowest id wins. 0 stands for NaN and for missing experts, which cannot be chosen.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.launch_table import Route
from nvfp4_cute.planning.arch.simt import ROUTE_WARPS, WARP_SIZE

from ..common import ptx
from ..common.global_access import global_scalar
from ..common.launch_record import read_record
from ..common.select import select
from .silu import exp_minus, sigmoid
from .softplus import sqrt_softplus

LARGEST = 3.4028234663852886e38
# Avoids 0 / 0 if all scores are zero, and does not change any other sum.
TINY = 1e-20
SIGN = 0x80000000
NO_ID = 0x7FFFFFFF


@dataclass(frozen=True)
class RouteOperands:
    """Addresses and the byte pitch are Int64, extents Int32."""

    logits: Int64
    bias: Int64
    correction: Int64
    ids: Int64
    weights: Int64
    pitch: Int64
    tokens: Int32
    experts: Int32
    top_k: Int32
    num_groups: Int32
    topk_groups: Int32
    scale: Uint32  # bits of a Float32
    given: Int64


class RouteKernel:
    """One compiled variant.

    Args:
        dtype: dtype of the logits: cutlass.Float32, Float16 or BFloat16.
        slots: experts per lane.
        scoring: "softmax", "sigmoid" or "sqrtsoftplus".
        renormalize: whether weights are divided by their sum.
        has_bias: whether each expert has a number that is added to its logits.
        has_correction: whether each expert has a number that is added to its score, for the choice.
        has_groups: whether experts are chosen only from the best groups.
        has_ids: whether the experts are given, so that only their weights are computed.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(
        self,
        dtype: type,
        slots: int,
        scoring: str,
        renormalize: bool,
        has_bias: bool,
        has_correction: bool,
        has_groups: bool,
        has_ids: bool,
        name: str,
    ):
        self.dtype = dtype
        self.slots = slots
        self.is_softmax, self.is_sigmoid = scoring == "softmax", scoring == "sigmoid"
        self.renormalize = renormalize
        self.has_bias = has_bias
        self.has_correction = has_correction
        self.has_groups = has_groups
        self.has_ids = has_ids
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one warp per token of the logits.

        Args:
            table: Int64 in host memory: ``launch_table.Route``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Route)))
        operands = read_record(RouteOperands, Route, t)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(cute.ceil_div(operands.tokens, ROUTE_WARPS), 1, 1),
            block=(ROUTE_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: RouteOperands):
        """Scores, chooses, weighs, and stores."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        token = block_idx * ROUTE_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        lane = tidx % WARP_SIZE
        if token < operands.tokens:
            # For the experts of a lane: keys of the choice, and scores for weights.
            keys = cute.make_rmem_tensor(self.slots, Uint32)
            scores = cute.make_rmem_tensor(self.slots, Float32)
            corrections = []
            if cutlass.const_expr(self.has_correction):
                corrections = self.read(operands, operands.correction, Float32, lane)
            self.load(operands, token, lane, keys, scores)
            total = self.score(keys, scores)
            if cutlass.const_expr(self.has_correction):
                self.correct(corrections, keys, scores, total)
            if cutlass.const_expr(self.has_groups):
                self.keep_best_groups(operands, lane, keys)
            chosen, weight = Int32(-1), Float32(0.0)
            if cutlass.const_expr(self.has_ids):
                chosen, weight = self.look_up(operands, token, lane, keys, scores)
            else:
                chosen, weight = self.choose(operands.top_k, lane, keys, scores)
            if cutlass.const_expr(self.renormalize):
                total = Float32(0.0)
                for i in cutlass.range(operands.top_k, unroll=1):
                    total = ptx.add_f32(total, cute.arch.shuffle_sync(weight, i))
                weight = ptx.div_f32(weight, ptx.add_f32(total, Float32(TINY)))
            elif cutlass.const_expr(self.is_softmax and not self.has_correction):
                weight = ptx.div_f32(weight, ptx.add_f32(total, Float32(TINY)))
            if lane < operands.top_k:
                place = (Int64(token) * operands.top_k + lane) * 4
                ids, weights = (
                    global_scalar(dtype, address + place)
                    for dtype, address in ((Int32, operands.ids), (Float32, operands.weights))
                )
                ids[0] = chosen
                weights[0] = ptx.mul_f32(weight, ptx.float_of(operands.scale))

    @cute.jit
    def read(self, operands: RouteOperands, row: Int64, dtype: cutlass.Constexpr, lane: Int32) -> list:
        """Returns a row's values of the lane's experts; those of the last expert for missing ones.

        Reads all at once, without a branch.
        """
        last, item_bytes = operands.experts - 1, dtype.width // 8
        return [
            global_scalar(dtype, row + Int64(cutlass.min(s * WARP_SIZE + lane, last)) * item_bytes)[0]
            for s in range(self.slots)
        ]

    @cute.jit
    def load(
        self, operands: RouteOperands, token: Int32, lane: Int32, keys: cute.Tensor, scores: cute.Tensor
    ):
        """Loads finite logits into ``scores``, and their keys."""
        logits = self.read(operands, operands.logits + Int64(token) * operands.pitch, self.dtype, lane)
        biases = []
        if cutlass.const_expr(self.has_bias):
            biases = self.read(operands, operands.bias, Float32, lane)
        for s in cutlass.range_constexpr(self.slots):
            x = logits[s].to(Float32)
            if cutlass.const_expr(self.has_bias):
                x = ptx.add_f32(x, biases[s])
            is_expert = s * WARP_SIZE + lane < operands.experts
            keys[s] = select(is_expert, key_of(x), Uint32(0))
            scores[s] = select(is_expert, finite(x), Float32(0.0))

    @cute.jit
    def score(self, keys: cute.Tensor, scores: cute.Tensor):
        """Turns logits into scores: numerators for softmax. Returns their sum if it is needed."""
        total = Float32(0.0)
        if cutlass.const_expr(self.is_softmax):
            most = keys[0]
            for s in cutlass.range_constexpr(1, self.slots):
                most = select(keys[s] > most, keys[s], most)
            largest = number_of(cute.arch.warp_redux_sync(most, "max"))
            for s in cutlass.range_constexpr(self.slots):
                below = exp_minus(ptx.add_f32(largest, -scores[s]))
                scores[s] = select(keys[s] == 0, Float32(0.0), below)
            if cutlass.const_expr(self.has_correction or not self.renormalize):
                for s in cutlass.range_constexpr(self.slots):
                    total = ptx.add_f32(total, scores[s])
                for step in (16, 8, 4, 2, 1):
                    total = ptx.add_f32(total, cute.arch.shuffle_sync_bfly(total, step))
        else:
            for s in cutlass.range_constexpr(self.slots):
                score = Float32(0.0)
                if cutlass.const_expr(self.is_sigmoid):
                    score = sigmoid(scores[s])
                else:
                    score = sqrt_softplus(scores[s])
                scores[s] = select(keys[s] == 0, Float32(0.0), score)
        return total

    @cute.jit
    def correct(self, corrections: list, keys: cute.Tensor, scores: cute.Tensor, total: Float32):
        """Sets the keys of scores plus corrections."""
        for s in cutlass.range_constexpr(self.slots):
            if cutlass.const_expr(self.is_softmax):
                scores[s] = ptx.div_f32(scores[s], ptx.add_f32(total, Float32(TINY)))
            corrected = key_of(ptx.add_f32(scores[s], corrections[s]))
            keys[s] = select(keys[s] == 0, Uint32(0), corrected)

    @cute.jit
    def keep_best_groups(self, operands: RouteOperands, lane: Int32, keys: cute.Tensor):
        """Clears the keys of all groups except those with the largest sums of two; lane g weighs group g."""
        size = operands.experts // operands.num_groups
        group_key = Uint32(0)
        for g in cutlass.range(operands.num_groups, unroll=1):
            first, second = Uint32(0), Uint32(0)
            for s in cutlass.range_constexpr(self.slots):
                expert = s * WARP_SIZE + lane - g * size
                key = select((expert >= 0) & (expert < size), keys[s], Uint32(0))
                is_first, is_second = key > first, key > second
                second = select(is_first, first, select(is_second, key, second))
                first = select(is_first, key, first)
            best = cute.arch.warp_redux_sync(first, "max")
            owner = lowest_lane(first == best)
            rest = select(lane == owner, second, first)
            next_best = cute.arch.warp_redux_sync(rest, "max")
            sum_of_two = ptx.add_f32(number_of(best), number_of(next_best))
            if lane == g:
                group_key = key_of(sum_of_two) if best != 0 else Uint32(0)
        kept = Int32(0)
        for i in cutlass.range(operands.topk_groups, unroll=1):
            best = cute.arch.warp_redux_sync(group_key, "max")
            owner = lowest_lane(group_key == best)
            kept = kept | (Int32(1) << owner)
            group_key = select(lane == owner, Uint32(0), group_key)
        for s in cutlass.range_constexpr(self.slots):
            group = cutlass.min((s * WARP_SIZE + lane) // size, WARP_SIZE - 1)
            keys[s] = select((kept >> group) & 1 == 1, keys[s], Uint32(0))

    @cute.jit
    def choose(self, top_k: Int32, lane: Int32, keys: cute.Tensor, scores: cute.Tensor):
        """Returns the experts with the largest keys, descending, choice i in lane i, and their scores; -1 and 0 for none."""
        chosen, score = Int32(-1), Float32(0.0)
        for i in cutlass.range(top_k, unroll=1):
            best, expert, value = keys[0], lane, scores[0]
            for s in cutlass.range_constexpr(1, self.slots):
                is_better = keys[s] > best
                best = select(is_better, keys[s], best)
                expert = select(is_better, s * WARP_SIZE + lane, expert)
                value = select(is_better, scores[s], value)
            most = cute.arch.warp_redux_sync(best, "max")
            mine = select((best == most) & (most != 0), expert, Int32(NO_ID))
            expert = cute.arch.warp_redux_sync(mine, "min")
            value = cute.arch.shuffle_sync(value, expert % WARP_SIZE)
            for s in cutlass.range_constexpr(self.slots):
                keys[s] = select(expert == s * WARP_SIZE + lane, Uint32(0), keys[s])
            if lane == i and most != 0:
                chosen, score = expert, value
        return chosen, score

    @cute.jit
    def look_up(
        self, operands: RouteOperands, token: Int32, lane: Int32, keys: cute.Tensor, scores: cute.Tensor
    ):
        """Returns the given experts, choice i in lane i, and their scores; -1 and 0 for an invalid id and for a NaN logit."""
        given = Int32(-1)
        if lane < operands.top_k:
            place = (Int64(token) * operands.top_k + lane) * 4
            given = global_scalar(Int32, operands.given + place)[0]
        chosen, score = Int32(-1), Float32(0.0)
        for i in cutlass.range(operands.top_k, unroll=1):
            expert = cute.arch.shuffle_sync(given, i)
            # Keys of missing experts are 0, and no lane holds a negative id.
            key, value = Uint32(0), Float32(0.0)
            for s in cutlass.range_constexpr(self.slots):
                is_mine = expert == s * WARP_SIZE + lane
                key, value = select(is_mine, keys[s], key), select(is_mine, scores[s], value)
            owner = expert & (WARP_SIZE - 1)
            key, value = cute.arch.shuffle_sync(key, owner), cute.arch.shuffle_sync(value, owner)
            if lane == i and key != 0:
                chosen, score = expert, value
        return chosen, score


@cute.jit
def finite(x: Float32) -> Float32:
    """Clamps ``x`` to the finite numbers, with -0 as 0; NaN becomes a number."""
    return ptx.add_f32(ptx.least(cutlass.max(x, Float32(-LARGEST)), Float32(LARGEST)), Float32(0.0))


@cute.jit
def key_of(x: Float32) -> Uint32:
    """Returns an integer in the order of ``finite(x)``, not 0; 0 for NaN."""
    word = ptx.bits_of(finite(x))
    key = word ^ select(word >= Uint32(SIGN), Uint32(0xFFFFFFFF), Uint32(SIGN))
    return select(x == x, key, Uint32(0))


@cute.jit
def number_of(key: Uint32) -> Float32:
    """Returns the number of a key; the number 0 for key 0."""
    word = key ^ select(key >= Uint32(SIGN), Uint32(SIGN), Uint32(0xFFFFFFFF))
    return ptx.float_of(select(key == 0, Uint32(0), word))


@cute.jit
def lowest_lane(condition) -> Int32:
    """Returns the lowest lane for which the condition holds; 32 for none."""
    mask = Uint32(cute.arch.vote_ballot_sync(condition))
    return Int32(cute.arch.popc(~mask & (mask - 1)))
