"""``tune``: times every possible config of a call, and stores the fastest one for later calls.

On a GPU, times are measured: CUDA events around a replayed graph on a cold L2, alternating between configs (``stopwatch``). For
CPU operands, times come from the timing model (``modelled``) for any GPU.
"""

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
    """Find the fastest config of a call, and use it for every later call of the same problem.

    ``tune(grouped_gemm, a, b, offs)`` has the arguments of the call. With CUDA tensors, it measures, and computes the results
    many times. With CPU tensors, it models the GPU that ``backend`` names ("emulator:RTX 5090"; a B200 by default). Modelling
    takes seconds to minutes, and leaves meaningless values in outputs.

    Calls have the same problem if they agree in sizes and their order, form, width and layout of the output, activation, GPU
    product, kernels, and CuTe DSL version. If the device reads the sizes, the mean number of rows (masked: M_max) only has to
    round up to the same power of two. Tuning affects only calls without ``config``, including those under ``torch.compile`` and
    in layers. Bits of a result may depend on the config if it splits K. Calls that other threads repeat, and captured graphs,
    do not change.

    Args:
        operation: ``gemm``, ``grouped_gemm``, ``dual_gemm`` or ``grouped_dual_gemm``.
        args, backend, options: arguments of the operation, without a ``config``.
        keep: whether to store the result, in the folder of compiled kernels (``NVFP4_CUTE_CACHE_DIR``). If that fails, a
            warning says why.

    Returns:
        The times of all configs, which prints as a table; its ``config`` is the fastest.

    Raises:
        ValueError: the call has nothing to tune.
        EmulatorError: a kernel broke a rule.

    Also raises what the operation raises.
    """
    own = options.get("options")
    if own is not None and own.config is not None:
        raise ValueError("config is what tuning looks for: leave it out")
    where = backends.resolve(backend, _device_of(args[0]))
    is_measured = where == "cuda"
    if where in ("reference", "emulator"):
        where = f"{backends.EMULATOR_OF}{B200.name}"
    prepared.forget()
    asked = tuned.asked_by(lambda: operation(*args, backend=where, **options))

    def compute(name: str, config: KernelConfig) -> object:
        return operation(
            *args, backend=name, **(options | {"options": replace(own or Options(), config=config)})
        )

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
    """Returns every config to try, the untuned choice first, without those that cannot compute the problem.

    Args:
        request: the problem on a GPU.
        check: check of the call (``tuned.asked_by``), which knows what is launched: large products are divided into bands of
            rows. None checks the problem as it is.

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
    """Returns the configs that can compute the problem, and the reason why the first of the others cannot."""
    found, refusal = [], None
    for config in dict.fromkeys(tried):
        try:
            check(config)
            found.append(config)
        except (ConfigError, UnsupportedProblem) as error:
            refusal = refusal or error
    return found, refusal


def measured_us(compute: Compute, tried: Sequence[KernelConfig]) -> dict[KernelConfig, float]:
    """Returns median times on the current GPU."""

    def repeat(config: KernelConfig) -> stopwatch.Call:
        return lambda _: compute(config)

    for config in Progress(tried, desc="compile", unit="config"):
        compute(config)
    samples = stopwatch.measure({config.to_name(): repeat(config) for config in tried}, 1)
    return {config: samples[config.to_name()].median for config in tried}


def modelled_us(
    compute: Callable[..., object], tried: Sequence[KernelConfig], target: Target
) -> dict[KernelConfig, float]:
    """Returns modelled times on a GPU. ``compute`` takes a backend and a ``config``."""
    from nvfp4_cute.roofline import modelled  # imports all of the emulator, which takes a while

    times = {}
    for config in Progress(tried, desc=f"model {target.name}", unit="config"):
        call = partial(compute, config=config)
        timings = modelled.modelled_times(call, target, by_representatives=True)
        times[config] = sum(timing.us for timing in timings)
    return times


def _device_of(operand: Any) -> torch.device:
    """Returns the device of the first operand; the CPU for other values, which the operation's checks refuse."""
    while isinstance(operand, list | tuple) and operand:
        operand = operand[0]
    return operand.device if isinstance(operand, torch.Tensor) else torch.device("cpu")
