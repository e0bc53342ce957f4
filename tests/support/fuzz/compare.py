"""Compares backends on one call: all refuse it with the same error, or compute the same bits.

A crash is a failure, and so is a write before a refusal.
"""

from dataclasses import dataclass
from typing import Any

import torch

import nvfp4_cute as nv
from fuzz.calls import Arguments, Call, copied
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.operands.draws import SCALES, scale_choices

BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Errors that a user may see. Any other error counts as a crash.
REFUSALS = (TypeError, ValueError, nv.UnsupportedProblem, nv.UnsupportedTarget, nv.ConfigError)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call.

    Attributes:
        refusal: type and text of the error; None if the call returned a result.
        results: bytes by name, of the result and of every tensor among the arguments after the call.
        crash: an error that no user should see, or None.
        written: an output that changed although the call was refused, or None.
    """

    refusal: str | None
    results: dict[str, torch.Tensor]
    crash: str | None = None
    written: str | None = None


UNREAD = ("is not a positive, normal float32 number", ": offs[", ": masked_m[")
"""Parts of refusals by the values of tensors, which are not read on a GPU, because that would wait for it."""


def outcome(call: Call, backend: str) -> Outcome:
    """Runs a call and records its result, writes and errors."""
    arguments = copied(call.arguments, "cuda" if backend == "cuda" else "cpu")
    try:
        with observe(mode=call.mode):
            result = call.run(arguments, backend)
    except REFUSALS as error:
        text = f"{type(error).__name__}: {error}"
        crash = None if _is_ours(error) else f"raised by torch or numpy: {text}"
        return Outcome(text, {}, crash, _changed_output(call.arguments, arguments))
    except Exception as error:
        return Outcome(None, {}, f"{type(error).__name__}: {error}")
    found: dict[str, torch.Tensor] = {}
    _collect("result", result, found)
    _collect_arguments(arguments, found)
    return Outcome(None, found)


def _changed_output(before: Arguments, after: Arguments) -> str | None:
    """Returns the name of the first output whose bytes changed."""
    old: dict[str, torch.Tensor] = {}
    new: dict[str, torch.Tensor] = {}
    _collect("out", before.get("out"), old)
    _collect("out", after.get("out"), new)
    return next((n for n, t in old.items() if n in new and not torch.equal(_bits(t), _bits(new[n]))), None)


def _is_ours(error: BaseException) -> bool:
    """Whether a line of this package raised the error, and not something that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "nvfp4_cute" in trace.tb_frame.f_globals.get("__name__", "")


def _collect(name: str, value: Any, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, nv.BlockScaledTensor):
        _collect(f"{name}.data", value.data, found)
        _collect(f"{name}.value", nv.dequantize(value), found)  # padding of scales is not part of the result
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            _collect(f"{name}[{i}]", v, found)
    elif isinstance(value, torch.Tensor) and value.device.type != "meta":
        found[name] = value.detach().to("cpu", copy=True)


def _collect_arguments(arguments: Arguments, found: dict[str, torch.Tensor]) -> None:
    for name, value in arguments.items():
        if name == "out" or isinstance(value, torch.Tensor):
            _collect(name, value, found)


@dataclass(frozen=True)
class Verdict:
    """Comparison of two backends on a call.

    Attributes:
        word: ``equal``, ``refused`` (by both), ``no kernel``, ``not compared`` (results need not be exact) or
            ``wrong``.
        reason: explanation of ``wrong``.
    """

    word: str
    reason: str | None = None


def verdict(call: Call, reference: Outcome, other: Outcome, backend: str) -> Verdict:
    """Compares the outcome on a backend with the reference's."""
    for name, one in (("reference", reference), (backend, other)):
        if one.crash is not None:
            return Verdict("wrong", f"{name} crashed: {one.crash}")
    if other.written is not None:
        return Verdict("wrong", f"{backend} wrote to {other.written} and refused afterwards")
    if (reference.refusal is None) != (other.refusal is None):
        said = reference.refusal or other.refusal
        if other.refusal is not None and other.refusal.startswith(
            ("UnsupportedTarget", "ConfigError", "UnsupportedProblem")
        ):
            return Verdict("no kernel")  # named as such
        if backend == "cuda" and any(words in (reference.refusal or "") for words in UNREAD):
            return Verdict("not compared")
        refuser, accepter = ("reference", backend) if reference.refusal else (backend, "reference")
        return Verdict("wrong", f"{refuser} refuses, {accepter} does not: {said}")
    if reference.refusal is not None:
        return Verdict("refused")
    if not _sizes_are_right(call) or not _sums_are_exact(call):
        return Verdict("not compared")  # no crash and no read out of bounds; nothing more is required
    found = difference(call, reference, other)
    return Verdict("wrong", found) if found else Verdict("equal")


