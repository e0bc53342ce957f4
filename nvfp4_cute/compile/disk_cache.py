"""Compiled kernels on disk: compiled once on a machine, or on another machine, and loaded in milliseconds.

An entry is a folder, ``<kernel name>-<digest>``, with the object file (host code with the cubin inside), the PTX text,
the cubin, and ``entry.json``: what the entry was made from and the SHA-256 of each file. An entry that does not say
exactly what is expected, or whose files are not those that it lists, is compiled again and replaced. Checksums find
damage, not malice: loading runs native code, so a folder must belong to someone who is trusted.
"""

import fcntl
import hashlib
import importlib.util
import json
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nvfp4_cute.compile.compiler import CompiledKernel, compile_kernel, load_kernel
from nvfp4_cute.errors import CacheError

OBJECT, PTX, CUBIN, MANIFEST = "kernel.o", "kernel.ptx", "kernel.cubin", "entry.json"
# Every module that generated code depends on, by name in the package: test_style.py holds kernels to these.
SOURCES = (
    "kernels",
    "planning.arch",
    "planning.config",
    "errors",
    "formats.block_format",
    "formats.codecs",
    "formats.scale_layout",
    "formats.silu",
    "launch_table",
    "private_api",
    "compile.keys",
    "compile.compiler",
    "compile.host_code",
    "compile.simt_keys",
    "experts.keys",
)
DSL_DISTRIBUTIONS = "nvidia_cutlass_dsl*.dist-info"


@dataclass(frozen=True)
class Contents:
    """What a folder holds: the number of entries, and the bytes of all their files."""

    num_entries: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.num_entries} kernel{'s' * (self.num_entries != 1)}, {self.nbytes / 1e6:.1f} MB"


def fetch(folder: Path, key: Any) -> CompiledKernel:
    """The kernel of ``key`` from ``folder``; where no valid entry is there, compiled and kept there.

    Processes that miss together compile once: the others wait and load. A folder that cannot be written still serves
    the entries that it has; for another kernel a warning says why it was not kept.

    Args:
        folder: made where it is missing.
        key: what to compile, a KernelKey or a ``task.Key``. Sources that were changed in memory are not noticed.
    """
    kernel, problem = _fetch(folder, key)
    if problem is not None:
        warnings.warn(_describe(folder, key, problem), RuntimeWarning, stacklevel=2)
    return kernel


def ensure(folder: Path, key: Any) -> None:
    """Have a valid entry of ``key`` in ``folder``, compiling it if need be. Raises CacheError where that fails."""
    _, problem = _fetch(folder, key)
    if problem is not None:
        raise CacheError(_describe(folder, key, problem))


def _fetch(folder: Path, key: Any) -> tuple[CompiledKernel, OSError | None]:
    """The kernel, and why it could not be kept where it had to be compiled for this process only."""
    identity = identity_of(key)
    entry = folder / entry_name(key, identity)
    kernel = _load(entry, key, identity)
    if kernel is not None:
        return kernel, None
    with _locked(entry) as problem:
        kernel = None if problem else _load(entry, key, identity)
        if kernel is None:
            kernel = compile_kernel(key)
            problem = problem or _store(entry, kernel, identity)
    return kernel, problem


def _describe(folder: Path, key: Any, problem: OSError) -> str:
    return (
        f"{key.to_name()} was compiled for this process only: {folder} has no valid entry for it and cannot be "
        f"written ({problem}); set NVFP4_CUTE_CACHE_DIR to a folder that can, or to `off`"
    )


def contents(folder: Path) -> Contents:
    """What ``folder`` holds now; nothing where it is missing."""
    manifests = list(folder.glob(f"*/{MANIFEST}"))
    files = [file for manifest in manifests for file in manifest.parent.iterdir()]
    return Contents(len(manifests), sum(file.stat().st_size for file in files))


def identity_of(key: Any) -> dict[str, Any]:
    """Everything that decides whether an entry can be used here, for JSON.

    Python's version is part of it because the object holds a pickled signature.
    """
    return {
        "kernel": key.to_name(),
        "key": repr(key),
        "arch": key.arch,
        "sources": source_digest(),
        "dsl": dsl_versions(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "host": f"{sys.platform}-{platform.machine()}",
    }


def entry_name(key: Any, identity: dict[str, Any]) -> str:
    """Name of an entry's folder: readable, with a digest of ``identity``."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{key.to_name()}-{digest[:16]}"


@cache
def dsl_versions() -> dict[str, str]:
    """Version of every nvidia-cutlass-dsl distribution, read from the names of their metadata folders.

    Reading the metadata of everything that is installed would take longer than loading a kernel.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        for path in sorted(Path(folder).glob(DSL_DISTRIBUTIONS)):
            name, _, version = path.stem.partition("-")
            found.setdefault(name, version)
    if not found:  # copied without its metadata
        import cutlass

        found["cutlass"] = cutlass.__version__
    return found


@cache
def source_digest() -> str:
    """SHA-256 of the sources that generated code depends on, as they are on disk."""
    digest = hashlib.sha256()
    for name in SOURCES:
        spec = importlib.util.find_spec(f"nvfp4_cute.{name}")
        assert spec is not None and spec.origin is not None, name
        origin = Path(spec.origin)
        is_package = spec.submodule_search_locations is not None
        for path in sorted(origin.parent.rglob("*.py")) if is_package else [origin]:
            digest.update(f"{name}/{path.relative_to(origin.parent)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _load(entry: Path, key: Any, identity: dict[str, Any]) -> CompiledKernel | None:
    """The kernel of an entry, or None where the entry is missing, damaged or made from something else."""
    try:
        files = {name: (entry / name).read_bytes() for name in (OBJECT, PTX, CUBIN)}
        manifest = json.loads((entry / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    if manifest != _manifest(identity, files):
        return None
    return load_kernel(key, entry / OBJECT, files[PTX].decode(), files[CUBIN])


def _manifest(identity: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "identity": identity,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }


def _store(entry: Path, kernel: CompiledKernel, identity: dict[str, Any]) -> OSError | None:
    """Put a kernel in its place under the entry's lock: complete, or, returning the reason, not at all."""
    files = {OBJECT: kernel.object_code, PTX: kernel.ptx.encode(), CUBIN: kernel.cubin}
    manifest = json.dumps(_manifest(identity, files), indent=2).encode()
    partial = entry.with_name(f"{entry.name}.partial")
    try:
        _remove(partial)  # of a process that was killed
        partial.mkdir()
        for name, data in {**files, MANIFEST: manifest}.items():
            (partial / name).write_bytes(data)
        _remove(entry)
        partial.rename(entry)
    except OSError as error:
        with suppress(OSError):  # a full disk is not kept full
            _remove(partial)
        return error
    return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(entry: Path) -> Iterator[OSError | None]:
    """Inside the block no other process is in such a block of this entry; gives the reason where there is no lock.

    The lock ends with its process, however that ends. Its file stays: removing it would let two processes lock two
    files of one name.

    Not the package filelock: on a file system without locks its versions raise another error, or lock by a marker file that a
    killed process leaves behind. Here such a folder serves what it has and says why it keeps nothing.
    """
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(entry.with_name(f"{entry.name}.lock"), "ab")
    except OSError as error:
        yield error
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            problem: OSError | None = error
        else:
            problem = None
        yield problem
