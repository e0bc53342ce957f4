"""Scripts and test suites of public projects that `public_kernels` runs, at small sizes."""

from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path("examples/python/CuTeDSL")
"""Folder of the scripts in a CUTLASS checkout."""


@dataclass(frozen=True)
class Case:
    """A script with its architecture and arguments; or tests of a project's suite.

    Attributes:
        project: name of the project.
        suite: whether `script` is a file of tests, and `arguments` are those of `pytest -k`.
    """

    script: str
    arch: str
    arguments: str = ""
    project: str = "cutlass"
    suite: bool = False

    def __str__(self) -> str:
        owner = "" if self.project == "cutlass" else f"{self.project}/"
        return f"{self.arch} {owner}{self.script} {self.arguments}".strip()


def _variants(arch: str, script: str, *arguments: str) -> list[Case]:
    return [Case(script, arch, text) for text in arguments]


TUTORIAL = "cute/blackwell/tutorial/tutorial_gemm"
NVFP4 = "--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN --sf_dtype Float8E4M3FN --sf_vec_size 16"
MXFP4 = "--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN --sf_dtype Float8E8M0FNU --sf_vec_size 32"
MXFP8 = "--a_dtype Float8E4M3FN --b_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32"
MIXED = "--a_dtype Float4E2M1FN --b_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32"
GROUPS = "--num_groups 2 --problem_sizes_mnkl (256,128,64,1),(72,64,64,1)"
NVFP4_AB = "--ab_dtype Float4E2M1FN --sf_dtype Float8E4M3FN --sf_vec_size 16"
GROUP_TILES = (
    ("128,128", "1,1"), ("128,128", "1,2"), ("128,128", "2,1"), ("128,128", "2,2"), ("128,256", "1,1"),
    ("256,128", "2,1"), ("256,128", "4,1"), ("256,256", "2,1"),
)  # fmt: skip

