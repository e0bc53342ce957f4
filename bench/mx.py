"""MXFP4 and MXFP8 on the GPU of this machine: quantize, weight-only products, and gpt-oss's experts, beside torch in bf16.

    python -m nvfp4_cute.bench.mx [--only quantize products experts] [--json mx.json]

Every call is replayed from a CUDA graph on a cold L2 (``tuning.stopwatch``); medians in us, what an empty interval takes told
besides. "of a copy": bytes that the operation moves, by the bandwidth of a copy of as many bytes in the same run. Every result
is compared with float32 products of the dequantized weights before it is timed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nvfp4_cute import MXFP4, MXFP8_E4M3, NVFP4, gemm, quantize
from nvfp4_cute.experts.activation import activate_rows
from nvfp4_cute.experts.gather import gather
from nvfp4_cute.experts.layer import moe
from nvfp4_cute.experts.middle import activate
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, dequantize
from nvfp4_cute.ops.parts import grouped_gemm
from nvfp4_cute.problem import dtype_name
from nvfp4_cute.tuning import stopwatch

from .memory_bound import QUANTIZE_SHAPES, copies
from .moe import MODELS, TOKENS, Batch, Model

PRODUCT = (28672, 8192)  # N, K
ROWS = (1, 2, 4, 8, 16, 32, 64)
NUM_SETS = 3
MODEL = MODELS["gpt-oss-20b"]
LIMIT = 7.0
# Sums in fp32 and results in bf16; rows between the products are rounded to bf16, too.
TOLERANCE = 0.02
PARTS = ("quantize", "products", "experts")


def timed(calls: dict[str, Callable[[int], object]], sets: int = NUM_SETS) -> dict[str, float]:
    """Medians in us."""
    return {name: sample.median for name, sample in stopwatch.measure(calls, sets).items()}


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference over that of what is right. Raises RuntimeError where rounding does not explain it."""
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < TOLERANCE:
        raise RuntimeError(f"differs by {error:.3g} of the norm")
    return error


def quantize_times(m: int, k: int) -> dict[str, Any]:
    """Of every format, and of a copy of as many bytes as MXFP4's."""
    inputs = [torch.randn(m, k, device="cuda").bfloat16() for _ in range(NUM_SETS)]
    moved = {str(f): m * k * 2 + f.nbytes(m, k) for f in (NVFP4, MXFP4, MXFP8_E4M3)}
    calls: dict[str, Callable[[int], object]] = {
        str(f): lambda i, f=f: quantize(inputs[i], format=f) for f in (NVFP4, MXFP4, MXFP8_E4M3)
    }
    us = timed(calls | {f"copy, {name}": copies(nbytes) for name, nbytes in moved.items()})
    return {"m": m, "k": k, "us": us, "of a copy": {name: us[f"copy, {name}"] / us[name] for name in moved}}


def product_times(m: int) -> dict[str, Any]:
    """bf16 rows times weights of either 4-bit format, and torch's bf16 product."""
    n, k = PRODUCT
    rows = [torch.randn(m, k, device="cuda").bfloat16() for _ in range(NUM_SETS)]
    dense = [torch.randn(n, k, device="cuda").bfloat16() / k**0.5 for _ in range(NUM_SETS)]
    calls: dict[str, Callable[[int], object]] = {"torch bf16": lambda i: rows[i] @ dense[i].T}
    errors, moved = {}, {}
    for format in (NVFP4, MXFP4):
        name, weights = str(format), [quantize(w, format=format) for w in dense]
        run = partial(_product, rows, weights)
        errors[name] = error_of(run(0), rows[0].float() @ dequantize(weights[0], torch.float32).T)
        calls[name] = run
        moved[name] = format.nbytes(n, k) + 2 * m * (n + k)
    us = timed(calls | {f"copy, {name}": copies(nbytes) for name, nbytes in moved.items()})
    share = {name: us[f"copy, {name}"] / us[name] for name in moved}
    return {"m": m, "n": n, "k": k, "us": us, "of a copy": share, "error": errors}


def _product(rows: list[torch.Tensor], weights: list[BlockScaledTensor], index: int) -> torch.Tensor:
    return gemm(rows[index], weights[index])


