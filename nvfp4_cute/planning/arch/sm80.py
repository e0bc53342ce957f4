"""Ampere and Ada, sm_80, sm_86 and sm_89: weights are quantized, activations have 16 bits.

There are kernels for weight-only products, quantize, dequantize, routing and what is done to rows of a layer of experts. Two
quantized operands are not multiplied: these chips have no FP4 tensor cores, no TMA and no wgmma, so that a product of decoded
rows would take longer than one of the 16-bit rows that they were made of. Launches have no clusters and none begins before the
end of the one before it.
"""

from nvfp4_cute.errors import UnsupportedTarget

ARCHS = ("sm_80", "sm_86", "sm_89")
KIB = 1024
# From the CUDA programming guide's table of limits: shared memory of a CTA, and warps of an SM.
SMEM_CAPACITY_BYTES = {"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB}
WARPS_PER_SM = {"sm_80": 64, "sm_86": 48, "sm_89": 48}


def check_arch(arch: str) -> None:
    """Raises UnsupportedTarget where both operands of a product may not be quantized."""
    if arch in ARCHS:
        raise UnsupportedTarget(
            f"{arch}: no kernel multiplies two quantized operands (it has no FP4 tensor cores); pass a as rows of 16 bits, as "
            'layers with activations="16bit" do, or pass backend="reference"'
        )
