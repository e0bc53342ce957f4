"""A layer of experts on this machine's GPU: each phase and the layer, with torch's grouped products in bf16 and fp8.

    python -m nvfp4_cute.bench.moe [--model qwen3-30b-a3b ...] [--format mxfp4] [--tokens 1,8,32,128,512,2048] [--json] [--clean]
    python -m nvfp4_cute.bench.moe --read bench/results/h100_moe.json --save h100_moe

The second command writes the page of a report that an earlier call printed, with other libraries' times if the report
has them: ``"peers": {"Humming 0.1.19": {"qwen3-30b-a3b": {"1": 31.7}}}``, us of "rows", and a ``"note"`` on their
origin.

Every call is replayed from a CUDA graph on a cold L2 (``tuning.stopwatch``). Times are medians in us, and include an
empty interval. Weights, of ``--format``, and activations are random. Routing is by random logits, equal for all. "rows"
is the layer without routing and without the weighted sum: from tokens and known ids to one result per choice; other
libraries are compared by it. torch's rows are also gathered and quantized in the timed graph, in a known order. A
result is compared with the bf16 layer's before it is timed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute import MoE, UnsupportedProblem, UnsupportedTarget, route
from nvfp4_cute.experts.activation import activate_rows
from nvfp4_cute.experts.combine import finalize
from nvfp4_cute.experts.gather import gather
from nvfp4_cute.experts.middle import activate
from nvfp4_cute.experts.permutation import Permutation, permute
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_format import FORMATS, MXFP4, MXFP8, BlockFormat
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_scaled import dequantize, quantized_tensor
from nvfp4_cute.formats.codecs import E4M3_MAX
from nvfp4_cute.ops.parts import Parts, gate_up, grouped_dual_gemm, grouped_gemm
from nvfp4_cute.problem import RESULT_FORMATS
from nvfp4_cute.tuning import stopwatch

RESULTS = Path(__file__).parent / "results"
TOKENS = (1, 8, 32, 128, 512, 2048)
# Rounding rows to NVFP4 twice costs about a tenth of the norm; a wrong order or weight costs all of it.
WRONG = 0.25
WRONG_16BIT = 0.02


@dataclass(frozen=True)
class Model:
    """Sizes of a layer: experts, experts per token, H, I."""

    experts: int
    top_k: int
    hidden: int
    width: int


MODELS = {
    "qwen3-30b-a3b": Model(128, 8, 2048, 768),
    "deepseek-v3-slice": Model(64, 8, 7168, 2048),
    "mixtral-8x7b": Model(8, 2, 4096, 14336),
    "gpt-oss-20b": Model(32, 4, 2880, 2880),
}


@dataclass(frozen=True)
class Weights:
    """Weights of a model: our layers, one of 16-bit rows, and equal bf16 weights [E, K, N] as for torch's products."""

    layer: MoE
    weight_only: MoE
    gate_up: torch.Tensor
    down: torch.Tensor


def make_weights(
    model: Model, device: str = "cuda", seed: int = 0, format: BlockFormat = NVFP4_FORMAT
) -> Weights:
    """Makes random quantized weights, and bf16 weights with the dequantized values. Rows are in the format's usual layout."""
    generator = torch.Generator(device).manual_seed(seed)

    def one(n: int, k: int) -> tuple[ExpertWeights, torch.Tensor]:
        parts, decoded = [], []
        for _ in range(model.experts):
            w = torch.randn((1, n, k), device=device, generator=generator) / k**0.5
            part = ExpertWeights.quantize(w, format)
            parts.append(part)
            factor = None if part.global_scale is None else part.global_scale[0]
            tensor = quantized_tensor(part.data[0], part.scale[0], factor, (n, k), format)
            decoded.append(dequantize(tensor, torch.bfloat16))
        whole = lambda tensors: torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)
        data, scale = whole([part.data for part in parts]), whole([part.scale for part in parts])
        found = [part.global_scale for part in parts if part.global_scale is not None]
        quantized = ExpertWeights(data, scale, torch.cat(found) if found else None, format)
        return quantized, torch.stack(decoded).transpose(1, 2)

    (w13, gate_up), (w2, down) = one(2 * model.width, model.hidden), one(model.hidden, model.width)
    own, weight_only = (MoE.from_quantized(w13, w2, activations=kind) for kind in (None, "16bit"))
    return Weights(own, weight_only, gate_up, down)


