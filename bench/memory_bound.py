"""gemv, weight-only products and quantize beside what memory allows, measured on the GPU of this machine.

    python -m nvfp4_cute.bench.memory_bound [--page w4a16] [--save]

prints (and saves as ``bench/results/<gpu>_<page>.md``) times, bandwidths, and shares of a device-to-device copy's
bandwidth. Every time is a median over graph replays on a cold L2 with rotating inputs, the competitors in turn.
"""

import argparse
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nvfp4_cute import quantize
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.codecs import encode_e4m3
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.gpus import targets
from nvfp4_cute.ops.parts import gemm, gemv
from nvfp4_cute.problems.nvfp4_gemv import spec
from nvfp4_cute.tuning.stopwatch import EMPTY, Sample, measure

RESULTS = Path(__file__).parent / "results"
# (M, K, L): the competition's, then projections of one token in models with hidden sizes 4096 and 8192.
DECODE = ((4096, 4096, 1), (14336, 4096, 1), (4096, 14336, 1), (28672, 8192, 1), (8192, 28672, 1))
GEMV_SHAPES = (*((case.m, case.k, case.l) for case in spec.BENCHMARKS), *DECODE)
QUANTIZE_SHAPES = ((16, 7168), (128, 7168), (1024, 7168), (8192, 4096), (16384, 7168))
# (rows of activations, N, K) of weight-only products: one token, and as many as are multiplied at once.
W4A16_SHAPES = (
    *((1, n, k) for n, k, _ in DECODE),
    *((m, n, k) for m in (8, 16, 32) for n, k in ((14336, 4096), (28672, 8192))),
)
# What a large copy moves, read and written: far more than L2 holds.
COPY_BYTES = 2 << 30
NUM_SETS = 3
TITLES = {"gemv": "gemv and quantize", "w4a16": "Weight-only products and quantize of silu(gate) * up"}


def time_gemv(m: int, k: int, l: int) -> tuple[int, dict[str, Sample]]:
    """Bytes that a gemv moves, and samples of ours, of torch on bf16 weights, and of a copy of as many bytes."""
    sets = [_gemv_operands(m, k, l, seed) for seed in range(NUM_SETS)]
    weights = [torch.randn(l, m, k, device="cuda", dtype=torch.bfloat16) for _ in sets]
    vectors = [torch.randn(l, k, 1, device="cuda", dtype=torch.bfloat16) for _ in sets]
    results = [torch.empty(l, m, 1, device="cuda", dtype=torch.bfloat16) for _ in sets]
    moved = l * (NVFP4.nbytes(m + 1, k) + 2 * m)
    return moved, measure(
        {
            "ours": lambda i: gemv(*sets[i][:-1], out=sets[i][-1], out_dtype=torch.float16),
            "torch": lambda i: (
                torch.bmm(weights[i], vectors[i], out=results[i])
                if l > 1
                else torch.mv(weights[i][0], vectors[i][0, :, 0], out=results[i][0, :, 0])
            ),
            "copy": copies(moved),
        },
        NUM_SETS,
    )


def time_quantize(m: int, k: int) -> tuple[int, dict[str, Sample]]:
    """Bytes that a quantization of bf16 moves, and samples of ours, of the same in torch operations, and of a copy."""
    inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(NUM_SETS)]
    factor = torch.full((), 2.0**-9, device="cuda")
    moved = m * k * 2 + NVFP4.nbytes(m, k)
    return moved, measure(
        {
            "ours": lambda i: quantize(inputs[i], global_scale=factor),
            "copy": copies(moved),
        },
        NUM_SETS,
    )


def time_w4a16(m: int, n: int, k: int) -> tuple[int, dict[str, Sample]]:
    """Bytes that a weight-only product of bf16 moves, and samples of ours, of torch on bf16 weights, and of a copy."""
    sets = [_gemv_operands(n, k, 1, seed) for seed in range(NUM_SETS)]
    weights, rows, results = (
        [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in sets]
        for shape in ((n, k), (m, k), (m, n))
    )
    moved = NVFP4.nbytes(n, k) + 2 * m * (k + n)
    return moved, measure(
        {
            "ours": lambda i: gemm(
                rows[i], sets[i][0][:, :, 0], None, sets[i][2][0], out=results[i], out_dtype=torch.bfloat16
            ),
            "torch": lambda i: torch.mm(rows[i], weights[i].t(), out=results[i]),
            "copy": copies(moved),
        },
        NUM_SETS,
    )


def time_silu_quantize(m: int, k: int) -> tuple[int, dict[str, Sample]]:
    """Bytes that quantizing silu(gate) * up moves, and samples of ours and of a copy."""
    halves = [torch.randn(m, 2 * k, device="cuda", dtype=torch.bfloat16) for _ in range(NUM_SETS)]
    factor = torch.full((), 2.0**-9, device="cuda")
    moved = 2 * m * k * 2 + NVFP4.nbytes(m, k)
    return moved, measure(
        {
            "ours": lambda i: quantize(halves[i][:, :k], up=halves[i][:, k:], global_scale=factor),
            "copy": copies(moved),
        },
        NUM_SETS,
    )


