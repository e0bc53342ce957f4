"""What calibration and rounding did to every layer: numbers, a verdict, and a page with a picture."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from nvfp4_cute.formats.block_format import E2M1, NVFP4
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.codecs import unpack_e2m1
from nvfp4_cute.models.checkpoints.names import expert_of
from nvfp4_cute.models.quantizing.rules import Layer
from nvfp4_cute.terminal import markdown_table

# Codes of e4m3: the largest number, and the first one that is not subnormal, 2^-6.
LARGEST_CODE, FIRST_NORMAL_CODE = 0x7E, 0x08
MOST_SUBNORMAL, MOST_OUTLIERS = 0.05, 0.01  # parts of a layer's blocks
MOST_ERROR = 1.5  # times the median of layers of the same format
GOOD = "good"
HEADS = (
    "layer", "format", "tokens", "error", "with inputs", "outliers", "saturated", "subnormal", "zero", "verdict",
)  # fmt: skip
MOST_ROWS = 40  # of layers that the page lists


@dataclass(frozen=True)
class LayerNote:
    """Counts and errors of one layer.

    Attributes:
        name, format: of the layer, and what its weights became.
        tokens: rows of the calibration that reached it; None without a calibration.
        error: root mean square of the weights' errors over that of the weights. input_error: the same of columns weighted by the
            mean square of their input; None without one.
        blocks: how many there are. outliers: whose largest value turned more than half of the others into zeros.
        saturated: whose largest value lies over the largest that their scale can hold. subnormal: whose e4m3 scale is under 2^-6,
            and so has fewer than four significant bits. zero: whose scale is 0, though their values are not.
    """

    name: str
    format: str
    tokens: int | None
    error: float
    input_error: float | None
    blocks: int
    outliers: int = 0
    saturated: int = 0
    subnormal: int = 0
    zero: int = 0

    @classmethod
    def of(
        cls,
        layer: Layer,
        weight: torch.Tensor,
        stored: BlockScaledTensor,
        tokens: int | None,
        squares: torch.Tensor | None,
    ) -> "LayerNote":
        """Arguments: float [N, K] as it was and as it is stored; mean squares of its input [K], or None."""
        exact = weight.float()
        wrong = stored.dequantize(torch.float32).to(exact.device) - exact
        ones = torch.ones(exact.shape[1], device=exact.device)
        of_inputs = None if squares is None else _relative(wrong, exact, squares.to(ones))
        counts = _counts(exact, stored, layer.recipe.weights.block_of(layer.shape[1]))
        error = _relative(wrong, exact, ones)
        return cls(layer.name, layer.recipe.weights.name, tokens, error, of_inputs, **counts)

    def verdict(self, usual: float) -> str:
        """What is to be done about it, "good" where nothing is. usual: median ``error`` of layers of the same format."""
        found = []
        if self.tokens == 0:
            found.append("no token reached it: calibrate on more text")
        if self.zero:
            found.append(
                f"{self.zero} blocks lost all their values: their scales are 0; keep it in more bits"
            )
        if self.saturated:
            found.append(f"{self.saturated} blocks are cut: a larger global scale")
        if self.outliers > MOST_OUTLIERS * self.blocks:
            found.append(
                "outliers turn their blocks into zeros: more bits, or blocks of neighbours in another order"
            )
        if self.subnormal > MOST_SUBNORMAL * self.blocks:
            found.append("small scales: few bits of them are left beside the layer's largest value")
        if self.error > MOST_ERROR * usual:
            found.append(f"loses {self.error / usual:.1f} times what others do: more bits (--budget, --keep)")
        return "; ".join(found) or GOOD


def _relative(wrong: torch.Tensor, exact: torch.Tensor, columns: torch.Tensor) -> float:
    """Root mean square of errors [N, K] over that of values, each column weighted by a number of ``columns`` [K]."""
    most = float((exact.square() @ columns).sum())
    return (float((wrong.square() @ columns).sum()) / max(most, 1e-30)) ** 0.5


def _counts(exact: torch.Tensor, stored: BlockScaledTensor, block_k: int) -> dict[str, int]:
    """Numbers of blocks; scales are judged where they are e4m3 codes, zeros where elements are e2m1."""
    blocks = exact.unflatten(-1, (-1, block_k))
    amax = blocks.abs().amax(-1)
    found = {"blocks": amax.numel()}
    if stored.format == NVFP4:
        codes = stored.scale.view(torch.uint8).to(amax.device)
        factor = 1.0 if stored.global_scale is None else float(stored.global_scale)
        most = NVFP4.element.max * NVFP4.scale.max * factor * (1 + 2.0**-5)
        found["saturated"] = int(((codes == LARGEST_CODE) & (amax > most)).sum())
        found["subnormal"] = int(((codes > 0) & (codes < FIRST_NORMAL_CODE)).sum())
        found["zero"] = int(((codes == 0) & (amax > 0)).sum())
    if stored.format.element == E2M1:
        elements = unpack_e2m1(stored.data).to(amax.device).unflatten(-1, (-1, block_k))
        lost = ((elements & 7 == 0) & (blocks != 0)).sum(-1)
        found["outliers"] = int((lost > (blocks != 0).sum(-1) // 2).sum())
    return found


def usual_errors(notes: Iterable[LayerNote]) -> dict[str, float]:
    """Format -> median error of its layers."""
    by_format: dict[str, list[float]] = {}
    for note in notes:
        by_format.setdefault(note.format, []).append(note.error)
    return {format: median(errors) for format, errors in by_format.items()}


def verdicts(notes: Sequence[LayerNote]) -> dict[str, str]:
    """Layer -> verdict."""
    usual = usual_errors(notes)
    return {note.name: note.verdict(usual[note.format]) for note in notes}


def tokens_of_experts(notes: Sequence[LayerNote]) -> dict[str, dict[int, int]]:
    """Module of experts -> expert -> tokens that reached it."""
    found: dict[str, dict[int, int]] = {}
    for note in notes:
        expert = expert_of(note.name)
        if expert is not None and expert[2] is not None and note.tokens is not None:
            found.setdefault(expert[0], {})[expert[2]] = note.tokens
    return found


def page(notes: Sequence[LayerNote], title: str, picture: str | None = None) -> str:
    """Markdown: verdicts, tokens of experts, and layers by error.

    Args:
        title: of what was made of what. picture: name of the file of :func:`draw`.
    """
    said = verdicts(notes)
    bad = [name for name, verdict in said.items() if verdict != GOOD]
    parts = [f"# {title}\n", f"{len(notes) - len(bad)} of {len(notes)} layers are good.\n"]
    parts += [f"![Errors of layers, and tokens of experts]({picture})\n"] if picture else []
    if experts := tokens_of_experts(notes):
        rows = []
        for module, tokens in experts.items():
            never = [str(e) for e, count in sorted(tokens.items()) if not count]
            counts = (min(tokens.values()), int(median(tokens.values())), max(tokens.values()))
            rows.append((module, str(len(tokens)), *map(str, counts), ", ".join(never) or "none"))
        parts += [
            "## Tokens per expert\n",
            markdown_table(("experts of", "experts", "least", "median", "most", "never reached"), rows),
        ]
    parts += [
        "\n## Layers by error\n",
        "Errors are relative: of weights, and of weights times the root mean square of their inputs. Blocks: *outliers* turn "
        "more than half of their neighbours into zeros, *saturated* ones are cut, *subnormal* scales have fewer bits, and *zero* "
        "scales lose a block.\n",
    ]  # fmt: skip
    order = sorted(notes, key=lambda note: (said[note.name] == GOOD, -note.error))
    rows = [_row(note, said[note.name]) for note in order[:MOST_ROWS]]
    parts.append(markdown_table(HEADS, rows))
    if len(order) > MOST_ROWS:
        parts.append(
            f"\n{len(order) - MOST_ROWS} more layers, none with a larger error and the same verdict."
        )
    return "\n".join(parts) + "\n"


def _row(note: LayerNote, verdict: str) -> tuple[str, ...]:
    """A layer's line of the table."""
    counts = (note.outliers, note.saturated, note.subnormal, note.zero)
    parts = (f"{count} ({100 * count / note.blocks:.2g} %)" if count else "0" for count in counts)
    tokens = "-" if note.tokens is None else str(note.tokens)
    of_inputs = "-" if note.input_error is None else f"{note.input_error:.4f}"
    return note.name, note.format, tokens, f"{note.error:.4f}", of_inputs, *parts, verdict


def write(notes: Sequence[LayerNote], path: Path, title: str) -> None:
    """Write the page, and next to it a picture of the same name, where matplotlib is installed."""
    picture: Path | None = path.with_suffix(".png")
    try:
        draw(notes, path.with_suffix(".png"), title)
    except ValueError:
        picture = None
    path.write_text(page(notes, title, picture.name if picture else None))


def draw(notes: Sequence[LayerNote], path: Path, title: str) -> None:
    """Errors of layers in the order of the model, and tokens of experts. Raises ValueError where matplotlib is not installed."""
    from nvfp4_cute.roofline.plot import points_and_map

    said = verdicts(notes)
    points: dict[str, list[tuple[int, float]]] = {}
    for number, note in enumerate(notes):
        points.setdefault("good" if said[note.name] == GOOD else "to be looked at", []).append(
            (number, note.error)
        )
    experts = tokens_of_experts(notes)
    rows = [[float(tokens[e]) for e in sorted(tokens)] for tokens in experts.values()]
    points_and_map(
        path,
        points,
        rows,
        (title, "layer", "relative error of weights"),
        ("tokens per expert", "expert", "layer of experts"),
    )
