"""GPU MODE nvfp4_dual_gemm: specification."""