def difference(call: Call, reference: Outcome, other: Outcome) -> str | None:
    """Describes where results differ from the reference's, or returns None."""
    for name, want in reference.results.items():
        got = other.results.get(name)
        if got is None or got.shape != want.shape or got.dtype != want.dtype:
            return f"{name}: {None if got is None else (got.dtype, tuple(got.shape))}, the reference has {want.dtype}, {tuple(want.shape)}"
        if name in ("result", "result[0]"):
            got, want = _rows_of_groups(call, got), _rows_of_groups(call, want)
        if name in ("result[1]", "out[1]") and _is_quantized_form(call):
            continue  # nobody writes or reads the padding of scales
        if "dual" in call.operation and _is_near(got, want):
            continue  # the kernel rounds the activation in fp32, the reference in float64
        same = torch.equal(_bits(got), _bits(want)) or _nan_equal(got, want)
        if not same:
            return f"{name} differs from the reference's"
    return None


def _rows_of_groups(call: Call, result: torch.Tensor) -> torch.Tensor:
    """Returns a result's rows that belong to a group. In an output that the call allocates, the other rows are undefined."""
    if call.arguments.get("out") is not None:
        return result
    if (offs := call.arguments.get("offs")) is not None:
        return result[: int(offs[-1])]
    if (masked_m := call.arguments.get("masked_m")) is not None:
        return torch.cat([rows[:count] for rows, count in zip(result, masked_m.tolist(), strict=True)])
    return result


def _is_quantized_form(call: Call) -> bool:
    return "offs" in call.arguments or "masked_m" in call.arguments


def _is_near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether results differ by at most two units in the last place plus the error of the activation's exponential.

    For silu below -88, the exponential overflows in fp32 and the result is 0. Codes of e2m1 are not compared, because a
    small difference may round to another code.
    """
    if not got.is_floating_point() or got.element_size() == 1:
        return True
    unit = torch.finfo(got.dtype).eps
    return torch.allclose(
        got.double(), want.double(), rtol=2 * unit + 2.0**-17, atol=2.0**-100, equal_nan=True
    )


def _sums_are_exact(call: Call) -> bool:
    """Whether every block scale and every FP8 element is one of those that are drawn.

    With other values, sums depend on their order.

    Intermediate values of a layer of experts are exact only with operands as drawn.
    """
    if call.operation == "moe":
        return not call.mutations
    for name in ("a", "b", "b1", "b2"):
        format = call.arguments.get(f"{name[0]}_format", NVFP4)
        is_drawn = not any(made.startswith(f"{name}:") for made in call.mutations)
        if isinstance(format, nv.BlockFormat) and format.element.bits == 8 and not is_drawn:
            return False
    for name, value in call.arguments.items():
        if not name.endswith("_scale") or name == "out_global_scale":
            continue
        format = call.arguments.get(f"{name[0]}_format", NVFP4)
        if not isinstance(format, nv.BlockFormat):
            return False
        # Padding is 0.
        codes = scale_choices(format, (0.0, *SCALES))
        codes = torch.cat([codes, torch.zeros_like(codes[:1])])
        codes = codes.view(BITS_OF_SIZE[codes.element_size()])
        for t in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(t, torch.Tensor) or t.device.type != "cpu":
                continue
            if (
                t.element_size() == codes.element_size()
                and not torch.isin(t.contiguous().view(codes.dtype), codes).all()
            ):
                return False
    return True


def _sizes_are_right(call: Call) -> bool:
    """Whether sizes on the device, which no check reads, are ascending ends or counts within the rows."""
    for name, rows_dim in (("offs", 0), ("masked_m", 1)):
        sizes = call.arguments.get(name)
        if not isinstance(sizes, torch.Tensor) or sizes.device.type != "cpu":
            continue
        rows = call.arguments["x" if "x" in call.arguments else "a"].shape[rows_dim]
        numbers = sizes.flatten().tolist()
        if min(numbers) < 0 or max(numbers) > rows or (name == "offs" and numbers != sorted(numbers)):
            return False
    return True


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _nan_equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Compares bit patterns, but treats all NaNs as equal. Zeros of different sign differ."""
    if not got.is_floating_point() or got.element_size() == 1:
        return False
    nan = got.isnan() & want.isnan()
    return torch.equal(_bits(got.masked_fill(nan, 0)), _bits(want.masked_fill(nan, 0)))


def judged(call: Call, backend: str) -> Verdict:
    """Compares a call on a backend with the reference."""
    reference = outcome(call, "reference")
    if any(isinstance(v, torch.Tensor) and v.device.type == "meta" for v in call.arguments.values()):
        backend = "reference"  # torch and the reference accept shapes without data, kernels do not
    return verdict(call, reference, reference if backend == "reference" else outcome(call, backend), backend)


def failure_of(call: Call, backend: str) -> str | None:
    """Describes what is wrong with a call on a backend, or returns None."""
    return judged(call, backend).reason
