"""FP8 products on sm_100a, sm_103a and sm_110a with fp32 scales: 1 x 128 of tokens, 128 x 128 of weights."""
