"""Sources for forms that no public run uses: other users on the hardware, or the probe that will decide."""

import re
from dataclasses import dataclass

from nvfp4_cute.emulator.record.forms import Form


@dataclass(frozen=True)
class Note:
    """A note on the forms of a scope whose "kind: text" matches a pattern.

    Attributes:
        scope: family of architectures, or "" for any.
        pattern: regular expression to search for.
        words: the source, or the part of `nvfp4-cute prove` that decides.
    """

    scope: str
    pattern: str
    words: str

    def fits(self, form: Form) -> bool:
        """Whether the note applies to a form."""
        return (
            self.scope in ("", form.scope)
            and re.search(self.pattern, f"{form.kind}: {form.text}") is not None
        )


SOURCES: tuple[Note, ...] = (
    Note(
        "sm_100",
        r"mma: tcgen05\.mma\.kind::mxf4nvf4\.block(16|32)\.cta_group::2 M=256 N=192, K=96",
        "CUTLASS C++, test/unit/gemm/device/sm103_gemm_f4_f4_f32_tensor_op_f32_2sm_256x192.cu: tiles of 256 x 192 x 768, "
        "blocks of 16 and of 32, whose every other tile begins in the middle of a block of scales",
    ),
    Note(
        "sm_100",
        r"fence: tcgen05\.(fence::after_thread_sync -> tcgen05\.cp|wait::ld\S* -> tcgen05\.fence::after_thread_sync)$",
        "DeepGEMM, deep_gemm/include/deep_gemm/impls/sm100_bf16_gemm.cuh and epilogue/sm100_store_cd.cuh (for SM100 GPUs): "
        "after_thread_sync behind each mbarrier wait, in front of whatever tcgen05 comes next",
    ),
    Note(
        "sm_100",
        r"L2 policy 0x1[24]f0+",
        "FlashMLA, csrc/sm100/prefill/sparse/fwd/head128/phase1.cuh (B200): EVICT_FIRST and EVICT_LAST of CUTLASS's "
        "CacheHintSm90, which are these values, on tensor copies; a prefetch takes the same operand",
    ),
    Note(
        "sm_120",
        r"L2 policy 0x1[24]f0+",
        "FlashInfer, msa_ops/cute_dsl/proxy_score_sm12x.py passes EVICT_FIRST on SM12x; EVICT_LAST is another of CUTLASS's "
        "CacheHintSm90. A policy decides what L2 drops first, and no result",
    ),
    Note(
        "sm_120",
        r"tensor map: load: rank 3, b4x16, swizzle 128B of 16B, rows of 128 B",
        "FlashInfer's b12x (a run above) loads such rows by maps of rank 2; those of CUTLASS C++ have rank 3, and "
        "its FP4 tiles with 128 bytes of K on SM120 (FlashInfer PR #2994) such rows",
    ),
    Note(
        "sm_100",
        r"mbarrier\.try_wait\.parity\.acquire\.cluster",
        "CCCL, cuda::ptx::mbarrier_try_wait_parity with sem_acquire and scope_cluster, since SM_90; QuACK looks so, too, by "
        "test_wait (AI/gather_a_2cta_cluster_fence_soundness.md)",
    ),
    Note(
        "sm_100",
        r"opcode: cp\.async\.bulk\.tensor\.\dd.*shared::cluster",
        "CUTLASS C++, include/cute/arch/copy_sm90_tma.hpp: loads of a CTA of its own say shared::cluster, too; "
        "DeepGEMM uses them on SM100",
    ),
    Note(
        "sm_100",
        r"st\.async\..*v4",
        "NVIDIA's Kimi K3 decode kernels in CuTe DSL for TensorRT-LLM (_st_async_v4 in clusters of 7, with PDL) and ones in "
        "CUDA C++ for vLLM (st_async_v4 in clusters of 16, with PDL), both for sm_100a",
    ),
    Note(
        "sm_100",
        r"launch: (cluster of [248]x1x1|programmatic, cluster of [48])",
        "the Kimi K3 decode kernels for TensorRT-LLM and vLLM on sm_100a: clusters of 7 and of 16 are launched with PDL",
    ),
    Note(
        "sm_100",
        r"mxf4nvf4\.(block_scale\.)?block32",
        "CUTLASS C++, test/unit/gemm/device/sm100_blockscaled_tensorop_gemm/mxf4_mxf4_*: MXFP4 by single CTAs and by pairs, "
        "tiles of 128 to 256 columns; CuTe DSL (a run above) writes its instruction as this kind. Other widths and columns of "
        "scales are those of NVFP4 in runs above, in which a word of scales is two MMAs' here",
    ),
    Note(
        "sm_100",
        r"mxf8f6f4\.block32",
        "CUTLASS C++, the same folder: mxf8_mxf8_*, mxf8_mxf4_* and mxf4_mxf8_*; DeepGEMM, sm100_fp8_fp4_gemm_1d1d.cuh (SM100): "
        "FP8 tokens beside FP4 weights, by pairs, too. Types are fields of a descriptor; widths are those of runs above",
    ),
    Note(
        "sm_100",
        r"mma\.kind::f8f6f4\.cta_group::1 M=128 N=64|fence::after_thread_sync -> tcgen05\.fence::before_thread_sync$",
        "DeepGEMM, sm100_fp8_gemm_1d2d.cuh (SM100; commit 3f71de7): FP8 with fp32 scales, an accumulator a K tile; MMAs of 128 "
        "rows and a multiple of 16 columns, and between both fences nothing where a stage has no K tile",
    ),
    Note(
        "sm_100",
        r"kind::i8\b",
        "CUTLASS C++, test/unit/gemm/device/sm100_tensorop_gemm/s8_s8_void_s32.cu and s8_s8_s32_s32_fusion.cu: int8 rows in the "
        "128-byte swizzle by single CTAs and by pairs; gn-kernels' README has int8 products on a B200 at 3,378 TOP/s",
    ),
    Note(
        "any",
        r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32",
        "PTX ISA, target notes of mma: int8 since sm_80; gn-kernels has INT8 matmul for SM120 by TMA and mma.sync, and its "
        "README 726 TOP/s of int8 on an RTX 5090",
    ),
    Note(
        "sm_100",
        r"tensor map: (load|prefetch): rank 3, (u8|b4x16_p64), swizzle 128B",
        "CUTLASS C++, the same tests: its maps of 8-bit elements have rank 3, and 4-bit ones beside them are padded "
        "(include/cute/arch/copy_sm90_desc.hpp), as DeepGEMM's are (csrc/jit_kernels/impls/runtime_utils.hpp)",
    ),
    Note(
        "sm_120",
        r"mma\.sync\S*kind::(mxf8f6f4|mxf4)\.",
        "CUTLASS C++, test/unit/gemm/device/sm120_blockscaled_tensorop_gemm/sm120_bs_gemm_mxf4_mxf4_*, mxf8_mxf4_*, and Triton, "
        "MMAv2.cpp: e4m3 and e5m2 in any pair. gn-kernels (a run above) takes scales from all threads of a quad",
    ),
    Note(
        "sm_120",
        r"b4x16_p64",
        "CUTLASS C++, the mxf8_mxf4_* tests of that folder: TMA pads the 4-bit operand, ldmatrix unpacks it, and a shift by two "
        "places it (include/cute/atom/mma_traits_sm120.hpp)",
    ),
    Note(
        "sm_120",
        r"cp\.async\.mbarrier\.arrive\.noinc",
        "CUTLASS C++, include/cutlass/gemm/collective/sm120_mma_tma_blockwise_scaling.hpp: a warp copies fp32 scales and "
        "arrives so, beside the thread that issues TMA",
    ),
    Note(
        "any",
        r"ldmatrix\.sync\.aligned\.m8n8\.x2",
        "CUTLASS C++ PR #3292 (tile N of 8 and 16 of block-scaled GEMMs on SM120): its copy selector takes ldmatrix x2",
    ),
    Note(
        "any",
        r"opcode: (add|sub|mul|mad|fma|min|max|neg|abs|div|rcp|sqrt|ex2|lg2|tanh|cvt|set|setp|selp|and|or|xor|not|shl|shr|shf|"
        r"prmt|lop3|bfe|bfi|bfind|brev|clz|popc|mov|ld|st|cvta|bra|ret|exit|call|bar|shfl|vote|match|activemask|redux|ldmatrix|"
        r"movmatrix|nanosleep|membar|fence|atom|red|isspacep|dp4a|slct|copysign|testp|trap)\b",
        "PTX ISA, target notes: in every architecture since sm_90 or earlier, and what nvcc makes of CUDA C++",
    ),
    Note(
        "",
        r"directive: \.(minnctapersm|maxntid|reqntid|maxnreg)",
        "CUDA C++ programming guide: what __launch_bounds__ says, on every GPU",
    ),
    Note(
        "",
        r"opcode: cvt\.rn\.(f16x2\.(e4m3x2|e2m1x2)|satfinite\.e\dm\dx2\.f32)|ld\.global\.nc\.L1::no_allocate",
        "CUDA's headers cuda_fp8.hpp and cuda_fp4.hpp make these conversions on every GPU of the family; L1::no_allocate is of "
        "PTX ISA 7.4",
    ),
)  # fmt: skip
"""Forms that are known to work; the first match counts."""

