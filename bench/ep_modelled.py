"""A layer of experts over more GPUs than were measured: phases from bytes, operations, and the constants of ``LINKS``.

    python -m nvfp4_cute.bench.ep_modelled [--save]

Nothing here is measured. Routing is even: every token chooses k of E experts without repetition, and experts are spread
evenly. A phase takes its launches, plus the longest time of its link, its memory and its matrix units; phases follow
each other. Shares of peaks are those that two H100s reached in ``bench/results/h100x2_ep.json``; the last table
compares with that file.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from pathlib import Path

from nvfp4_cute.bench.moe import MODELS, Model
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.planning.arch.simt import FEW_SLOTS

RESULTS = Path(__file__).parent / "results"
PAGE = "ep_modelled.md"
PHASES = ("send", "receive", "products", "give", "sum")
LAUNCHES = {"send": 1, "receive": 2, "products": 2, "give": 1, "sum": 1}
SIGNALS = {"receive": 1, "sum": 1}
TOKENS = (1, 8, 64, 512, 8192)
SIGNAL_S = 2e-6
"""Seconds from the last store into another GPU's memory until a kernel there has seen the signal. Assumed."""
LAUNCH_S = 2.3e-6
"""Seconds per launch in a CUDA graph for a target without its own figure: an H200's, bench/probes/h200_launch_probe.txt."""
MATRIX_SHARE = 0.60
"""Share of the dense peak: products of 8,192 tokens per rank of DeepSeek's slice on two H100s, 592 of 989 TFLOP/s."""
MEMORY_SHARE = 0.71
"""Share of the memory's bandwidth: products of 8 tokens per rank there, 2.37 of 3.35 TB/s."""
LINK_SHARE = 0.84
"""Share of a link's bandwidth: copies into a peer's buffer, 370 to 391 of 450 GB/s on two H100s."""


@dataclass(frozen=True)
class Link:
    """Link from a GPU to the others: bytes per second, and source of the figure."""

    bandwidth: float
    source: str


LINKS = {
    "H100 SXM": Link(450e9, "NVLink 4, 18 links of 25 GB/s in each direction, NVIDIA's data sheet"),
    "B200": Link(900e9, "NVLink 5, 18 links of 50 GB/s in each direction, NVIDIA's data sheet"),
    "GB200": Link(900e9, "NVLink 5, the same to each of 72 GPUs"),
}
MODELS_HERE = {
    "qwen3-30b-a3b": MODELS["qwen3-30b-a3b"],
    "deepseek-v3": Model(256, 8, 7168, 2048),
    "mega-moe-384": Model(384, 6, 7168, 3072),
}
MACHINES = (("B200", 8), ("GB200", 72))
PUBLISHED = (
    ("H100 SXM", 4, "mega-moe-384", 512, 2763.0, "FP8"),
    ("H100 SXM", 4, "mega-moe-384", 8192, 11673.0, "FP8"),
)
"""us of FlashInfer's pull-style mega MoE, moe_ep/kernel_src/sm90/pull_style_cutedsl_megakernel/TUNING.md."""


@dataclass(frozen=True)
class Share:
    """Work of a rank: tokens, experts chosen by any token of any rank, and bytes that leave it in each phase."""

    model: Model
    ranks: int
    tokens: int

    @property
    def row_bytes(self) -> float:
        """Bytes of a token on its way: codes, scales, ids."""
        return self.model.hidden * (0.5 + 1 / 16) + 4 * self.model.top_k

    @property
    def goals(self) -> float:
        """Mean number of other ranks that a token goes to."""
        experts, k = self.model.experts, self.model.top_k
        elsewhere = experts - experts // self.ranks
        return (self.ranks - 1) * (1 - comb(elsewhere, k) / comb(experts, k))

    @property
    def experts(self) -> float:
        """Mean number of local experts with a row."""
        missed = (1 - self.model.top_k / self.model.experts) ** (self.ranks * self.tokens)
        return self.model.experts / self.ranks * (1 - missed)

    @property
    def choices(self) -> int:
        """Rows of the products, equal in number to this rank's own choices."""
        return self.tokens * self.model.top_k

    def link_bytes(self, phase: str) -> float:
        """Returns the bytes that leave the rank."""
        if phase == "send":
            return self.tokens * self.goals * self.row_bytes
        away = (self.ranks - 1) / self.ranks
        return self.choices * away * 2 * self.model.hidden if phase == "give" else 0.0

    def memory_bytes(self, phase: str) -> float:
        """Returns the bytes of the rank's own memory traffic."""
        hidden, width = self.model.hidden, self.model.width
        half = self.row_bytes
        weights = 3 * hidden * width * (0.5 + 1 / 16)
        of = {
            "send": self.tokens * 2 * hidden,
            "receive": self.tokens * self.goals * half + self.choices * half,
            "products": self.experts * weights + self.choices * (half + width * 9 / 8 + 2 * hidden),
            "give": self.choices * 2 * hidden,
            "sum": self.choices * 2 * hidden + self.tokens * 2 * hidden,
        }
        return of[phase]

    def flops(self, phase: str) -> float:
        """Returns the operations of the matrix units."""
        return 6.0 * self.choices * self.model.hidden * self.model.width if phase == "products" else 0.0


