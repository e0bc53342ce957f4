"""`nvfp4-cute quantize`: quantizes a 16-bit checkpoint, in the layout of a tool."""

import argparse
import contextlib
import fnmatch
import sys
import tempfile
from pathlib import Path
from typing import Any

from nvfp4_cute.errors import printable


def run(args: argparse.Namespace) -> int:
    """Rotates and calibrates if requested, quantizes, and prints a summary."""
    from nvfp4_cute.models.checkpoints.folders import local_folder
    from nvfp4_cute.models.checkpoints.tensors import TensorFiles, check_has_no_tensors
    from nvfp4_cute.models.quantizing.checkpoint import config_of_16_bits
    from nvfp4_cute.models.quantizing.layouts import RECIPES

    by_type: dict[str, str] = {}
    if args.recipe:
        from nvfp4_cute.models.quantizing.rules import RECIPE_FORMATS, RECIPE_PATTERNS

        if args.format != "nvfp4":
            raise ValueError(
                f"--recipe {args.recipe} with --format {args.format}: the recipe says every format; pass one of them"
            )
        args.format, by_type = RECIPE_FORMATS[args.recipe], RECIPE_PATTERNS[args.recipe]
    calibrates = args.calibrate or args.generate
    if args.method == "gptq" and not calibrates:
        raise ValueError(
            "--method gptq compensates errors on a text; pass --calibrate TEXT or --generate TEXTS"
        )
    if args.distill and args.method != "gptq":
        raise ValueError(f"--distill {args.distill} follows --method gptq; pass both")
    if args.budget is not None and not calibrates:
        raise ValueError(
            "--budget measures on a text what layers lose; pass --calibrate TEXT or --generate TEXTS"
        )
    args.model = local_folder(args.model)
    # Checks that can fail run before a model is loaded for calibration.
    args.layout = args.layout or RECIPES[args.format].layouts[0]
    config_of_16_bits(args.model)
    TensorFiles(args.model)
    check_has_no_tensors(args.out)
    if args.calibrate:
        from nvfp4_cute.models.quantizing.calibrate import check_text

        check_text(args.calibrate)
    with contextlib.ExitStack() as stack:
        if args.rotate is not None:
            from nvfp4_cute.models.quantizing.rotate import rotate_checkpoint

            near = args.out.parent if args.out.parent.is_dir() else None
            rotated = stack.enter_context(tempfile.TemporaryDirectory(dir=near, prefix=".rotated-"))
            rotate_checkpoint(args.model, Path(rotated) / args.model.name, block=args.rotate)
            args.model = Path(rotated) / args.model.name
        return _quantize(args, by_type)


def _quantize(args: argparse.Namespace, by_type: dict[str, str]) -> int:
    from nvfp4_cute.models.quantizing.checkpoint import CALIBRATION, Calibration, quantize_checkpoint

    given: dict[str, Any] = {}
    formats = dict.fromkeys(args.keep, "16bit") | by_type
    if args.calibrate or args.generate:
        from nvfp4_cute.models.quantizing.budget import check_budget, within_budget
        from nvfp4_cute.models.quantizing.calibrate import largest_inputs

        if args.budget is not None:
            check_budget(args.budget, args.format)
        model, batches = _model_and_text(args)
        if args.budget is not None:
            kinds = {"format": args.format, "layout": args.layout}
            raised = within_budget(args.model, model, batches, args.budget, formats=formats, **kinds)
            counts = {f: list(raised.values()).count(f) for f in dict.fromkeys(raised.values())}
            each = ", ".join(f"{count} in {f}" for f, count in counts.items()) or "none"
            print(f"layers with more bits within {args.budget} bits per weight: {each}")
            formats |= raised
        if args.method == "gptq":
            given["calibration"] = Calibration(model, batches)
        else:
            given["seen"] = largest_inputs(model, batches)
    done = quantize_checkpoint(
        args.model, args.out, format=args.format, layout=args.layout, method=args.method,
        formats=formats, lm_head=args.lm_head, embedding=args.embedding, unreached=args.unreached,
        distill=args.distill, device=args.device, **given,
    )  # fmt: skip
    print(
        f"{args.out}: {done.layers} layers in {args.format}, {done.bytes_before / 1e9:.3f} GB to {done.bytes_after / 1e9:.3f} "
        f"GB, {done.bits_per_weight:.2f} bits per weight; relative error of the weights {done.error:.4f}"
    )
    if done.left_out:
        reasons: dict[str, list[str]] = {}
        for name, reason in done.left_out.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            print(
                printable(f"left out {reason}: {names[0]}")
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            )
    if args.report:
        from nvfp4_cute.models.quantizing import report

        title = f"{args.model.name} in {args.recipe or args.format}, {args.method}"
        report.write(done.notes, args.report, title)
        bad = [verdict for verdict in report.verdicts(done.notes).values() if verdict != report.GOOD]
        print(f"{args.report}: {len(done.notes) - len(bad)} of {len(done.notes)} layers are good")
    for pattern in args.keep:
        if not fnmatch.filter(done.left_out, pattern):
            print(
                f"--keep {pattern} matches no layer; `nvfp4-cute models inspect {args.out}` lists their names",
                file=sys.stderr,
            )
    if done.unreached:
        print(
            f"no token reached {len(done.unreached)} projections of experts, such as {done.unreached[0]}: their activations "
            f"have the {args.unreached} scale of their layer, as {CALIBRATION} says; calibrate on more text",
            file=sys.stderr,
        )
    if done.uncompensated:
        print(
            f"gptq had no inputs of {len(done.uncompensated)} layers, such as {done.uncompensated[0]}: their scales were "
            "searched instead",
            file=sys.stderr,
        )
    return 0


def _model_and_text(args: argparse.Namespace) -> tuple[Any, list[Any]]:
    import torch

    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(
            '--calibrate and --generate run the model with transformers: pip install "nvfp4-cute[models]"'
        ) from error
    from nvfp4_cute.models.auto import auto_class
    from nvfp4_cute.models.quantizing.calibrate import generated, samples

    model = (
        auto_class(args.model)
        .from_pretrained(args.model, dtype=torch.bfloat16, device_map=args.device)
        .eval()
    )
    vocabulary = model.config.get_text_config().vocab_size
    texts = samples(args.model, args.calibrate, vocabulary) if args.calibrate else []
    return model, texts + generated(model, args.generate)