@dataclass(frozen=True)
class Batch:
    """Tokens with their routing, and the order of rows."""

    x: torch.Tensor
    logits: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    order: Permutation

    @classmethod
    def make(cls, model: Model, tokens: int, device: str = "cuda", seed: int = 1) -> "Batch":
        """Makes random tokens and logits."""
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn((tokens, model.hidden), device=device, generator=generator).bfloat16()
        logits = torch.randn((tokens, model.experts), device=device, generator=generator).bfloat16()
        ids, weights = route(logits, model.top_k)
        return cls(x, logits, ids, weights, permute(ids, model.experts))

    @property
    def tokens_of_rows(self) -> torch.Tensor:
        """Token of every row."""
        return self.order.slots.long() // self.ids.shape[1]


Calls = dict[str, Callable[[], Any]]


def alpha_of(layer: MoE) -> torch.Tensor | None:
    """Returns the factor of both products of the first half, [E], or None."""
    return None if layer.alpha13 is None else layer.alpha13[0]


def parts_of(layer: MoE) -> tuple[Parts, Parts]:
    """Returns the weights of both projections."""
    format = layer.formats[0]
    return Parts(layer.w13, layer.w13_scale, format), Parts(layer.w2, layer.w2_scale, format)


def ours(model: Model, weights: Weights, batch: Batch) -> Calls:
    """Returns the phases of our layer, each with the results of the earlier ones, and the layer."""
    layer, experts = weights.layer, model.experts
    x, ids, order = batch.x, batch.ids, batch.order
    rows_of = RESULT_FORMATS[layer.activations]
    alpha, offs = alpha_of(layer), order.offs
    w13, w2 = parts_of(layer)
    w = gate_up(w13, None, "concatenated", alpha, alpha)
    rows_of_all = Parts(*gather(x, ids, experts, format=rows_of)[0][:2], rows_of)
    is_fused = 2 * model.width % 256 == 0
    first: Calls = {}
    if is_fused:
        first["gate_up"] = lambda: grouped_dual_gemm(rows_of_all, w, offs, out_dtype=layer.activations)
    else:
        product = lambda: grouped_gemm(rows_of_all, w13, offs, alpha)
        h = product()
        first["gate_up"] = product
        first["activate"] = lambda: activate(h, ids, order, format=rows_of)
    hidden = [*first.values()][-1]()
    second = lambda: grouped_gemm(Parts(hidden[0], hidden[1], rows_of), w2, offs, layer.alpha2)
    rows = second()

    def without_sum() -> Any:
        (data, scale, _), order = gather(x, ids, experts, format=rows_of)
        given = Parts(data, scale, rows_of)
        if is_fused:
            hidden = grouped_dual_gemm(given, w, order.offs, out_dtype=layer.activations)
        else:
            h = grouped_gemm(given, w13, order.offs, alpha)
            hidden = activate(h, ids, order, format=rows_of)
        return grouped_gemm(Parts(hidden[0], hidden[1], rows_of), w2, order.offs, layer.alpha2)

    return {
        "route": lambda: route(batch.logits, model.top_k),
        "permute": lambda: permute(ids, experts),
        "permute + gather_quantize": lambda: gather(x, ids, experts, format=rows_of),
        **first,
        "down": second,
        "finalize": lambda: finalize(rows, order.rows, batch.weights),
        "rows": without_sum,
        "layer": lambda: layer(x, ids, batch.weights),
        "route + layer": lambda: layer(x, *route(batch.logits, model.top_k)),
    }


def weight_only(model: Model, weights: Weights, batch: Batch) -> Calls:
    """Returns the products of 16-bit rows, and the layer, if this GPU has kernels for them."""
    layer, experts = weights.weight_only, model.experts
    x, ids, alpha = batch.x, batch.ids, alpha_of(layer)
    w13, w2 = parts_of(layer)
    is_fused = 2 * model.width % 256 == 0

    def gated(rows: torch.Tensor, order: Permutation) -> torch.Tensor:
        if is_fused:
            both = gate_up(w13, None, "concatenated", alpha, alpha)
            return grouped_dual_gemm(rows, both, order.offs)
        h = grouped_gemm(rows, w13, order.offs, alpha)
        return activate(h, ids, order).data

    def down(rows: torch.Tensor, order: Permutation) -> torch.Tensor:
        return grouped_gemm(rows, w2, order.offs, layer.alpha2)

    def without_sum() -> torch.Tensor:
        rows, order = gather(x, ids, experts)
        return down(gated(rows.data, order), order)

    (rows, *_), order = gather(x, ids, experts)
    hidden = gated(rows, order)
    return {
        "gate_up, 16 bits": lambda: gated(rows, order),
        "down, 16 bits": lambda: down(hidden, order),
        "rows, 16 bits": without_sum,
        "route + layer, 16 bits": lambda: layer(x, *route(batch.logits, model.top_k)),
    }


