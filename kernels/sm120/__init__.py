"""Kernels for sm_120a and sm_121a: TMA, ldmatrix, block-scaled mma.sync of warps."""
