"""What the kernels in ``kernels/simt`` cost and how they spread over threads: plain integers, shared by host and device."""

from dataclasses import dataclass

from nvfp4_cute.errors import UnsupportedTarget
from nvfp4_cute.formats.block_format import (
    FP32,
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

# Formats of the matrix and the vector that a gemv multiplies, as do products of few rows, and of weights beside 16-bit ``a``.
GEMV_PAIRS = ((NVFP4, NVFP4),)
W4A16_PAIRS = tuple(
    (None, weights)
    for weights in (NVFP4, MXFP4, MXFP8_E4M3, MXFP8_E5M2, FP8_128x128, INT8, *INT4_FORMATS.values())
)
BEFORE_BLACKWELL = (*sm80.ARCHS, "sm_90a")
ARCHS = (*BEFORE_BLACKWELL, "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
WARP_SIZE = 32

# ---- gemv: what one lane loads of a row at once is 16 bytes: 32 values of K in two blocks ----
GEMV_PIECE_K = 32
GEMV_LANES_K = WARP_SIZE
GEMV_WARPS = 4
# Warps of a CTA that share its rows along K: a constant, so that M and L never change a bit of a result.
GEMV_WARPS_K = 2


def has_fp4_convert(arch: str) -> bool:
    """Whether e2m1 conversions are instructions (PTX ISA 9.7.9.21: sm_100a and later) or have to be computed."""
    return arch not in BEFORE_BLACKWELL


def has_bf16_products(arch: str) -> bool:
    """Whether bf16 has additions and products beside ``fma`` (PTX ISA 9.7.4, from sm_90 on), which needs a register more."""
    return arch not in sm80.ARCHS


def has_programmatic_products(arch: str) -> bool:
    """Whether products of quantized rows are programmatic launches: they begin while the launch before them ends."""
    return arch not in BEFORE_BLACKWELL


@dataclass(frozen=True)
class GemvSpread:
    """How a gemv spreads over a GPU; no bit of a result depends on it.

    Attributes:
        rows: of a warp at a time: r, r + 32, r + 64, r + 96 of an atom, or those and the rows after them.
        ctas_per_sm: as many as fit without spills.
        is_persistent: whether there are no more CTAs than fit at once, which go from rows to rows.
    """

    rows: int
    ctas_per_sm: int
    is_persistent: bool

    @property
    def rows_per_cta(self) -> int:
        """Rows of a CTA at a time."""
        return self.rows * GEMV_WARPS // GEMV_WARPS_K

    def num_cta(self, m: int, batches: int, num_sms: int) -> int:
        """CTAs of each batch, for matrices of whole atoms."""
        tiles = m // self.rows_per_cta
        return min(tiles, max(num_sms * self.ctas_per_sm // batches, 1)) if self.is_persistent else tiles


def gemv_spread(arch: str) -> GemvSpread:
    """That of an architecture; on an H200 the fastest of those measured, elsewhere by the timing model."""
    if arch == "sm_90a":
        return GemvSpread(rows=4, ctas_per_sm=5, is_persistent=True)
    return GemvSpread(rows=8, ctas_per_sm=4 if arch in ("sm_120a", "sm_121a") else 6, is_persistent=False)


def is_gemv_for_one_row(arch: str) -> bool:
    """Whether a gemv takes less time than a GEMM of one row: measured on an H200 (``bench/results``), by 17 to 39 %.

    Elsewhere not measured: modelled it takes 0 to 5 % less on an RTX 5090, and 15 % less to 12 % more on a B200.
    """
    return arch == "sm_90a"


def check_arch(arch: str) -> None:
    """Raises UnsupportedTarget where these kernels do not run."""
    if arch not in ARCHS:
        raise UnsupportedTarget(
            f"no gemv, w4a16 or quantize kernel for {arch}; there is one for {', '.join(ARCHS)}. "
            'Pass backend="reference", or CPU tensors'
        )


def check_quantized_products(arch: str) -> None:
    """Raises UnsupportedTarget where no kernel multiplies two quantized operands."""
    sm80.check_arch(arch)


# ---- quantize: a warp takes 8 rows of a scale atom, four blocks of K each: one 32-byte sector of scales -------------
QUANTIZE_WARPS = 8
# Words that a lane has on their way from memory at once: of four blocks of 16 values, or of two of 32. Of few values, one block:
# a kernel that small is mostly the fetch of its instructions.
QUANTIZE_WORDS = 32
QUANTIZE_FEW_WORDS = 8
QUANTIZE_FEW_CTAS_PER_SM = 4


def quantize_words(arch: str, num_sms: int, atom_rows: int, k_blocks: int) -> int:
    """Words of a lane of a quantization: few where its CTAs then still run all at once.

    Modelled on a B200: 8 rows of 2048 take 3.85 us, not 5.24, 512 of 4096 4.85, not 5.62; 128 of 28672, whose CTAs would not fit,
    6.60, not 5.79. Not measured. On sm_90a the other one was.

    Args:
        atom_rows: rows of scale atoms, of all batches. k_blocks: of a row.
    """
    num_cta = -(-k_blocks // 4) * 16 // QUANTIZE_WARPS * atom_rows
    fit = num_cta <= QUANTIZE_FEW_CTAS_PER_SM * num_sms
    return quantize_choices(arch)[-1] if fit else QUANTIZE_WORDS


def quantize_choices(arch: str) -> tuple[int, ...]:
    """What ``quantize_words`` may say."""
    return (QUANTIZE_WORDS,) if arch == "sm_90a" else (QUANTIZE_WORDS, QUANTIZE_FEW_WORDS)


# ---- dequantize: a warp takes so many rows of 256 columns ----
DEQUANTIZE_WARPS = 8
DEQUANTIZE_ROWS = 4

# ---- global scale: a lane takes eight values at a time; one CTA takes all where they are few, else each about so many ----
AMAX_THREADS = 512
AMAX_VALUES = 8
AMAX_SMALL = 64 * 1024
AMAX_VALUES_OF_CTA = 16 * 1024
# The last launch reads one word a thread.
AMAX_MAX_CTAS = AMAX_THREADS


def amax_ctas(values: int) -> int:
    """CTAs that look for the largest of so many values."""
    if values <= AMAX_SMALL:
        return 1
    return min(-(-values // AMAX_VALUES_OF_CTA), AMAX_MAX_CTAS)


# Rows of 16-bit activations from which decoding the weights and multiplying in 16 bits takes less time. Measured on an H100
# (``bench/notes``), whose kernel for many rows takes 1.0 to 1.3 times cuBLAS's bf16 time, decoding 0.9 to 1.3 times as long.
DECODE_FIRST_ROWS = {"sm_90a": 4096}
# Elsewhere a pass over the weights for every 32 rows costs as much as decoding from about four of them on, by their bytes.
DECODE_FIRST_ROWS_ELSEWHERE = 128
# By float32 scales torch decodes, which moves about 16 bytes a weight: as many as 16 passes over weights of 8 bits.
DECODE_FIRST_ROWS_OF_FP32 = 512
LEAST_DECODE_FIRST_ROWS = min(DECODE_FIRST_ROWS_ELSEWHERE, *DECODE_FIRST_ROWS.values())


def decode_first_rows(arch: str, weights: BlockFormat = NVFP4) -> int:
    """Rows from which a linear layer with 16-bit activations decodes its weights first."""
    if weights.scale == FP32 and not weights.is_int4:
        return DECODE_FIRST_ROWS_OF_FP32
    return DECODE_FIRST_ROWS.get(arch, DECODE_FIRST_ROWS_ELSEWHERE)


# Rows up to which a W4A4 layer is as fast with 16-bit activations, by the number of weights that its product reads. Measured on
# an H200 (``bench/notes/2026-11-28-h200-w4a4-rows.md``): the launch that quantizes takes 4.4 to 5 us. The product of 16-bit rows
# takes longer by 0.07 us per million weights at 16 rows, 0.08 at 32, 0.13 at 128.
EXACT_ROWS_WEIGHTS = {"sm_90a": ((16, 70e6), (32, 60e6), (128, 35e6))}


def keeps_16_bits(arch: str, rows: int, weights: float) -> bool:
    """Whether a product of W4A4 operands is at least as fast with activations that are not quantized.

    Args:
        rows: of activations. weights: elements of weights that are read.
    """
    return any(rows <= most and weights <= size for most, size in EXACT_ROWS_WEIGHTS.get(arch, ()))


# ---- weight rows of a CTA of the products below, whose warps take chunks of K in turn ----
UNIT_ROWS = 32

# ---- few rows of NVFP4 activations times NVFP4 weights ----
FEW_ROWS = 8
FEW_ROWS_WARPS = 8
# Chunks that a warp has on their way; on an H200 three or four take up to 8 % longer.
FEW_ROWS_SLOTS = 2


def is_for_few_rows(arch: str, num_sms: int, m: int, n: int, batches: int) -> bool:
    """Whether such a product takes less time than a GEMM: measured on an H200 (``bench/results``), by 13 to 30 %, where every CTA
    has an SM to itself; with two an SM by 11 % less to 17 % more. Elsewhere not measured.

    Args:
        m, n: rows of activations and of weights. batches: of both.
    """
    num_cta = -(-n // UNIT_ROWS) * batches
    return arch == "sm_90a" and m <= FEW_ROWS and num_cta <= num_sms


# ---- 16-bit activations times NVFP4 weights ----
W4A16_WARPS = 8
W4A16_CHUNK_K = 128
# Rows of activations of a CTA: every weight is read once for so many.
W4A16_TOKENS = (8, 16, 32)


def w4a16_tokens(m: int) -> int:
    """Rows of activations that a CTA should multiply: all, or as many as there is a kernel for."""
    return next((tokens for tokens in W4A16_TOKENS if tokens >= m), W4A16_TOKENS[-1])


def w4a16_blocks_per_sm(tokens: int, weight_bits: int = 4, most_tokens: int = 16) -> int:
    """CTAs that an SM should hold: as many as fit without spills.

    Args:
        most_tokens: up to which registers are enough for two, of 4-bit weights.
    """
    return 2 if weight_bits == 4 and tokens <= most_tokens else 1


# ---- a layer of experts: routing, order, and what is done to rows between its products ------------------------------
ROUTE_WARPS = 4
MAX_EXPERTS = 1024
# A lane holds the choices of one token, one each.
MAX_TOP_K = WARP_SIZE
# Experts that a permutation's shared memory holds counts of, for each of so many warps.
PERMUTE_WARPS = {128: 32, 512: 32, 1024: 16}
PERMUTE_THREADS = 1024
# (Token, k) pairs of one CTA; more take a cluster. On an H100 modelled, 1024 pairs take 2.4 us in a CTA and 4096 take 5.4.
PERMUTE_SLOTS_OF_CTA = 2048
PERMUTE_CLUSTER = 8
# Those of a cluster; more take two launches, of CTAs with so many each.
PERMUTE_SLOTS_AT_ONCE = 65536
PERMUTE_SLOTS_PER_CTA = 8192
# (Token, k) pairs whose order every warp finds by itself.
FEW_SLOTS = 64
ROW_WARPS = 4
# CTAs of a launch that stores into other ranks' memory: each signals to every rank. So many warps have enough of x on its way
# from memory to fill a link of 450 GB/s with NVFP4 rows, of a quarter of its bytes. An H100 runs all of them at once.
PUSH_CTAS = 1024


def push_ctas(num_warps: int) -> int:
    """CTAs for the work of so many warps: as many on every rank."""
    return max(min(-(-num_warps // ROW_WARPS), PUSH_CTAS), 1)


def permute_capacity(num_experts: int) -> int:
    """The least number of experts that there is a kernel for."""
    return next(capacity for capacity in PERMUTE_WARPS if capacity >= num_experts)


def has_clusters(arch: str) -> bool:
    """Whether CTAs form clusters (PTX ISA 3.3, from sm_90 on)."""
    return arch not in sm80.ARCHS


def route_slots(num_experts: int) -> int:
    """Experts of a lane: a power of two."""
    slots = 1
    while slots * WARP_SIZE < num_experts:
        slots *= 2
    return slots
