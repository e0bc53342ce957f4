"""Draws calls of every public operation from seeds: valid ones, and ones with one or two invalid arguments.

``MEMBERS`` consecutive seeds are of one kind. A separate random generator per kind draws what kernels are compiled from
(the operation, architecture, form, formats, dtypes, config), so that a kernel compiled once serves many calls. Each
seed draws its own sizes, values, layouts and invalid arguments. A valid call is small, its sums are exact in fp32 in
any order (``operands.draws.Dice``), and its outputs hold poison before the call. A call with changed arguments may be
refused or still be valid. All backends must agree on that.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import expert_layers
import flat_parts as parts
import torch
from expert_layers import mx_weights, some_layer

import nvfp4_cute as nv
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_format import (
    INT8,
    INT8_PAIR,
    MIXED_PAIRS,
    MXFP4,
    MXFP8,
    MXFP8_PAIRS,
    NVFP4,
    NVFP4_PAIR,
    BlockFormat,
    Formats,
    FP8_1x128,
    FP8_128x128,
)
from nvfp4_cute.operands.draws import Dice, depth_step, poisoned
from nvfp4_cute.operands.whole import Parts, in_form
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.problem import Form, Gate, OutDtype, result_format

MEMBERS = 200
KINDS = 2**40
"""First seed of the dice of kinds."""
ARCHS = ("sm_100a", "sm_120a", "sm_90a")
MODES = ("eager", "eager", "lazy", "random")
"""When asynchronous operations happen on the emulator."""
HOSTILE = 4
"""One call of so many has arguments made wrong, where nothing else is asked for."""
WIDE = 10
"""One call of so many is larger than the others."""
# Half of the problems are NVFP4's.
FP8_PAIR = (FP8_1x128, FP8_128x128)
OTHER_PAIRS = ((MXFP4, MXFP4), *MXFP8_PAIRS, *MIXED_PAIRS, FP8_PAIR, FP8_PAIR, INT8_PAIR)
PAIRS = (NVFP4_PAIR,) * len(OTHER_PAIRS) + OTHER_PAIRS
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Weight formats that only 16-bit rows are multiplied by: each scale type, blocks of each size, zero points.
INT4 = tuple(nv.int4_format(*kind) for kind in ((32, "bfloat16"), (64, "float16"), (128, "float32")))
INT4 += tuple(
    nv.int4_format(block, dtype, zero_points=True) for block, dtype in ((64, "bfloat16"), (128, "float16"))
)
Arguments = dict[str, Any]
PARTS = ("data", "scale", "global_scale")  # of a quantized tensor


@dataclass(frozen=True)
class Limits:
    """Bounds of what is drawn: rows of a group, groups, N in steps of 16, K in steps of 32."""

    rows: int = 40
    groups: int = 3
    n_steps: int = 5
    k_steps: int = 5


LARGER = Limits(300, 5, 24, 24)
# Sorted from the smallest. A failure is shown with the first of these that still fails.
SMALLER = (
    Limits(1, 1, 1, 1),
    Limits(3, 1, 1, 1),
    Limits(3, 2, 2, 2),
    Limits(10, 2, 2, 2),
    Limits(40, 1, 5, 5),
)


@dataclass(frozen=True)
class Call:
    """One call: an operation and its arguments by name, on the CPU.

    Attributes:
        operation: name in ``nvfp4_cute``.
        arguments: values by name. Tensors that share memory also share it in a copy.
        arch: architecture of the emulator that the call was drawn for. The config is one of that architecture's.
        mode: mode of the emulator.
        mutations: descriptions of the invalid arguments.
    """

    operation: str
    arguments: Arguments
    arch: str
    mode: str = "eager"
    mutations: tuple[str, ...] = ()

    def run(self, arguments: Arguments, backend: str) -> Any:
        """Runs the operation on a copy (``copied``) of the arguments, which it may write to. Returns its result."""
        home = expert_layers if self.operation == "moe" else parts if hasattr(parts, self.operation) else nv
        return getattr(home, self.operation)(**arguments, backend=backend)

    @property
    def form(self) -> str:
        """How groups are given; "single" for an operation without groups or with one group."""
        if "offs" in self.arguments or "masked_m" in self.arguments:
            return "ragged" if "offs" in self.arguments else "masked"
        return "list" if self.operation.startswith("grouped") else "single"

    @property
    def formats(self) -> str:
        """Formats of the operands, or of the tensor that is quantized or dequantized; a dtype for rows that are not quantized."""
        given = self.arguments
        if self.operation == "route":
            return str(getattr(given["router_logits"], "dtype", None))
        if self.operation == "moe":
            return f"{given.get('activations', 'nvfp4')} x {getattr(given['w13'], 'format', None)}"
        if "t" in given or "x" in given:
            return str(given.get("format", getattr(given.get("t"), "format", None)))
        rows = given.get("a_format", NVFP4) if given["a_scale"] is not None else "16bit"
        return f"{rows} x {given.get('b_format', NVFP4)}"

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in self.arguments.items())
        wrong = f"   # {'; '.join(self.mutations)}" if self.mutations else ""
        return f"{self.operation}({shown}) on {self.arch} {self.mode}{wrong}"


def copied(arguments: Arguments, device: str = "cpu") -> Arguments:
    """Copies arguments to a device. Tensors that share memory also share it in the copy."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(copy, value))
        if isinstance(value, ExpertWeights | nv.BlockScaledTensor):
            return replace(value, **{name: copy(getattr(value, name)) for name in PARTS})
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        old = value.untyped_storage()
        if old.data_ptr() not in storages:
            data = torch.empty(0, dtype=torch.uint8).set_(old)
            storages[old.data_ptr()] = data.to(device, copy=True).untyped_storage()
        new = torch.empty(0, dtype=value.dtype, device=device)
        return new.set_(storages[old.data_ptr()], value.storage_offset(), value.shape, value.stride())

    return {name: copy(value) for name, value in arguments.items()}


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}/{list(value.stride())}@{value.device.type}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, ExpertWeights | nv.BlockScaledTensor):
        parts = ", ".join(_shown(getattr(value, name)) for name in PARTS)
        return f"{type(value).__name__}({parts}, {value.format})"
    return repr(value)