class GptOss:
    """A layer of gpt-oss-20b's experts: gate and up rows in turns, biases, the clamped SwiGLU."""

    def __init__(self, format: BlockFormat, model: Model = MODEL, device: str = "cuda", seed: int = 0):
        generator = torch.Generator(device).manual_seed(seed)
        e, h, i = model.experts, model.hidden, model.width

        def some(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator) / h**0.5

        gate_up, down = some(e, 2 * i, h), some(e, h, i)
        self.w13, self.w2 = (ExpertWeights.quantize(w, format) for w in (gate_up, down))
        self.bias13, self.bias2 = some(e, 2 * i).bfloat16(), some(e, h).bfloat16()
        self.options: Any = {"activation": "swiglu_oai", "limit": LIMIT}

    def layer(self, batch: Batch) -> torch.Tensor:
        """The layer."""
        return moe(
            batch.x, batch.ids, batch.weights, self.w13, self.w2, activations="16bit", weight_layout="interleaved",
            bias13=self.bias13, bias2=self.bias2, **self.options,
        )  # fmt: skip

    def rows(self, batch: Batch) -> torch.Tensor:
        """From tokens and known ids to one row a choice, without the last bias."""
        rows, order = gather(batch.x, batch.ids, len(self.w13.data))
        alphas = [w.global_scale for w in (self.w13, self.w2)]
        h = grouped_gemm(
            rows, self.w13.data, None, self.w13.scale, order.offs, alphas[0], b_format=self.w13.format
        )
        h = activate(h, batch.ids, order, gate_layout="interleaved", bias=self.bias13, **self.options)
        return grouped_gemm(
            h, self.w2.data, None, self.w2.scale, order.offs, alphas[1], b_format=self.w2.format
        )

    def dense(self, weights: ExpertWeights) -> torch.Tensor:
        """[E, K, N] in bf16, of one that has no global scale."""
        whole = BlockScaledTensor(weights.data, weights.scale, None, weights.shape, format=weights.format)
        experts = [dequantize(whole[e], torch.bfloat16) for e in range(len(whole))]
        return torch.stack(experts).transpose(1, 2)

    def expected(self, batch: Batch, dense: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The layer in float32."""
        y = torch.zeros(batch.x.shape, device=batch.x.device)
        for e in batch.ids.unique().tolist():
            tokens, k = (batch.ids == e).nonzero(as_tuple=True)
            h = batch.x[tokens].float() @ dense[0][e].float() + self.bias13[e].float()
            rows = activate_rows(h, self.options["activation"], "interleaved", LIMIT) @ dense[1][e].float()
            y.index_add_(0, tokens, (rows + self.bias2[e].float()) * batch.weights[tokens, k, None])
        return y

    def torch_rows(self, batch: Batch, dense: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``rows`` by ``torch._grouped_mm``, biases left out, the order of rows known before."""
        offs = batch.order.offs
        h = torch._grouped_mm(batch.x[batch.tokens_of_rows], dense[0], offs=offs)
        gate, up = h[:, ::2].clamp(max=LIMIT), h[:, 1::2].clamp(-LIMIT, LIMIT)
        return torch._grouped_mm((up + 1) * gate * torch.sigmoid(1.702 * gate), dense[1], offs=offs)


def expert_times(
    tokens: int, of_format: dict[str, GptOss], dense: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, Any]:
    """The layer and its rows, with MXFP4 and with NVFP4 weights, and torch's rows in bf16."""
    batch = Batch.make(MODEL, tokens)
    mx = of_format["mxfp4"]
    error = error_of(mx.layer(batch), mx.expected(batch, dense))
    calls: dict[str, Callable[[int], object]] = {"rows, torch bf16": lambda _: mx.torch_rows(batch, dense)}
    for name, made in of_format.items():
        calls[f"rows, {name}"] = lambda _, made=made: made.rows(batch)
        calls[f"layer, {name}"] = lambda _, made=made: made.layer(batch)
    return {"tokens": tokens, "us": timed(calls, 1), "error": error}


def print_row(label: str, result: dict[str, Any]) -> None:
    """Times, and shares of a copy where there are."""
    us = ", ".join(
        f"{name} {value:.1f}" for name, value in result["us"].items() if not name.startswith("copy")
    )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in result.get("of a copy", {}).items())
    print(f"{label}: us: {us}" + (f"; of a copy: {shares}" if shares else ""), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what (default: all)")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA GPU that torch can use", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": dtype_name(torch.bfloat16),
    }
    if "quantize" in args.only:
        report["quantize"] = []
        for m, k in tqdm(QUANTIZE_SHAPES, "quantize", disable=None):
            report["quantize"].append(quantize_times(m, k))
            print_row(f"quantize {m} x {k}", report["quantize"][-1])
    if "products" in args.only:
        report["products"] = []
        for m in tqdm(ROWS, "products", disable=None):
            report["products"].append(product_times(m))
            print_row(f"{m} rows x {PRODUCT}", report["products"][-1])
    if "experts" in args.only:
        report["experts"] = []
        of_format = {str(format): GptOss(format) for format in (MXFP4, NVFP4)}
        mx = of_format["mxfp4"]
        dense = mx.dense(mx.w13), mx.dense(mx.w2)
        for tokens in tqdm(TOKENS, "experts", disable=None):
            report["experts"].append(expert_times(tokens, of_format, dense))
            print_row(f"gpt-oss-20b, {tokens} tokens", report["experts"][-1])
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
