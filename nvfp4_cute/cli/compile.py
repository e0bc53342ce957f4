"""`nvfp4-cute compile`: compiles kernels ahead of time, in parallel processes, into a folder that any machine can load from.

The folder is a cache (``disk_cache``), which may be read-only. NVFP4_CUTE_CACHE_DIR selects it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.backends import installed
from nvfp4_cute.batch_invariance import set_batch_invariant
from nvfp4_cute.cli.options.compile import EVERYWHERE, OF_FORMATS, OPERATIONS, WEIGHT_ONLY
from nvfp4_cute.compile import disk_cache
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.compile.parallel import ensure_all
from nvfp4_cute.compile.simt_keys import FewRowsKey, GemvKey, GlobalScaleKey, QuantizeKey, W4A16Key
from nvfp4_cute.errors import CacheError, UnsupportedProblem
from nvfp4_cute.formats.block_format import INT8_PAIR
from nvfp4_cute.launch.plan import check_list_groups
from nvfp4_cute.operands.rules import check_result_of_pair
from nvfp4_cute.ops.global_scale import MAX_TIMES
from nvfp4_cute.planning.arch import is_weight_only, simt
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import (
    RESULT_FORMATS,
    Gate,
    dtype_name,
    num_weights,
    result_format,
)


def run(args: argparse.Namespace) -> int:
    """Compiles the requested kernels; returns 0."""
    if args.model:
        with set_batch_invariant(args.batch_invariant):
            wanted = list(_of_model(args.model, args.arch, args.activations))
        return compile_all(wanted, args.out, args.jobs)
    configs = [KernelConfig.from_name(name) for name in args.config] if args.config else None
    wanted = []
    for arch in args.arch:
        key = KernelKey(
            arch, KernelConfig(), 1, out_dtype=args.dtype if args.dtype in RESULT_FORMATS else getattr(torch, args.dtype),
            has_alpha=args.alpha, form=args.form, activation=args.activation, weight_layout=args.weight_layout,
            has_limit=args.limit, early_weights=args.early_weights, a_format=args.formats[0], b_format=args.formats[1],
            bias_dtype=args.bias and getattr(torch, args.bias),
        )  # fmt: skip
        wanted += keys(args.operations or _usual(arch, args.dtype), key, args.groups, configs)
    versions = installed.versions()
    for arch in dict.fromkeys(args.arch):
        problem = installed.toolkit_problem(arch, versions)
        if problem:
            print(f"warning: {problem}", file=sys.stderr)
    return compile_all(wanted, args.out, args.jobs)


def _of_model(folder: str, archs: Sequence[str], activations: str) -> Iterator[Any]:
    """Iterates over the kernels for a checkpoint's layers. Raises CheckpointError if the readers refuse it."""
    from nvfp4_cute.models.checkpoints import Checkpoint
    from nvfp4_cute.models.checkpoints.folders import local_folder
    from nvfp4_cute.models.engines import TOP_K, checkpoint_kernels
    from nvfp4_cute.models.inspect import inspect
    from nvfp4_cute.models.layers import ACTIVATION_CHOICES

    checkpoint = Checkpoint(local_folder(folder))
    experts, kinds = checkpoint.experts_config if checkpoint.experts else None, inspect(checkpoint).kinds
    how: dict[str, Any] = {"activations": ACTIVATION_CHOICES[activations]}
    if experts is not None:
        how |= {"top_k": experts.top_k or TOP_K, "activation": experts.activation}
    for arch in archs:
        yield from checkpoint_kernels(kinds, arch, **how)


def _usual(arch: str, dtype: str) -> Sequence[str]:
    """Returns the operations to compile if none is named."""
    if is_weight_only(arch):
        return WEIGHT_ONLY
    return OF_FORMATS if dtype in RESULT_FORMATS else EVERYWHERE


