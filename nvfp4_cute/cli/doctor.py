"""`nvfp4-cute doctor`: what is installed, which GPUs there are, what would run where, and why.

Nothing is imported or queried before `run` (or a function here) is called.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from nvfp4_cute import env
from nvfp4_cute.activation import SILU
from nvfp4_cute.backends import installed
from nvfp4_cute.backends.installed import Gpu
from nvfp4_cute.errors import EmulatorError, UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4_PAIR, Formats
from nvfp4_cute.gpus import targets


def run(args: argparse.Namespace) -> int:
    """Prints the report. Returns 0 if a kernel can run on this machine, on a GPU or on the emulator, else 1.

    For a script, prints only its requirements, and returns 1 if one of them is missing.
    """
    if args.subject and Path(args.subject).suffix == ".py":
        return script_report(Path(args.subject))
    text, usable = report(args.formats, verbose=args.verbose)
    print(text, end="")
    if args.subject:
        print("\ncheckpoint")
        for line in checkpoint_lines(args.subject, args.target):
            print(f"  {line}")
    return 0 if usable else 1


def script_report(script: Path) -> int:
    """Prints the architecture, CuTe DSL version and packages that a script needs. Returns 1 if something is missing."""
    from nvfp4_cute.emulator.fronts.script_needs import needs

    if not script.is_file():
        raise EmulatorError(f"there is no file `{script}`")
    try:
        found = needs(script)
    except SyntaxError as error:
        raise EmulatorError(f"{script}:{error.lineno}: not Python: {error.msg}") from error
    print(script)
    for line in found.lines(str(script)):
        print(f"  {line}")
    return 1 if found.dsl is None or found.names or found.modules else 0


def report(formats: Formats = NVFP4_PAIR, *, verbose: bool = False) -> tuple[str, bool]:
    """Returns the whole report as text, and whether some kernel can run here (on a GPU or on the emulator).

    Args:
        formats: formats of ``a`` and ``b``, for which the report says what multiplies them where.
        verbose: whether to list every environment variable at the end; misspelled ones are always listed.
    """
    from nvfp4_cute.prove import silicon

    found, present, shim = installed.versions(), installed.gpus(), installed.shim_problem()
    compiler = installed.version_problem(found)
    native = installed.native_gpus()
    sections = {
        "what you can do here": list(_ability_lines(native, compiler, shim)),
        "versions": [f"{name} {version or '(not installed)'}" for name, version in found.items()],
        "GPUs": [line for gpu in present for line in (_gpu_line(gpu, gpu in native), _target_line(gpu))]
        or ["none that torch can use"],
        "kernels": [compiler] if compiler else _kernel_lines(found),
        "formats": list(_format_lines(formats)),
        "emulator": [
            f"not usable: {compiler or shim}" if compiler or shim else "ready: the launch shim is built"
        ],
        'backend="auto"': _auto_lines(native, present),
        "engines": _engine_lines(),
        "silicon": list(silicon.lines()),
        "compiled kernels": _cache_lines(),
    }
    if verbose:
        sections["environment"] = env.describe().splitlines()
    elif unknown := env.unknown():
        sections["environment"] = unknown
    text = "\n".join(
        f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items()
    )
    return text, compiler is None and (bool(native) or shim is None)


def _ability_lines(native: list[Gpu], compiler: str | None, shim: str | None) -> Iterator[str]:
    """Iterates over what this machine can do, with the command to start with."""
    on_gpu = ", ".join(f"cuda:{gpu.index} {gpu.name}" for gpu in native)
    if compiler:
        yield f"compute on the CPU with the float64 reference, and look into checkpoints; no kernels: {compiler}"
        return
    if native:
        yield f"compute with kernels on {on_gpu}; serve, load and quantize models there"
        yield "measure: nvfp4-cute check, nvfp4-cute bench, nvfp4-cute prove"
    else:
        yield "compute on the CPU with the float64 reference (CPU tensors); no GPU here runs a kernel"
        yield "look into checkpoints and quantize them: nvfp4-cute models inspect DIR, nvfp4-cute quantize MODEL --out DIR"
    if shim is None:
        yield "run any kernel on the virtual GPU, slowly: nvfp4-cute demo, nvfp4-cute emulate --check script.py"
        yield "model times of Blackwell and Hopper: nvfp4-cute trace nvfp4_gemm, nvfp4-cute bench --target B200"
    else:
        yield "no virtual GPU: see emulator below"
    yield "compute the speed of light of a GPU, and compile kernels for it: nvfp4-cute sol, nvfp4-cute compile"


def _engine_lines() -> list[str]:
    """Returns lines on installed engines, and on whether they load the plug-ins."""
    from nvfp4_cute.models import engines

    found = engines.installed()
    listed = [f"{name} {version}: {engines.ENGINES[name]}".rstrip(": ") for name, version in found.items()]
    return [
        *listed,
        *(f"{name} plug-in: {engines.plugin_state(found, engine=name)}" for name in engines.PLUGINS),
    ]


def checkpoint_lines(folder: str, target: str | None = None) -> Iterator[str]:
    """Iterates over lines on who serves a checkpoint in each engine and why, and on the kernels of each kind of layer, by rows.

    Args:
        folder: folder of config.json and safetensors files.
        target: a GPU; None for the first one here, or a B200.

    Raises:
        CheckpointError: the readers refuse it.
        UnsupportedTarget: the GPU is unknown.
    """
    from nvfp4_cute.models import engines
    from nvfp4_cute.models.checkpoints import Checkpoint
    from nvfp4_cute.models.checkpoints.folders import local_folder
    from nvfp4_cute.models.inspect import inspect, what_runs
    from nvfp4_cute.models.layers import ACTIVATION_CHOICES
    from nvfp4_cute.models.vllm.taken import asked_activations

    checkpoint = Checkpoint(local_folder(folder))
    for engine in engines.PLUGINS:
        state = engines.plugin_state(engines.installed(), is_checked=True, engine=engine)
        yield f"in {engine}: {engines.who_serves(checkpoint.config, state, engine)}"
    here = next((gpu.arch for gpu in installed.native_gpus()), targets.B200.name)
    chosen = targets.lookup(target or here)
    yield f"kernels on {chosen.name} ({chosen.arch}), by rows of activations or tokens:"
    activation = checkpoint.experts_config.activation if checkpoint.experts else SILU
    asked = asked_activations(checkpoint.config.get("quantization_config") or {})
    activations = ACTIVATION_CHOICES.get(asked, "by_rows")  # the plug-in refuses other values
    for kind in inspect(checkpoint).kinds:
        if kind.scheme is None:
            continue
        yield f"{kind.name}, {kind.count} of {kind.shape}, {kind.scheme}: {what_runs(kind)}"
        if kind.weights in engines.KNOWN:
            found = engines.kernels_by_rows(kind, chosen.arch, activation=activation, activations=activations)
            for rows, names in found.items():
                yield f"  {rows}: {', '.join(names)}"


def _kernel_lines(found: dict[str, str | None]) -> list[str]:
    """Returns lines on the architectures of the kernels, and on those that the compiler refuses."""
    from nvfp4_cute.planning.arch import ARCHS, is_weight_only, simt

    refused = installed.refused_archs()
    accepted = ", ".join(arch for arch in ARCHS if arch not in refused)
    weight_only = ", ".join(arch for arch in simt.ARCHS if is_weight_only(arch) and arch not in refused)
    return [
        f"grouped_gemm compiles for {accepted}; compiling needs no GPU",
        f"weight-only products, quantize and the launches around experts' products also compile for {weight_only}",
        *(
            f"{arch}: refused, {installed.DSL_PREFIX} {found[installed.DSL_PREFIX]} does not know it"
            for arch in refused
        ),
        *filter(None, (installed.toolkit_problem(arch, found) for arch in ARCHS if arch not in refused)),
    ]


def _format_lines(formats: Formats) -> Iterator[str]:
    """Iterates over lines on how architectures multiply a pair, or why they cannot, and on kernels for 16-bit ``a``."""
    from nvfp4_cute.formats.block_format import BFLOAT16
    from nvfp4_cute.planning.arch import ARCHS, WEIGHT_ONLY_FAMILIES, is_weight_only, mmas_of, simt
    from nvfp4_cute.planning.arch.base import check_pair

    yield "{} x {}; another pair: --formats".format(*formats)
    found = defaultdict[str, list[str]](list)
    for arch in ARCHS:
        mmas = mmas_of(arch)
        try:
            check_pair(arch, formats, mmas)
        except UnsupportedProblem as error:
            found[str(error).removeprefix(f"{arch}: ")].append(arch)
        else:
            mma = mmas[formats]
            how = f"dequantized to {mma.kind}" if mma.decodes else f"tensor cores, {mma.kind}"
            found[how].append(arch)
    yield from (f"{', '.join(archs)}: {how}" for how, archs in found.items())
    weight_only = ", ".join(filter(is_weight_only, simt.ARCHS))
    yield f"{weight_only}: a has 16 bits; layers whose checkpoint quantizes a are weight-only there, and say so"
    weights = BFLOAT16, formats[1]
    if weights in simt.W4A16_PAIRS:
        grouped = {arch for family in WEIGHT_ONLY_FAMILIES if weights in family.MMA for arch in family.ARCHS}
        where = ", ".join(arch for arch in simt.ARCHS if arch in grouped)
        yield f"16-bit a x {formats[1]}: gemm and gemv on every GPU; grouped and dual products on {where or 'none'}"


def _gpu_line(gpu: Gpu, has_kernel: bool) -> str:
    from nvfp4_cute.planning.arch import is_weight_only

    kernel = "no kernel for it here; the emulator can still be used by name"
    if has_kernel:
        kernel = "weight-only products run on it" if is_weight_only(gpu.arch) else "grouped_gemm runs on it"
    return f"cuda:{gpu.index} {gpu.name} ({gpu.arch}): {kernel}"


def _target_line(gpu: Gpu) -> str:
    if gpu.target is None:
        return f"  not in the table of targets: `nvfp4-cute sol` takes a --target, {targets.B200.name} by default"
    bandwidth = gpu.target.floor_bandwidth_bytes_per_s / 1e12
    return (
        f"  target {gpu.target.name}: {gpu.target.num_sms} SMs, {bandwidth:.4g} TB/s (see `nvfp4-cute sol`)"
    )


def _cache_lines() -> list[str]:
    """Returns lines on the folder of compiled kernels, and on its contents."""
    from nvfp4_cute.compile import disk_cache

    folder = env.cache_dir()
    if folder is None:
        return ["kept in memory only"]
    return [f"{folder}: {disk_cache.contents(folder)} ({_writability(folder)})"]


def _writability(folder: Path) -> str:
    from nvfp4_cute.compile.trusted_files import Untrusted, check_folder

    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    is_there = nearest == folder and folder.is_dir()
    if not nearest.is_dir():
        return f"cannot be made: {nearest} is a file"
    try:
        if is_there:
            check_folder(folder)
        with tempfile.TemporaryDirectory(prefix=".doctor_", dir=nearest):
            pass
    except Untrusted as error:
        return f"not used: {error.strerror}; set {env.CACHE_DIR.name} to a folder of your own"
    except OSError as error:
        if is_there:
            return f"read-only: {error.strerror}"
        return f"cannot be made: {nearest}: {error.strerror}; set {env.CACHE_DIR.name} to a folder that can, or to `off`"
    return "can be written" if is_there else "made when the first kernel is compiled"


def _auto_lines(native: list[Gpu], present: list[Gpu]) -> list[str]:
    """Returns lines on what backend="auto" does with CPU and with CUDA tensors, and why."""
    import torch

    from nvfp4_cute import backends

    try:
        forced = env.backend() != env.BACKEND.default
        chosen = {kind: backends.resolve("auto", torch.device(kind)) for kind in ("cpu", "cuda")}
    except ValueError as error:
        return [str(error)]
    why_cpu = why_cuda = f"because {env.BACKEND.name} says so"
    if not forced:
        why_cpu = 'backend="emulator" runs the kernel itself, slowly'
        why_cuda = f"on {', '.join(f'cuda:{gpu.index}' for gpu in native)}"
        if not native:
            why_cuda = "refused: " + ("no kernel for these GPUs" if present else "no GPU that torch can use")
    return [f"CPU tensors -> {chosen['cpu']} ({why_cpu})", f"CUDA tensors -> {chosen['cuda']} ({why_cuda})"]
