"""nvfp4_quantize: specification, reference, kernel."""
