"""Random problems of every operation, with poisoned outputs, and every config on one awkward problem.

Operands are those of ``check``: sums are exact in fp32 in any order, so one differing bit is a defect. Results with an
exponential (silu) are held to the bound that ``reference.grouped_dual_gemm_reference`` derives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from nvfp4_cute import BlockScaledTensor, quantize
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import MXFP4, MXFP8, BlockFormat
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.scale_layout import from_blocked, to_blocked
from nvfp4_cute.ops.parts import gemm, gemv, grouped_dual_gemm, grouped_gemm, grouped_quantize
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, OUT_DTYPES, RESULT_FORMATS, Form, Gate, OutDtype, result_format
from nvfp4_cute.prove.exact import K_STEP, Dice, difference
from nvfp4_cute.reference import grouped_dual_gemm_reference, grouped_gemm_reference

MAX_M, MAX_N, MAX_K, MAX_GROUPS = 300, 384, 1024, 3
POISON_BYTE = 0xFE  # NaN in every float format
SLACK = 5
"""Rows after the last group of the ragged form, which stay unwritten."""
# Sizes that no tile divides: more than a tile, one row, no row, and a K that ends inside a K tile.
AWKWARD_LIST = ((131, 208, 544), (1, 80, 96), (0, 144, 64), (70, 336, 288))
AWKWARD_ROWS, AWKWARD_NK = (131, 1, 0, 37), (208, 544)
DUAL_LIST = ((131, 256, 544), (1, 128, 96), (0, 128, 64), (70, 384, 288))
DUAL_NK = (256, 544)
FORMS: tuple[Form, ...] = ("list", "ragged")

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """One problem, with operands on the CPU.

    Attributes:
        text: description for people.
        run: (backend, device) -> outputs on the CPU, including the poison around them.
        expected: expected outputs.
        bound: None if every bit must be equal; else (results) -> why they are too far off, or None.
    """

    text: str
    run: Callable[[str, str], Tensors]
    expected: Callable[[], Tensors]
    bound: Callable[[Tensors], str | None] | None = None

    def failure(self, backend: str, device: str) -> str | None:
        """Returns why the results of a backend are wrong, or None."""
        got = self.run(backend, device)
        if self.bound is not None:
            return self.bound(got)
        flat = lambda tensors: [t.reshape(-1, t.shape[-1] if t.ndim else 1) for t in tensors]
        return difference(flat(got), flat(self.expected()))


# ---- operands --------------------------------------------------------------------------------------------------
def _to(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_to(v, device) for v in value] if isinstance(value, list) else value


def _poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype, device=device)
    out.view(torch.uint8).fill_(POISON_BYTE)
    return out


def _grouped(dice: Dice, sizes: Sequence[tuple[int, int, int]], num_b: int = 1) -> dict[str, list[Any]]:
    """Returns operands of the list form: a, a_scale, and b0, b0_scale, ... for each weight."""
    operands: dict[str, list[Any]] = {
        "a": [dice.values(m, k) for m, _, k in sizes],
        "a_scale": [dice.scales(m, k) for m, _, k in sizes],
    }
    for i in range(num_b):
        operands[f"b{i}"] = [dice.values(n, k) for _, n, k in sizes]
        operands[f"b{i}_scale"] = [dice.scales(n, k) for _, n, k in sizes]
    return operands


def _valid(t: BlockScaledTensor, m: int, n: int) -> Tensors:
    """Returns data and the scales of real rows, the defined parts of a quantized result."""
    scale = from_blocked(t.scale.cpu().view(torch.uint8), m, t.format.padded_scale_shape(m, n)[1])
    return [t.data.cpu().view(torch.uint8)[:m], scale]


def _valid_groups(
    data: torch.Tensor, scale: torch.Tensor, rows: Sequence[int], n: int, format: BlockFormat
) -> Tensors:
    """Returns data and scales of real rows for every group of the ragged form, whose scales start with a row of atoms each."""
    blocks_k = -(-n // format.atom_k)
    found, row, atom = [], 0, 0
    scale = scale.cpu().view(torch.uint8).reshape(-1, blocks_k, 32, 4, 4)
    for m in rows:
        atoms = -(-m // 128)
        found.append(data.cpu().view(torch.uint8)[row : row + m])
        if m:
            found.append(from_blocked(scale[atom : atom + atoms], m, 4 * blocks_k))
        row, atom = row + m, atom + atoms
    return found


# ---- grouped GEMM ----------------------------------------------------------------------------------------------
def list_problem(
    dice: Dice, sizes: Sequence[tuple[int, int, int]], dtype: OutDtype, config: KernelConfig | None = None
) -> Problem:
    """Makes a grouped GEMM in list form; its outputs lie in one poisoned tensor with a gap after each."""
    operands = _grouped(dice, sizes)
    alpha = dice.factors(len(sizes)) if config is None and dice.choose((False, True)) else None

    def run(backend: str, device: str, config: KernelConfig | None = config) -> Tensors:
        a, b, a_scale, b_scale = (_to(operands[name], device) for name in ("a", "b0", "a_scale", "b0_scale"))
        options: dict[str, Any] = {"alpha": _to(alpha, device), "backend": backend, "config": config}
        if not isinstance(dtype, torch.dtype):
            made: Any = grouped_gemm(a, b, a_scale, b_scale, out_dtype=dtype, **options)
            return [part for t, (m, n, _) in zip(made, sizes, strict=True) if m for part in _valid(t, m, n)]
        elements = [m * n + 64 for m, n, _ in sizes]  # 64 more keep outputs 128-byte aligned, or better
        elements = [-(-count // 64) * 64 for count in elements]
        whole = _poisoned(sum(elements), dtype=dtype, device=device)
        out = [part[: m * n].view(m, n) for part, (m, n, _) in zip(whole.split(elements), sizes, strict=True)]
        grouped_gemm(a, b, a_scale, b_scale, out=out, out_dtype=dtype, **options)
        return [whole.cpu()]

    return Problem(
        f"grouped_gemm list {list(sizes)} {dtype} alpha={alpha is not None}",
        run,
        lambda: run("reference", "cpu", None),
    )


def ragged_problem(
    dice: Dice, rows: Sequence[int], n: int, k: int, dtype: OutDtype, config: KernelConfig | None = None
) -> Problem:
    """Makes a grouped GEMM in ragged form, with rows after the last group."""
    operands = _grouped(dice, [(m, n, k) for m in rows])
    a, a_scale = _ragged_rows(operands, k)
    b, b_scale = torch.stack(operands["b0"]), torch.stack([s.flatten() for s in operands["b0_scale"]])
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32)
    alpha = dice.factors(len(rows)) if config is None and dice.choose((False, True)) else None

    def run(backend: str, device: str, config: KernelConfig | None = config) -> Tensors:
        given = [_to(t, device) for t in (a, b, a_scale, b_scale, offs, alpha)]
        if not isinstance(dtype, torch.dtype):
            made = grouped_gemm(*given, out_dtype=dtype, backend=backend, config=config)
            return _valid_groups(made[0], made[1], rows, n, RESULT_FORMATS[dtype])
        out = _poisoned(len(a), n, dtype=dtype, device=device)
        grouped_gemm(*given, out=out, out_dtype=dtype, backend=backend, config=config)
        return [out.cpu()]

    text = f"grouped_gemm ragged {list(rows)} x {n} x {k} {dtype} alpha={alpha is not None}"
    return Problem(text, run, lambda: run("reference", "cpu", None))


def _ragged_rows(operands: dict[str, list[Any]], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows of all groups and ``SLACK`` more, and their scales."""
    a = torch.cat([*operands["a"], torch.full((SLACK, NVFP4_FORMAT.row_bytes(k)), 0x77, dtype=torch.uint8)])
    flat = [s.view(torch.uint8).flatten() for s in operands["a_scale"]]
    # NaN for rows outside all groups, zeros in padding columns: kernels multiply the columns after the last block by
    # zeros.
    nan = torch.full((NVFP4_FORMAT.scale_atom[0], NVFP4_FORMAT.num_k_blocks(k)), 0x7F, dtype=torch.uint8)
    return a, torch.cat([*flat, to_blocked(nan).flatten()])


