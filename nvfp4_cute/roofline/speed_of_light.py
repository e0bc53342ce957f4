"""The least possible time of an operation: the bytes that it must move over a bandwidth, its operations over a rate.

These times are computed, never measured. Two formulas answer two questions:

- :func:`competition_us` is the published speed of light of the GPU MODE NVFP4 problems, one B200 with two constants,
  fitted to all fourteen published rows: the eleven GEMM rows agree within 0.05 %, the three GEMV rows within 0.4 %.
- :func:`physical_floor` is the longest of three terms on a :class:`~nvfp4_cute.gpus.targets.Target`: bytes over the
  best measured bandwidth, operations over the tensor cores' rate at the highest known clock, and one launch.

Both count every operand once, without padding and from memory. Operands that are still in L2 can be faster.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nvfp4_cute.formats.block_format import (
    FORMATS,
    FOUR_OVER_SIX,
    INT4_FORMATS,
    INT8,
    MXFP8_E4M3,
    NVFP4_PAIR,
    BlockFormat,
    Formats,
)
from nvfp4_cute.gpus.power import least_us
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.planning.arch import is_weight_only, mmas_of

# B200: 0.96 of 8 TB/s; 94.9 % of 148 SMs x 32768 FLOP per clock x 1.5 GHz (dense NVFP4 at the published clock).
COMPETITION_HBM_BYTES_PER_S = 7.68e12
COMPETITION_FP4_FLOPS_PER_S = 6.90e15


@dataclass(frozen=True)
class Storage:
    """Storage of a tensor's values: bits per value, and bits of one scale per ``block`` values in each of ``block_rows`` rows.

    ``block``: 0 means all values of a row.
    """

    bits: int
    block: int = 0
    scale_bits: int = 0
    block_rows: int = 1


def _stored(format: BlockFormat) -> Storage:
    return Storage(format.element.bits, format.block_k, format.scale.bits, format.block_rows)


STORAGE = {
    **{name: _stored(format) for name, format in (FORMATS | INT4_FORMATS).items()},
    FOUR_OVER_SIX.name: _stored(FOUR_OVER_SIX),
    "mxfp8": _stored(MXFP8_E4M3),
    "fp8": Storage(8),
    "fp16": Storage(16),
    "bf16": Storage(16),
    "fp32": Storage(32),
}
"""By format name. ``fp8`` has one scale for a complete tensor, which is not counted."""


@dataclass(frozen=True)
class Traffic:
    """One tensor of an operation: bytes that cross memory once, read or written."""

    name: str
    bytes: int
    written: bool = False


@dataclass(frozen=True)
class Product:
    """One matrix product of an operation: floating-point operations, two per multiply-add."""

    name: str
    flops: int


@dataclass(frozen=True)
class Work:
    """Traffic and operations of an operation, by operand and by product.

    Attributes:
        operands: tensors that cross memory, summed over groups.
        products: matrix products, summed over groups.
        math: format of the multiplication, one of ``targets.MATH_FORMATS``.
        pair: block formats of A and B; None if either has none.
    """

    operands: tuple[Traffic, ...]
    products: tuple[Product, ...]
    math: str = "nvfp4"
    pair: Formats | None = NVFP4_PAIR

    @property
    def bytes(self) -> int:
        """Total traffic in bytes."""
        return sum(operand.bytes for operand in self.operands)

    @property
    def flops(self) -> int:
        """Total operations."""
        return sum(product.flops for product in self.products)

    @property
    def intensity(self) -> float:
        """FLOP per byte; 0 if nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


# ---- traffic and operations ------------------------------------------------------------------------------------


