"""nvfp4_group_gemm: specification, reference, kernel."""
