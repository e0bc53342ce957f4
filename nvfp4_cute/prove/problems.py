"""Random problems of every operation, with poisoned outputs, and every config on one awkward problem.

Operands are those of ``check``: sums are exact in fp32 in any order, so one differing bit is a defect. Results with an
exponential (silu) are held to the bound that ``reference.grouped_dual_gemm_reference`` derives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from nvfp4_cute import quantize
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import MXFP4, MXFP8
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.scale_layout import from_blocked, to_blocked
from nvfp4_cute.operands.draws import K_STEP, Dice, poisoned
from nvfp4_cute.operands.whole import in_form
from nvfp4_cute.ops.parts import (
    Options,
    Parts,
    gate_up,
    gemm,
    gemv,
    grouped_dual_gemm,
    grouped_gemm,
    grouped_quantize,
)
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, OUT_DTYPES, RESULT_FORMATS, Form, Gate, OutDtype, result_format
from nvfp4_cute.prove.exact import difference
from nvfp4_cute.reference import grouped_dual_gemm_reference, grouped_gemm_reference

MAX_M, MAX_N, MAX_K, MAX_GROUPS = 300, 384, 1024, 3
SLACK = 5
"""Number of rows after the last group of the ragged form, and after each group of the masked form. They stay unwritten."""
# Sizes that no tile divides: more than a tile, one row, no row, and a K that ends inside a K tile.
AWKWARD_LIST = ((131, 208, 544), (1, 80, 96), (0, 144, 64), (70, 336, 288))
AWKWARD_ROWS, AWKWARD_NK = (131, 1, 0, 37), (208, 544)
DUAL_LIST = ((131, 256, 544), (1, 128, 96), (0, 128, 64), (70, 384, 288))
DUAL_NK = (256, 544)
FORMS: tuple[Form, ...] = ("list", "ragged")

Tensors = list[torch.Tensor]
Sizes = Sequence[tuple[int, int, int]]
Compute = Callable[[Callable[[Any], Any], dict[str, Any]], Tensors]
"""Function of (a function that moves operands to a device, backend and config). Returns outputs on the CPU, with their poison."""


@dataclass(frozen=True)
class Problem:
    """One problem, with operands on the CPU.

    Attributes:
        text: description for people.
        compute: computes the outputs.
        config: config of the kernel, or None; the reference has none.
        expected: expected outputs; None for those of the reference.
        bound: None if every bit must be equal; else (results) -> why they are too far off, or None.
    """

    text: str
    compute: Compute
    config: KernelConfig | None = None
    expected: Callable[[], Tensors] | None = None
    bound: Callable[[Tensors], str | None] | None = None

    def failure(self, backend: str, device: str) -> str | None:
        """Returns why the results of a backend are wrong, or None."""
        how: dict[str, Any] = {"backend": backend}
        if self.config:
            how["options"] = Options(self.config)
        got = self.compute(lambda value: _to(value, device), how)
        if self.bound is not None:
            return self.bound(got)
        want = (
            self.expected() if self.expected else self.compute(lambda value: value, {"backend": "reference"})
        )
        flat = lambda tensors: [t.reshape(-1, t.shape[-1] if t.ndim else 1) for t in tensors]
        return difference(flat(got), flat(want))


# ---- operands --------------------------------------------------------------------------------------------------
def _to(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_to(item, device) for item in value]
        return Parts._make(items) if isinstance(value, Parts) else items
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _drawn(dice: Dice, sizes: Sizes, num_b: int = 1) -> list[Parts]:
    """Returns data and scales of every group, of ``a`` and of each weight."""
    sides = [[(m, k) for m, _, k in sizes], *[[(n, k) for _, n, k in sizes]] * num_b]
    return [dice.operand(side) for side in sides]


def _most(sizes: Sizes) -> int:
    """Returns the number of rows of each group's memory in the masked form."""
    return max(*(m for m, _, _ in sizes), 1) + SLACK