def masked_problem(dice: Dice, rows: Sequence[int], n: int, k: int, dtype: torch.dtype) -> Problem:
    """Makes a grouped GEMM in masked form; rows after a group's own rows hold poison before and after."""
    most = max(*rows, 1) + SLACK
    operands = _grouped(dice, [(most, n, k)] * len(rows))
    a, b = torch.stack(operands["a"]), torch.stack(operands["b0"])
    scales = [torch.stack([s.flatten() for s in operands[side]]) for side in ("a_scale", "b0_scale")]
    masked_m = torch.tensor(rows, dtype=torch.int32)

    def run(backend: str, device: str) -> Tensors:
        out = _poisoned(len(rows), most, n, dtype=dtype, device=device)
        given = [_to(t, device) for t in (a, b, *scales)]
        grouped_gemm(*given, masked_m=masked_m.to(device), out=out, out_dtype=dtype, backend=backend)
        return [out.cpu()]

    text = f"grouped_gemm masked {list(rows)} of {most} x {n} x {k} {dtype}"
    return Problem(text, run, lambda: run("reference", "cpu"))


def gemm_problem(dice: Dice, m: int, n: int, k: int, batches: int, dtype: torch.dtype) -> Problem:
    """Makes a ``gemm`` problem of one matrix or a batch."""
    operands = _grouped(dice, [(m, n, k)] * batches)
    a, b = (torch.stack(operands[side]).permute(1, 2, 0) for side in ("a", "b0"))
    scales = [torch.stack(operands[side]) for side in ("a_scale", "b0_scale")]

    def run(backend: str, device: str) -> Tensors:
        whole = _poisoned(batches, m + 1, n, dtype=dtype, device=device)
        out = whole[:, :m].permute(1, 2, 0)
        moved = [t.to(device) for t in (a, b)]
        gemm(*moved, *(s.to(device) for s in scales), out=out, out_dtype=dtype, backend=backend)
        return [whole.cpu()]

    text = f"gemm {m} x {n} x {k}, {batches} batches, {dtype}"
    return Problem(text, run, lambda: run("reference", "cpu"))


