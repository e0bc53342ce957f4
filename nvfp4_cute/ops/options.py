"""Records that group arguments of the operations: ``Options`` and ``GateUp``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from nvfp4_cute import private_api
from nvfp4_cute.batch_invariance import of_call
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_scaled import BLOCK_SCALED, BlockScaledTensor
from nvfp4_cute.operands.group_sizes import debug
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES
from nvfp4_cute.planning.config import KernelConfig, check_config
from nvfp4_cute.problem import DualWeights, check_early_weights

Weights = BlockScaledTensor | Sequence[BlockScaledTensor]
Run = TypeVar("Run", bound=Callable[..., Any])
Factor = float | torch.Tensor | Sequence[float] | None
# What products take as rows: a quantized tensor, or 16-bit values.
Input = BlockScaledTensor | torch.Tensor


@dataclass(frozen=True)
class Options:
    """How an operation is launched. Only ``config`` and ``batch_invariant`` may change the order of summation, and so the result.

    Attributes:
        config: tile shape and pipeline depths. None uses what ``tune`` found for the problem, else an estimate.
        prefetch_weights: promises that the previous launch on the stream wrote neither weights nor group sizes. Kernels for
            sm_100a, sm_103a and sm_110a then load weights while that launch ends; others ignore the promise. If the previous
            launch made this promise, it must also hold for the launch before that one.
        check: check ``offs`` and ``masked_m`` of this call on a GPU, as :class:`nvfp4_cute.debug` does.
        batch_invariant: True: the bits of a row do not depend on the other rows, and a ``config`` must have ``stream_k=False``.
            None: as :class:`nvfp4_cute.set_batch_invariant` decides.

    Raises:
        TypeError, ConfigError: a field has the wrong type.
    """

    config: KernelConfig | None = None
    prefetch_weights: bool = False
    check: bool = False
    batch_invariant: bool | None = None

    def __post_init__(self):
        check_config(self.config)
        check_early_weights(self.prefetch_weights)


@dataclass(frozen=True, eq=False)
class GateUp:
    """Weights of both projections of a gated layer.

    Attributes:
        gate, up: [N, K] each, a list of them, or [G, N, K], in one format. ``up`` is None where ``gate`` holds the rows of both
            in the order of ``layout``.
        layout: "separate"; "concatenated": [gate; up], a multiple of 256 rows; "interleaved_64_up_first": 64 rows of up, 64 of
            the gate and so on; "interleaved_32_gate_first": 32 rows of the gate, 32 of up and so on. The weights are never
            copied.
        gate_alpha, up_alpha: factors of the two products; see ``alpha`` of ``gemm`` and ``grouped_gemm``. Global scales are
            applied in addition.
    """

    gate: Weights
    up: Weights | None = None
    layout: DualWeights = "separate"
    gate_alpha: Factor = None
    up_alpha: Factor = None


DEFAULT = Options()


def options_of(options: Any) -> Options:
    """Returns the caller's options, or the defaults for None. Raises TypeError for anything else."""
    if options is None:
        return DEFAULT
    if not isinstance(options, Options):
        raise TypeError(f"options={options!r} is not Options; pass nvfp4_cute.Options(...)")
    return options


def running(run: Run, how: Options) -> Run:
    """Wraps ``run`` in the settings that ``how`` makes for one call: checks of group sizes, and batch invariance."""
    if not how.check and how.batch_invariant is None:
        return run
    if how.batch_invariant is not None and private_api.is_traced():
        raise UnsupportedProblem(
            "Options(batch_invariant=...) in a graph of torch.compile, which decides for all its calls: use set_batch_invariant"
        )

    @wraps(run)
    def with_settings(*arguments: Any, **options: Any) -> Any:
        with of_call(how.batch_invariant):
            if not how.check:
                return run(*arguments, **options)
            with debug():
                return run(*arguments, **options)

    return with_settings  # type: ignore[return-value]


def check_operand(name: str, given: Any, *, takes_16_bits: bool = False) -> None:
    """Raises TypeError unless ``given`` is block-scaled or, where the operation accepts them, 16-bit."""
    if isinstance(given, BlockScaledTensor):
        return
    if isinstance(given, torch.Tensor):
        if takes_16_bits and given.dtype in ACTIVATION_DTYPES:
            return
        if given.dtype.itemsize > 1:
            also = f", or 16-bit values: {name}.bfloat16()" if takes_16_bits else ""
            raise TypeError(f"{name} has {given.dtype} values; pass quantize({name}){also}")
        raise TypeError(
            f"{name} is {given.dtype} {list(given.shape)}, data without scales; pass BlockScaledTensor.from_parts({name}, scale)"
        )
    raise TypeError(f"{name} is {_kind(given)}; pass a BlockScaledTensor, which quantize returns")


def check_operands(name: str, given: Any, *, is_list: bool, takes_16_bits: bool = False) -> None:
    """Checks one tensor, or one per group in list form. Raises TypeError for the form that does not fit."""
    if not is_list:
        if isinstance(given, list | tuple):
            raise TypeError(f"{name} is {_kind(given)}; with offs or masked_m pass one tensor of all groups")
        return check_operand(name, given, takes_16_bits=takes_16_bits)
    if not isinstance(given, list | tuple):
        fix = (
            "offs= or masked_m= for one tensor of all groups" if hasattr(given, "shape") else f"list({name})"
        )
        raise TypeError(f"{name} is {_kind(given)}; pass a list with one tensor per group, or {fix}")
    if BLOCK_SCALED.issuperset(map(type, given)):
        return
    for g, one in enumerate(given):
        check_operand(f"{name}[{g}]", one, takes_16_bits=takes_16_bits)
        if isinstance(one, torch.Tensor) is not isinstance(given[0], torch.Tensor):
            raise TypeError(
                f"{name}[0] is {_kind(given[0])} and {name}[{g}] {_kind(one)}; quantize all groups of a call, or none"
            )


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name.startswith('NVFP4') else 'a'} {name}"


def gate_up_of(w: Any) -> GateUp:
    """Returns ``w`` if it is a GateUp and raises TypeError otherwise."""
    if not isinstance(w, GateUp):
        raise TypeError(
            f"w is a {type(w).__name__}; pass nvfp4_cute.GateUp(gate, up), or GateUp(both, layout=...) of one tensor"
        )
    return w
