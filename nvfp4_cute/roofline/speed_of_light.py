"""The least possible time of an operation: what it must move over a bandwidth, what it must compute over a rate.

Computed, never measured. Two formulas, for two questions:

- :func:`competition_us` is the published speed of light of the GPU MODE NVFP4 problems, one B200 with two constants,
  found by fitting all fourteen published rows: the eleven GEMM rows agree within 0.05 %, the three GEMV rows within
  0.4 %.
- :func:`physical_floor` is the longest of three terms on a :class:`~nvfp4_cute.gpus.targets.Target`: bytes over the best
  bandwidth that was reached, operations over the tensor cores' rate at the highest clock known, and one launch.

Both count every operand once, without padding and from memory: operands that are still in L2 can be faster.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nvfp4_cute.formats.block_format import (
    FORMATS,
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

# B200: 0.96 of 8 TB/s; 94.9 % of 148 SMs x 32768 FLOP a clock x 1.5 GHz (dense NVFP4 at the published clock).
COMPETITION_HBM_BYTES_PER_S = 7.68e12
COMPETITION_FP4_FLOPS_PER_S = 6.90e15


@dataclass(frozen=True)
class Storage:
    """How a tensor's values lie in memory: bits a value, and bits of one scale for ``block`` values of each of ``block_rows``.

    ``block``: 0 for all of a row.
    """

    bits: int
    block: int = 0
    scale_bits: int = 0
    block_rows: int = 1


def _stored(format: BlockFormat) -> Storage:
    return Storage(format.element.bits, format.block_k, format.scale.bits, format.block_rows)


STORAGE = {
    **{name: _stored(format) for name, format in (FORMATS | INT4_FORMATS).items()},
    "mxfp8": _stored(MXFP8_E4M3),
    "fp8": Storage(8),
    "fp16": Storage(16),
    "bf16": Storage(16),
    "fp32": Storage(32),
}
"""By format name. ``fp8`` has one scale for a whole tensor, which is not counted."""


@dataclass(frozen=True)
class Operand:
    """One tensor of an operation: bytes that cross memory once, read or written."""

    name: str
    bytes: int
    written: bool = False


@dataclass(frozen=True)
class Product:
    """One matrix product of an operation: floating-point operations, two a multiply-add."""

    name: str
    flops: int


@dataclass(frozen=True)
class Work:
    """What an operation moves and computes, by operand and by product.

    Attributes:
        operands: tensors that cross memory; groups are summed up.
        products: matrix products; groups are summed up.
        math: the format in which they are multiplied, one of ``targets.MATH_FORMATS``.
        pair: block formats of A and B; None where either has none.
    """

    operands: tuple[Operand, ...]
    products: tuple[Product, ...]
    math: str = "nvfp4"
    pair: Formats | None = NVFP4_PAIR

    @property
    def bytes(self) -> int:
        """All traffic."""
        return sum(operand.bytes for operand in self.operands)

    @property
    def flops(self) -> int:
        """All operations."""
        return sum(product.flops for product in self.products)

    @property
    def intensity(self) -> float:
        """FLOP a byte; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


# ---- what operations move and compute --------------------------------------------------------------------------


