"""Products of 8-bit operands on sm_90a with fp32 scales: FP8 by 1 x 128 of tokens and 128 x 128 of weights, INT8 by rows."""