def grouped_gemm(
    sizes: Iterable[tuple[int, int, int]],
    *,
    a: str = "nvfp4",
    b: str = "nvfp4",
    out: str = "fp16",
    num_b: int = 1,
) -> Work:
    """Returns the work of groups of (m, n, k) in elements: C_g = A_g @ B_g^T, only real rows. Empty groups move nothing.

    Args:
        sizes: (m, n, k) of every group.
        a, b, out: storage formats of A (m, k), of every B (n, k), and of C (m, n); keys of ``STORAGE``. NVFP4 output is
            the output of a quantizing epilogue: values and scales. Operands of 16 bits are multiplied as fp16 (W4A16:
            weights are dequantized on the way to the tensor cores).
        num_b: B operands that share A; 2 is a dual GEMM, whose C is written once.

    Raises:
        ValueError: an unknown format, or a size below 0.
    """
    live = [_check_size(size) for size in sizes]
    live = [(m, n, k) for m, n, k in live if m and n]
    names_b = ["b"] if num_b == 1 else [f"b{i}" for i in range(1, num_b + 1)]
    operands = _tensor("a", a, [(m, k) for m, _, k in live])
    for name in names_b:
        operands += _tensor(name, b, [(n, k) for _, n, k in live])
    operands += _tensor("c", out, [(m, n) for m, n, _ in live], written=True)
    flops = sum(2 * m * n * k for m, n, k in live)
    products = tuple(Product(f"a @ {name}^T", flops) for name in names_b)
    pair = (FORMATS[a], FORMATS[b]) if a in FORMATS and b in FORMATS else None
    return Work(tuple(operands), products, _math(a, b), pair)


def gemm(m: int, n: int, k: int, l: int = 1, *, out: str = "fp16") -> Work:
    """Returns the work of ``l`` NVFP4 GEMMs of one shape."""
    return grouped_gemm([(m, n, k)] * l, out=out)


def gemv(m: int, k: int, l: int = 1, *, out: str = "fp16") -> Work:
    """Returns the work of ``l`` products of an NVFP4 matrix (m, k) and an NVFP4 vector (k,), result (m,)."""
    return gemm(m, 1, k, l, out=out)


def dual_gemm(m: int, n: int, k: int, *, out: str = "fp16") -> Work:
    """Returns the work of C = silu(A @ B1^T) * (A @ B2^T) with C (m, n); the activation does not count as operations."""
    return grouped_gemm([(m, n, k)], num_b=2, out=out)


