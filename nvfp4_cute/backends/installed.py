"""Installed versions, visible GPUs, and which of them have kernels.

Imports and queries happen only when one of these functions is called.
"""

import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass

from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target

DSL_PREFIX = "nvidia-cutlass-dsl"
CUDA_13_ARCHS = ("sm_110a",)  # these have other names in CUDA 12


@dataclass(frozen=True)
class Gpu:
    """One visible GPU: its index in torch, its name, and the architecture of its code ("sm_100a").

    `target` is its entry in the table of targets; None for a product, or a part of one, without an entry.
    """

    index: int
    name: str
    arch: str
    target: Target | None = None


def versions() -> dict[str, str | None]:
    """Returns the version of Python and of each distribution that affects compilation; None for a missing one.

    All nvidia-cutlass-dsl distributions are listed: a mix of versions is the usual cause of a broken install.
    """
    names = ["nvfp4-cute", "torch", "numpy", "cuda-python", DSL_PREFIX]
    installed = {
        _canonical(d.metadata["Name"]) for d in importlib.metadata.distributions() if d.metadata["Name"]
    }
    names += sorted(name for name in installed if name.startswith(f"{DSL_PREFIX}-"))
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_problem(found: dict[str, str | None]) -> str | None:
    """Returns why these versions cannot compile a kernel, or None. `found` is the result of `versions`."""
    if found[DSL_PREFIX] is None:
        return f"{DSL_PREFIX} is not installed: no kernel can be compiled; run `pip install -e .`"
    dsl = {name: version for name, version in found.items() if name.startswith(DSL_PREFIX)}
    if len(set(dsl.values())) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in dsl.items())
        return f"{listed}: all must have one version; run `pip install --force-reinstall {DSL_PREFIX}=={found[DSL_PREFIX]}`"
    # The package keeps it in a separate folder, which a .pth file names.
    if importlib.util.find_spec("cutlass") is None:
        return (
            f"{DSL_PREFIX} {found[DSL_PREFIX]} is installed, but its module `cutlass` is not found: its .pth file is read "
            "only in the environment that it is installed in; run `pip install -e .` in this one"
        )
    return None


def refused_archs() -> tuple[str, ...]:
    """Returns our architectures that the installed compiler does not know."""
    from nvfp4_cute import private_api
    from nvfp4_cute.planning.arch import simt

    known = private_api.dsl_archs()
    return tuple(arch for arch in simt.ARCHS if arch not in known)


def toolkit_problem(arch: str, found: dict[str, str | None]) -> str | None:
    """Returns why code for `arch` will not load under a CUDA 13 driver, or None. `found` is the result of `versions`.

    CuTe DSL comes with the libraries of CUDA 12. It uses those of CUDA 13 if they are also installed and the driver is
    new enough or missing. The architecture of Thor has a different name in each: drivers of CUDA 13 refuse code for
    sm_101a, its name in CUDA 12.
    """
    if arch not in CUDA_13_ARCHS or f"{DSL_PREFIX}-libs-cu13" in found:
        return None
    return (
        f"{arch}: compiled as sm_101a, which CUDA 13 drivers refuse, since CuTe DSL's libraries of CUDA 13 are "
        f'not installed; run `pip install "{DSL_PREFIX}[cu13]=={found[DSL_PREFIX]}"`'
    )


def gpus() -> list[Gpu]:
    """Returns the GPUs that torch can use; an empty list without a driver or with a CPU build of torch."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        arch = targets.arch_of_capability(torch.cuda.get_device_capability(index))
        found.append(Gpu(index, torch.cuda.get_device_name(index), arch, targets.detect(index)))
    return found


def native_gpus() -> list[Gpu]:
    """Returns the GPUs for which there is a kernel."""
    from nvfp4_cute.planning.arch import simt

    return [gpu for gpu in gpus() if gpu.arch in simt.ARCHS]


def missing_gpu_reason(arch: str) -> str | None:
    """Returns why no kernel compiled for `arch` ("sm_100a") can run on a GPU here, or None if one can.

    Such code runs on exactly its own compute capability; the trailing letter means that.
    """
    present = gpus()
    if arch in [gpu.arch for gpu in present]:
        return None
    listed = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in present) or "no GPU that torch can use"
    return f"needs an {arch} GPU; here: {listed}"


def shim_problem() -> str | None:
    """Returns why the emulator's launch shim (a small C library, built at install time) is missing, or None."""
    from nvfp4_cute.emulator.fronts.launch_shim import shim_path

    try:
        shim_path()
    except EmulatorError as error:
        return str(error)
    return None