CASES: tuple[Case, ...] = (
    *(
        Case(f"{TUTORIAL}/fp16_gemm_{name}.py", "sm_100a", "--mnk 512,256,128")
        for name in ("0", "1", "2", "3", "3_1", "4", "5", "6")
    ),
    *(Case(f"{TUTORIAL}/nvfp4_gemm_{i}.py", "sm_100a", "--mnkl 256,256,512,1") for i in (0, 1)),
    *_variants(
        "sm_100a",
        "cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
        f"--mnkl 256,256,256,2 {NVFP4}",
        f"--mnkl 256,256,256,1 {MXFP4} --c_dtype Float32",
        f"--mnkl 256,256,256,1 {MXFP8} --c_dtype BFloat16",
        f"--mnkl 256,256,256,1 {MXFP8} --a_major m --b_major n --c_major m",
        f"--mnkl 512,256,256,1 {NVFP4} --mma_tiler_mn 256,128 --cluster_shape_mn 2,1",
        f"--mnkl 512,256,256,1 {MXFP8} --mma_tiler_mn 256,256 --cluster_shape_mn 2,1",
        f"--mnkl 256,512,256,1 {NVFP4} --mma_tiler_mn 128,64 --cluster_shape_mn 1,2",
        f"--mnkl 512,384,256,1 {NVFP4} --mma_tiler_mn 128,192 --cluster_shape_mn 2,2",
        f"--mnkl 1024,512,256,1 {NVFP4} --mma_tiler_mn 256,128 --cluster_shape_mn 4,4",
        f"--mnkl 512,512,256,1 {MXFP4} --mma_tiler_mn 128,128 --cluster_shape_mn 4,4",
    ),
    *_variants(
        "sm_100a",
        "cute/blackwell/kernel/blockscaled_grouped_gemm/grouped_blockscaled_gemm.py",
        *(
            f"{GROUPS} {NVFP4_AB} --mma_tiler_mn {tile} --cluster_shape_mn {cluster}"
            for tile, cluster in GROUP_TILES
        ),
        f"{GROUPS} --ab_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32 --host_problem_shape_available",
    ),
    *_variants(
        "sm_100a",
        "cute/blackwell/kernel/dense_gemm/dense_gemm_persistent.py",
        "--mnkl 256,256,128,1",
        "--mnkl 256,256,128,2 --ab_dtype Float16 --c_dtype Float16 --use_tma_store",
        "--mnkl 512,256,128,1 --ab_dtype Float8E4M3FN --c_dtype Float16 --use_2cta_instrs --mma_tiler_mn 256,128 "
        "--cluster_shape_mn 2,1 --use_tma_store",
        "--mnkl 256,256,128,1 --ab_dtype BFloat16 --a_major m --b_major n --c_major m --cluster_shape_mn 2,2",
    ),
    *_variants(
        "sm_100a",
        "cute/blackwell/kernel/grouped_gemm/grouped_gemm.py",
        "",
        "--tensormap_update_mode GMEM --host_problem_shape_available",
        "--use_2cta_instrs --mma_tiler_mn 256,128 --cluster_shape_mn 2,1",
    ),
    *_variants(
        "sm_120a",
        "cute/blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_cooperative.py",
        f"--mnkl 256,256,256,1 {NVFP4}",
        f"--mnkl 256,256,256,1 {MXFP4}",
        f"--mnkl 256,256,256,1 {MXFP8}",
        f"--mnkl 256,256,256,1 {MIXED}",
    ),
    *_variants(
        "sm_120a",
        "cute/blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_pingpong.py",
        f"--mnkl 256,256,256,1 {NVFP4}",
        f"--mnkl 256,256,256,1 {MXFP8}",
    ),
    *_variants(
        "sm_90a",
        "cute/hopper/kernel/dense_gemm/dense_gemm_persistent.py",
        "--mnkl 256,256,128,1",
        "--mnkl 256,256,128,2 --tile_shape_mn 128,256 --cluster_shape_mn 2,1",
        "--mnkl 256,256,128,1 --a_dtype Float8E4M3FN --b_dtype Float8E4M3FN --c_dtype Float16",
        "--mnkl 256,256,128,1 --a_major m --b_major n --c_major m --cluster_shape_mn 1,2",
    ),
    *_variants(
        "sm_90a",
        "cute/hopper/kernel/grouped_gemm/grouped_gemm.py",
        "--num_groups 2 --problem_sizes_mnkl (128,128,128,1),(256,128,64,1)",
        "--num_groups 2 --problem_sizes_mnkl (128,128,128,1),(256,128,64,1) --tensormap_update_mode GMEM "
        "--cluster_shape_mn 2,1",
    ),
)


def _scripts(project: str, folder: str, table: dict[str, dict[str, tuple[str, ...]]]) -> tuple[Case, ...]:
    """Returns cases of an architecture: script (without .py) to its command lines, below `folder`."""
    return tuple(
        Case(f"{folder}{script}.py", arch, text, project)
        for arch, scripts in table.items()
        for script, texts in scripts.items()
        for text in texts
    )


PLAIN = ("",)
GEMM = "--mnkl 256,256,128,1"
PAIR = "--use_2cta_instrs --mma_tiler_mn 256,128 --cluster_shape_mn 2,1"

