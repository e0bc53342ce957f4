"""Ampere and Ada, sm_80, sm_86 and sm_89: weights are quantized, activations have 16 bits.

There are kernels for weight-only products, quantize, dequantize, routing, and operations on rows of a layer of experts.
No kernel multiplies two quantized operands. These chips have no FP4 tensor cores, no TMA and no wgmma, so a product of
dequantized rows would take longer than one of the original 16-bit rows. Launches have no clusters, and none begins
before the previous one ends.
"""

from nvfp4_cute.errors import UnsupportedTarget

ARCHS = ("sm_80", "sm_86", "sm_89")
KIB = 1024
# From the CUDA programming guide's table of limits: shared memory per CTA, and warps per SM.
SMEM_CAPACITY_BYTES = {"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB}
WARPS_PER_SM = {"sm_80": 64, "sm_86": 48, "sm_89": 48}


def check_arch(arch: str) -> None:
    """Raises UnsupportedTarget on architectures where the operands of a product may not both be quantized."""
    if arch in ARCHS:
        raise UnsupportedTarget(
            f"{arch}: no kernel multiplies two quantized operands (it has no FP4 tensor cores); pass a as rows of 16 bits, as "
            'layers with activations="16bit" do, or pass backend="reference"'
        )
