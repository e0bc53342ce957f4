"""GPU MODE nvfp4_group_gemm: specification, inputs, reference, adapter."""