MORE_CASES: tuple[Case, ...] = _scripts(
    "cutlass",
    "",
    {
        "sm_90a": {
            "cute/ampere/kernel/attention/flash_attention_v2": (
                "--batch_size 1 --seqlen_q 128 --seqlen_k 128 --num_head 1 --head_dim 64",
                "--batch_size 1 --seqlen_q 128 --seqlen_k 192 --num_head 1 --head_dim 64 --is_causal",
            ),
            "cute/ampere/kernel/attention/hstu_attention": (
                "--batch_size 1 --seqlen_q 128 --seqlen_kv 128 --num_head 1 --head_dim 64",
            ),
            "cute/ampere/kernel/dense_gemm/sgemm": ("--mnk 128,128,32", "--mnk 128,128,64 --a_major k --c_major m"),
            "cute/ampere/kernel/dense_gemm/tensorop_gemm": (
                "--mnkl 128,128,64,1",
                "--mnkl 112,136,40,1 --a_major k --b_major k",
            ),
            "cute/ampere/kernel/elementwise/elementwise_add": ("--M 128 --N 128", "--M 130 --N 120"),
            "cute/ampere/kernel/elementwise/elementwise_apply": ("--M 128 --N 256 --op mul",),
            "cute/hopper/kernel/attention/fmha": (
                "--q_shape 1,128,2,64 --k_shape 1,128,2,64",
                "--q_shape 1,128,1,64 --k_shape 1,192,1,64 --is_causal --is_persistent",
            ),
            "cute/hopper/kernel/cta_norm/cta_norm": ("--M 64 --N 256", "--M 64 --N 256 --norm_type rms"),
            "cute/hopper/kernel/dense_gemm/dense_gemm": (GEMM, "--mnkl 256,256,128,1 --cluster_shape_mn 2,1"),
            "cute/hopper/kernel/dense_gemm/dense_gemm_fp8_2xacc": ("--mnkl 256,256,256,1",),
            "cute/hopper/kernel/dense_gemm/dense_gemm_fp8_gelu_persistent": ("--mnkl 256,256,256,1",),
            "cute_ext/ampere/memcpy_simt_universal_copy": PLAIN,
        },
        "sm_100a": {
            "cute/blackwell/efc/activation_custom_epilogue_dense_gemm": (
                "--mnkl 256,256,128,1",
                "--mnkl 256,256,128,1 --activation gelu --beta 0.5",
            ),
            "cute/blackwell/efc/custom_epilogue_dense_gemm": ("--mnkl 256,256,128,1",),
            "cute/blackwell/efc/synthetic_custom_epilogue_dense_gemm": ("--mnkl 256,256,128,1",),
            "cute/blackwell/kernel/attention/fmha/fmha": (
                "--q_shape 1,256,1,64 --k_shape 1,256,1,64",
                "--q_shape 1,256,1,64 --k_shape 1,256,1,64 --is_causal --is_persistent",
                "--q_shape 1,256,2,128 --k_shape 1,128,1,128 --lse_calculation",
            ),
            "cute/blackwell/kernel/attention/fmha/fmha_bwd": ("--s_q 128 --s_k 128 --h_q 1 --h_k 1 --d 64",),
            "cute/blackwell/kernel/attention/mla/mla_decode_fp16": (
                "--batch_size 1 --seq_len_k 128 --page_size 128",
            ),
            "cute/blackwell/kernel/attention/mla/mla_decode_fp8": ("--batch_size 1 --seq_len_k 128 --page_size 128",),
            "cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_amax": (
                "--mnkl 256,256,256,1 --sf_dtype Float8E4M3FN",
            ),
            "cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_prefetch": (
                "--mnkl 256,256,256,1 --sf_dtype Float8E4M3FN",
            ),
            "cute/blackwell/kernel/blockwise_gemm/blockwise_gemm": ("--mnkl 256,256,256,1",),
            "cute/blackwell/kernel/blockwise_gemm/contiguous_grouped_gemm": ("--mnkl 128,128,256,2",),
            "cute/blackwell/kernel/dense_gemm/dense_gemm": (GEMM, f"--mnkl 512,256,128,1 {PAIR} --use_tma_store"),
            "cute/blackwell/kernel/dense_gemm/dense_gemm_alpha_beta_persistent": (f"{GEMM} --alpha 2.0 --beta 0.5",),
            "cute/blackwell/kernel/dense_gemm/dense_gemm_persistent_dynamic": (GEMM, f"{GEMM} --use_tma_store"),
            "cute/blackwell/kernel/dense_gemm/dense_gemm_persistent_prefetch": (f"{GEMM} --use_tma_store",),
            "cute/blackwell/kernel/dense_gemm/dense_gemm_software_pipeline": (GEMM,),
            "cute/blackwell/kernel/mixed_input_gemm/mixed_input_gemm": PLAIN,
            "cute/blackwell/kernel/mixed_input_gemm/grouped_mixed_input_gemm": PLAIN,
            "cute/blackwell/kernel/moe/torch_scaled_grouped_mm": (
                "--tokens 32 --experts 2 --top_k_select 1 --hidden 256 --intermediate 128",
                "--tokens 32 --experts 2 --top_k_select 1 --hidden 256 --intermediate 128 --kind nvfp4",
            ),
            "cute/blackwell/kernel/moe/torch_grouped_mm": (
                "--tokens 32 --experts 2 --top_k_select 1 --hidden 128 --intermediate 128",
            ),
            "cute/blackwell/kernel/reduce/reduce": PLAIN,
            "cute/blackwell/kernel/rmsnorm/rmsnorm": ("--M 16 --N 1024", "--M 16 --N 1024 --no_weight"),
            "cute/blackwell/tutorial/tutorial_tma/tma_v0": ("--M 128 --N 128 --num_warmup 0 --num_iters 1",),
            "cute/blackwell/tutorial/tutorial_tma/tma_v1": ("--num_warmup 0 --num_iters 1",),
            "cute/blackwell/tutorial/tutorial_tma/tma_v2": ("--num_warmup 0 --num_iters 1",),
            "cute_ext/blackwell/dense_block_scaled_gemm": ("--mnkl 256,256,256,1",),
            "cute_ext/blackwell/dense_gemm": ("--mnkl 256,256,128,1",),
            "cute_ext/blackwell/dense_gemm_2sm": PLAIN,
            "cute_ext/blackwell/dense_gemm_cute_pipeline": (GEMM,),
            "cute_ext/blackwell/dense_gemm_ptr_array": ("--mnkl 256,256,128,2",),
            "dsl_tutorials/inline_ptx": PLAIN,
            "dsl_tutorials/programmatic_dependent_launch": ("--M 64 --N 64 --use_pdl",),
            "dsl_tutorials/smem_allocator": PLAIN,
            **{
                f"experimental/primitives/{name}": PLAIN
                for name in (
                    "async_pipeline", "bar_warp_sync", "barrier_cta_red", "barrier_cta_sync", "basic_types",
                    "cp_async_bulk", "cp_async_bulk_prefetch", "cp_async_mbarrier_arrive_cluster",
                    "cp_async_mbarrier_arrive_cta", "cp_async_shared_global", "cp_async_shared_global_swizzled",
                    "elect_sync", "ldmatrix_stmatrix", "mapa", "mbarrier", "mbarrier_lifecycle",
                    "pipeline_software_fill", "red", "redux_sync", "shfl_sync", "vote_sync", "warp_named_barrier",
                    "reduction/block_smem_reduce", "reduction/cluster_smem_reduce", "reduction/cluster_tmem_reduce",
                    "reduction/thread_vector_reduce", "reduction/warp_vector_reduce",
                    "tcgen05/1cta_mma_a_from_tmem", "tcgen05/1cta_mma_basic", "tcgen05/1cta_mma_mn_major",
                    "tcgen05/1cta_mma_pipeline", "tcgen05/2cta_mma_basic", "tcgen05/2cta_mma_blockscale_m128",
                    "tcgen05/2cta_mma_tma_store", "tcgen05/cp_narrow_a_to_tmem_mma", "tcgen05/tmem_ld_st",
                    "tcgen05/tmem_ld_to_stmatrix_transpose", "tcgen05/slicek_m32n8k128",
                    "tma/tma_1cta_mbarrier", "tma/tma_load_store", "tma/tma_load_to_ldmatrix", "tma/tma_multicast",
                    "tma/tma_pipeline_count2", "tma/tma_pipeline_pingpong", "tma/tma_pipeline_warpspec",
                    "tma/tma_store", "tma/tma_swizzle_modes", "tma/tma_tensormap_replace",
                    "tutorial/01_hello_world", "tutorial/04_tma_load", "tutorial/05_minimal_tensor_mma",
                    "tutorial/06_softmax", "tutorial/07_vectorized_array", "tutorial/09_tma_4d_to_2d",
                    "tutorial/10_minimal_tensor_mma_fp8",
                )
            },
        },
        "sm_120a": {
            "cute/blackwell_geforce/kernel/dense_gemm/dense_gemm": ("--mnkl 128,128,64,1",),
        },
    },
)  # fmt: skip

