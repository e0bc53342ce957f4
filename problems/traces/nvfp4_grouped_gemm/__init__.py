"""nvfp4_grouped_gemm: specification, reference, kernel."""
