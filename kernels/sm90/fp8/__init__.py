"""FP8 products on sm_90a with fp32 scales: 1 x 128 of tokens, 128 x 128 of weights."""