# ---- dual GEMM -------------------------------------------------------------------------------------------------
def dual_problem(
    dice: Dice,
    sizes: Sequence[tuple[int, int, int]],
    dtype: OutDtype,
    form: Form = "list",
    activation: str = "relu2",
    config: KernelConfig | None = None,
) -> Problem:
    """Makes a gated dual GEMM in list or ragged form. relu2 has only one right result: the fp32 operations in their order."""
    operands = _grouped(dice, sizes, 2)
    alphas = [torch.tensor([2.0**-6] * len(sizes)), torch.tensor([2.0**-5] * len(sizes))]
    rows = [m for m, _, _ in sizes]

    def run(backend: str, device: str) -> Tensors:
        options: dict[str, Any] = {"activation": activation, "backend": backend, "config": config}
        factors = [t.to(device) for t in alphas]
        if form == "ragged":
            n, k = sizes[0][1:]
            a, a_scale = _ragged_rows(operands, k)
            stack = lambda name: torch.stack(operands[name]).to(device)
            flat = lambda name: torch.stack([s.flatten() for s in operands[name]]).to(device)
            offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
            given = (
                a.to(device),
                stack("b0"),
                stack("b1"),
                a_scale.to(device),
                flat("b0_scale"),
                flat("b1_scale"),
            )
            if not isinstance(dtype, torch.dtype):
                made = grouped_dual_gemm(*given, *factors, offs=offs, out_dtype=dtype, **options)
                return _valid_groups(made[0], made[1], rows, n, RESULT_FORMATS[dtype])
            out = _poisoned(len(a), n, dtype=dtype, device=device)
            grouped_dual_gemm(*given, *factors, offs=offs, out=out, out_dtype=dtype, **options)
            return [part.cpu() for part in out.split([*rows, SLACK])]
        names = ("a", "b0", "b1", "a_scale", "b0_scale", "b1_scale")
        made = grouped_dual_gemm(
            *(_to(operands[name], device) for name in names), *factors, out_dtype=dtype, **options
        )
        if not isinstance(dtype, torch.dtype):
            return [part for t, (m, n, _) in zip(made, sizes, strict=True) if m for part in _valid(t, m, n)]
        return [t.cpu() for t in made]

    def expected() -> Tensors:
        found: Tensors = []
        for x in _relu2(operands, alphas):
            if isinstance(dtype, torch.dtype):
                found.append(x.to(dtype))
                continue
            format = RESULT_FORMATS[dtype]
            want = block_scaled.quantize(x, format=format) if len(x) else None
            found += _valid(want, *x.shape) if want is not None else []
            if want is None and form == "ragged":
                found.append(torch.empty((0, format.row_bytes(x.shape[1])), dtype=torch.uint8))
        if isinstance(dtype, torch.dtype) and form == "ragged":
            found.append(_poisoned(SLACK, sizes[0][1], dtype=dtype, device="cpu"))
        return found

    text = f"grouped_dual_gemm {form} {list(sizes)} {dtype} {activation}"
    if activation == "relu2":
        return Problem(text, run, expected)
    names = ("a", "b0", "b1", "a_scale", "b0_scale", "b1_scale")
    return Problem(
        text, run, expected, lambda got: _silu_excess([operands[name] for name in names], alphas, got)
    )


