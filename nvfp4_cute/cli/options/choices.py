"""Values of options that modules with torch define; `tests/cli/test_options.py` compares the two."""

SUITES = ("competition", "dense", "linear", "experts")
OPERATIONS = ("gemm", "dual", "w4a16")
QUANTIZED_RESULTS = ("nvfp4", "nvfp4_four_over_six", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "fp8_1x128")
RESULTS = ("fp16", "bf16", "fp32", *QUANTIZED_RESULTS)
FORMS = ("list", "ragged", "masked", "batched")
WEIGHT_LAYOUTS = ("separate", "interleaved_64_up_first", "interleaved_32_gate_first")
MODES = ("test", "benchmark", "leaderboard", "profile")
TRACE_DEVICES = ("auto", "cuda", "emulator", "cpu")
TRACE_RULES = ("sol-execbench", "flashinfer-bench")
EXPORTS = ("gpumode",)
TRACE_EXPORTS = ("trace", "trace-set")
KINDS = (
    "elementwise", "nvfp4_dual_gemm", "nvfp4_gemm", "nvfp4_gemv", "nvfp4_group_gemm", "nvfp4_grouped_gemm", "nvfp4_moe",
    "nvfp4_quantize",
)  # fmt: skip
STEPS = ("probes", "configs", "problems", "constants", "timed", "host")
PROBLEMS = ("nvfp4_gemv", "nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm")
