"""Kernels without tensor memory, TMA or wgmma: one source for every architecture from sm_80 on."""