PROBES: tuple[Note, ...] = (
    Note(
        "sm_100",
        r"N=(96|160|224)",
        "`nvfp4-cute prove --steps probes`: mma_n96, mma_n160, mma_n224, scale by scale",
    ),
    Note("sm_100", r"of A, [13] of B", "`nvfp4-cute prove --steps probes`: mma_n32_column1"),
    Note("", r"st\.async\..*v4", "`nvfp4-cute prove --steps probes`: st_async_v4"),
    Note("", r"launch: programmatic, cluster", "`nvfp4-cute prove --steps probes`: pdl_cluster"),
    Note("", r"launch: cluster", "`nvfp4-cute prove --steps probes`: resident_8"),
    Note("", r"registers: ", "`nvfp4-cute prove --steps probes`: register_counts"),
    Note("", r"griddepcontrol", "`nvfp4-cute prove --steps probes`: pdl"),
    Note("", r"", "`nvfp4-cute prove --steps configs`: every config that is chosen, bit by bit"),
)
"""Probes for forms without a source; the first match counts."""


def source_of(form: Form) -> str | None:
    """Returns the source that says a form works, or None."""
    return next((note.words for note in SOURCES if note.fits(form)), None)


def probe_of(form: Form) -> str:
    """Returns the probe that decides a form."""
    return next(note.words for note in PROBES if note.fits(form))
