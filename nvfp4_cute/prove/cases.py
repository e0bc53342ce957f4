"""Cases that `prove` times and that are predicted beforehand: benchmark suites, and a mixture-of-experts layer."""

from nvfp4_cute.bench import cases
from nvfp4_cute.bench.cases import Case

SELECTED = (
    *(f"nvfp4_group_gemm case {i}" for i in range(4)),
    *(f"nvfp4_gemm {shape}" for shape in ("m128_n7168_k16384", "m128_n4096_k7168", "m128_n7168_k2048")),
    *(f"nvfp4_gemv {shape}" for shape in ("m7168_k16384_l1", "m4096_k7168_l8", "m7168_k2048_l4")),
    *(f"nvfp4_dual_gemm {shape}" for shape in ("m256_n4096_k7168", "m256_n3072_k4096")),
    *(f"linear 4096 x 4096 {rows} rows" for rows in (1, 8, 32, 128)),
    *(f"linear 14336 x 4096 {rows} rows" for rows in (1, 8, 32)),
    *(f"linear 4096 x 14336 {rows} rows" for rows in (1, 8, 32)),
    "Qwen3-30B-A3B gate_up decode",
    "Qwen3-30B-A3B down decode",
    "DeepSeek-V3 down decode",
)
QUICK = SELECTED[:4]


def timed(*, quick: bool = False) -> list[Case]:
    """Returns the cases, in the order of ``SELECTED``. quick: only those of the group problem.

    Raises:
        ValueError: a name that no suite has.
    """
    by_name = {str(case): case for case in cases.select(("competition", "linear", "experts"))}
    wanted = QUICK if quick else SELECTED
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise ValueError(f"no suite has a case named {missing[0]!r}")
    return [by_name[name] for name in wanted]
