"""`nvfp4-cute models`: inspects checkpoints, and measures speed and accuracy of whole models."""

import argparse
import json
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

from nvfp4_cute.cli.options.models import SCHEMES
from nvfp4_cute.errors import printable
from nvfp4_cute.terminal import text_table

WORST_LAYERS = 3  # number of layers to print per scheme


def run_inspect(args: argparse.Namespace) -> int:
    """Prints the contents of a folder; returns 1 if the readers refuse a layer."""
    from nvfp4_cute.models.checkpoints import Checkpoint
    from nvfp4_cute.models.checkpoints.folders import local_folder
    from nvfp4_cute.models.inspect import inspect, kept_bytes, what_runs, where_it_runs

    found = inspect(Checkpoint(local_folder(args.folder)))
    if args.json:
        kinds = [k.as_dict() | ({"computed_by": what_runs(k)} if k.scheme else {}) for k in found.kinds]
        print(json.dumps(vars(found) | {"kinds": kinds}, indent=1))
        return bool(found.refusals)
    say = lambda text: print(printable(text, keep="\n"))
    say(f"{args.folder}: {printable(found.model_type)}, {_size(found.nbytes)}, quantization by {found.tool}")
    rows = [
        (
            printable(k.name), str(k.scheme) if k.scheme else printable(k.dtype), str(k.count), k.shape, _size(k.nbytes),
            "" if k.scale_range is None else "{:.3g} to {:.3g}".format(*k.scale_range),
        )
        for k in found.kinds
    ]  # fmt: skip
    say(text_table(("layers", "format", "count", "size of one", "bytes", "global scales"), rows, left=2))
    quantized = [kind for kind in found.kinds if kind.scheme]
    if quantized:
        say("\ncomputed by:")
        for how in dict.fromkeys(map(what_runs, quantized)):
            names = ", ".join(printable(kind.name) for kind in quantized if what_runs(kind) == how)
            say(f"  {how}: {names}")
        for archs, how in where_it_runs():
            say(f"  on {archs}: {how}")
        if kept := kept_bytes(found):
            say(f"  dequantized weights next to the 4-bit ones (keep_decoded) take {_size(kept)} more")
    for kind in quantized:
        if kind.unequal:
            say(
                f"{printable(kind.name)}: gate and up have different global scales in {kind.unequal} layers; both are kept"
            )
    if found.kv_scales:
        say(f"{found.kv_scales} scales of an FP8 KV cache, which are read and not used")
    for refusal in found.refusals:
        say(f"refused: {refusal}")
    return bool(found.refusals)


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def run_bench(args: argparse.Namespace) -> int:
    """Measures, and prints a table."""
    import torch

    from nvfp4_cute.bench.models.random_model import config_of
    from nvfp4_cute.bench.models.speed import measure_schemes

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print(
            "nvfp4-cute models bench: no GPU; --device cpu runs, slowly, with the reference", file=sys.stderr
        )
        return 1
    configs = {name: config_of(name) for name in args.model}
    report = _about(args.device)
    cases = [(batch, prompt) for prompt in args.prompt for batch in args.batch]
    for name, config in configs.items():
        if args.layers:
            _cut(config, args.layers)
        found = measure_schemes(
            name,
            config,
            args.schemes,
            cases,
            attentions=args.attention,
            tokens=args.tokens,
            device=args.device,
            fuse=not args.alone,
        )
        report["models"].append(found.as_dict())
        if not args.json:
            _print_speeds(found, report["device"])
    if args.json:
        print(json.dumps(report, indent=1))
    return 0


def _about(device: str) -> dict[str, Any]:
    import torch
    import transformers

    from nvfp4_cute.prove.machine import driver

    is_cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if is_cuda else "CPU", "driver": driver() if is_cuda else None,
        "torch": torch.__version__, "transformers": transformers.__version__, "date": date.today().isoformat(), "models": [],
    }  # fmt: skip


def _print_speeds(found: Any, device: str) -> None:
    print(f"{found.model}, {found.layers} layers, random weights, {device}")
    header = (
        "weights", "attention", "sequences x prompt", "GB", "peak GB", "prefill ms", "prefill tok/s", "first token ms",
        "eager ms", "decode ms", "decode tok/s", "decode by",
    )  # fmt: skip
    rows = [
        (
            s.scheme, s.attention, f"{s.batch} x {s.prompt}", f"{s.weight_bytes / 1e9:.2f}", f"{s.peak_bytes / 1e9:.2f}",
            f"{1e3 * s.prefill_s:.2f}", f"{s.prefill_rate:.0f}", f"{1e3 * s.first_token_s:.2f}", f"{1e3 * s.eager_s:.2f}",
            f"{1e3 * s.decode_s:.3f}", f"{s.decode_rate:.1f}", s.decode,
        )
        for s in found.speeds
    ]  # fmt: skip
    print(text_table(header, rows, left=3))
    for line in found.left_out:
        print(line)


