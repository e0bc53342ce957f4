"""nvfp4_moe: specification, reference, kernel."""
