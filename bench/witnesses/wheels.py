"""Unpacks wheels for the kernels that `public_kernels` calls."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

PACKAGES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "lightmoe": ("lightmoe",),
        "dist-moe": ("dist_moe",),
        "b12x": ("b12x",),
        "cudnn": ("nvidia_cudnn_frontend",),
        "operators": ("nvidia_cutlass_operators",),
        "sglang": ("sglang",),
        "flashinfer-wheel": ("flashinfer_python",),
        "liger": ("liger_kernel",),
        "sonic-moe": ("sonic_moe", "quack_kernels"),
    }
)
"""Prefixes of the file names of each project's wheels."""

SUFFIXES = (".py", ".so", ".json", "METADATA")
"""Files of a wheel that kernels need."""

LARGEST = 50_000_000
"""Bytes. Larger files are libraries of compiled kernels, which no call here reaches."""


def unpack(project: str, folder: Path, scratch: Path) -> list[Path]:
    """Unpacks a project's wheels from `folder` into folders of `scratch`, unless these exist.

    Returns the folders, which belong at the front of ``sys.path``; an empty list if a wheel is missing.
    """
    found = [sorted(folder.glob(f"{name}-*.whl")) for name in PACKAGES[project]]
    if not all(found):
        return []
    return [_unpacked(wheels[-1], scratch) for wheels in found]


def _unpacked(wheel: Path, scratch: Path) -> Path:
    target = scratch / "-".join(wheel.name.split("-")[:2])
    if not target.is_dir():
        with zipfile.ZipFile(wheel) as archive:
            files = [info for info in archive.infolist() if info.filename.endswith(SUFFIXES)]
            archive.extractall(target, [info.filename for info in files if info.file_size < LARGEST])
    return target