OLD_CASES: tuple[Case, ...] = _scripts(
    "cutlass-4.3",
    f"{EXAMPLES}/",
    {
        "sm_90a": {
            "ampere/elementwise_add": ("--M 128 --N 128",),
            "ampere/elementwise_apply": ("--M 128 --N 256 --op add",),
            "ampere/flash_attention_v2": (
                "--batch_size 1 --seqlen_q 128 --seqlen_k 128 --num_head 1 --head_dim 64",
            ),
            "ampere/sgemm": ("--mnk 128,128,32",),
            "ampere/tensorop_gemm": ("--mnkl 112,136,40,1",),
            "ampere/inline_ptx": PLAIN,
            "ampere/smem_allocator": PLAIN,
            "ampere/dynamic_smem_size": PLAIN,
            "hopper/dense_gemm": (GEMM,),
            "hopper/dense_gemm_persistent": (GEMM, "--mnkl 256,256,128,1 --cluster_shape_mn 2,1"),
            "hopper/fmha": ("--q_shape 1,128,1,64 --k_shape 1,128,1,64",),
        },
        "sm_100a": {
            "blackwell/blockwise_gemm/blockwise_gemm": ("--mnkl 256,256,256,1",),
            "blackwell/blockwise_gemm/contiguous_grouped_gemm": ("--mnkl 128,128,256,2",),
            "blackwell/dense_blockscaled_gemm_persistent": (
                "--mnkl 256,256,256,1 --sf_dtype Float8E4M3FN",
                "--mnkl 256,256,256,1 --ab_dtype Float8E4M3FN --sf_vec_size 32",
            ),
            "blackwell/dense_gemm": (GEMM,),
            "blackwell/dense_gemm_alpha_beta_persistent": (f"{GEMM} --alpha 2.0 --beta 0.5",),
            "blackwell/dense_gemm_persistent": (GEMM, f"--mnkl 512,256,128,1 {PAIR} --use_tma_store"),
            "blackwell/dense_gemm_software_pipeline": (GEMM,),
            "blackwell/fmha": ("--q_shape 1,256,1,64 --k_shape 1,256,1,64",),
            "blackwell/fmha_bwd": ("--s_q 128 --s_k 128 --h_q 1 --h_k 1 --d 64",),
            "blackwell/grouped_blockscaled_gemm": (f"{GROUPS} {NVFP4_AB}",),
            "blackwell/grouped_gemm": PLAIN,
            "blackwell/mixed_input_gemm": PLAIN,
            "blackwell/programmatic_dependent_launch": ("--M 64 --N 64 --use_pdl",),
            "blackwell/tutorial_gemm/fp16_gemm_0": ("--mnk 512,256,128",),
            "blackwell/tutorial_gemm/fp16_gemm_1": ("--mnk 512,256,128",),
        },
        "sm_120a": {"blackwell_geforce/dense_gemm": ("--mnkl 128,128,64,1",)},
    },
)
"""CUTLASS 4.3.5, whose examples are in other folders and use the DSL's older interfaces."""