def grouped_gemm(
    sizes: Iterable[tuple[int, int, int]],
    *,
    a: str = "nvfp4",
    b: str = "nvfp4",
    out: str = "fp16",
    num_b: int = 1,
) -> Work:
    """Groups of (m, n, k) in elements: C_g = A_g @ B_g^T, real rows only. A group without rows or columns moves nothing.

    Args:
        sizes: of every group.
        a, b, out: storage formats of A (m, k), of every B (n, k), and of C (m, n); a key of ``STORAGE``. NVFP4
            output is what a quantizing epilogue writes: values and scales. Operands of 16 bits are multiplied as fp16
            (W4A16: weights are decoded on the way to the tensor cores).
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
    """A batch of ``l`` NVFP4 GEMMs of one shape."""
    return grouped_gemm([(m, n, k)] * l, out=out)


def gemv(m: int, k: int, l: int = 1, *, out: str = "fp16") -> Work:
    """A batch of ``l`` products of an NVFP4 matrix (m, k) and an NVFP4 vector (k,), result (m,)."""
    return gemm(m, 1, k, l, out=out)


def dual_gemm(m: int, n: int, k: int, *, out: str = "fp16") -> Work:
    """C = silu(A @ B1^T) * (A @ B2^T) with C (m, n); the activation is not counted as operations."""
    return grouped_gemm([(m, n, k)], num_b=2, out=out)


def tensor_bytes(storage: str, rows: int, cols: int) -> tuple[int, int]:
    """Bytes of the values and of the block scales of a (rows, cols) tensor; rows start at whole bytes, no padding.

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
) -> list[Operand]:
    """Values and, where the format has them, block scales of all groups."""
    sizes = [tensor_bytes(storage, rows, cols) for rows, cols in shapes or [(0, 0)]]
    parts = [Operand(name, sum(data for data, _ in sizes), written)]
    if STORAGE[storage].scale_bits:
        parts.append(Operand(f"{name}_scale", sum(scale for _, scale in sizes), written))
    return parts


def _math(a: str, b: str) -> str:
    """The narrowest format whose tensor cores take both operands."""
    if a == b == INT8.name:
        return "int8"
    bits = max(STORAGE[a].bits, STORAGE[b].bits)
    return {4: "nvfp4", 8: "fp8", 16: "fp16", 32: "tf32"}[bits]


# ---- least times -----------------------------------------------------------------------------------------------


def competition_us(work: Work) -> float:
    """Published speed of light in us: a B200 at 7.68 TB/s and 6.90 PFLOP/s of NVFP4.

    Raises:
        ValueError: the work is not multiplied as NVFP4; the competition has no formula for it.
    """
    if work.math != "nvfp4":
        raise ValueError(
            f"math={work.math!r}: the competition's formula is for nvfp4 alone; use physical_floor"
        )
    return 1e6 * max(work.bytes / COMPETITION_HBM_BYTES_PER_S, work.flops / COMPETITION_FP4_FLOPS_PER_S)


def grouped_gemm_us(sizes: Iterable[tuple[int, int, int]]) -> float:
    """Published speed of light in us of groups of (m, n, k) with fp16 C."""
    return competition_us(grouped_gemm(sizes))


@dataclass(frozen=True)
class Term:
    """One bound of a floor: microseconds, or None where the target's figure is unknown, and how it was computed."""

    name: str
    us: float | None
    basis: str


@dataclass(frozen=True)
class Floor:
    """The physical speed of light of a work on a target: the longest of its terms."""

    target: Target
    terms: tuple[Term, ...]
    sustained_us: float | None = None
    """Of a launch that is repeated for seconds, by the power limit (``gpus.power``); None where that is not known."""

    @property
    def us(self) -> float:
        """Microseconds below which no implementation gets, by the figures that are known."""
        return max(term.us for term in self.terms if term.us is not None)

    @property
    def bound(self) -> str:
        """Name of the term that decides: "memory", "math" or "launch"."""
        return next(term.name for term in self.terms if term.us == self.us)


def physical_floor(work: Work, target: Target) -> Floor:
    """Memory, math, and launch time of ``work`` on ``target``, each with its basis.

    On a target without FP4 tensor cores NVFP4 operands count at the fp16 rate: their values times their scales have too
    many bits for fp8. So do other pairs that its kernels decode.
    """
    math, note = _math_on(work, target)
    terms = (_memory_term(work, target), _math_term(work, target, math, note), _launch_term(target))
    return Floor(target, terms, least_us(work.flops, math, target))


def _math_on(work: Work, target: Target) -> tuple[str, str]:
    """The format that tensor cores of the target multiply in, and why where operands have another one."""
    if work.math in ("nvfp4", "fp8") and work.math not in target.rates:
        return "fp16", f", no {'FP4' if work.math == 'nvfp4' else 'FP8'} tensor cores"
    mma = None if work.pair is None or is_weight_only(target.arch) else mmas_of(target.arch).get(work.pair)
    if mma is not None and mma.decodes:
        return "fp16", f", decoded to {mma.kind}"
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
