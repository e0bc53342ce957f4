"""GPU MODE nvfp4_gemm: specification."""
