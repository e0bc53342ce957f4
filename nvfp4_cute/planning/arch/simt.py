"""Costs of the kernels in ``kernels/simt``, and their division over threads: plain integers, shared by host and device."""

from dataclasses import dataclass

from nvfp4_cute.errors import UnsupportedTarget
from nvfp4_cute.formats.block_format import (
    ATOM_ROWS,
    INT4_FORMATS,
    INT8,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
    FP8_128x128,
)
from nvfp4_cute.planning.arch import sm80
from nvfp4_cute.planning.arch.base import H200_SMS, paced_us, weight_only_pairs

# Formats of matrix and vector in a gemv. Products of few rows and of weights with 16-bit ``a`` have the same formats.
GEMV_PAIRS = ((NVFP4, NVFP4),)
W4A16_PAIRS = weight_only_pairs(
    (NVFP4, MXFP4, MXFP8_E4M3, MXFP8_E5M2, FP8_128x128, INT8, *INT4_FORMATS.values())
)
BEFORE_BLACKWELL = (*sm80.ARCHS, "sm_90a")
ARCHS = (*BEFORE_BLACKWELL, "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
WARP_SIZE = 32

# ---- gemv: a lane loads 16 bytes of a row at once: 32 values of K in two blocks ----
GEMV_PIECE_K = 32
GEMV_LANES_K = WARP_SIZE
GEMV_WARPS = 4
# Warps of a CTA that share its rows along K: a constant, so results do not depend on M and L.
GEMV_WARPS_K = 2


def has_fp4_convert(arch: str) -> bool:
    """Whether e2m1 conversions are instructions (PTX ISA 9.7.9.21: sm_100a and later). Otherwise they are computed."""
    return arch not in BEFORE_BLACKWELL


def has_bf16_products(arch: str) -> bool:
    """Whether bf16 has additions and products besides ``fma`` (PTX ISA 9.7.4, from sm_90 on), which needs an extra register."""
    return arch not in sm80.ARCHS


def has_programmatic_products(arch: str) -> bool:
    """Whether products of quantized rows are programmatic launches, which begin while the previous launch ends."""
    return arch not in BEFORE_BLACKWELL


@dataclass(frozen=True)
class GemvSpread:
    """Division of a gemv over a GPU. No bit of a result depends on it.

    Attributes:
        rows: rows per warp at a time: r, r + 32, r + 64, r + 96 of an atom, or those and the rows after them.
        ctas_per_sm: the largest number that fits without spills.
        is_persistent: launches only CTAs that fit at once; each computes several sets of rows.
    """

    rows: int
    ctas_per_sm: int
    is_persistent: bool

    @property
    def rows_per_cta(self) -> int:
        """Rows per CTA at a time."""
        return self.rows * GEMV_WARPS // GEMV_WARPS_K

    def num_cta(self, m: int, batches: int, num_sms: int) -> int:
        """Returns the CTAs per batch, for matrices of full atoms."""
        tiles = m // self.rows_per_cta
        return min(tiles, max(num_sms * self.ctas_per_sm // batches, 1)) if self.is_persistent else tiles


def gemv_spread(arch: str) -> GemvSpread:
    """Returns the division for an architecture.

    On an H200 it is the fastest measured one; elsewhere the timing model chose it.
    """
    if arch == "sm_90a":
        return GemvSpread(rows=4, ctas_per_sm=5, is_persistent=True)
    return GemvSpread(rows=8, ctas_per_sm=4 if arch in ("sm_120a", "sm_121a") else 6, is_persistent=False)


def is_gemv_for_one_row(arch: str) -> bool:
    """Whether a gemv takes less time than a GEMM of one row: measured on an H200 (``bench/results``), by 17 to 39 %.

    Not measured elsewhere. Modelled, it takes 0 to 5 % less on an RTX 5090, and 15 % less to 12 % more on a B200.
    """
    return arch == "sm_90a"


def check_arch(arch: str) -> None:
    """Raises UnsupportedTarget for architectures on which these kernels do not run."""
    if arch not in ARCHS:
        raise UnsupportedTarget(
            f"no gemv, w4a16 or quantize kernel for {arch}; there is one for {', '.join(ARCHS)}. "
            'Pass backend="reference", or CPU tensors'
        )


def check_quantized_products(arch: str) -> None:
    """Raises UnsupportedTarget if no kernel multiplies two quantized operands."""
    sm80.check_arch(arch)


# ---- quantize: a warp takes 8 neighbouring rows of a scale atom with four blocks of K each --------------------------
QUANTIZE_WARPS = 8
# Words that a lane loads at once: those of four blocks of 16 values, or of two blocks of 32. For few values it is one
# block, because such a small kernel mostly fetches its instructions.
QUANTIZE_WORDS = 32
QUANTIZE_FEW_WORDS = 8
QUANTIZE_CHOICES = (QUANTIZE_WORDS, QUANTIZE_FEW_WORDS)
# Most CTAs per SM with few words: modelled, and on sm_90a (True) measured on an H200.
QUANTIZE_FEW_CTAS_PER_SM = {False: 4, True: 8}


def quantize_words(arch: str, num_sms: int, atom_rows: int, format: BlockFormat, k: int) -> int:
    """Returns the words per lane of a quantization: few if all of its CTAs then still run at once.

    Measured on an H200, us with 8 and with 32 words: 5.0 and 6.3 for 16 rows of 4096, 9.5 and 10.4 for 512 rows of 7168, 15.2 and
    15.1 for 2048 rows of 4096. 4over6 of 8192 rows of 4096 takes 57.2 us with 32 words and 53.2 with 16, which need fewer
    registers. Modelled on a B200: 3.9 and 5.2 for 8 rows of 2048, 4.9 and 5.6 for 512 rows of 4096, 6.6 and 5.8 for 128 rows of
    28672.

    Args:
        atom_rows: rows of scale atoms, over all batches.
        format, k: format and columns of the result.
    """
    num_cta = -(-format.num_k_blocks(k) // 4) * 16 // QUANTIZE_WARPS * atom_rows
    most = QUANTIZE_FEW_CTAS_PER_SM[arch == "sm_90a"] * num_sms
    return QUANTIZE_FEW_WORDS if num_cta <= most else many_words(format)


def many_words(format: BlockFormat) -> int:
    """Returns the words per lane of a quantization of many rows."""
    return QUANTIZE_WORDS // 2 if format.scaling == "four_over_six" else QUANTIZE_WORDS


# Quantization with a global scale per row: (warps of a row's CTA, blocks that a thread holds in registers), for few rows, many
# rows, and for many rows of silu(x) * up, whose values are float32. Short rows get fewer of both. On an H200, 8192 rows of 2048
# took 42.9 us with (4, 4) and 26.9 with (4, 1); rows of 4096, 55.2 with (4, 4) and 43.1 with (4, 2); silu(x) * up with rows of
# 2048, 76.3 with (8, 2) and 44.8 with (4, 1).
SCALED_ROWS_FEW = (8, 1)
SCALED_ROWS_MANY = (4, 4)
SCALED_ROWS_SILU = (8, 2)
SCALED_ROWS_FEW_PER_SM = 8


def scaled_rows_split(num_sms: int, rows: int, has_up: bool, blocks: int) -> tuple[int, int]:
    """Returns the warps of a row's CTA, and the blocks that each thread holds.

    Args:
        rows: rows of all batches and groups.
        has_up: whether silu(x) * up is quantized.
        blocks: blocks per row. Threads without a block, and registers for more blocks, only cost time.
    """
    if rows <= SCALED_ROWS_FEW_PER_SM * num_sms:
        return SCALED_ROWS_FEW
    warps, held = SCALED_ROWS_SILU if has_up else SCALED_ROWS_MANY
    held = min(held, -(-blocks // (warps * WARP_SIZE)))
    while warps > 1 and warps // 2 * WARP_SIZE >= blocks:
        warps //= 2
    return warps, max(held, 1)


# ---- dequantize: number of rows of 256 columns per warp ----
DEQUANTIZE_WARPS = 8
DEQUANTIZE_ROWS = 4

# ---- global scale: eight values per lane at a time; one CTA for few values, otherwise about this number of values per
# CTA ----
AMAX_THREADS = 512
AMAX_VALUES = 8
AMAX_SMALL = 64 * 1024
AMAX_VALUES_OF_CTA = 16 * 1024
# The last launch reads one word per thread.
AMAX_MAX_CTAS = AMAX_THREADS


def amax_ctas(values: int) -> int:
    """Returns the number of CTAs that search the largest of this number of values."""
    if values <= AMAX_SMALL:
        return 1
    return min(-(-values // AMAX_VALUES_OF_CTA), AMAX_MAX_CTAS)


# ---- weight rows per CTA of the products below, whose warps take chunks of K in turn ----
UNIT_ROWS = 32

# ---- few rows of NVFP4 activations times NVFP4 weights ----
FEW_ROWS = 8
FEW_ROWS_WARPS = 8
# Chunks that a warp loads ahead. On an H200, three or four take up to 8 % longer.
FEW_ROWS_SLOTS = 2


def is_for_few_rows(arch: str, num_sms: int, m: int, n: int, batches: int) -> bool:
    """Whether this kernel takes less time than a GEMM.

    Measured on an H200 (``bench/results``): 13 to 30 % less if every CTA has an SM to itself; 11 % less to 17 % more
    with two CTAs per SM. Not measured elsewhere.

    Args:
        m, n: rows of activations and of weights.
        batches: batches of both.
    """
    num_cta = -(-n // UNIT_ROWS) * batches
    return arch == "sm_90a" and m <= FEW_ROWS and num_cta <= num_sms


# ---- 16-bit activations times NVFP4 weights ----
# Warps of a CTA, which divide K. A thread has the same number of registers with one CTA of 16 per SM as with two of 8.
W4A16_WARPS, W4A16_MANY_WARPS = 8, 16
W4A16_CHUNK_K = 128
# Rows of activations per CTA. Every weight is read once per this number of rows.
W4A16_TOKENS = (8, 16, 32)


def w4a16_tokens(m: int) -> int:
    """Returns the rows of activations that a CTA should multiply: all, or the most that a kernel supports."""
    return next((tokens for tokens in W4A16_TOKENS if tokens >= m), W4A16_TOKENS[-1])


def w4a16_blocks_per_sm(tokens: int, weight_bits: int = 4, most_tokens: int = 16) -> int:
    """Returns the CTAs that an SM should hold: the largest number that fits without spills.

    Args:
        most_tokens: largest number of tokens for which registers suffice for two CTAs, with 4-bit weights.
    """
    return 2 if weight_bits == 4 and tokens <= most_tokens else 1


def w4a16_warps(num_sms: int, m: int, n: int, k: int, batches: int) -> int:
    """Returns the warps per CTA, for kernels whose registers suffice for two CTAs of ``W4A16_WARPS`` per SM.

    With 8 warps, a CTA that has an SM to itself has too few loads in flight. On an H200, 16 warps take 0.76 to 1.0 of the time
    (``bench/notes/2026-11-29-weight-only-limits.md``). If some SMs get two CTAs, 16 warps are slower, because the CTAs run one
    after the other: modelled on an A100, 1 x 4096 x 14336, 24.4 us with 8 warps and 30.6 with 16.
    """
    num_ctas = -(-m // w4a16_tokens(m)) * batches * (-(-n // ATOM_ROWS) * (ATOM_ROWS // UNIT_ROWS))
    has_work = k >= 2 * W4A16_MANY_WARPS * W4A16_CHUNK_K
    return W4A16_MANY_WARPS if num_ctas <= num_sms and has_work else W4A16_WARPS


@dataclass(frozen=True)
class W4A16Times:
    """Model of a launch for some rows in us: waves of CTAs, one per SM, and what memory and L2 take.

    Attributes:
        launch: of a launch without work.
        wave: us per 1000 values of K in a wave.
        per_mb: us per MB of weights.
    """

    launch: float
    wave: float
    per_mb: float


# By rows of a CTA, for weights of 4 and of 8 bits. Fitted to what is the fastest in
# ``bench/results/h200_weight_only.json``.
W4A16_TIMES = {
    8: (W4A16Times(6.7, 0.29, 0.259), W4A16Times(6.5, 1.407, 0)),
    16: (W4A16Times(6.2, 0.308, 0.407), W4A16Times(6.3, 1.718, 0)),
    32: (W4A16Times(7.0, 1.137, 0.36), W4A16Times(6.4, 3.012, 0)),
}
# With 16 warps, by rows of a CTA, fitted to seven shapes of 4-bit weights on an H200: at most 7 % off.
W4A16_MANY_TIMES = {8: W4A16Times(6.5, 0.41, 0.187), 16: W4A16Times(7.2, 0.46, 0.237)}


def w4a16_us(arch: str, num_sms: int, m: int, n: int, k: int, batches: int, b_format: BlockFormat) -> float:
    """Returns the modelled time of ``kernels/simt/w4a16.py`` in us for [m, k] x [n, k] per batch."""
    tokens, weights = w4a16_tokens(m), batches * b_format.nbytes(n, k)
    times, passes = W4A16_TIMES[tokens][b_format.element.bits == 8], -(-m // tokens)
    has_many = w4a16_blocks_per_sm(tokens, b_format.element.bits) > 1
    if has_many and w4a16_warps(num_sms, m, n, k, batches) == W4A16_MANY_WARPS:
        times = W4A16_MANY_TIMES[tokens]
    waves = -(-passes * batches * -(-n // UNIT_ROWS) // num_sms)
    # Waves of this GPU take as long as on one with more SMs.
    us = waves * k / 1000 * times.wave * num_sms / H200_SMS + passes * weights / 1e6 * times.per_mb
    return times.launch + paced_us(arch, num_sms, us, weights)


# ---- a layer of experts: routing, order, and operations on rows between its products --------------------------------
ROUTE_WARPS = 4
MAX_EXPERTS = 1024
# A lane holds one choice of one token.
MAX_TOP_K = WARP_SIZE
# Number of experts whose counts a permutation's shared memory holds -> number of warps with counts of their own.
PERMUTE_WARPS = {128: 32, 512: 32, 1024: 16}
PERMUTE_THREADS = 1024
# Largest number of (token, k) pairs of one CTA, by whether there are clusters. More pairs use a cluster, or two launches. On an
# H200 a CTA takes 3.9 us for 80 pairs and 7.5 us for 1280.
PERMUTE_SLOTS_OF_CTA = {True: 512, False: 2048}
PERMUTE_CLUSTER = 8
# Pairs of a cluster. More pairs use two launches, of CTAs with the following number of pairs each.
PERMUTE_SLOTS_AT_ONCE = 65536
PERMUTE_SLOTS_PER_CTA = 8192
# (Token, k) pairs whose order every warp computes by itself.
FEW_SLOTS = 64
ROW_WARPS = 4
# Most choices of a token whose rows are loaded at once for their sum.
FINALIZE_AHEAD = 8
# CTAs of a launch that stores into other ranks' memory; each signals every rank. With this number of warps, enough of x
# is on its way from memory to fill a link of 450 GB/s with NVFP4 rows, which have a quarter of its bytes. An H100 runs
# all of them at once.
PUSH_CTAS = 1024


def push_ctas(num_warps: int) -> int:
    """Returns the number of CTAs for the work of this number of warps, equal on every rank."""
    return max(min(-(-num_warps // ROW_WARPS), PUSH_CTAS), 1)


def permute_capacity(num_experts: int) -> int:
    """Returns the least number of experts for which there is a kernel."""
    return next(capacity for capacity in PERMUTE_WARPS if capacity >= num_experts)


def has_clusters(arch: str) -> bool:
    """Whether CTAs form clusters (PTX ISA 3.3, from sm_90 on)."""
    return arch not in sm80.ARCHS


def route_slots(num_experts: int) -> int:
    """Returns the experts per lane: a power of two."""
    slots = 1
    while slots * WARP_SIZE < num_experts:
        slots *= 2
    return slots