def run_eval(args: argparse.Namespace) -> int:
    """Prints how much quantized models differ from the 16-bit one."""
    import torch

    from nvfp4_cute.models.accuracy import compare, quantized_copy
    from nvfp4_cute.models.checkpoints.folders import local_folder
    from nvfp4_cute.models.checkpoints.tensors import TensorFiles
    from nvfp4_cute.models.quantizing.calibrate import SAMPLE_TOKENS, check_text, largest_inputs, samples
    from nvfp4_cute.models.quantizing.checkpoint import config_of_16_bits

    for text in filter(None, (args.text, args.calibrate)):
        check_text(text)
    args.model = local_folder(args.model)
    args.checkpoint = [local_folder(folder) for folder in args.checkpoint]
    config_of_16_bits(args.model)
    TensorFiles(args.model)
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(
            'models eval runs models with transformers: pip install "nvfp4-cute[models]"'
        ) from error
    from nvfp4_cute.models.auto import auto_class
    from nvfp4_cute.models.transformers import load

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": args.device}
    reference = auto_class(args.model).from_pretrained(args.model, **options).eval()
    vocabulary = reference.config.get_text_config().vocab_size
    windows = [ids for ids in samples(args.model, args.text, vocabulary) if ids.shape[1] > 1]
    windows = windows[: -(-args.tokens // SAMPLE_TOKENS)] if args.tokens else windows
    schemes: Any = (SCHEMES[1:] if not args.checkpoint else ()) if args.schemes is None else args.schemes
    makers: dict[str, Callable[[], Any]] = {
        scheme: partial(quantized_copy, reference, scheme) for scheme in schemes
    }
    if args.calibrate:
        seen = largest_inputs(reference, samples(args.model, args.calibrate, vocabulary))
        makers["nvfp4, calibrated"] = partial(quantized_copy, reference, "nvfp4", seen)
    decode = torch.device(args.device).type == "cpu"  # kernels would be computed by the float64 reference
    makers |= {
        str(folder): partial(load, str(folder), decode=decode, **options) for folder in args.checkpoint
    }
    found = {title: compare(reference, make(), windows, title) for title, make in makers.items()}
    if args.json:
        result = {"model": str(args.model), "text": args.text, "torch": torch.__version__}
        print(json.dumps(result | {"schemes": {title: a.as_dict() for title, a in found.items()}}, indent=1))
        return 0
    first = next(iter(found.values()))
    print(
        f"{args.model}, {first.tokens} tokens of {args.text}: perplexity of the 16-bit model {first.reference_perplexity:.4g}"
    )
    header = ("weights", "perplexity", "of 16-bit perplexity", "KL, nats", "worst KL", "top-1 agreement")
    rows = [
        (
            title, f"{a.perplexity:.4g}", f"{100 * a.ratio:.2f} %", f"{a.kl:.4g}", f"{a.kl_worst:.3g}",
            f"{100 * a.same_choice:.1f} %",
        )
        for title, a in found.items()
    ]  # fmt: skip
    print(text_table(header, rows))
    for title, a in found.items():
        worst = sorted(a.layers.items(), key=lambda item: -item[1])[:WORST_LAYERS]
        print(
            f"{title}, largest errors of layers: " + ", ".join(f"{name} {error:.3f}" for name, error in worst)
        )
    return 0


def run_judge(args: argparse.Namespace) -> int:
    """Prints how much two models differ."""
    from nvfp4_cute.models import judge
    from nvfp4_cute.models.checkpoints.folders import local_folder
    from nvfp4_cute.models.checkpoints.tensors import TensorFiles
    from nvfp4_cute.models.quantizing.calibrate import check_text

    check_text(args.text)
    first, second = local_folder(args.first), local_folder(args.second)
    for folder in (first, second):
        TensorFiles(folder)
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(
            'models judge runs models with transformers: pip install "nvfp4-cute[models]"'
        ) from error
    found = judge.judge(first, second, args.text, args.tokens, args.device)
    names = (first.name, second.name)
    if args.report:
        judge.write(found, args.report, names, args.text)
    print(json.dumps(found.as_dict(), indent=1) if args.json else judge.page(found, names, args.text))
    return 0


def _cut(config, layers: int) -> None:
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