def _gemv_operands(m: int, k: int, l: int, seed: int) -> tuple[torch.Tensor, ...]:
    """a, b, their scales, out: every bit pattern of e2m1, scales of 0.5 to 2."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)

    def scales(rows: int) -> torch.Tensor:
        uniform = torch.rand((l, *NVFP4.padded_scale_shape(rows, k)), device="cuda", generator=generator)
        return to_blocked(encode_e4m3(0.5 + 1.5 * uniform))

    out = torch.empty((l, m), dtype=torch.float16, device="cuda").T
    return (
        values(l, m, NVFP4.row_bytes(k)).permute(1, 2, 0),
        values(l, NVFP4.row_bytes(k)).T,
        scales(m),
        scales(1),
        out,
    )


def copies(moved: int) -> Callable[[int], object]:
    """A kernel that reads half of ``moved`` bytes and writes as many (negated: a plain copy may leave the SMs)."""
    pairs = [torch.empty(2, 4 * ceil(moved / 32), device="cuda") for _ in range(NUM_SETS)]
    return lambda i: torch.neg(pairs[i][0], out=pairs[i][1])


def time_copy() -> dict[str, Sample]:
    """Samples of a copy of ``COPY_BYTES``, and of an empty interval."""
    return measure({"copy": copies(COPY_BYTES)}, NUM_SETS)


def page(name: str) -> str:
    """The measured tables of a page, "gemv" or "w4a16", as Markdown."""
    large = time_copy()
    copy_bandwidth = COPY_BYTES / large["copy"].median
    common = ["MB", "us", "deciles 1 to 9", "TB/s", "of a copy", "copy of as many bytes, us"]

    def table(header: str, shapes: tuple[tuple[int, ...], ...], time: Callable[..., Any]) -> str:
        rows, others = [], []
        for shape in tqdm(shapes, desc=header):
            moved, samples = time(*shape)
            ours, copy = samples["ours"].median, samples["copy"].median
            speed = moved / ours
            others = ["torch bf16, us", "faster than bf16"] if "torch" in samples else []
            rows.append(
                [
                    " x ".join(map(str, shape)),
                    f"{moved / 1e6:.2f}",
                    f"{ours:.1f}",
                    f"{samples['ours'].low:.1f} to {samples['ours'].high:.1f}",
                    f"{speed / 1e6:.2f}",
                    f"{100 * speed / copy_bandwidth:.0f} %",
                    f"{copy:.1f}",
                    *[f"{x:{fmt}}" for x, fmt in _against_torch(samples)],
                ]
            )
        return _markdown([header, *common, *others], rows)

    sections = {
        "gemv": lambda: [
            "## gemv: NVFP4 matrix (M x K, L of them) times NVFP4 vector, fp16 out",
            table("M x K x L", GEMV_SHAPES, time_gemv),
            "`torch bf16` multiplies bf16 weights of the same shape: `torch.mv`, and `torch.bmm` for L > 1.",
            "## quantize: bf16 (M x K) to NVFP4, blocked scales, global scale on the device",
            table("M x K", QUANTIZE_SHAPES, time_quantize),
        ],
        "w4a16": lambda: [
            "## gemm of bf16 activations (M x K) and NVFP4 weights (N x K), bf16 out",
            table("M x N x K", W4A16_SHAPES, time_w4a16),
            "`torch bf16` multiplies bf16 weights of the same shape: `torch.mm`.",
            "## quantize of silu(gate) * up: two bf16 (M x K) to NVFP4, blocked scales, global scale on the device",
            table("M x K", QUANTIZE_SHAPES, time_silu_quantize),
        ],
    }
    gpu = torch.cuda.get_device_name()
    return "\n\n".join(
        [
            f"# {TITLES[name]} on {gpu}",
            f"Measured with torch {torch.__version__}, CUDA {torch.version.cuda}: `python -m "
            f"nvfp4_cute.bench.memory_bound --page {name} --save`. Medians of graph replays on a cold L2, rotating inputs, "
            f"competitors in turn. An empty interval takes {large[EMPTY].median:.1f} us and is part of every time. A "
            f"device-to-device copy (`torch.neg`, 1 GiB read and written) moves {copy_bandwidth / 1e6:.2f} TB/s; the "
            "column `of a copy` is the share of that.",
            *sections[name](),
        ]
    )


def _against_torch(samples: dict[str, Sample]) -> list[tuple[float, str]]:
    """Torch's time and how many times as long it is, each with its format; nothing where torch was not timed."""
    if "torch" not in samples:
        return []
    other = samples["torch"].median
    return [(other, ".1f"), (other / samples["ours"].median, ".2f")]


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="also write the page into bench/results")
    parser.add_argument(
        "--page", choices=TITLES, default="gemv", help="what to measure (default %(default)s)"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU here; these tables are measured, never modelled")
    text = page(arguments.page) + "\n"
    print(text)
    if arguments.save:
        target = targets.detect()
        path = RESULTS / f"{target.name.lower() if target else 'gpu'}_{arguments.page}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"saved to {path}")


if __name__ == "__main__":
    main()
