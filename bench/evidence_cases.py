"""Public kernels that ran on hardware, and the arguments with which `bench.evidence` runs them on the emulator.

Projects without suitable scripts are called by those in `tests/support/public_scripts`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from nvfp4_cute.bench import public_cases
from nvfp4_cute.bench.public_cases import EXAMPLES, GROUPS, NVFP4, NVFP4_AB

CUTE = EXAMPLES / "cute"
SCRIPTS = Path(__file__).parents[1] / "tests" / "support" / "public_scripts"


@dataclass(frozen=True)
class Project:
    """A project whose kernels count as proven on hardware.

    Attributes:
        name: short name.
        marker: a file in its checkouts that no other project has.
        python_path: folder of a checkout to import from, or None.
        proof: evidence that its kernels run on their hardware.
    """

    name: str
    marker: str
    python_path: str | None
    proof: str


CUTLASS = Project(
    "CUTLASS",
    "include/cutlass/cutlass.h",
    None,
    "NVIDIA's examples for its own GPUs; each compares with a reference on the GPU, test/examples/CuTeDSL runs them",
)
QUACK = Project(
    "QuACK",
    "quack/gemm_sm100.py",
    ".",
    "the README asks for H100, B200/B300 or RTX 50; tests/ compare on them (AI/sm120_hardware.md: RTX 5090)",
)
FLASH_ATTENTION = Project(
    "FlashAttention",
    "flash_attn/cute/interface.py",
    ".",
    "for Hopper and Blackwell GPUs (flash_attn/cute/README.md); tests/cute compare on them",
)
FLASHINFER = Project(
    "FlashInfer",
    "flashinfer/cute_dsl/blockscaled_gemm.py",
    ".",
    "tests/gemm compare on SM100, SM103 and SM120 GPUs (PR #3403: on SM103; PR #3152: on DGX Spark)",
)
GN_KERNELS = Project(
    "gn-kernels",
    "gn_kernels/cutedsl/__init__.py",
    ".",
    "gau-nernst's kernels; the README gives their times on GeForce RTX 5090, RTX PRO 6000 and B200",
)
PROJECTS = (CUTLASS, QUACK, FLASH_ATTENTION, FLASHINFER, GN_KERNELS)


@dataclass(frozen=True)
class Case:
    """A run: project, architecture, script (of the checkout, or of `SCRIPTS`), and arguments."""

    project: Project
    arch: str
    script: str
    arguments: str = ""

    def __str__(self) -> str:
        return f"{self.project.name} {self.arch} {self.script} {self.arguments}".strip()

    def path(self, checkout: Path) -> Path:
        """Returns the path of the script."""
        return checkout / self.script if self.project is CUTLASS else SCRIPTS / self.script


def _cutlass(arch: str, script: str, *arguments: str) -> list[Case]:
    return [Case(CUTLASS, arch, str(CUTE / script), text) for text in arguments]


def _own(project: Project, arch: str, script: str, *arguments: str) -> list[Case]:
    return [Case(project, arch, script, text) for text in arguments]


SCALED = "blackwell/kernel/blockscaled_gemm"
MXFP4_AB = "--ab_dtype Float4E2M1FN --sf_dtype Float8E8M0FNU --sf_vec_size 32"
PLAIN = (
    ("elementwise/elementwise_add.py", "--M 64 --N 256"),
    ("elementwise/elementwise_apply.py", "--M 64 --N 256"),
    ("dense_gemm/sgemm.py", "--mnk 128,128,64"),
    ("dense_gemm/tensorop_gemm.py", "--mnkl 128,128,64,1"),
    (
        "attention/flash_attention_v2.py",
        "--batch_size 1 --seqlen_q 128 --seqlen_k 128 --num_head 1 --head_dim 64",
    ),
)
"""Kernels that use only features of sm_80, which every current GPU runs."""

PRIMITIVES = "examples/python/CuTeDSL/experimental/primitives"
TENSOR_MEMORY_PRIMITIVES = (
    "tcgen05/1cta_mma_basic", "tcgen05/1cta_mma_pipeline", "tcgen05/2cta_mma_basic", "tcgen05/2cta_mma_blockscale_m128",
    "tcgen05/2cta_mma_tma_store", "tcgen05/clusterMxN_2cta_mma", "tcgen05/mcast_clusterMxN_1cta_mma",
    "tcgen05/mcast_clusterMxN_2cta_mma", "tcgen05/slicek_m32n8k128", "tcgen05/tmem_ld_st", "tma/tma_multicast",
)  # fmt: skip

CASES: tuple[Case, ...] = (
    *(
        Case(CUTLASS, case.arch, str(EXAMPLES / case.script), case.arguments)
        for case in public_cases.CASES
        if not re.search(r"--(a|b|ab)_dtype Float8", case.arguments)  # block-scaled; our kernels use nothing of them
    ),
    *_cutlass(
        "sm_100a",
        f"{SCALED}/dense_blockscaled_gemm_persistent.py",
        f"--mnkl 512,512,256,1 {NVFP4} --mma_tiler_mn 256,256 --cluster_shape_mn 2,1",
        f"--mnkl 512,512,256,1 {NVFP4} --mma_tiler_mn 256,64 --cluster_shape_mn 2,1",
        f"--mnkl 512,384,256,1 {NVFP4} --mma_tiler_mn 256,192 --cluster_shape_mn 2,1",
        f"--mnkl 512,512,256,1 {NVFP4} --mma_tiler_mn 128,256 --cluster_shape_mn 1,1 --c_dtype BFloat16",
        f"--mnkl 512,128,256,1 {NVFP4} --mma_tiler_mn 128,128 --cluster_shape_mn 4,1 --c_dtype Float32",
    ),
    *_cutlass("sm_100a", f"{SCALED}/dense_blockscaled_gemm_persistent_amax.py", f"--mnkl 256,256,256,1 {NVFP4_AB}"),
    *_cutlass("sm_100a", f"{SCALED}/dense_blockscaled_gemm_persistent_prefetch.py", f"--mnkl 256,256,256,1 {NVFP4_AB}"),
    *_cutlass(
        "sm_103a",
        "blackwell/kernel/blockscaled_grouped_gemm/grouped_blockscaled_gemm.py",
        f"{GROUPS} {NVFP4_AB} --mma_tiler_mn 128,128 --cluster_shape_mn 1,1",
    ),
    *_cutlass(
        "sm_103a",
        f"{SCALED}/sm103_dense_blockscaled_gemm_persistent.py",
        f"--mnkl 256,256,768,1 {NVFP4_AB} --mma_tiler_mn 256,256 --cluster_shape_mn 2,1",
        f"--mnkl 512,128,1024,1 {NVFP4_AB} --mma_tiler_mn 256,128 --cluster_shape_mn 4,1",
        f"--mnkl 256,256,768,1 {MXFP4_AB} --mma_tiler_mn 256,256 --cluster_shape_mn 2,1",
        f"--mnkl 512,128,1024,1 {MXFP4_AB} --mma_tiler_mn 256,128 --cluster_shape_mn 4,1",
    ),
    *_cutlass(
        "sm_100a",
        "blackwell/kernel/dense_gemm/dense_gemm_persistent_dynamic.py",
        "--mnkl 256,256,128,1 --ab_dtype Float16",
    ),
    *_cutlass(
        "sm_100a",
        "blackwell/kernel/blockwise_gemm/blockwise_gemm.py",
        "--mnkl 256,256,512,1 --mma_tiler_mn 128,128 --cluster_shape_mn 1,1",
        "--mnkl 256,256,512,1 --use_2cta_instrs --mma_tiler_mn 256,128 --cluster_shape_mn 2,1",
    ),
    *_cutlass("sm_100a", "blackwell/kernel/rmsnorm/rmsnorm.py", "--M 16 --N 1024", "--M 4 --N 16384"),
    *_cutlass("sm_90a", "hopper/kernel/cta_norm/cta_norm.py", "--M 8 --N 1024 --iterations 1 --warmup_iterations 0"),
    *_cutlass("sm_90a", "hopper/kernel/dense_gemm/dense_gemm_fp8_2xacc.py", "--mnkl 128,128,256,1"),
    *_cutlass("sm_90a", "hopper/kernel/attention/fmha.py", "--q_shape 1,128,2,128 --k_shape 1,128,2,128"),
    *(
        Case(CUTLASS, arch, "examples/python/CuTeDSL/dsl_tutorials/programmatic_dependent_launch.py", "--M 32 --N 32 --use_pdl")
        for arch in ("sm_90a", "sm_100a", "sm_120a")
    ),
    *_cutlass("sm_120a", "blackwell_geforce/kernel/dense_gemm/dense_gemm.py", "--mnkl 128,128,128,1"),
    *(Case(CUTLASS, "sm_100a", str(CUTE / "ampere/kernel" / script), text) for script, text in PLAIN),
    *(Case(CUTLASS, "sm_100a", f"{PRIMITIVES}/{name}.py") for name in TENSOR_MEMORY_PRIMITIVES),
    *(
        Case(CUTLASS, arch, f"{PRIMITIVES}/{name}.py")
        for arch in ("sm_90a", "sm_100a", "sm_120a")
        for name in ("reduction/cluster_smem_reduce", "mapa", "cp_async_bulk_prefetch", "tma/tma_pipeline_warpspec")
    ),
    *_own(
        QUACK,
        "sm_100a",
        "run_tests_of_project.py",
        "tests/test_gemm_blockscaled_interface.py -k 'varlen_m and nvfp4'",
        "tests/test_gemm_sm100_blockscaled.py -k 'test_blockscaled_correctness and Float4E2M1FN'",
        "tests/test_gemm_sm100_blockscaled.py -k 'test_blockscaled_correctness and Float8E4M3FN'",
        "tests/test_gemm_sm100_blockscaled.py -k 'varlen_m_nonaligned and nvfp4'",
    ),
    *_own(
        QUACK,
        "sm_120a",
        "run_tests_of_project.py",
        "tests/test_gemm_sm120_mxfp8.py -k 'same_dtype_fp4_gemm and nvfp4 and shape_mnk0'",
        "tests/test_gemm_sm120_mxfp8.py -k 'same_dtype_fp4_gemm and mxfp4 and shape_mnk0'",
        "tests/test_gemm_sm120_mxfp8.py -k 'test_sm120_mxfp8_split_k'",
    ),
    *(
        Case(QUACK, arch, "quack_reductions.py", f"--n {n}")
        for arch in ("sm_90a", "sm_100a", "sm_120a")
        for n in (4096, 32768)
    ),
    *_own(
        FLASH_ATTENTION,
        "sm_100a",
        "flash_attention_forward.py",
        "--lengths 128,128 --heads 2,1 --dim 64",
        "--lengths 113,203 --heads 2,2 --dim 128 --causal",
        "--lengths 256,256 --heads 2,1 --dim 128",
    ),
    *(
        Case(FLASH_ATTENTION, arch, "flash_attention_forward.py", text)
        for arch in ("sm_90a", "sm_120a")
        for text in ("--lengths 128,128 --heads 2,1 --dim 64", "--lengths 113,203 --heads 2,2 --dim 128 --causal")
    ),
    Case(
        FLASHINFER,
        "sm_100a",
        "run_tests_of_project.py",
        "tests/gemm/test_cute_dsl_blockscaled_gemm.py -k test_grouped_gemm_nt_masked_scheduler_empty_experts",
    ),
    *(
        Case(FLASHINFER, arch, "flashinfer_mm_fp4.py", f"--backend {backend} --mnk {mnk}")
        for arch, backend in (("sm_100a", "cute-dsl"), ("sm_103a", "cute-dsl"), ("sm_120a", "b12x"))
        for mnk in ("1,128,512", "17,128,128", "48,512,128", "300,256,512")
    ),
    Case(GN_KERNELS, "sm_120a", "gn_kernels_mm.py", "--mnk 256,256,512"),
    *_own(
        GN_KERNELS,
        "sm_100a",
        "gn_kernels_mm.py",
        "--mnk 256,256,256 --tile 256 --ctas 2",
        "--mnk 256,256,256 --tile 128 --ctas 1",
    ),
)  # fmt: skip
