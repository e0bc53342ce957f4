"""nvfp4_gemm: specification, reference, kernel."""
