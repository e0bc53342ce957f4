"""tune: every config that a call may be computed with is timed, and the fastest one kept for later calls.

On a GPU times are measured: CUDA events around a replayed graph on a cold L2, all configs in turn (``stopwatch``).
For CPU operands they are those of the timing model (``modelled``), of any GPU.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.errors import ConfigError, UnsupportedProblem
from nvfp4_cute.gpus.targets import B200, Target, lookup
from nvfp4_cute.launch import prepared, tuned
from nvfp4_cute.launch.plan import key_of
from nvfp4_cute.launch.tuned import Request, Tuning
from nvfp4_cute.ops.options import Options
from nvfp4_cute.planning import choose
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.terminal import Progress
from nvfp4_cute.tuning import stopwatch

Compute = Callable[[KernelConfig], object]


def tune(
    operation: Callable[..., object], *args: Any, backend: str = "auto", keep: bool = True, **options: Any
) -> Tuning:
    """Find the fastest config of a call, and have every later call of the same problem computed with it.

    ``tune(grouped_gemm, a, b, offs)``: the arguments are those of the call. CUDA tensors are measured,
    their results computed again and again. For CPU tensors the GPU that ``backend`` names is modelled, a B200 unless it says
    ("emulator:RTX 5090"); that takes seconds to minutes, and what it leaves in outputs has no meaning.

    The same problem: the same sizes in the same order, form, width and layout of the output, and activation, on the same
    product of GPU, with the same kernels and version of CuTe DSL. Where the device reads the sizes, the mean number of rows
    (masked: of rows there is room for) only has to lie within the same power of two. Only calls without ``config`` are
    affected, those under ``torch.compile`` and in layers included; bits of a result may depend on the config where it splits
    K. Calls that other threads repeat, and captured graphs, stay as they are.

    Args:
        operation: ``gemm``, ``grouped_gemm``, ``dual_gemm`` or ``grouped_dual_gemm``.
        args, backend, options: of the operation, without a ``config``.
        keep: whether to keep it, in the folder of compiled kernels (``NVFP4_CUTE_CACHE_DIR``); if that fails, a warning
            says why.

    Returns:
        The times of all configs, which prints as a table; its ``config`` is the fastest.

    Raises:
        ValueError: the call has nothing to tune. What the operation raises. EmulatorError: a kernel broke a rule.
    """
    own = options.get("options")
    if options.get("config") is not None or (own is not None and own.config is not None):
        raise ValueError("config is what tuning looks for: leave it out")
    where = backends.resolve(backend, _device_of(args[0]))
    is_measured = where == "cuda"
    if where in ("reference", "emulator"):
        where = f"{backends.EMULATOR_OF}{B200.name}"
    prepared.forget()
    asked = tuned.asked_by(lambda: operation(*args, backend=where, **options))

    def compute(name: str, config: KernelConfig) -> object:
        chosen: dict[str, Any] = {"config": config}
        if "options" in inspect.signature(operation).parameters:
            chosen = {"options": replace(own or Options(), config=config)}
        return operation(*args, backend=name, **(options | chosen))

    found = candidates(asked.request, asked.check)
    if is_measured:
        times = measured_us(lambda config: compute(where, config), found)
    else:
        target = lookup(where.removeprefix(backends.EMULATOR_OF))
        times = modelled_us(compute, found, target)
    tuning = Tuning(asked.request, "measured" if is_measured else "modelled", tuned.ranked(times))
    prepared.forget()
    reason = tuned.store(tuning) if keep else None
    if reason is not None:
        warnings.warn(
            f"the config was not kept: {reason}; or pass it as config", RuntimeWarning, stacklevel=2
        )
    return tuning


def candidates(request: Request, check: tuned.Check | None = None) -> list[KernelConfig]:
    """Every config to try, the one that is chosen without tuning first, those that cannot compute the problem left out.

    Args:
        check: of the call (``tuned.asked_by``), which knows what is launched: large products go by bands of rows. None: of the
            problem as it is.

    Raises:
        UnsupportedTarget, UnsupportedProblem, ConfigError: there is none.
    """
    problem, (arch, num_sms, _) = request.problem, request.gpu
    chosen_for = problem
    if problem.form not in ("list", "batched"):
        is_ragged = problem.form == "ragged"
        chosen_for = choose.problem_of_mean(
            problem.num_groups,
            problem.sizes[0],
            problem.gate,
            problem.out_format,
            is_ragged,
            (problem.a_format, problem.b_format),
        )
    tried = choose.ranked(chosen_for, arch, num_sms)
    found, refusal = _computable(check or partial(key_of, problem, arch), tried)
    if refusal is not None and not found:
        raise refusal
    return found


def _computable(
    check: tuned.Check, tried: Sequence[KernelConfig]
) -> tuple[list[KernelConfig], ConfigError | UnsupportedProblem | None]:
    """Those that can compute the problem, and why the first of the others cannot."""
    found, refusal = [], None
    for config in dict.fromkeys(tried):
        try:
            check(config)
            found.append(config)
        except (ConfigError, UnsupportedProblem) as error:
            refusal = refusal or error
    return found, refusal


def measured_us(compute: Compute, tried: Sequence[KernelConfig]) -> dict[KernelConfig, float]:
    """Median times on the current GPU."""

    def repeat(config: KernelConfig) -> stopwatch.Call:
        return lambda _: compute(config)

    for config in Progress(tried, desc="compile", unit="config"):
        compute(config)
    samples = stopwatch.measure({config.to_name(): repeat(config) for config in tried}, 1)
    return {config: samples[config.to_name()].median for config in tried}


def modelled_us(
    compute: Callable[..., object], tried: Sequence[KernelConfig], target: Target
) -> dict[KernelConfig, float]:
    """Modelled times on a GPU. ``compute`` takes a backend and a ``config``."""
    from nvfp4_cute.roofline import modelled  # with all of the emulator, which takes a while to import

    times = {}
    for config in Progress(tried, desc=f"model {target.name}", unit="config"):
        call = partial(compute, config=config)
        timings = modelled.modelled_times(call, target, by_representatives=True)
        times[config] = sum(timing.us for timing in timings)
    return times


def _device_of(operand: Any) -> torch.device:
    """The device of the first operand; of what is none, the CPU: the operation's checks say what is wrong."""
    first = operand[0] if isinstance(operand, list | tuple) and operand else operand
    return first.device if isinstance(first, torch.Tensor) else torch.device("cpu")
