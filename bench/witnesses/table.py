"""Kernels of wheels with rows in `bench/results/public_kernels.md`, and kernels without a row."""

from nvfp4_cute.bench.public_cases import Case

NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("lightmoe", "sm_100a"): (
        "dense", "grouped", "grouped-pair", "grouped-dynamic", "dispatch", "quantize-rowwise", "quantize-both", "decode-1",
        "decode-5", "decode-relu2", "decode-70", "decode-70-empty", "prefill-40", "train",
    ),
    ("dist-moe", "sm_100a"): (
        "fprop", "dgrad", "wgrad", "fprop-static", "quantize-mxfp8", "quantize-nvfp4", "fprop-mxfp8", "fprop-nvfp4", "rms-norm",
        "rms-norm-narrow", "rms-norm-combine",
    ),
    ("b12x", "sm_120a"): ("quantize-nvfp4", "quantize-mxfp8", "gemm-nvfp4", "gemv-bf16"),
    ("cudnn", "sm_100a"): (
        "gemm-amax", "gemm-swiglu", "rms-norm-rht", "rms-norm", "layer-norm", "causal-conv1d", "vision-rope-backward",
        "nsa-selection", "grouped-gemm-quant", "grouped-gemm-srelu",
    ),
    ("flashinfer-wheel", "sm_100a"): ("top-k", "grouped-gemm-masked"),
    ("sglang", "sm_100a"): (
        "bf16-gemm", "bf16-gemm-128", "fused-a-gemm", "dual-gemm", "router", "rms-norm-scale-shift", "layer-norm-scale-shift",
        "kda-decode", "gdn-decode", "gdn-decode-32", "gdn-kkt", "gdn-output", "kda-kkt",
    ),
    ("liger", "sm_100a"): (
        "rms-norm", "layer-norm", "softmax", "swiglu", "geglu", "add-rms-norm", "cross-entropy",
        "kl-div", "jsd",
    ),
    ("liger", "sm_90a"): ("rms-norm", "swiglu"),
    ("operators", "sm_100a"): ("persistent", "preferred-cluster", "custom-epilogue", "sm80"),
    ("sonic-moe", "sm_100a"): ("softmax-over-top-k", "top-k-over-softmax"),
}  # fmt: skip
"""Names of the kernels by project and architecture; keys of ``main``'s argument in the project's file."""

WITNESSES: tuple[Case, ...] = tuple(
    Case(f"run_{project.removesuffix('-wheel').replace('-', '_')}.py", arch, name, project)
    for (project, arch), names in NAMES.items()
    for name in names
)

NOT_CALLED: tuple[tuple[str, str], ...] = (
    ("DeepGEMM", "54e2261 contains CUDA C++ and no kernel of CuTe DSL."),
    (
        "TensorRT-LLM",
        "It publishes no wheel. FlashInfer has ports of its top-k and of its block-scaled grouped kernels.",
    ),
    (
        "LightMoE",
        "wgrad with a persistent scheduler: the package never calls it, and the emulator reports that it hangs.",
    ),
    (
        "Dist-MoE",
        "kernels that dispatch and combine over several GPUs, because a process has one virtual GPU.",
    ),
    (
        "cuDNN frontend",
        "most of its kernels: attention, convolution, linear attention and others that its Frost templates build. Its norms "
        "import `cutlass.primitives`, which CuTe DSL 4.8.1 does not have, as two rows show.",
    ),
    (
        "FlashInfer",
        "fused experts, because they also launch kernels that nvcc compiles. Its test suite has rows of its own.",
    ),
    (
        "b12x",
        "attention, experts, sequence and communication, because their plans need caches of a served model.",
    ),
    (
        "SGLang",
        "its copy of flash-attention, which has rows of its own, and kernels that reduce over several GPUs.",
    ),
    (
        "Liger",
        "RoPE and the fused linear cross-entropy, because they also launch kernels of Triton, which the emulator does not run. "
        "`liger_cute_kernels` is CUDA C++.",
    ),
)
"""Projects, and their kernels that no row calls, with the reason."""
