"""GPU MODE nvfp4_gemv: specification."""
