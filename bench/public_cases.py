"""Scripts of a CUTLASS checkout and test suites of other projects that `public_kernels` runs, at small sizes of their own."""

from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path("examples/python/CuTeDSL/cute")
"""Where a CUTLASS checkout keeps the scripts."""


@dataclass(frozen=True)
class Case:
    """A script, the architecture it is for, and its arguments; or tests of a project's suite.

    Attributes:
        project: whose.  suite: `script` is a file of tests, and `arguments` what `pytest -k` takes.
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


TUTORIAL = "blackwell/tutorial/tutorial_gemm"
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
        "blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
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
        "blackwell/kernel/blockscaled_grouped_gemm/grouped_blockscaled_gemm.py",
        *(
            f"{GROUPS} {NVFP4_AB} --mma_tiler_mn {tile} --cluster_shape_mn {cluster}"
            for tile, cluster in GROUP_TILES
        ),
        f"{GROUPS} --ab_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32 --host_problem_shape_available",
    ),
    *_variants(
        "sm_100a",
        "blackwell/kernel/dense_gemm/dense_gemm_persistent.py",
        "--mnkl 256,256,128,1",
        "--mnkl 256,256,128,2 --ab_dtype Float16 --c_dtype Float16 --use_tma_store",
        "--mnkl 512,256,128,1 --ab_dtype Float8E4M3FN --c_dtype Float16 --use_2cta_instrs --mma_tiler_mn 256,128 "
        "--cluster_shape_mn 2,1 --use_tma_store",
        "--mnkl 256,256,128,1 --ab_dtype BFloat16 --a_major m --b_major n --c_major m --cluster_shape_mn 2,2",
    ),
    *_variants(
        "sm_100a",
        "blackwell/kernel/grouped_gemm/grouped_gemm.py",
        "",
        "--tensormap_update_mode GMEM --host_problem_shape_available",
        "--use_2cta_instrs --mma_tiler_mn 256,128 --cluster_shape_mn 2,1",
    ),
    *_variants(
        "sm_120a",
        "blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_cooperative.py",
        f"--mnkl 256,256,256,1 {NVFP4}",
        f"--mnkl 256,256,256,1 {MXFP4}",
        f"--mnkl 256,256,256,1 {MXFP8}",
        f"--mnkl 256,256,256,1 {MIXED}",
    ),
    *_variants(
        "sm_120a",
        "blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_pingpong.py",
        f"--mnkl 256,256,256,1 {NVFP4}",
        f"--mnkl 256,256,256,1 {MXFP8}",
    ),
    *_variants(
        "sm_90a",
        "hopper/kernel/dense_gemm/dense_gemm_persistent.py",
        "--mnkl 256,256,128,1",
        "--mnkl 256,256,128,2 --tile_shape_mn 128,256 --cluster_shape_mn 2,1",
        "--mnkl 256,256,128,1 --a_dtype Float8E4M3FN --b_dtype Float8E4M3FN --c_dtype Float16",
        "--mnkl 256,256,128,1 --a_major m --b_major n --c_major m --cluster_shape_mn 1,2",
    ),
    *_variants(
        "sm_90a",
        "hopper/kernel/grouped_gemm/grouped_gemm.py",
        "--num_groups 2 --problem_sizes_mnkl (128,128,128,1),(256,128,64,1)",
        "--num_groups 2 --problem_sizes_mnkl (128,128,128,1),(256,128,64,1) --tensormap_update_mode GMEM "
        "--cluster_shape_mn 2,1",
    ),
)


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
    *_tests(
        "flash-attention",
        "sm_100a",
        "tests/cute/test_flash_attn_fast.py",
        "test_flash_attn_output and 128-128-64",
    ),
    *_tests(
        "flash-attention",
        "sm_100a",
        "tests/cute/test_flash_attn_fast.py",
        "test_flash_attn_varlen_unpad_output and 128-64-False",
    ),
    *_tests(
        "flash-attention",
        "sm_90a",
        "tests/cute/test_flash_attn_fast.py",
        "test_flash_attn_output and 128-128-64",
    ),
    *_tests(
        "flash-attention",
        "sm_120a",
        "tests/cute/test_flash_attn_fast.py",
        "test_flash_attn_output and 128-128-64",
    ),
    *_tests(
        "flash-attention",
        "sm_100a",
        "tests/cute/test_flash_attn_combine.py",
        "test_flash_attn_combine and 1-3-64",
    ),
)
"""Tests of suites that expect a GPU. A case counts as many configurations as tests ran."""
