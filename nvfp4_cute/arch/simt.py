"""What the kernels in ``kernels/simt`` cost and how they spread over threads: plain integers, shared by host and device."""

from nvfp4_cute.errors import UnsupportedTarget

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
WARP_SIZE = 32

# ---- gemv: what one lane loads of a row at once is 16 bytes: 32 values of K in two blocks ----
GEMV_PIECE_K = 32
# Lanes of a warp side by side along K; the other half of the warp has the next row.
GEMV_LANES_K = 16
GEMV_STEP_K = GEMV_PIECE_K * GEMV_LANES_K
# Rows r, r + 32, r + 64, r + 96 of an atom have their scales in 16 consecutive bytes: one lane takes all four.
GEMV_ROWS_PER_LANE = 4
GEMV_ROWS_PER_WARP = 2 * GEMV_ROWS_PER_LANE
GEMV_WARPS = 8
# Steps that a warp should have before another warp is put beside it along K.
GEMV_MIN_STEPS = 4


def has_fp4_convert(arch: str) -> bool:
    """Whether e2m1 conversions are instructions (PTX ISA 9.7.9.21: sm_100a and later) or have to be computed."""
    return arch != "sm_90a"


def check_arch(arch: str) -> None:
    """Raises UnsupportedTarget where these kernels do not run."""
    if arch not in ARCHS:
        raise UnsupportedTarget(
            f"no gemv, w4a16_gemv or quantize kernel for {arch}; there is one for {', '.join(ARCHS)}. "
            'Pass backend="reference", or CPU tensors'
        )


def gemv_warps_k(k: int) -> int:
    """Warps that share one row of K elements: 1, 2, 4 or 8. A function of K alone, so M and L never change a bit."""
    warps = 1
    while warps < GEMV_WARPS and k >= 2 * warps * GEMV_MIN_STEPS * GEMV_STEP_K:
        warps *= 2
    return warps


# ---- quantize: a warp takes 8 rows of a scale atom, four blocks of K each: one 32-byte sector of scales -------------
QUANTIZE_WARPS = 8
# Columns of scale atoms (64 values of K each) that a warp has on its way from memory at once.
QUANTIZE_ATOMS = 2
