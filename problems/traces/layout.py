"""Shapes of NVFP4 operands as axes of a problem: bytes of packed values, and atoms of blocked scales."""

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.problems.trace_schema import TensorSpec

ATOM = {"S32": 32, "S4a": 4, "S4b": 4}
ATOM_ROWS = 128


def k_axes(name: str, k: int) -> dict[str, int]:
    """Returns the axes of a summed dimension: its packed bytes, and its atoms of scales."""
    return {f"{name}_bytes": NVFP4.row_bytes(k), f"{name}_atoms": -(-NVFP4.num_k_blocks(k) // 4)}


def row_atoms(rows: int) -> int:
    """Returns the number of scale atoms for ``rows``."""
    return -(-rows // ATOM_ROWS)


def values(*shape: str) -> TensorSpec:
    """Returns the tensor of packed values; the last axis counts bytes."""
    return TensorSpec("float4_e2m1", shape, "two e2m1 values a byte, the first in the low four bits")


def scales(*shape: str) -> TensorSpec:
    """Returns the tensor of blocked scales, from axes of atoms."""
    text = "ue4m3, one for 16 values, never negative; row 32 j + i, block l of an atom of 128 rows and 4 blocks at [i, j, l]"
    return TensorSpec("float8_e4m3fn", (*shape, *ATOM), text)
