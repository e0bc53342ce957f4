"""sm_103a: the members of ``base.Family``, those of sm_100a and MMAs of 96 elements of K of 4-bit operands.

Such an MMA takes as long as one of 64 elements (PTX ISA 9.7.16.10; a B300 has 1.5 times a B200's peak). It reads 48
bytes of a row. Three K tiles of 128 bytes are eight MMAs, two of which continue in the next K tile, wherever that lies
in shared memory.
"""

from dataclasses import replace

from nvfp4_cute.formats.block_format import NVFP4_PAIR, BlockFormat, Formats
from nvfp4_cute.planning.arch.sm100 import (
    CANDIDATES as CANDIDATES_OF_SM100,
)
from nvfp4_cute.planning.arch.sm100 import (
    DEFAULT_CONFIG,
    DUAL_CANDIDATES,
    HAS_CHAINS,
    HAS_EARLY_WEIGHTS,
    MMA,
    OUT_M_MAJOR,
    TO_AND_FRO,
    choosing,
    ctas_per_sm,
    interleave_reason,
    limits,
    prefetches_in_turns,
    quantized_reason,
    resident_clusters,
    resolve,
    smem_plan,
    work_reason,
    workspace_bytes,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Form, GroupedProblem

__all__ = [
    "ARCHS", "CANDIDATES", "DEFAULT_CONFIG", "DUAL_CANDIDATES", "HAS_CHAINS", "HAS_EARLY_WEIGHTS", "KERNEL", "MMA", "OPTIONS",
    "OUT_M_MAJOR", "TO_AND_FRO", "candidates", "choose", "ctas_per_sm", "estimates", "interleave_reason", "prefetches_in_turns",
    "quantized_reason", "resident_clusters", "resolve", "smem_plan", "unsupported_reason", "work_reason", "workspace_bytes",
]  # fmt: skip

ARCHS = ("sm_103a",)
KERNEL = "sm100.k96.grouped_gemm.K96GemmSm103"
OPTIONS = (*limits.OPTIONS, "use_k96_instrs")
# N tiles of the MMAs in CUTLASS's kernels for sm_103a (test/unit/gemm/device, sm103_gemm_f4_f4_f32_tensor_op_f32_*).
K96_TILES_N = (128, 192, 256)
# Tiles bound by MMAs of 96 elements: many columns, whose loads L2 delivers fast enough if clusters share them.
K96_CANDIDATES = (
    *(
        KernelConfig(
            (128, 256, 256), use_2cta_instrs=True, swap_ab=swap, multicast_n=shared, use_k96_instrs=True
        )
        for swap in (False, True)
        for shared in (1, 2)
    ),
    *(
        KernelConfig(
            (128, 128, 256), num_acc_stage=3, use_2cta_instrs=True, swap_ab=swap, use_k96_instrs=True
        )
        for swap in (False, True)
    ),
)
K96_DUAL_CANDIDATES = tuple(
    KernelConfig((128, 128, 256), use_2cta_instrs=True, swap_ab=swap, use_k96_instrs=True)
    for swap in (False, True)
)
CANDIDATES = (*CANDIDATES_OF_SM100, *K96_CANDIDATES)


def unsupported_reason(config: KernelConfig, num_b: int = 1, formats: Formats = NVFP4_PAIR) -> str | None:
    """Returns why this family cannot build ``config``, with the nearest legal value; None if it can."""
    reason = limits.unsupported_reason(config, num_b, formats, OPTIONS)
    if reason is not None or not config.use_k96_instrs:
        return reason
    if MMA[formats].element_bits != 4:
        return f"use_k96_instrs of {formats[0]} x {formats[1]}: only 4-bit operands have MMAs of 96; use use_k96_instrs=False"
    if config.cta_tile_shape_mnk[1] not in K96_TILES_N:
        return (
            f"use_k96_instrs with N tile {config.cta_tile_shape_mnk[1]}: MMAs of 96 elements have {K96_TILES_N} columns; "
            "use one of these, or use_k96_instrs=False"
        )
    if config.split_k > 1:
        return f"use_k96_instrs with split_k={config.split_k}: an MMA may reach into the next part of K; use split_k=1"
    if smem_plan(config, num_b, formats).num_ab_stage < 2:
        return f"use_k96_instrs with num_ab_stage={config.num_ab_stage}: an MMA may read two stages; use num_ab_stage=2"
    return None


def candidates(
    num_b: int = 1,
    weight_layout: str = "separate",
    out_format: BlockFormat | None = None,
    form: Form = "list",
    formats: Formats = NVFP4_PAIR,
) -> tuple[KernelConfig, ...]:
    """Returns the candidates: those of sm_100a, and MMAs of 96 elements of K."""
    tried = choosing.candidates(num_b, weight_layout, out_format, form, formats)
    if MMA[formats].element_bits != 4:
        return tried
    more = K96_DUAL_CANDIDATES if num_b > 1 else K96_CANDIDATES
    built = (c for c in more if interleave_reason(c, weight_layout) is None)
    return (*tried, *built)


def estimates(problem: GroupedProblem, num_sms: int) -> list[choosing.Estimate]:
    """Returns every candidate, the best first (``sm100.choosing.estimates``). Empty if only the device knows the sizes."""
    if problem.form not in choosing.KNOWN_SIZES:
        return []
    formats = problem.a_format, problem.b_format
    tried = candidates(problem.num_b, problem.weight_layout, formats=formats)
    return choosing.ranked(tried, problem, num_sms)


def choose(problem: GroupedProblem, num_sms: int) -> KernelConfig:
    """Returns the config for groups of these sizes, or of this mean size if only the device knows the sizes."""
    if problem.form in choosing.KNOWN_SIZES:
        return estimates(problem, num_sms)[0].config
    chosen = choosing.choose(problem, num_sms)
    formats = problem.a_format, problem.b_format
    smem = smem_plan(chosen, problem.num_b, formats)
    # If pairs with other tokens share weights, L2 delivers them, and the MMAs of a K tile may take longer than its copies.
    # Single CTAs are chosen where memory is the limit.
    shares = chosen.use_2cta_instrs and problem.sizes[0][0] > chosen.work_tile_mnk[0]
    shares = shares and not problem.batch_invariant
    if not shares or limits.k_tile_mma_cycles(chosen, smem) <= sum(limits.k_tile_copy_cycles(chosen, smem)):
        return chosen
    with_k96 = replace(chosen, use_k96_instrs=True)
    return chosen if unsupported_reason(with_k96, problem.num_b, formats) else with_k96
