"""Weight-only products on sm_90a: 16-bit activations times quantized weights."""
