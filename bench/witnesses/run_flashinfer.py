"""FlashInfer's wheel: its top-k, ported from TensorRT-LLM, and the masked grouped GEMM."""

import importlib.util
from pathlib import Path

import torch

from nvfp4_cute.bench import public_bug_runs
from nvfp4_cute.bench.witnesses.support import close, main, rounded

ROWS, N, K = 128, 128, 256


def top_k() -> None:
    """Runs the kernel with a reported fault. Its results are not compared."""
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None and spec.origin is not None
    public_bug_runs.top_k(Path(spec.origin).parents[1], ())


def masked() -> None:
    """Multiplies two groups of 128 and 40 rows of NVFP4."""
    from flashinfer.gemm import grouped_gemm_nt_masked

    from nvfp4_cute import quantize

    counts = [ROWS, 40]
    parts = {}
    for name, rows in (("a", ROWS), ("b", N)):
        values = [torch.randn(rows, K) for _ in counts]
        parts[name] = [quantize(x) for x in values], [rounded(x, 1.0) for x in values]
    stack = lambda name, field: torch.stack(
        [getattr(t, field).view(torch.uint8) for t in parts[name][0]]
    ).cuda()
    matrix = lambda name: stack(name, "data").permute(1, 2, 0)
    scale = lambda name, rows: (
        stack(name, "scale").view(2, rows // 128, K // 64, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
    )
    out = torch.zeros(2, ROWS, N, dtype=torch.bfloat16, device="cuda")
    grouped_gemm_nt_masked(
        (matrix("a"), scale("a", ROWS).view(torch.float8_e4m3fn)), (matrix("b"), scale("b", N).view(torch.float8_e4m3fn)),
        out.permute(1, 2, 0), torch.tensor(counts, dtype=torch.int32, device="cuda"), ab_dtype="float4_e2m1fn",
        sf_dtype="float8_e4m3fn", c_dtype="bfloat16", sf_vec_size=16, sm_count=16,
    )  # fmt: skip
    for group, count in enumerate(counts):
        expected = parts["a"][1][group][:count] @ parts["b"][1][group].T
        close(out[group, :count], expected, 0.005)


main({"top-k": top_k, "grouped-gemm-masked": masked})