def _tests(project: str, arch: str, script: str, *selections: str) -> list[Case]:
    return [Case(script, arch, text, project, suite=True) for text in selections]


SUITES: tuple[Case, ...] = (
    *_tests(
        "quack",
        "sm_100a",
        "tests/test_softmax.py",
        "test_softmax and 1-192",
        "test_softmax and 1-1024",
    ),
    *_tests("quack", "sm_90a", "tests/test_softmax.py", "test_softmax and 1-192"),
    *_tests("quack", "sm_100a", "tests/test_rmsnorm.py", "test_rmsnorm_forward_backward and False-1-192"),
    *_tests(
        "quack", "sm_100a", "tests/test_layernorm.py", "test_layernorm_forward_backward and 256-37-input"
    ),
    *_tests("quack", "sm_100a", "tests/test_cross_entropy.py", "test_cross_entropy and False-False-1-192"),
    *_tests(
        "quack",
        "sm_100a",
        "tests/test_topk.py",
        "test_topk and False-False-1-64-16",
        "test_topk and False-True-37-256-16",
    ),
    *_tests("quack", "sm_100a", "tests/test_rotary.py", "test_rotary_emb_dim_dtype_grid and 32-8"),
    *_tests(
        "quack",
        "sm_100a",
        "tests/test_gemm_symmetric.py",
        "float-1.0-False-1.0-128-128-1",
        "float-2.5-True-0.5-128-128-1",
    ),
    *_tests("quack", "sm_90a", "tests/test_gemm_symmetric.py", "float-1.0-False-1.0-128-128-1"),
    *_tests(
        "quack", "sm_100a", "tests/test_gemm_sm100_blockscaled.py", "test_blockscaled_varlen_m_nonaligned"
    ),
    *_tests(
        "quack",
        "sm_100a",
        "tests/test_gemm_blockscaled_interface.py",
        "test_blockscaled_gemm and shape_mnk0 and not varlen",
    ),
    *_tests("quack", "sm_120a", "tests/test_gemm_sm120_mxfp8.py", "shape_mnk0"),
    *_tests("quack", "sm_100a", "tests/test_gemm_split_k.py", "test_gemm_split_k and None-out_dtype0"),
    *(
        case
        for arch in ("sm_90a", "sm_100a", "sm_120a")
        for case in _tests(
            "flash-attention",
            arch,
            "tests/cute/test_flash_attn_fast.py",
            *(f"test_flash_attn_output and 128-128-64 and {heads}" for heads in ("mha", "gqa", "mqa")),
        )
    ),
    *_tests(
        "flash-attention",
        "sm_100a",
        "tests/cute/test_flash_attn_fast.py",
        *(
            f"test_flash_attn_varlen_unpad_output and 128-64-False and {heads}"
            for heads in ("mha", "gqa", "mqa")
        ),
    ),
    *_tests(
        "flash-attention",
        "sm_100a",
        "tests/cute/test_flash_attn_combine.py",
        "test_flash_attn_combine and 1-3-64",
    ),
    *_tests(
        "flashinfer",
        "sm_100a",
        "tests/norm/test_rmsnorm_fp4_quant_cute_dsl.py",
        "test_rmsnorm_fp4quant_2d[1e-05-dtype0-64-4]",
        "test_rmsnorm_fp4quant_3d[dtype0-128-16-4]",
        "test_mxfp4_basic[dtype0-128-4]",
        "test_auto_allocation_swizzled[dtype0-512-16]",
    ),
    *_tests(
        "flashinfer",
        "sm_100a",
        "tests/norm/test_add_rmsnorm_fp4_quant_cute_dsl.py",
        "test_add_rmsnorm_fp4quant_2d[1e-05-dtype0-64-4]",
        "test_mxfp4_basic[dtype0-128-4]",
        "test_both_sf_layouts_3d_input[dtype0-256-16-4]",
        "test_residual_inplace_update_2d[dtype0-256-4]",
    ),
    *_tests(
        "flashinfer",
        "sm_100a",
        "tests/attention/test_cute_dsl_mla_decode.py",
        "test_cute_dsl_mla_decode_fp16[modular-True-1-dtype0-32-128-1]",
        "test_cute_dsl_mla_decode_fp8[modular-False-128-64-128-1]",
    ),
    *_tests(
        "flashinfer",
        "sm_100a",
        "tests/kda/test_packed_kda_decode_cute.py",
        "test_packed_kda_cute_matches_reference_and_preserves_pool[1]",
        "test_packed_kda_cute_forced_tiles_match_reference[8]",
        "test_packed_kda_cute_forced_tiles_match_reference[64]",
    ),
    *_tests(
        "flashinfer",
        "sm_100a",
        "tests/kda/test_recurrent_kda.py",
        "test_spec_decode_basic[N4-H8-D64-S3]",
    ),
    *_tests(
        "flashinfer",
        "sm_100a",
        "tests/gdn/test_decode_delta_rule.py",
        "test_gdn_decode_bf16_state_t1_kernel[bfloat16-1-16-16-32-128-auto-True-True]",
    ),
    *_tests(
        "flashinfer",
        "sm_100a",
        "tests/attention/test_cute_dsl_decode.py",
        "test_cute_dsl_decode_ragged[dtype0-128-1]",
    ),
)
"""Tests of suites that expect a GPU. A case counts one configuration per test that ran."""