def _arguments(form: Form, operands: list[Parts], sizes: Sizes) -> tuple[list[Parts], dict[str, Any]]:
    """Returns the operands as a form takes them, and the groups' sizes."""
    a, *weights = operands
    rows = torch.tensor([m for m, _, _ in sizes], dtype=torch.int32)
    if form != "ragged":
        return in_form(form, a, *weights), {"masked_m": rows} if form == "masked" else {}
    k = sizes[0][2]
    # NaN for rows outside all groups, zeros in padding columns: kernels multiply the columns after the last block by
    # zeros.
    nan = torch.full((NVFP4_FORMAT.scale_atom[0], NVFP4_FORMAT.num_k_blocks(k)), 0x7F, dtype=torch.uint8)
    slack = torch.full((SLACK, NVFP4_FORMAT.row_bytes(k)), 0x77, dtype=torch.uint8)
    scales = [*(s.view(torch.uint8) for s in a.scale), to_blocked(nan)]
    more = a._replace(data=[*a.data, slack], scale=scales)
    return in_form(form, more, *weights), {"offs": rows.cumsum(0).int()}


# ---- results ---------------------------------------------------------------------------------------------------
def _outputs(form: Form, sizes: Sizes, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Returns poisoned memory, and the output of a form in it. Lists have a gap after each output."""
    n = sizes[0][1]
    if form == "list":
        elements = [-(-(m * n + 64) // 64) * 64 for m, n, _ in sizes]  # all 128-byte aligned, or better
        whole = poisoned(sum(elements), dtype=dtype)
        parts = zip(whole.split(elements), sizes, strict=True)
        return whole, [part[: m * n].view(m, n) for part, (m, n, _) in parts]
    shape = (len(sizes), _most(sizes), n) if form == "masked" else (sum(m for m, _, _ in sizes) + SLACK, n)
    whole = poisoned(*shape, dtype=dtype)
    return whole, whole


def _moved(
    form: Form, sizes: Sizes, dtype: torch.dtype, move: Callable[[Any], Any]
) -> tuple[torch.Tensor, Any]:
    """Returns ``_outputs`` on a device."""
    whole, out = _outputs(form, sizes, dtype)
    there = move(whole)
    if form != "list":
        return there, there
    return there, [there.as_strided(t.shape, t.stride(), t.storage_offset()) for t in out]


def _defined(made: Any, form: Form, sizes: Sizes, name: str) -> Tensors:
    """Returns data and scales of the real rows of every group's quantized results."""
    format, found, row, atom = RESULT_FORMATS[name], [], 0, 0
    for g, (m, n, _) in enumerate(sizes):
        atoms, columns = -(-m // 128), 4 * -(-n // format.atom_k)
        if form == "list":
            data, scale = made[g].data, made[g].scale.view(torch.uint8)
        else:  # every group's scales start with a row of atoms
            every = made[1].view(torch.uint8).reshape(-1, columns // 4, 32, 4, 4)
            data, scale = made[0][row : row + m], every[atom : atom + atoms]
        row, atom = row + m, atom + atoms
        if m:
            found += [data.cpu().view(torch.uint8)[:m], from_blocked(scale.cpu(), m, columns)]
    return found


# ---- grouped and dual GEMM -------------------------------------------------------------------------------------
def grouped_problem(
    dice: Dice, form: Form, sizes: Sizes, dtype: OutDtype, config: KernelConfig | None = None
) -> Problem:
    """Makes a grouped GEMM; ragged and masked groups have one N and one K."""
    drawn = [(_most(sizes), n, k) for _, n, k in sizes] if form == "masked" else sizes
    given, ends = _arguments(form, _drawn(dice, drawn), sizes)
    alpha = dice.factors(len(sizes)) if config is None and dice.choose((False, True)) else None

    def compute(move: Callable[[Any], Any], how: dict[str, Any]) -> Tensors:
        options = {"alpha": move(alpha), "out_dtype": dtype, **move(ends), **how}
        if not isinstance(dtype, torch.dtype):
            return _defined(grouped_gemm(*move(given), **options), form, sizes, dtype)
        whole, out = _moved(form, sizes, dtype, move)
        grouped_gemm(*move(given), out=out, **options)
        return [whole.cpu()]

    text = f"grouped_gemm {form} {list(sizes)} {dtype} alpha={alpha is not None}"
    return Problem(text, compute, config)


def dual_problem(
    dice: Dice,
    sizes: Sizes,
    dtype: OutDtype,
    form: Form = "list",
    activation: str = "relu2",
    config: KernelConfig | None = None,
) -> Problem:
    """Makes a gated dual GEMM in list or ragged form. relu2 has only one right result: the fp32 operations in their order."""
    operands = _drawn(dice, sizes, 2)
    alphas = [torch.tensor([2.0**-6] * len(sizes)), torch.tensor([2.0**-5] * len(sizes))]
    given, ends = _arguments(form, operands, sizes)

    def compute(move: Callable[[Any], Any], how: dict[str, Any]) -> Tensors:
        options = {"activation": activation, "out_dtype": dtype, **move(ends), **how}
        a, gate, up = move(given)
        w = gate_up(gate, up, "separate", *move(alphas))
        if not isinstance(dtype, torch.dtype):
            return _defined(grouped_dual_gemm(a, w, **options), form, sizes, dtype)
        whole, out = _moved(form, sizes, dtype, move)
        grouped_dual_gemm(a, w, out=out, **options)
        return [whole.cpu()] if activation == "relu2" else [t.cpu() for t in out]

    def expected() -> Tensors:
        wants = list(_relu2(operands, alphas))
        if not isinstance(dtype, torch.dtype):
            made = [block_scaled.quantize(x, format=RESULT_FORMATS[dtype]) if len(x) else None for x in wants]
            return _defined(made, "list", [(len(x), x.shape[1], 0) for x in wants], dtype)
        whole, out = _outputs(form, sizes, dtype)
        parts = out if form == "list" else out.split([*(len(x) for x in wants), SLACK])
        for part, want in zip(parts, wants, strict=False):
            part.copy_(want)
        return [whole]

    text = f"grouped_dual_gemm {form} {list(sizes)} {dtype} {activation}"
    bound = None if activation == "relu2" else lambda got: _silu_excess(operands, alphas, got)
    return Problem(text, compute, config, expected, bound)


def _relu2(operands: list[Parts], alphas: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Computes max(x, 0)^2 * y in fp32, from exact sums x and y times powers of two, so only these operations round."""
    a, *weights = operands
    products = [
        grouped_gemm_reference(a.data, b.data, a.scale, b.scale, alpha, torch.float32)
        for b, alpha in zip(weights, alphas, strict=True)
    ]
    for x, y in zip(*products, strict=True):
        x = x.clamp(min=0)
        yield x * x * y


def _silu_excess(operands: list[Parts], alphas: Sequence[torch.Tensor], got: Tensors) -> str | None:
    """Returns where silu(x) * y is further from float64 than the hardware's approximations allow."""
    (a, b1, b2), (a_scale, b1_scale, b2_scale) = zip(*((x.data, x.scale) for x in operands), strict=True)
    gates = grouped_gemm_reference(a, b1, a_scale, b1_scale, alphas[0], torch.float64)
    ups = grouped_gemm_reference(a, b2, a_scale, b2_scale, alphas[1], torch.float64)
    wants = grouped_dual_gemm_reference(
        a, b1, b2, a_scale, b1_scale, b2_scale, alphas[0], alphas[1], torch.float64
    )
    for group, (out, x, y, want) in enumerate(zip(got, gates, ups, wants, strict=False)):
        kind = torch.finfo(out.dtype)
        units = (3 * x.abs() + 11) * 2.0**-24 + kind.eps / 2
        bound = want.abs() * units + kind.tiny * kind.eps + 2.0**-119 * y.abs()
        error = (out.double() - want.clamp(-kind.max, kind.max)).abs()
        # Beyond the largest number both are infinite or the largest number, which this does not compare.
        far = (error > bound) & (want.abs() < kind.max)
        if bool(far.any()) or bool(out.isnan().any()):
            return f"group {group}: {int(far.sum())} of {far.numel()} results are further off than the bound"
    return None


# ---- other operations ------------------------------------------------------------------------------------------
def gemm_problem(dice: Dice, m: int, n: int, k: int, batches: int, dtype: torch.dtype) -> Problem:
    """Makes a ``gemm`` problem of one matrix or a batch."""
    given = in_form("batched", *_drawn(dice, [(m, n, k)] * batches))

    def compute(move: Callable[[Any], Any], how: dict[str, Any]) -> Tensors:
        whole = move(poisoned(batches, m + 1, n, dtype=dtype))
        gemm(*move(given), out=whole[:, :m].permute(1, 2, 0), out_dtype=dtype, **how)
        return [whole.cpu()]

    return Problem(f"gemm {m} x {n} x {k}, {batches} batches, {dtype}", compute)


def gemv_problem(dice: Dice, m: int, k: int, dtype: torch.dtype) -> Problem:
    """Makes an NVFP4 matrix times NVFP4 vector problem."""
    matrix = Parts(dice.values(m, k), dice.scales(m, k))
    vector = Parts(dice.values(1, k)[0], dice.scales(1, k))

    def compute(move: Callable[[Any], Any], how: dict[str, Any]) -> Tensors:
        whole = move(poisoned(m + 64, dtype=dtype))
        gemv(*move([matrix, vector]), out=whole[:m], out_dtype=dtype, **how)
        return [whole.cpu()]

    return Problem(f"gemv {m} x {k} {dtype}", compute)


def weight_only_problem(dice: Dice, m: int, n: int, k: int, dtype: torch.dtype) -> Problem:
    """Makes a problem of 16-bit activations times NVFP4 weights."""
    x, w = dice.halves(m, k).to(dtype), Parts(dice.values(n, k), dice.scales(n, k))

    def compute(move: Callable[[Any], Any], how: dict[str, Any]) -> Tensors:
        whole = move(poisoned(m + 1, n, dtype=torch.float32))
        gemm(*move([x, w]), out=whole[:m], out_dtype=torch.float32, **how)
        return [whole.cpu()]

    return Problem(f"gemm of {dtype} rows {m} x {n} x {k}", compute)


def quantize_problem(dice: Dice, m: int, k: int, dtype: torch.dtype, has_up: bool) -> Problem:
    """Makes a quantization of 16-bit values to NVFP4, alone or of silu(x) * up."""
    x, up = (dice.halves(m, k).to(dtype) / 3 for _ in range(2))

    def compute(move: Callable[[Any], Any], how: dict[str, Any]) -> Tensors:
        made = quantize(move(x), up=move(up) if has_up else None, global_scale=0.01, **how)
        return [made.data.cpu().view(torch.uint8), made.scale.cpu().view(torch.uint8).reshape(1, -1)]

    return Problem(f"quantize {m} x {k} {dtype} up={has_up}", compute)


def grouped_quantize_problem(dice: Dice, rows: Sequence[int], k: int, dtype: torch.dtype) -> Problem:
    """Makes a quantization of the rows of groups to NVFP4."""
    x = dice.halves(sum(rows), k).to(dtype) / 3
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32)

    def compute(move: Callable[[Any], Any], how: dict[str, Any]) -> Tensors:
        data, scale = grouped_quantize(move(x), move(offs), **how)
        return [data.cpu(), scale.cpu().view(torch.uint8).reshape(1, -1)]

    return Problem(f"grouped_quantize {list(rows)} x {k} {dtype}", compute)


# ---- drawing ---------------------------------------------------------------------------------------------------
OPERATIONS = (
    *("list",) * 6,
    *("ragged",) * 5,
    *("masked",) * 2,
    *("gemm",) * 2,
    *("dual", "dual ragged", "silu", "gemv", "weight-only", "quantize", "grouped quantize"),
)
KERNEL_DTYPES = (torch.float16, torch.bfloat16)


def draw(seed: int, *, small: bool = False) -> Problem:
    """Draws the problem of a seed. small: a problem for an emulator."""
    dice = Dice(seed)
    operation = dice.choose(OPERATIONS)
    max_m, max_n, max_k = (40, 80, 160) if small else (MAX_M, MAX_N, MAX_K)
    k = lambda: K_STEP * dice.integer(1, max_k // K_STEP)
    groups = dice.integer(1, MAX_GROUPS)
    some_mx: Any = dice.choose(tuple(f.name for f in (MXFP4, *MXFP8)))
    kinds = {"list": (*OUT_DTYPES, NVFP4, some_mx), "dual ragged": (torch.bfloat16, NVFP4, some_mx)}
    kinds["ragged"] = kinds["list"]
    dtype: Any = dice.choose(kinds.get(operation, OUT_DTYPES))
    format = result_format(dtype)
    step = NVFP4_FORMAT.block_k if format is None else format.block_k
    columns = step * dice.integer(1, max_n // step)  # for quantized results; other results accept any number
    n = lambda: dice.integer(1, max_n) if format is None else columns
    rows, shared_k = [dice.rows(max_m) for _ in range(groups)], k()
    if operation == "list":
        return grouped_problem(dice, "list", [(m, n(), k()) for m in rows], dtype)
    if operation in ("ragged", "masked"):
        return grouped_problem(dice, operation, [(m, columns, shared_k) for m in rows], dtype)
    if operation == "gemm":
        few = dice.integer(1, 8) if dice.choose((True, False)) else dice.integer(1, max_m)
        return gemm_problem(dice, few, columns, k(), dice.integer(1, 3), dtype)
    if operation in ("dual", "silu"):
        sizes = [(m, columns, k()) for m in rows]
        return dual_problem(dice, sizes, dtype, activation="silu" if operation == "silu" else "relu2")
    if operation == "dual ragged":
        return dual_problem(dice, [(m, columns, shared_k) for m in rows], dtype, "ragged")
    if operation == "gemv":
        return gemv_problem(dice, dice.integer(1, 4 * max_m), k(), dtype)
    if operation == "weight-only":
        return weight_only_problem(dice, dice.integer(1, 32), columns, k(), dice.choose(KERNEL_DTYPES))
    if operation == "quantize":
        return quantize_problem(dice, max(rows[0], 1), k(), dice.choose(KERNEL_DTYPES), dice.choose((False, True)))  # fmt: skip
    return grouped_quantize_problem(dice, [*rows, 3], k(), dice.choose(KERNEL_DTYPES))


# ---- every config ----------------------------------------------------------------------------------------------
def configs(arch: str) -> Iterator[tuple[str, Form, bool, str]]:
    """Yields (operation, form, whether results are NVFP4, config name) of all configs that defaults may choose."""
    gate = Gate("relu2", None, "separate")
    for form in FORMS:
        quantized = set(candidates(arch, form, NVFP4_FORMAT))
        for config in candidates(arch, form):
            yield "gemm", form, False, config.to_name()
        for config in quantized - set(candidates(arch, form)):
            yield "gemm", form, True, config.to_name()
        for config in candidates(arch, form, gate=gate):
            yield "dual", form, False, config.to_name()
    for config in candidates(arch, "ragged", NVFP4_FORMAT):
        yield "gemm", "ragged", True, config.to_name()


def config_problem(operation: str, form: Form, is_quantized: bool, name: str) -> Problem:
    """Makes the awkward problem with one config. Raises ConfigError if the config cannot be built."""
    dice, config = Dice(1), KernelConfig.from_name(name)
    dtype: OutDtype = NVFP4 if is_quantized else torch.bfloat16
    sizes: Sizes
    sizes, shape = (DUAL_LIST, DUAL_NK) if operation == "dual" else (AWKWARD_LIST, AWKWARD_NK)
    if form != "list":
        sizes = tuple((m, *shape) for m in AWKWARD_ROWS)
    if operation == "dual":
        return dual_problem(dice, sizes, dtype, form, config=config)
    return grouped_problem(dice, form, sizes, dtype, config)
