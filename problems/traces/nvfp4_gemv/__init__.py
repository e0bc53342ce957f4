"""nvfp4_gemv: specification, reference, kernel."""