def peak(target: Target) -> float:
    """Returns FLOP/s of the multiplied format: NVFP4, or fp16 on sm_90a."""
    return target.peaks.get("nvfp4", target.peaks["fp16"])


def phase_us(phase: str, share: Share, target: Target) -> float:
    """Returns the modelled time of a phase."""
    link = LINKS[target.name].bandwidth * LINK_SHARE
    work = max(
        share.link_bytes(phase) / link,
        share.memory_bytes(phase) / (target.bandwidth_bytes_per_s * MEMORY_SHARE),
        share.flops(phase) / (peak(target) * MATRIX_SHARE),
    )
    few = phase == "receive" and share.ranks * share.choices <= FEW_SLOTS
    fixed = (LAUNCHES[phase] - few) * (target.launch_s or LAUNCH_S) + SIGNALS.get(phase, 0) * SIGNAL_S
    return 1e6 * (work + fixed)


def layer_us(share: Share, target: Target) -> float:
    """Returns the time of all phases, one after the other."""
    return sum(phase_us(phase, share, target) for phase in PHASES)


def page(measured: dict) -> str:
    """Returns the page in Markdown."""
    parts = [
        "# A layer of experts over 8 and 72 GPUs, modelled\n\n"
        "Modelled, not measured, by `python -m nvfp4_cute.bench.ep_modelled --save`. Routing is even. us of one layer on each "
        "rank, phases one after the other. Today's launches store into the buffers of 8 GPUs; 72 are a projection.\n\n"
        "## Constants\n",
        _table(("what", "figure", "from"), _constants()),
    ]
    for name, ranks in MACHINES:
        target = targets.lookup(name)
        for model_name, model in MODELS_HERE.items():
            rows = []
            for tokens in TOKENS:
                share = Share(model, ranks, tokens)
                us = [phase_us(phase, share, target) for phase in PHASES]
                total, moved = sum(us), share.link_bytes("send") + share.link_bytes("give")
                rows.append(
                    (
                        str(tokens),
                        *(f"{x:.1f}" for x in (*us, total)),
                        f"{moved / 1e6:.2f}",
                        f"{share.flops('products') / total / 1e6:.0f}",
                    )
                )
            head = ("tokens a rank", *PHASES, "layer", "MB out of a rank", "TFLOP/s a GPU")
            parts.append(f"\n## {model_name} on {ranks} x {name}, modelled\n\n{_table(head, rows)}")
    rows = [
        (
            f"{ranks} x {name}",
            model,
            str(tokens),
            f"{us:.0f} ({form})",
            f"{layer_us(Share(MODELS_HERE[model], ranks, tokens), targets.lookup(name)):.0f}",
        )
        for name, ranks, model, tokens, us, form in PUBLISHED
    ]
    head = ("GPUs", "layer", "tokens a rank", "FlashInfer's mega MoE, published", "this layer, modelled")
    parts.append(
        f"\n## Beside published times\n\n{_table(head, rows)}\n\nFlashInfer's is one kernel, which overlaps its phases, with "
        "8-bit operands: moe_ep/kernel_src/sm90/pull_style_cutedsl_megakernel/TUNING.md. 384 experts, 6 a token, H 7168, I 3072."
    )
    head = ("layer", "tokens a rank", *PHASES, "modelled", "measured", "of measured")
    parts.append(
        f"\n## Two H100s, modelled and measured\n\n{_table(head, _compared(measured))}\n\nEach phase: modelled / measured.\n"
    )
    return "\n".join(parts)


def _compared(measured: dict) -> Iterator[tuple[str, ...]]:
    target = targets.lookup("H100 SXM")
    for name, results in measured["models"].items():
        for result in results:
            us = result["us"]
            share = Share(MODELS[name], measured["ranks"], result["tokens"])
            phases = [f"{phase_us(p, share, target):.1f} / {us[p]:.1f}" if p in us else "-" for p in PHASES]
            total, found = layer_us(share, target), us.get("capacity", us["exact"])
            yield name, str(result["tokens"]), *phases, f"{total:.1f}", f"{found:.1f}", f"{total / found:.2f}"


def _constants() -> Iterator[tuple[str, ...]]:
    for name, link in LINKS.items():
        yield f"link of {name}", f"{link.bandwidth / 1e9:.0f} GB/s", link.source
    yield (
        "share of it",
        f"{LINK_SHARE}",
        "copies into a peer's buffer on two H100s, 370 to 391 of 450 GB/s; assumed elsewhere",
    )
    yield (
        "share of memory bandwidth",
        f"{MEMORY_SHARE}",
        "products of 8 tokens a rank on two H100s; assumed elsewhere",
    )
    yield (
        "share of matrix peak",
        f"{MATRIX_SHARE}",
        "products of 8,192 tokens a rank on two H100s; assumed elsewhere",
    )
    yield "a signal", f"{1e6 * SIGNAL_S:.1f} us", "assumed"
    yield (
        "a launch",
        f"{1e6 * LAUNCH_S:.1f} us",
        "H200, bench/probes/h200_launch_probe.txt, where a GPU has no figure of its own",
    )


def _table(head: tuple[str, ...], rows) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{PAGE}")
    options = parser.parse_args(arguments)
    text = page(json.loads((RESULTS / "h100x2_ep.json").read_text()))
    if options.save:
        (RESULTS / PAGE).write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