def torch_bf16(weights: Weights, batch: Batch) -> Callable[[], torch.Tensor]:
    """Returns a call of the layer's rows with ``torch._grouped_mm``."""
    tokens, offs = batch.tokens_of_rows, batch.order.offs

    def run() -> torch.Tensor:
        gate, up = torch._grouped_mm(batch.x[tokens], weights.gate_up, offs=offs).chunk(2, 1)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * up, weights.down, offs=offs)

    return run


def torch_fp8(weights: Weights, batch: Batch) -> Callable[[], torch.Tensor]:
    """Returns a call of the layer's rows with ``torch._scaled_grouped_mm``: e4m3 rows and columns, one scale each."""

    def narrowed(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
        return (x / scale).to(torch.float8_e4m3fn), scale.squeeze(dim)

    def stored(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [narrowed(expert.T, 1) for expert in w]
        return torch.stack([p[0] for p in parts]).transpose(1, 2), torch.stack([p[1] for p in parts])

    gate_up, down = stored(weights.gate_up), stored(weights.down)
    tokens, offs = batch.tokens_of_rows, batch.order.offs

    def product(rows: torch.Tensor, w: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, scale = narrowed(rows, 1)
        return torch._scaled_grouped_mm(values, w[0], scale, w[1], offs=offs, out_dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        gate, up = product(batch.x[tokens], gate_up).chunk(2, 1)
        return product(torch.nn.functional.silu(gate) * up, down)

    return run


def expected(weights: Weights, batch: Batch) -> torch.Tensor:
    """Computes the layer by float32 products of the weights, without rounding in between."""
    y = torch.zeros(batch.x.shape, device=batch.x.device)
    for e in batch.ids.unique().tolist():
        tokens, k = (batch.ids == e).nonzero(as_tuple=True)
        both = batch.x[tokens].float() @ weights.gate_up[e].float()
        rows = activate_rows(both, "silu", "concatenated", None) @ weights.down[e].float()
        y.index_add_(0, tokens, rows * batch.weights[tokens, k, None])
    return y


def check(layer: MoE, weights: Weights, batch: Batch, most: float) -> float:
    """Returns the norm of a layer's error over that of the result. Raises ValueError if rounding does not explain it."""
    want = expected(weights, batch)
    got = layer(batch.x, batch.ids, batch.weights)
    error = float((got.float() - want).norm() / want.norm())
    if not error < most:
        tokens = len(batch.x)
        raise ValueError(
            f"{tokens} tokens: the layer's result differs from bf16's by {error:.3g} of its norm"
        )
    return error


def measure(model: Model, weights: Weights, tokens: int, clean: bool) -> dict[str, Any]:
    """Returns times in us by phase and peer, the layer's error, and why a peer is missing.

    Raises:
        ValueError: the layer's result differs from bf16's.
    """
    batch = Batch.make(model, tokens)
    error = check(weights.layer, weights, batch, WRONG)
    calls, missing = ours(model, weights, batch), {}
    try:
        check(weights.weight_only, weights, batch, WRONG_16BIT)
        calls |= weight_only(model, weights, batch)
    except (UnsupportedTarget, UnsupportedProblem) as reason:
        missing["rows, 16 bits"] = str(reason).splitlines()[0]
    for name, make in (("torch bf16 rows", torch_bf16), ("torch fp8 rows", torch_fp8)):
        try:
            run = make(weights, batch)
            run()
            calls[name] = run
        except (RuntimeError, AttributeError) as reason:  # not in this build of torch, or not for these sizes
            missing[name] = str(reason).splitlines()[0]
    each = {name: lambda index, run=run: run() for name, run in calls.items()}
    samples = stopwatch.measure(each, 1, clean=clean)
    return {
        "tokens": tokens,
        "error": error,
        "us": {name: sample.median for name, sample in samples.items()},
        "missing": missing,
    }


def table(name: str, results: list[dict[str, Any]]) -> str:
    """Returns a model's times, one row per number of tokens."""
    columns = list(dict.fromkeys(column for result in results for column in result["us"]))
    lines = [("tokens", *columns, "error")]
    lines.append(("---",) * len(lines[0]))
    for result in results:
        cells = [f"{result['us'][c]:.1f}" if c in result["us"] else "-" for c in columns]
        lines.append((str(result["tokens"]), *cells, f"{result['error']:.3f}"))
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    reasons = {f"{peer}: {why}" for result in results for peer, why in result["missing"].items()}
    return f"## {name}\n\n{text}\n" + "".join(f"- {reason}\n" for reason in sorted(reasons))


def standing(report: dict[str, Any]) -> str:
    """Returns Markdown: our fastest rows over the fastest of others', one row per model. Values above 1 are slower, and bold."""
    counts = sorted({result["tokens"] for results in report["models"].values() for result in results})
    lines = [("model", *(f"{count} tokens" for count in counts)), ("---",) * (1 + len(counts))]
    for model, results in report["models"].items():
        cells = {}
        for result in results:
            us, tokens = result["us"], str(result["tokens"])
            own = min((time, name) for name, time in us.items() if name.startswith("rows"))
            known = {
                name: times[model][tokens]
                for name, times in report.get("peers", {}).items()
                if model in times
            }
            others = known | {name: us[name] for name in ("torch bf16 rows", "torch fp8 rows") if name in us}
            if not others:
                continue
            peer = min(others, key=lambda name: others[name])
            ratio = f"{own[0] / others[peer]:.2f}"
            cells[result["tokens"]] = (
                f"{f'**{ratio}**' if own[0] > others[peer] else ratio} {peer.split()[0]}"
            )
        lines.append((model, *(cells.get(count, "-") for count in counts)))
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"# Where it stands\n\nOur fastest rows over the fastest other ones, and whose these are.\n\n{text}\n"
    )


def page(report: dict[str, Any], made_by: str) -> str:
    """Returns Markdown of a report: "rows" with the peers' for all models, then every phase."""
    peers = report.get("peers", {})
    own = ("rows", "rows, 16 bits", "route + layer", "route + layer, 16 bits")
    names = ("tokens", *(f"ours, {name}" for name in own), *peers, "torch fp8 rows", "torch bf16 rows")
    parts = [
        f"# A layer of experts on an {report['gpu']}\n",
        f"Measured with torch {report['torch']}; us, medians of CUDA graph replays on a cold L2. Made by `{made_by}`.\n",
        '"Rows": from bf16 tokens and known ids to one row a choice, the order of rows included in ours, known before in the '
        "others'. Ours quantizes activations to NVFP4 on the way, or leaves rows in 16 bits; Humming is weight-only.\n",
    ]
    parts += [f"{report['note']}\n"] if "note" in report else []
    parts += [standing(report)]
    for model, results in report["models"].items():
        lines = [names, ("---",) * len(names)]
        for result in results:
            us, tokens = result["us"], str(result["tokens"])
            others = [peers[peer].get(model, {}).get(tokens) for peer in peers]
            cells = [
                *(us.get(name) for name in own),
                *others,
                us.get("torch fp8 rows"),
                us.get("torch bf16 rows"),
            ]
            lines.append((tokens, *("-" if x is None else f"{x:.1f}" for x in cells)))
        parts.append(f"## {model}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")
    parts.append("# Phases\n")
    parts += [table(model, results) for model, results in report["models"].items()]
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS), help="which; all")
    parser.add_argument(
        "--format",
        choices=[f.name for f in (NVFP4_FORMAT, MXFP4, *MXFP8)],
        default="nvfp4",
        help="of weights",
    )
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--clean", action="store_true", help="what fills L2 was read, not written")
    parser.add_argument("--read", type=Path, help="a report, instead of measuring")
    parser.add_argument("--save", metavar="NAME", help="with --read: write bench/results/NAME.md")
    options = parser.parse_args(arguments)
    if options.read:
        text = page(
            json.loads(options.read.read_text()),
            f"python -m nvfp4_cute.bench.moe --read ... --save {options.save}",
        )
        if options.save:
            (RESULTS / f"{options.save}.md").write_text(text)
        else:
            print(text)
        return 0
    if not torch.cuda.is_available():
        print("bench.moe: no CUDA GPU here; nothing is measured", file=sys.stderr)
        return 2
    counts = [int(count) for count in options.tokens.split(",")]
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "models": {}}
    for name in options.model:
        weights = make_weights(MODELS[name], format=FORMATS[options.format])
        results = [measure(MODELS[name], weights, tokens, options.clean) for tokens in counts]
        report["models"][name] = results
        if not options.json:
            print(table(name, results), flush=True)
        del weights
        torch.cuda.empty_cache()
    if options.json:
        print(json.dumps(report))
    else:
        print(f"{report['gpu']}, torch {report['torch']}; us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