def tensor_bytes(storage: str, rows: int, cols: int) -> tuple[int, int]:
    """Returns the bytes of the values and of the block scales of a (rows, cols) tensor.

    Rows start at full bytes, without padding.

    Raises:
        ValueError: ``storage`` is not a key of ``STORAGE``.
    """
    form = STORAGE.get(storage)
    if form is None:
        raise ValueError(f"format {storage!r} is unknown; use one of {', '.join(STORAGE)}")
    blocks = -(-cols // form.block) if form.block else 1
    scales = blocks * form.scale_bits // 8
    return rows * -(-cols * form.bits // 8), -(-rows // form.block_rows) * scales


def _check_size(size: tuple[int, int, int]) -> tuple[int, int, int]:
    if min(size) < 0:
        raise ValueError(f"(m, n, k)={size} has a negative extent; sizes are 0 or more")
    return size


def _tensor(
    name: str, storage: str, shapes: Sequence[tuple[int, int]], *, written: bool = False
) -> list[Traffic]:
    """Returns values and, if the format has them, block scales of all groups."""
    sizes = [tensor_bytes(storage, rows, cols) for rows, cols in shapes or [(0, 0)]]
    parts = [Traffic(name, sum(data for data, _ in sizes), written)]
    if STORAGE[storage].scale_bits:
        parts.append(Traffic(f"{name}_scale", sum(scale for _, scale in sizes), written))
    return parts


def _math(a: str, b: str) -> str:
    """Returns the narrowest format whose tensor cores accept both operands."""
    if a == b == INT8.name:
        return "int8"
    bits = max(STORAGE[a].bits, STORAGE[b].bits)
    return {4: "nvfp4", 8: "fp8", 16: "fp16", 32: "tf32"}[bits]


# ---- least times -----------------------------------------------------------------------------------------------


def competition_us(work: Work) -> float:
    """Returns the published speed of light in us: a B200 at 7.68 TB/s and 6.90 PFLOP/s of NVFP4.

    Raises:
        ValueError: the work is not multiplied as NVFP4; the competition has no formula for it.
    """
    if work.math != "nvfp4":
        raise ValueError(
            f"math={work.math!r}: the competition's formula is for nvfp4 alone; use physical_floor"
        )
    return 1e6 * max(work.bytes / COMPETITION_HBM_BYTES_PER_S, work.flops / COMPETITION_FP4_FLOPS_PER_S)


def grouped_gemm_us(sizes: Iterable[tuple[int, int, int]]) -> float:
    """Returns the published speed of light in us of groups of (m, n, k) with fp16 C."""
    return competition_us(grouped_gemm(sizes))


@dataclass(frozen=True)
class Term:
    """One bound of a floor: microseconds, or None if the target's figure is unknown, and its computation."""

    name: str
    us: float | None
    basis: str


@dataclass(frozen=True)
class Floor:
    """The physical speed of light of a work on a target: the longest of its terms."""

    target: Target
    terms: tuple[Term, ...]
    sustained_us: float | None = None
    """For a launch that is repeated for seconds: time at the power limit (``gpus.power``); None if unknown."""

    @property
    def us(self) -> float:
        """Least microseconds of any implementation, by the known figures."""
        return max(term.us for term in self.terms if term.us is not None)

    @property
    def bound(self) -> str:
        """Name of the deciding term: "memory", "math" or "launch"."""
        return next(term.name for term in self.terms if term.us == self.us)


def physical_floor(work: Work, target: Target) -> Floor:
    """Returns memory, math, and launch time of ``work`` on ``target``, each with its basis.

    On a target without FP4 tensor cores, NVFP4 operands count at the fp16 rate, because their values times their scales
    have too many bits for fp8. So do other pairs that its kernels dequantize.
    """
    math, note = _math_on(work, target)
    terms = (_memory_term(work, target), _math_term(work, target, math, note), _launch_term(target))
    return Floor(target, terms, least_us(work.flops, math, target))


def _math_on(work: Work, target: Target) -> tuple[str, str]:
    """Returns the format of the target's multiplication, and the reason if the operands have another format."""
    if work.math in ("nvfp4", "fp8") and work.math not in target.rates:
        return "fp16", f", no {'FP4' if work.math == 'nvfp4' else 'FP8'} tensor cores"
    mma = None if work.pair is None or is_weight_only(target.arch) else mmas_of(target.arch).get(work.pair)
    if mma is not None and mma.decodes:
        return "fp16", f", dequantized to {mma.kind}"
    return work.math, ""


def _memory_term(work: Work, target: Target) -> Term:
    bandwidth = target.floor_bandwidth_bytes_per_s
    kind = "theoretical, none measured" if target.reached_bandwidth_bytes_per_s is None else "reached"
    return Term(
        "memory",
        1e6 * work.bytes / bandwidth,
        f"{work.bytes / 1e6:.4g} MB / {bandwidth / 1e12:.4g} TB/s ({kind})",
    )


def _math_term(work: Work, target: Target, math: str, note: str) -> Term:
    rate = target.math_flops_per_s(math)
    if rate is None:
        return Term("math", None, f"the {math} rate of {target.name} is not known")
    return Term(
        "math",
        1e6 * work.flops / rate,
        f"{work.flops / 1e9:.4g} GFLOP / {rate / 1e12:.5g} TFLOP/s ({math} at {target.clock_hz / 1e9:.4g} GHz{note})",
    )


def _launch_term(target: Target) -> Term:
    if target.launch_s is None:
        return Term("launch", None, f"the time of an empty launch on {target.name} is not known")
    return Term("launch", 1e6 * target.launch_s, f"a kernel that does nothing: {target.sources['launch_s']}")
