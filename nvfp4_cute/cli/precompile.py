"""`nvfp4-cute compile`: kernels compiled ahead of time, in parallel processes, into a folder that any machine can load from.

The folder is a cache (``disk_cache``): a machine uses it, read-only or not, where NVFP4_CUTE_CACHE_DIR names it.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nvfp4_cute.compile import disk_cache
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.compile.simt_keys import FewRowsKey, GemvKey, QuantizeKey, W4A16Key
from nvfp4_cute.errors import CacheError
from nvfp4_cute.planning.arch import simt
from nvfp4_cute.planning.choose import candidates, dual_candidates
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, Activation, Form, Gate, OutDtype, WeightLayout

OPERATIONS = ("grouped_gemm", "grouped_dual_gemm", "gemv", "few_rows", "w4a16", "quantize")
# A process that compiles takes about a gigabyte.
MAX_JOBS = 8


def keys(
    operations: Sequence[str],
    arch: str,
    *,
    groups: Sequence[int],
    configs: Sequence[KernelConfig] | None,
    form: Form,
    activation: Activation,
    dtype: OutDtype,
    has_alpha: bool,
    weight_layout: WeightLayout = "separate",
    has_limit: bool = False,
) -> Iterator[Any]:
    """What to compile for one architecture.

    Args:
        operations: of ``OPERATIONS``.
        groups: group counts of GEMMs; in forms other than list one kernel serves any count.
        configs: of GEMMs; None for all that they may choose by themselves.
        form: of ``grouped_gemm`` and the dual GEMM.
        activation: of the dual GEMM.
        dtype: of outputs, and of what is quantized; "nvfp4" of GEMMs.
        has_alpha: whether products read a factor.
        weight_layout, has_limit: of the dual GEMM.

    Raises:
        UnsupportedTarget, ConfigError, UnsupportedProblem: a kernel that does not exist.
        ValueError: an operation that does not exist, or a dtype that quantize does not take.
    """
    counts = groups if form == "list" else (1,)
    for operation in operations:
        if operation == "grouped_gemm":
            for count, config in product(counts, configs or candidates(arch, form, dtype == NVFP4)):
                yield KernelKey.make(arch, config, count, dtype, has_alpha, form)
        elif operation == "grouped_dual_gemm":
            gate = Gate(activation, None, weight_layout)
            for count, config in product(
                counts, configs or dual_candidates(arch, form, gate, dtype == NVFP4)
            ):
                yield KernelKey.make(
                    arch, config, count, dtype, has_alpha, form, False, activation, weight_layout, has_limit
                )
        elif not isinstance(dtype, torch.dtype):
            raise ValueError(f"{operation} writes no {dtype}: leave it out with --dtype {dtype}")
        elif operation == "gemv":
            yield GemvKey(arch, dtype, has_alpha)
        elif operation == "few_rows":
            yield FewRowsKey(arch, dtype, has_alpha)
        elif operation == "w4a16":
            inputs = (torch.float16, torch.bfloat16) if dtype == torch.float32 else (dtype,)
            for activations, tokens in product(inputs, simt.W4A16_TOKENS):
                yield W4A16Key(arch, activations, dtype, has_alpha, tokens)
        elif operation == "quantize":
            if dtype == torch.float32:
                raise ValueError("quantize takes float16 or bfloat16: leave it out with --dtype float32")
            for options in product((False, True), repeat=4):
                yield QuantizeKey(arch, dtype, *options)
        else:
            raise ValueError(f"{operation!r} is none of {', '.join(OPERATIONS)}")


def run(wanted: Sequence[Any], out: Path, jobs: int | None = None) -> int:
    """Have every kernel in the folder ``out``, compiling what is missing; show progress, print a summary, return 0.

    Args:
        wanted: keys. jobs: processes; by default one for each core, ``MAX_JOBS`` at most.

    Raises: CacheError where the folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(f"{out} cannot be made ({error}): choose another folder") from error
    before = disk_cache.contents(out).num_entries
    jobs = min(jobs or min(len(os.sched_getaffinity(0)), MAX_JOBS), len(wanted))
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
        tqdm(total=len(wanted), unit="kernel", desc="compile", disable=None) as progress,
    ):
        futures = [pool.submit(disk_cache.ensure, out, key) for key in wanted]
        try:
            for future in as_completed(futures):
                future.result()
                progress.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    after = disk_cache.contents(out)
    print(
        f"{out} holds {after}: the {len(wanted)} asked for, of which {after.num_entries - before} are new.\n"
        f"To use it, here or on a machine with the same versions: export NVFP4_CUTE_CACHE_DIR={out.resolve()}"
    )
    return 0