def keys(
    operations: Sequence[str],
    wanted: KernelKey,
    groups: Sequence[int] = (1,),
    configs: Sequence[KernelConfig] | None = None,
) -> Iterator[Any]:
    """Iterates over the keys to compile for one architecture.

    Args:
        operations: entries of ``OPERATIONS``.
        wanted: architecture, form, dtype of outputs and of values to quantize, factor, bias and formats; activation, layout and
            limit of the dual GEMM, which has no bias; ``early_weights``, for GEMMs whose kernels support it.
        groups: numbers of groups of GEMMs; in forms other than list, one kernel serves any number.
        configs: configs of GEMMs; None for all that an estimate may choose.

    Raises:
        UnsupportedTarget, ConfigError, UnsupportedProblem: a kernel does not exist, or there are more groups than it can hold.
        ValueError: an operation does not exist, or quantize does not support the dtype.
    """
    arch, dtype, has_alpha, bias_dtype = wanted.arch, wanted.out_dtype, wanted.has_alpha, wanted.bias_dtype
    counts = groups if wanted.form == "list" else (1,)
    if {"grouped_gemm", "grouped_dual_gemm"} & set(operations):
        check_result_of_pair(dtype, (wanted.a_format, wanted.b_format))
    activation = wanted.activation or "silu"
    gates: dict[str, tuple[Gate | None, dict[str, Any]]] = {
        "grouped_gemm": (None, {"activation": None, "weight_layout": "separate", "has_limit": False}),
        "grouped_dual_gemm": (
            Gate(activation, None, wanted.weight_layout), {"activation": activation, "bias_dtype": None},
        ),
    }  # fmt: skip
    for operation in operations:
        if operation not in OPERATIONS:
            raise ValueError(f"{operation!r} is none of {', '.join(OPERATIONS)}")
        if operation in gates:
            gate, fields = gates[operation]
            num_b = num_weights(gate is not None, wanted.weight_layout)
            for count, config in product(counts, configs or _choices(wanted, gate)):
                check_list_groups(count, num_b, result_format(dtype) is not None)
                yield replace(wanted, config=config, num_groups=count, **fields).validated()
        elif not isinstance(dtype, torch.dtype):
            raise ValueError(f"{operation} writes no {dtype}: leave it out with --dtype {dtype}")
        elif operation == "gemv":
            yield GemvKey(arch, dtype, has_alpha, bias_dtype)
        elif operation == "few_rows":
            yield FewRowsKey(arch, dtype, has_alpha, bias_dtype)
        elif operation == "w4a16":
            inputs = (torch.float16, torch.bfloat16) if dtype == torch.float32 else (dtype,)
            for activations, tokens in product(inputs, simt.W4A16_TOKENS):
                key = W4A16Key(arch, activations, dtype, has_alpha, tokens, bias_dtype=bias_dtype)
                yield key
                if key.blocks_per_sm > 1:
                    yield replace(key, warps=simt.W4A16_MANY_WARPS)
        else:
            if dtype == torch.float32:
                raise ValueError("quantize takes float16 or bfloat16: leave it out with --dtype float32")
            for words in simt.QUANTIZE_CHOICES:
                for is_scaled, is_grouped, is_blocked, has_up in product((False, True), repeat=4):
                    yield QuantizeKey(arch, dtype, is_scaled, is_grouped, is_blocked, has_up, words=words)
            yield from _finding_keys(arch, dtype)


def _finding_keys(arch: str, dtype: torch.dtype) -> Iterator[QuantizeKey | GlobalScaleKey]:
    """Iterates over kernels that find the global scale "auto": in the quantizing launch for few values, before it for more."""
    for num_times in range(MAX_TIMES + 1):
        for is_blocked in (False, True):
            words = simt.QUANTIZE_FEW_WORDS
            yield QuantizeKey(arch, dtype, True, False, is_blocked, words=words, found_times=num_times)
        for is_small in (False, True):
            yield GlobalScaleKey(arch, dtype, is_small, num_times)


def _choices(wanted: KernelKey, gate: Gate | None) -> Sequence[KernelConfig]:
    """Returns all configs that an estimate may choose for a GEMM. Raises UnsupportedProblem if there is none."""
    formats = wanted.a_format, wanted.b_format
    found = candidates(wanted.arch, wanted.form, result_format(wanted.out_dtype), gate, formats)
    if not found:
        what, fix = "GEMM", "choose another --dtype or --formats"
        if gate is not None:
            what = "dual GEMM"
            if formats == INT8_PAIR:
                fix = "dual products of integers are two of grouped_gemm with --dtype float32: compile that"
        raise UnsupportedProblem(
            f"{wanted.arch} has no {what} of {formats[0]} x {formats[1]} in form {wanted.form} with results of "
            f"{dtype_name(wanted.out_dtype)}: {fix}"
        )
    return found


def compile_all(wanted: Sequence[Any], out: Path, jobs: int | None = None) -> int:
    """Puts every kernel into the folder ``out``, compiling missing ones; shows progress, prints a summary, returns 0.

    Args:
        wanted: keys.
        out: the folder.
        jobs: see ``ensure_all``.

    Raises: CacheError if the folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(f"{out} cannot be made ({error}): choose another folder") from error
    before = disk_cache.contents(out).num_entries
    ensure_all(out, wanted, jobs)
    after = disk_cache.contents(out)
    print(
        f"{out} holds {after}: the {len(wanted)} asked for, of which {after.num_entries - before} are new.\n"
        f"To use it, here or on a machine with the same versions: export NVFP4_CUTE_CACHE_DIR={out.resolve()}"
    )
    return 0