# ---- right calls -----------------------------------------------------------------------------------------------
def _columns(dice: Dice, limits: Limits, out_dtype: OutDtype) -> int:
    """Draws N. Rows of quantized results are a multiple of 16 bytes, except in a few calls, which are refused."""
    step = 32 if out_dtype == "nvfp4" and dice.integer(0, 15) else 16
    return step * dice.integer(1, limits.n_steps)


def _depth(dice: Dice, limits: Limits, pair: Formats = NVFP4_PAIR) -> int:
    step = depth_step(pair)
    return step * dice.integer(1, max(1, 32 * limits.k_steps // step))


def _formats(pair: Formats) -> Arguments:
    """Formats as arguments; none for NVFP4, the default."""
    return {f"{name}_format": f for name, f in zip("ab", pair, strict=True) if f != NVFP4}


def _quantized_out(
    lead: tuple[int, ...], form: str, groups: int, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of quantized results of the ragged or the masked form."""
    blocks = (lead[0] // 128 + groups,) if form == "ragged" else (groups, -(-lead[1] // 128))
    scale = poisoned(*blocks, -(-n // 64), 32, 4, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return poisoned(*lead, n // 2, dtype=torch.uint8), scale


def _operands(dice: Dice, rows: list[int], n: int, k: int, num_b: int, pair: Formats) -> Arguments:
    names = ("b",) if num_b == 1 else ("b1", "b2")
    sides = {"a": dice.operand([(m, k) for m in rows], pair[0])}
    sides |= {name: dice.operand([(n, k) for _ in rows], pair[1]) for name in names}
    return {name: x.data for name, x in sides.items()} | {
        f"{name}_scale": x.scale for name, x in sides.items()
    }


def _weights_of_rows(kind: Dice, pair: Formats) -> Formats:
    """Replaces the weights' format by one for 16-bit rows: the pair's, or an int4 format."""
    return NVFP4, kind.choose((pair[1],) * len(INT4) + INT4)


def _with_16_bit_rows(dice: Dice, made: Arguments, k: int, dtype: torch.dtype) -> Arguments:
    """Replaces quantized rows by 16-bit rows. The pair has no format for ``a`` then."""
    return made | {"a": [dice.halves(len(a), k).to(dtype) for a in made["a"]], "a_scale": None}


def _stacked(made: Arguments, form: str) -> Arguments:
    """Joins the operands of a list into those of the ragged or the masked form, with blocked scales as flat bytes."""
    flat = lambda scales: (
        scales and [s if s.element_size() > 1 else s.view(torch.uint8).flatten() for s in scales]
    )
    names = [name for name in made if not name.endswith("_scale")]
    sides = in_form(form, *(Parts(made[name], flat(made[f"{name}_scale"])) for name in names))
    found = {name: side.data for name, side in zip(names, sides, strict=True)}
    return found | {f"{name}_scale": side.scale for name, side in zip(names, sides, strict=True)}


def _config(
    kind: Dice, dice: Dice, arch: str, form: Form, out_dtype: OutDtype, pair: Formats, gate: Gate | None
) -> Arguments:
    """A config as arguments: none in a third of the kinds, else one of the architecture's, with a CTA count of the call."""
    if kind.integer(0, 2) == 0:
        return {}
    try:
        found = candidates(arch, form, result_format(out_dtype), gate, pair)
    except nv.UnsupportedProblem:  # of these formats
        return {}
    if not found:
        return {}
    config = kind.choose(found)
    num_cta = dice.choose((None, None, 1, 2, 3))
    return {"config": replace(config, num_cta=num_cta and num_cta * config.cluster_size)}


def _gate(num_b: int) -> Gate | None:
    """The drawn gate, whose results are exact."""
    return Gate("relu2", None, "separate") if num_b == 2 else None


def _grouped(kind: Dice, dice: Dice, arch: str, limits: Limits, num_b: int) -> Arguments:
    form, groups = kind.choose(("list", "ragged", "masked")), kind.integer(1, 3)
    pair, row_dtype = (
        kind.choose(PAIRS),
        kind.choose(DTYPES[:2]) if kind.integer(0, 5) == 0 else None,
    )
    pair = _weights_of_rows(kind, pair) if row_dtype is not None else pair
    has_quantized = row_dtype is None and pair[0].scale.bits == 8
    dtype = kind.choose((*DTYPES, "nvfp4") if has_quantized else DTYPES)
    has_factors, has_out_scale = kind.choose((False, True)), kind.choose((False, True))
    # The list form's kernel has a fixed number of slots for groups.
    rows = [
        dice.rows(limits.rows)
        for _ in range(min(groups, limits.groups) if form == "list" else dice.integer(1, limits.groups))
    ]
    n, k, most = _columns(dice, limits, dtype), _depth(dice, limits, pair), max(*rows, 1) + 1
    made = _operands(dice, [most] * len(rows) if form == "masked" else rows, n, k, num_b, pair)
    config: Arguments = {}
    if row_dtype is not None:
        made, pair = _with_16_bit_rows(dice, made, k, row_dtype), (NVFP4, pair[1])
    else:
        config = _config(kind, dice, arch, form, dtype, pair, _gate(num_b))
    names = ("alpha",) if num_b == 1 else ("alpha1", "alpha2")
    factors = {name: dice.factors(len(rows)) for name in names if has_factors}
    if form == "list":
        given = made
        if dtype != "nvfp4" and dice.choose((False, True)):
            given["out"] = [poisoned(m, n, dtype=dtype) for m in rows]
    else:
        given = _stacked(made, form)
        sizes = list(accumulate(rows)) if form == "ragged" else rows
        given["offs" if form == "ragged" else "masked_m"] = torch.tensor(sizes, dtype=torch.int32)
        # Rows of no group must keep their contents: they hold poison before the call and are compared after it.
        lead = (sum(rows),) if form == "ragged" else (len(rows), most)
        given["out"] = (
            _quantized_out(lead, form, len(rows), n) if dtype == "nvfp4" else poisoned(*lead, n, dtype=dtype)
        )
    if dtype == "nvfp4" and has_out_scale:
        given["out_global_scale"] = 2.0 ** -dice.integer(0, 6) * torch.ones(len(rows))
    if num_b == 2:
        given["activation"] = "relu2"
    return given | factors | _formats(pair) | {"out_dtype": dtype} | config


def _matrices(kind: Dice, dice: Dice, arch: str, limits: Limits, num_b: int) -> Arguments:
    pair, dtype, has_factor = (
        kind.choose(PAIRS),
        kind.choose(DTYPES),
        kind.choose((False, True)),
    )
    row_dtype = kind.choose(DTYPES[:2]) if num_b == 1 and kind.integer(0, 3) == 0 else None
    pair = _weights_of_rows(kind, pair) if row_dtype is not None else pair
    m, n, k = dice.rows(limits.rows), _columns(dice, limits, dtype), _depth(dice, limits, pair)
    made = _operands(dice, [m], n, k, num_b, pair)
    config: Arguments = {}
    if row_dtype is not None:
        made, pair = _with_16_bit_rows(dice, made, k, row_dtype), (NVFP4, pair[1])
    else:
        config = _config(kind, dice, arch, "list", dtype, pair, _gate(num_b))
    made = {name: value and value[0] for name, value in made.items()}
    if dice.choose((False, True)):
        made["out"] = poisoned(m, n, dtype=dtype)
    if num_b == 1 and has_factor:
        made["alpha"] = dice.factors(1)
    made |= _formats(pair) | {"out_dtype": dtype} | config
    return made | ({"activation": "relu2"} if num_b == 2 else {})


def _gemv(kind: Dice, dice: Dice, arch: str, limits: Limits) -> Arguments:
    b_format, dtype = kind.choose((NVFP4, NVFP4, MXFP4)), kind.choose(DTYPES)
    m, k = dice.integer(1, 2 * limits.rows), _depth(dice, limits)
    made = {
        "a": dice.values(m, k, b_format),
        "b": dice.values(1, k, b_format)[0],
        "a_scale": dice.scales(m, k, b_format),
        "b_scale": dice.scales(1, k, b_format),
    }
    return made | _formats((b_format, b_format)) | {"out": poisoned(m, dtype=dtype), "out_dtype": dtype}


def _format(dice: Dice) -> BlockFormat:
    return dice.choose((NVFP4, NVFP4, MXFP4, *MXFP8, *FP8_PAIR, INT8))


def _wide(dice: Dice, limits: Limits, format: BlockFormat) -> int:
    """Draws K of a tensor that is quantized."""
    return (format.block_k or 16) * dice.integer(1, 2 * limits.k_steps)


def _rows_to_quantize(dice: Dice, rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return dice.halves(rows, k).to(dtype) / 3


def _quantize(kind: Dice, dice: Dice, arch: str, limits: Limits) -> Arguments:
    format, dtype = _format(kind), kind.choose(DTYPES[:2])
    has_global_scale, has_up = kind.choose((False, True)), kind.choose((False, True))
    rounding, layout = kind.choose(("up", "down")), kind.choose((None, "blocked", "rowmajor"))
    x = _rows_to_quantize(dice, dice.integer(1, limits.rows), _wide(dice, limits, format), dtype)
    made: Arguments = {
        "x": x,
        "format": format,
        "scale_layout": None if format.scale_layout == "rowmajor" else layout,
    }
    if format.has_global_scale and has_global_scale:
        made["global_scale"] = dice.choose((0.5, torch.tensor(0.25), torch.tensor([0.125])))
    if has_up:
        made["up"] = x.clone()
    return made if format.has_global_scale else made | {"scale_rounding": rounding}


def _grouped_quantize(kind: Dice, dice: Dice, arch: str, limits: Limits) -> Arguments:
    format, dtype = kind.choose((NVFP4, NVFP4, MXFP4, *MXFP8)), kind.choose(DTYPES[:2])
    has_global_scale = kind.choose((False, True))
    rows = [dice.rows(limits.rows) for _ in range(dice.integer(1, limits.groups))]
    x = _rows_to_quantize(dice, sum(rows), _wide(dice, limits, format), dtype)
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32)
    made: Arguments = {"x": x, "offs": offs, "format": format}
    if format.has_global_scale and has_global_scale:
        made["global_scale"] = 2.0 ** -dice.integer(0, 6) * torch.ones(len(rows))
    return made


def _dequantize(kind: Dice, dice: Dice, arch: str, limits: Limits) -> Arguments:
    format, dtype = _format(kind), kind.choose(DTYPES)
    layout = "rowmajor" if format.scale_layout == "rowmajor" else kind.choose(("blocked", "rowmajor"))
    x = _rows_to_quantize(
        dice, dice.integer(1, limits.rows), _wide(dice, limits, format), dice.choose(DTYPES[:2])
    )
    t = nv.quantize(x, format=format, scale_layout=layout, backend="reference")
    return {"t": t, "dtype": dtype}


def _route(kind: Dice, dice: Dice, arch: str, limits: Limits) -> Arguments:
    groups, dtype = kind.choose((1, 1, 2, 4)), kind.choose(DTYPES)
    made: Arguments = {
        "scoring": kind.choose(("softmax", "sigmoid", "sqrtsoftplus")),
        "renormalize": kind.choose((False, True)),
    }
    biases = [name for name in ("bias", "correction_bias") if kind.integer(0, 3) == 0]
    experts = groups * dice.integer(1, 24)
    topk_groups = dice.integer(1, groups)
    made["router_logits"] = dice.halves(dice.rows(limits.rows), experts).to(dtype)  # some are equal
    made["top_k"] = dice.integer(1, min(8, experts // groups * topk_groups))
    for name in biases:
        made[name] = dice.halves(experts)
    return made | {"groups": (groups, topk_groups), "scale": dice.choose((1.0, 2.5))}


def _moe(kind: Dice, dice: Dice, arch: str, limits: Limits) -> Arguments:
    """A layer with exact sums. It may have experts without rows, ids of no expert, biases, and different numbers of launches."""
    is_16_bit, is_gated = kind.choose((False, True)), kind.choose((False, True, True))
    dtype, weight_format = kind.choose(DTYPES[1::-1]), kind.choose((NVFP4, MXFP4))
    layout = kind.choose(("concatenated", "interleaved"))
    has_input_scale, is_for_all = kind.choose((False, True)), kind.choose((False, True))
    has_bias13, has_bias2, has_shared = (kind.integer(0, 2) == 0 for _ in range(3))
    experts, hidden, width = dice.integer(1, 8), 32 * dice.integer(1, 4), 32 * dice.integer(1, 4)
    layer = some_layer(
        dice.rows(limits.rows), dice.integer(1, 4), experts, hidden, width, seed=dice.integer(0, 2**31), dtype=dtype,
        gated=is_gated, foreign=dice.choose((False, True)),
    )  # fmt: skip
    made = dict(zip(("x", "ids", "weights", "w13", "w2"), layer.arguments(), strict=True)) | layer.options
    if is_gated:
        made["weight_layout"] = layout
    rows = made["w13"].shape[1]
    if is_16_bit:
        made["activations"] = "16bit"
        if weight_format == MXFP4 and dtype == torch.bfloat16:
            generator = torch.Generator().manual_seed(dice.integer(0, 2**31))
            made["w13"] = mx_weights(experts, rows, hidden, generator, least_exponent=0)
            made["w2"] = mx_weights(experts, hidden, width, generator)
        else:
            made["w13"] = replace(made["w13"], global_scale=torch.ones(experts))
    elif has_input_scale:
        made["input_scale"] = 2.0 ** -dice.integer(0, 2) * torch.ones(1 if is_for_all else experts)
    if has_bias13:
        made["bias13"] = dice.halves(experts, rows).to(dtype) * 2
    if has_bias2:
        made["bias2"] = dice.halves(experts, hidden).to(dtype)
    if has_shared:
        made["shared"] = dice.halves(*made["x"].shape).to(dtype)
    return made


OPERATIONS: dict[str, Callable[[Dice, Dice, str, Limits], Arguments]] = {
    "grouped_gemm": partial(_grouped, num_b=1),
    "grouped_dual_gemm": partial(_grouped, num_b=2),
    "gemm": partial(_matrices, num_b=1),
    "dual_gemm": partial(_matrices, num_b=2),
    "gemv": _gemv,
    "quantize": _quantize,
    "grouped_quantize": _grouped_quantize,
    "dequantize": _dequantize,
    "route": _route,
    "moe": _moe,
}


def draw(
    seed: int,
    *,
    hostile: bool | None = None,
    limits: Limits | None = None,
    archs: tuple[str, ...] = ARCHS,
) -> Call:
    """Draws the call of a seed.

    Args:
        hostile: whether one or two arguments are invalid; None means in some calls.
        limits: limits of sizes; None means the usual ones, and larger ones in some calls.
        archs: architectures of which one is drawn.
    """
    kind, dice = Dice(KINDS + seed // MEMBERS), Dice(seed)
    operation, arch, mode = kind.choose(tuple(OPERATIONS)), kind.choose(archs), kind.choose(MODES)
    is_wide, is_hostile = dice.integer(1, WIDE) == 1, dice.integer(1, HOSTILE) == 1
    limits = limits or (LARGER if is_wide else Limits())
    mode = f"random:{seed}" if mode == "random" else mode
    call = Call(operation, OPERATIONS[operation](kind, dice, arch, limits), arch, mode)
    is_hostile = is_hostile if hostile is None else hostile
    for _ in range(dice.integer(1, 2) if is_hostile else 0):
        call = _mutated(dice, call)
    return call


# ---- invalid arguments -----------------------------------------------------------------------------------------
Mutation = Callable[[Dice, torch.Tensor], Any]


def _misaligned(_: Dice, t: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(t.numel() + 1, dtype=t.dtype)
    whole[1:] = t.flatten()
    return whole[1:].view(t.shape)


def _strided(_: Dice, t: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(*t.shape, 2, dtype=t.dtype)
    whole[..., 0] = t
    return whole[..., 0]


def _padded_rows(_: Dice, t: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(*t.shape[:-1], t.shape[-1] + 16, dtype=t.dtype)
    whole[..., : t.shape[-1]] = t
    return whole[..., : t.shape[-1]]


TENSORS: dict[str, Mutation] = {
    "None": lambda _, t: None,
    "a number": lambda _, t: 3,
    "a list": lambda _, t: [t],
    "a text": lambda _, t: "x",
    "numpy": lambda _, t: t.float().numpy(),
    "float64": lambda _, t: t.double(),
    "int32": lambda _, t: t.int(),
    "int64": lambda _, t: t.long(),
    "float32": lambda _, t: t.float(),
    "int8": lambda _, t: t.view(torch.uint8).view(torch.int8),
    "on meta": lambda _, t: t.to("meta"),
    "one row less": lambda _, t: t[:-1],
    "one row more": lambda _, t: torch.cat([t, t[:1]]),
    "one column less": lambda _, t: t[..., :-1],
    "half": lambda _, t: t[: len(t) // 2],
    "twice": lambda _, t: torch.cat([t, t]),
    "no rows": lambda _, t: t[:0],
    "a dimension more": lambda _, t: t.unsqueeze(-1),
    "a dimension in front": lambda _, t: t.unsqueeze(0),
    "a dimension less": lambda _, t: t[0],
    "flat": lambda _, t: t.flatten(),
    "transposed": lambda _, t: t.transpose(0, -1),
    "misaligned": _misaligned,
    "strided": _strided,
    "rows apart": _padded_rows,
    "rows of stride 0": lambda _, t: t[:1].expand_as(t),
    "needs a gradient": lambda _, t: t.float().requires_grad_(),
    "zeros": lambda _, t: torch.zeros_like(t),
    "negative": lambda _, t: -t if t.is_floating_point() else t - 7,
    "bytes FF": lambda _, t: torch.full_like(t.contiguous().view(torch.uint8), 0xFF).view(t.dtype),
    "far beyond": lambda _, t: t + 1000,
    "reversed": lambda _, t: t.flip(0),
}
VALUES: dict[str, tuple[Any, ...]] = {
    "out_dtype": (torch.float64, torch.int8, "nvfp4", "fp16", None, torch.float16),
    "scale_layout": ("rowmajor", "swizzled", None, 3),
    "activation": ("silu", "gelu", None, "relu2", 1),
    "alpha": (2.0, "2", [1.0], float("nan"), [float("inf")] * 3, [torch.tensor(1.0)]),
    "out_global_scale": (
        0.0,
        -1.0,
        float("nan"),
        [1.0],
        [0.0] * 3,
        torch.zeros(2),
        torch.tensor([-1.0, 1.0]),
    ),
    "global_scale": (
        0.0,
        -1.0,
        float("nan"),
        float("inf"),
        "auto",
        [1.0],
        torch.zeros(2),
        torch.tensor(-1.0),
    ),
    "a_format": (MXFP4, MXFP8[0], FP8_1x128, "mxfp4", None),
    "b_format": (NVFP4, MXFP4, MXFP8[1], FP8_128x128, 4),
    "format": (NVFP4, MXFP4, *MXFP8, *FP8_PAIR, "nvfp4", None),
    "scale_rounding": ("down", "nearest", None),
    "dtype": (torch.float64, torch.int8, "bf16", None),
    "t": (None, torch.zeros(3), 4),
    "w2": (None, torch.zeros(3, 32, 32), 4),
    "top_k": (0, -1, 17, 10**6, 2.0, None, "2"),
    "scoring": ("softmax", "topk", None),
    "groups": ((0, 1), (-1, 1), (3, 1), (1.0, 1), None, (2, 0), (2, 5), (2, None), (1, "1")),
    "scale": (0.0, -1.0, float("nan"), "1", None),
    "activations": ("nvfp4", "16bit", "8bit", None),
    "first_expert": (-1, 3, 2**31, 1.5, None),
    "input_scale": (1.0, 0.0, torch.tensor(-1.0), torch.ones(99), "auto"),
    "limit": (0.0, -1.0, float("nan"), 7.0, "7"),
    "weight_layout": ("concatenated", "interleaved_64_up_first", "woven"),
    "config": ("t128x128x256_s0a2", 3),
    "offs": (
        None,
        [1, 2],
        torch.tensor([5, 3], dtype=torch.int32),
        torch.tensor([2**31 - 1], dtype=torch.int32),
    ),
    "masked_m": (None, torch.tensor([-3, 2], dtype=torch.int32), torch.tensor([10**6], dtype=torch.int32)),
}
ACCEPTED = {
    "grouped_gemm": (
        "alpha",
        "out_global_scale",
        "scale_layout",
        "config",
        "offs",
        "masked_m",
        "out_dtype",
        "a_format",
        "b_format",
    ),
    "grouped_dual_gemm": (
        "out_global_scale",
        "limit",
        "weight_layout",
        "scale_layout",
        "config",
        "offs",
        "activation",
    ),
    "gemm": ("alpha", "scale_layout", "config", "out_dtype", "a_format", "b_format"),
    "dual_gemm": ("limit", "weight_layout", "config", "activation", "out_dtype"),
    "gemv": ("alpha", "scale_layout", "out_dtype", "a_format", "b_format"),
    "quantize": ("global_scale", "scale_layout", "format", "scale_rounding"),
    "grouped_quantize": ("global_scale", "format"),
    "dequantize": ("dtype", "t"),
    "route": ("top_k", "scoring", "groups", "scale"),
    "moe": ("limit", "activation", "activations", "weight_layout", "first_expert", "input_scale", "w2"),
}


def _mutated(dice: Dice, call: Call) -> Call:
    arguments = dict(call.arguments)
    if dice.integer(0, 3) == 0:
        name = dice.choose(ACCEPTED[call.operation])
        arguments[name] = dice.choose(VALUES[name])
        return replace(
            call, arguments=arguments, mutations=(*call.mutations, f"{name}={_shown(arguments[name])}")
        )
    if "out" in arguments and dice.integer(0, 7) == 0:
        try:
            return _overlapping(dice, call)
        except (RuntimeError, AttributeError, TypeError):  # not a tensor with data, or not flat
            return call
    name = dice.choose(
        tuple(n for n, v in arguments.items() if isinstance(v, torch.Tensor | list)) or tuple(arguments)
    )
    what = dice.choose(tuple(TENSORS))
    value = arguments[name]
    try:
        if isinstance(value, list) and value:
            index = dice.integer(0, len(value) - 1)
            arguments[name] = [TENSORS[what](dice, t) if i == index else t for i, t in enumerate(value)]
        elif isinstance(value, torch.Tensor):
            arguments[name] = TENSORS[what](dice, value)
        else:
            return call
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError):  # torch itself cannot make it
        return call
    return replace(call, arguments=arguments, mutations=(*call.mutations, f"{name}: {what}"))


def _overlapping(dice: Dice, call: Call) -> Call:
    """Places ``out`` in the bytes of an input."""
    out = call.arguments["out"]
    first = out[0] if isinstance(out, list | tuple) else out
    source = next(v for v in call.arguments.values() if isinstance(v, torch.Tensor | list))
    source = source[0] if isinstance(source, list) else source
    need = first.numel() * first.element_size()
    whole = torch.zeros(max(need, source.numel() * source.element_size()) + 256, dtype=torch.uint8)
    placed = whole[:need].view(first.dtype).view(first.shape)
    inside = whole[: source.numel() * source.element_size()].view(source.dtype).view(source.shape)
    inside.copy_(source)
    name = next(n for n, v in call.arguments.items() if isinstance(v, torch.Tensor | list))
    arguments = dict(call.arguments)
    arguments[name] = [inside, *arguments[name][1:]] if isinstance(arguments[name], list) else inside
    arguments["out"] = type(out)([placed, *out[1:]]) if isinstance(out, list | tuple) else placed
    return replace(call, arguments=arguments, mutations=(*call.mutations, f"out overlaps {name}"))
