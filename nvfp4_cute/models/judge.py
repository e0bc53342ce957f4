"""One page on how much two models of the same kind differ on a text: predictions, perplexities, and errors of layers."""

from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.models.accuracy import Accuracy, compare
from nvfp4_cute.models.checkpoints.checkpoint import read_config
from nvfp4_cute.models.quantizing.calibrate import SAMPLE_TOKENS, samples
from nvfp4_cute.terminal import markdown_table

MOST_LAYERS = 25  # that the page lists


def load_any(folder: Path, device: str) -> Any:
    """Loads a model in bfloat16, quantized or not; on a CPU, torch multiplies dequantized weights."""
    from nvfp4_cute.models.auto import auto_class
    from nvfp4_cute.models.transformers import load

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": device}
    if "quantization_config" in read_config(folder):
        return load(str(folder), decode=torch.device(device).type == "cpu", **options).eval()
    return auto_class(folder).from_pretrained(folder, **options).eval()


def judge(first: Path, second: Path, text: str, tokens: int | None = None, device: str = "cpu") -> Accuracy:
    """Compares the predictions of two models on a text.

    Args:
        first, second: folders; the tokenizer is that of ``first``. ``Accuracy`` calls the first the 16-bit model.
        text: a text file, or "random".
        tokens: use at most this many tokens, rounded up to windows; None for all.
        device: device on which both run.

    Raises:
        ValueError: the models have different classes or sizes, or the text is too short.
    """
    one, other = load_any(first, device), load_any(second, device)
    vocabulary = one.config.get_text_config().vocab_size
    windows = [ids for ids in samples(first, text, vocabulary) if ids.shape[1] > 1]
    return compare(one, other, windows[: -(-tokens // SAMPLE_TOKENS)] if tokens else windows, second.name)


def page(found: Accuracy, names: tuple[str, str], text: str, picture: str | None = None) -> str:
    """Returns the comparison as Markdown. picture: file name of :func:`draw`."""
    first, second = names
    worst = sorted(found.layers.items(), key=lambda item: -item[1])
    facts = [
        (f"perplexity of {first}", f"{found.reference_perplexity:.4g}"),
        (f"perplexity of {second}", f"{found.perplexity:.4g}"),
        ("ratio", f"{100 * found.ratio:.2f} %"),
        ("ratio by window", f"{100 * min(found.ratios):.1f} to {100 * max(found.ratios):.1f} %"),
        ("KL divergence, nats per token", f"{found.kl:.4g}"),
        ("largest KL divergence of a token", f"{found.kl_worst:.3g}"),
        ("top-1 agreement", f"{100 * found.same_choice:.1f} %"),
    ]
    parts = [
        f"# {second} against {first}\n",
        f"{found.tokens} tokens of {text}, in {len(found.losses)} windows. Errors of layers are relative, for equal inputs, in "
        "the first window.\n",
        markdown_table(("measure", "value"), facts),
        f"\n![Errors of layers, and ratios of perplexity]({picture})" if picture else "",
        "\n## Layers by error\n",
        markdown_table(("layer", "error"), [(name, f"{error:.4f}") for name, error in worst[:MOST_LAYERS]]),
    ]
    if len(worst) > MOST_LAYERS:
        parts.append(f"\n{len(worst) - MOST_LAYERS} more layers have smaller errors.")
    return "\n".join(parts) + "\n"


def draw(found: Accuracy, path: Path, names: tuple[str, str]) -> None:
    """Draws errors of layers in the model's order, and perplexity by window. Raises ValueError without matplotlib."""
    from nvfp4_cute.roofline.plot import points_and_points

    errors = list(enumerate(found.layers.values()))
    windows = {
        names[0]: list(enumerate(found.reference_perplexities)),
        names[1]: [
            (i, p * r)
            for i, (p, r) in enumerate(zip(found.reference_perplexities, found.ratios, strict=True))
        ],
    }
    points_and_points(
        path,
        f"{names[1]} against {names[0]}",
        ({"layers": errors}, "layer", "relative error of results"),
        (windows, "window", "perplexity"),
    )


def write(found: Accuracy, path: Path, names: tuple[str, str], text: str) -> None:
    """Writes the page, and next to it the picture if matplotlib is installed."""
    picture: Path | None = path.with_suffix(".png")
    try:
        draw(found, path.with_suffix(".png"), names)
    except ValueError:
        picture = None
    path.write_text(page(found, names, text, picture.name if picture else None))