def _relu2(operands: dict[str, list[Any]], alphas: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Computes max(x, 0)^2 * y in fp32, from exact sums x and y times powers of two, so only these operations round."""
    products = [
        grouped_gemm_reference(
            operands["a"],
            operands[f"b{i}"],
            operands["a_scale"],
            operands[f"b{i}_scale"],
            alphas[i],
            torch.float32,
        )
        for i in range(2)
    ]
    for x, y in zip(*products, strict=True):
        x = x.clamp(min=0)
        yield x * x * y


def _silu_excess(operands: list[Any], alphas: Sequence[torch.Tensor], got: Tensors) -> str | None:
    """Returns where silu(x) * y is further from float64 than the hardware's approximations allow."""
    a, b1, b2, a_scale, b1_scale, b2_scale = operands
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


# ---- one row, few rows, quantization ---------------------------------------------------------------------------
def gemv_problem(dice: Dice, m: int, k: int, dtype: torch.dtype) -> Problem:
    """Makes an NVFP4 matrix times NVFP4 vector problem."""
    a, a_scale, v, v_scale = dice.values(m, k), dice.scales(m, k), dice.values(1, k), dice.scales(1, k)

    def run(backend: str, device: str) -> Tensors:
        whole = _poisoned(m + 64, dtype=dtype, device=device)
        given = [t.to(device) for t in (a, v[0], a_scale, v_scale)]
        gemv(*given, out=whole[:m], out_dtype=dtype, backend=backend)
        return [whole.cpu()]

    return Problem(f"gemv {m} x {k} {dtype}", run, lambda: run("reference", "cpu"))


def weight_only_problem(dice: Dice, m: int, n: int, k: int, dtype: torch.dtype) -> Problem:
    """Makes a problem of 16-bit activations times NVFP4 weights."""
    x, w, w_scale = dice.halves(m, k).to(dtype), dice.values(n, k), dice.scales(n, k)

    def run(backend: str, device: str) -> Tensors:
        whole = _poisoned(m + 1, n, dtype=torch.float32, device=device)
        given = [t.to(device) for t in (x, w, w_scale)]
        gemm(given[0], given[1], None, given[2], out=whole[:m], out_dtype=torch.float32, backend=backend)
        return [whole.cpu()]

    return Problem(f"gemm of {dtype} rows {m} x {n} x {k}", run, lambda: run("reference", "cpu"))


def quantize_problem(dice: Dice, m: int, k: int, dtype: torch.dtype, has_up: bool) -> Problem:
    """Makes a quantization of 16-bit values to NVFP4, alone or of silu(x) * up."""
    x, up = (dice.halves(m, k).to(dtype) / 3 for _ in range(2))

    def run(backend: str, device: str) -> Tensors:
        made = quantize(
            x.to(device), up=up.to(device) if has_up else None, global_scale=0.01, backend=backend
        )
        return [made.data.cpu().view(torch.uint8), made.scale.cpu().view(torch.uint8).reshape(1, -1)]

    return Problem(f"quantize {m} x {k} {dtype} up={has_up}", run, lambda: run("reference", "cpu"))


def grouped_quantize_problem(dice: Dice, rows: Sequence[int], k: int, dtype: torch.dtype) -> Problem:
    """Makes a quantization of the rows of groups to NVFP4."""
    x = dice.halves(sum(rows), k).to(dtype) / 3
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32)

    def run(backend: str, device: str) -> Tensors:
        data, scale = grouped_quantize(x.to(device), offs.to(device), backend=backend)
        return [data.cpu(), scale.cpu().view(torch.uint8).reshape(1, -1)]

    return Problem(f"grouped_quantize {list(rows)} x {k} {dtype}", run, lambda: run("reference", "cpu"))


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
    rows = [dice.rows(max_m) for _ in range(groups)]
    if operation == "list":
        return list_problem(dice, [(m, n(), k()) for m in rows], dtype)
    if operation == "ragged":
        return ragged_problem(dice, rows, columns, k(), dtype)
    if operation == "masked":
        return masked_problem(dice, rows, columns, k(), dtype)
    if operation == "gemm":
        few = dice.integer(1, 8) if dice.choose((True, False)) else dice.integer(1, max_m)
        return gemm_problem(dice, few, columns, k(), dice.integer(1, 3), dtype)
    if operation in ("dual", "silu"):
        sizes = [(m, columns, k()) for m in rows]
        return dual_problem(dice, sizes, dtype, activation="silu" if operation == "silu" else "relu2")
    if operation == "dual ragged":
        shape = (columns, k())
        return dual_problem(dice, [(m, *shape) for m in rows], dtype, "ragged")
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
    if operation == "dual":
        sizes = DUAL_LIST if form == "list" else tuple((m, *DUAL_NK) for m in AWKWARD_ROWS)
        return dual_problem(dice, sizes, dtype, form, config=config)
    if form == "list":
        return list_problem(dice, AWKWARD_LIST, dtype, config)
    return ragged_problem(dice, AWKWARD_ROWS, *AWKWARD_NK, dtype, config)
