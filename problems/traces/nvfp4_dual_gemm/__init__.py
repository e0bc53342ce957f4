"""nvfp4_dual_gemm: specification, reference, kernel."""
