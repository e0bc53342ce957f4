"""Kernels for sm_100a, sm_103a and sm_110a: TMA, tensor memory, tcgen05 block-scaled MMA."""
