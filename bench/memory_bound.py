"""gemv and quantize beside what memory allows, measured on the GPU of this machine.

    python -m nvfp4_cute.bench.memory_bound [--save]

prints (and saves as ``bench/results/<gpu>_gemv.md``) times, bandwidths, and shares of a device-to-device copy's
bandwidth. Every time is a median over graph replays on a cold L2 with rotating inputs, the competitors in turn.
"""

import argparse
from collections.abc import Callable
from math import ceil
from pathlib import Path

import torch
from tqdm import tqdm

from nvfp4_cute import gemv, quantize, targets
from nvfp4_cute.bench.stopwatch import EMPTY, Sample, measure
from nvfp4_cute.formats import encode_e4m3
from nvfp4_cute.problems.nvfp4_gemv import spec
from nvfp4_cute.scale_layout import padded_shape, to_blocked

RESULTS = Path(__file__).parent / "results"
# (M, K, L): the competition's, then projections of one token in models with hidden sizes 4096 and 8192.
DECODE = ((4096, 4096, 1), (14336, 4096, 1), (4096, 14336, 1), (28672, 8192, 1), (8192, 28672, 1))
GEMV_SHAPES = (*((case.m, case.k, case.l) for case in spec.BENCHMARKS), *DECODE)
QUANTIZE_SHAPES = ((16, 7168), (128, 7168), (1024, 7168), (8192, 4096), (16384, 7168))
# What a large copy moves, read and written: far more than L2 holds.
COPY_BYTES = 2 << 30
NUM_SETS = 3


def time_gemv(m: int, k: int, l: int) -> tuple[int, dict[str, Sample]]:
    """Bytes that a gemv moves, and samples of ours, of torch on bf16 weights, and of a copy of as many bytes."""
    sets = [_gemv_operands(m, k, l, seed) for seed in range(NUM_SETS)]
    weights = [torch.randn(l, m, k, device="cuda", dtype=torch.bfloat16) for _ in sets]
    vectors = [torch.randn(l, k, 1, device="cuda", dtype=torch.bfloat16) for _ in sets]
    results = [torch.empty(l, m, 1, device="cuda", dtype=torch.bfloat16) for _ in sets]
    moved = l * ((m + 1) * (k // 2 + k // 16) + 2 * m)
    return moved, measure(
        {
            "ours": lambda i: gemv(*sets[i][:-1], out=sets[i][-1], out_dtype=torch.float16),
            "torch": lambda i: (
                torch.bmm(weights[i], vectors[i], out=results[i])
                if l > 1
                else torch.mv(weights[i][0], vectors[i][0, :, 0], out=results[i][0, :, 0])
            ),
            "copy": _copies(moved),
        },
        NUM_SETS,
    )


def time_quantize(m: int, k: int) -> tuple[int, dict[str, Sample]]:
    """Bytes that a quantization of bf16 moves, and samples of ours, of the same in torch operations, and of a copy."""
    inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(NUM_SETS)]
    factor = torch.full((), 2.0**-9, device="cuda")
    moved = m * k * 2 + m * k // 2 + m * k // 16
    return moved, measure(
        {
            "ours": lambda i: quantize(inputs[i], global_scale=factor),
            "copy": _copies(moved),
        },
        NUM_SETS,
    )


def _gemv_operands(m: int, k: int, l: int, seed: int) -> tuple[torch.Tensor, ...]:
    """a, b, their scales, out: every bit pattern of e2m1, scales of 0.5 to 2."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)

    def scales(rows: int) -> torch.Tensor:
        uniform = torch.rand((l, *padded_shape(rows, k // 16)), device="cuda", generator=generator)
        return to_blocked(encode_e4m3(0.5 + 1.5 * uniform))

    out = torch.empty((l, m), dtype=torch.float16, device="cuda").T
    return values(l, m, k // 2).permute(1, 2, 0), values(l, k // 2).T, scales(m), scales(1), out


def _copies(moved: int) -> Callable[[int], object]:
    """A kernel that reads half of ``moved`` bytes and writes as many (negated: a plain copy may leave the SMs)."""
    pairs = [torch.empty(2, 4 * ceil(moved / 32), device="cuda") for _ in range(NUM_SETS)]
    return lambda i: torch.neg(pairs[i][0], out=pairs[i][1])


def page() -> str:
    """The measured tables as Markdown."""
    large = measure({"copy": _copies(COPY_BYTES)}, NUM_SETS)
    copy_bandwidth = COPY_BYTES / large["copy"].median

    def row(name: str, moved: int, samples: dict[str, Sample]) -> list[str]:
        ours, copy = samples["ours"].median, samples["copy"].median
        speed = moved / ours
        cells = [
            name,
            f"{moved / 1e6:.2f}",
            f"{ours:.1f}",
            f"{samples['ours'].low:.1f} to {samples['ours'].high:.1f}",
        ]
        return [*cells, f"{speed / 1e6:.2f}", f"{100 * speed / copy_bandwidth:.0f} %", f"{copy:.1f}"]

    gemv_rows = []
    for shape in tqdm(GEMV_SHAPES, desc="gemv"):
        moved, samples = time_gemv(*shape)
        other = samples["torch"].median
        cells = row(" x ".join(map(str, shape)), moved, samples)
        gemv_rows.append([*cells, f"{other:.1f}", f"{other / samples['ours'].median:.2f}"])
    quantize_rows = [
        row(f"{m} x {k}", *time_quantize(m, k)) for m, k in tqdm(QUANTIZE_SHAPES, desc="quantize")
    ]
    common = ["MB", "us", "deciles 1 to 9", "TB/s", "of a copy", "copy of as many bytes, us"]
    name = torch.cuda.get_device_name()
    return "\n\n".join(
        [
            f"# gemv and quantize on {name}",
            f"Measured with torch {torch.__version__}, CUDA {torch.version.cuda}: `python -m "
            "nvfp4_cute.bench.memory_bound --save`. Medians of graph replays on a cold L2, rotating inputs, competitors in "
            f"turn. An empty interval takes {large[EMPTY].median:.1f} us and is part of every time. A device-to-device "
            f"copy (`torch.neg`, 1 GiB read and written) moves {copy_bandwidth / 1e6:.2f} TB/s; the column `of a copy` is "
            "the share of that.",
            "## gemv: NVFP4 matrix (M x K, L of them) times NVFP4 vector, fp16 out",
            _markdown(["M x K x L", *common, "torch bf16, us", "faster than bf16"], gemv_rows),
            "`torch bf16` multiplies bf16 weights of the same shape: `torch.mv`, and `torch.bmm` for L > 1.",
            "## quantize: bf16 (M x K) to NVFP4, blocked scales, global scale on the device",
            _markdown(["M x K", *common], quantize_rows),
        ]
    )


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="also write the page into bench/results")
    save = parser.parse_args().save
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU here; these tables are measured, never modelled")
    text = page() + "\n"
    print(text)
    if save:
        target = targets.detect()
        path = RESULTS / f"{target.name.lower() if target else 'gpu'}_gemv.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"saved to {path}")


if __name__ == "__main__":
    main()
