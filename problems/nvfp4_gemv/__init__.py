"""GPU MODE nvfp4_gemv: specification, inputs, reference, adapter."""
