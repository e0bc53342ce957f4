"""MMAs of 96 elements of K on sm_103a: 4-bit operands at 1.5 times the rate of MMAs of 64."""
