"""Kernels for sm_90a: NVFP4 decoded to fp16 in registers, wgmma with the weights as its register operand."""
