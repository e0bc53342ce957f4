"""Compiled kernels on disk: compiled once, on this machine or another, and loaded in milliseconds.

An entry is a folder, ``<kernel name>-<digest>``, with the object file (host code including the cubin), the PTX text,
the cubin, and ``entry.json``: the sources of the entry and the SHA-256 of each file. An entry that does not match
exactly, or whose files differ from its list, is compiled again and replaced. Checksums find damage, not malice: loading
runs native code, so nothing is loaded that a user other than this one and root may have written.
"""

import hashlib
import importlib.util
import json
import os
import platform
import re
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nvfp4_cute.compile.compiler import CompiledKernel, compile_kernel, load_kernel
from nvfp4_cute.compile.entry_lock import locked, locked_if_free
from nvfp4_cute.compile.trusted_files import Untrusted, check_entry, check_folder, read_bytes, remove
from nvfp4_cute.errors import CacheError

OBJECT, PTX, CUBIN, MANIFEST = "kernel.o", "kernel.ptx", "kernel.cubin", "entry.json"
# Every module that generated code depends on, by name in the package. test_style.py checks kernels against this list.
SOURCES = (
    "kernels",
    "planning.arch",
    "planning.config",
    "activation",
    "errors",
    "formats.block_format",
    "formats.codecs",
    "formats.scale_layout",
    "formats.four_over_six",
    "formats.silu",
    "formats.softplus",
    "launch_table",
    "private_api",
    "compile.keys",
    "compile.compiler",
    "compile.host_code",
    "compile.simt_keys",
    "experts.keys",
)
DSL_DISTRIBUTIONS = "nvidia_cutlass_dsl*.dist-info"
PARTIAL, LOCK = ".partial", ".lock"
ENTRY_NAME = re.compile(r"\w*sm_\d+.*-[0-9a-f]{16}")
"""Names of entries, made by `entry_name`. Nothing else in a folder is counted or removed."""
UNUSED_DAYS = 30
"""Days after which an entry of other versions that nobody loaded is removed."""


@dataclass(frozen=True)
class Contents:
    """Contents of a folder: number of entries, and bytes of all their files."""

    num_entries: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.num_entries} kernel{'s' * (self.num_entries != 1)}, {self.nbytes / 1e6:.1f} MB"


def fetch(folder: Path, key: Any) -> CompiledKernel:
    """Returns the kernel of ``key`` from ``folder``. Without a valid entry, compiles the kernel and stores it there.

    Processes that miss at the same time compile once: the others wait and load. A read-only folder still serves its
    entries; for another kernel a warning says why it was not stored.

    Args:
        folder: created if it is missing.
        key: a KernelKey or a ``task.Key``. Sources that were changed in memory are not noticed.
    """
    kernel, problem = _fetch(folder, key)
    if problem is not None:
        warnings.warn(_describe(folder, key, problem), RuntimeWarning, stacklevel=2)
    return kernel


def ensure(folder: Path, key: Any) -> None:
    """Ensures that ``folder`` has a valid entry of ``key``, and compiles it if needed. Raises CacheError if that fails."""
    _, problem = _fetch(folder, key)
    if problem is not None:
        raise CacheError(_describe(folder, key, problem))


def has(folder: Path, key: Any) -> bool:
    """Whether ``folder`` has an entry of ``key``. Its files are checked when it is loaded."""
    return (folder / entry_name(key, identity_of(key)) / MANIFEST).is_file()


def _fetch(folder: Path, key: Any) -> tuple[CompiledKernel, OSError | None]:
    """Returns the kernel, and why it could not be stored if it had to be compiled only for this process."""
    try:
        check_folder(folder)
    except Untrusted as error:
        return compile_kernel(key), error
    except OSError:  # missing, or it cannot be created, which the lock reports
        pass
    identity = identity_of(key)
    entry = folder / entry_name(key, identity)
    try:
        kernel = _load(entry, key, identity)
    except Untrusted as error:
        kernel = None
        warnings.warn(f"{entry} is not loaded, but compiled again: {error}", RuntimeWarning, stacklevel=3)
    if kernel is not None:
        return kernel, None
    with locked(_beside(entry, LOCK)) as problem:
        if problem is None:
            with suppress(Untrusted):
                kernel = _load(entry, key, identity)
        if kernel is None:
            kernel = compile_kernel(key)
            problem = problem or _store(entry, kernel, identity)
            if problem is None:
                prune(folder)
    return kernel, problem


def _beside(entry: Path, suffix: str) -> Path:
    return entry.with_name(entry.name + suffix)


def _describe(folder: Path, key: Any, problem: OSError) -> str:
    why = (
        "is not trusted"
        if isinstance(problem, Untrusted)
        else "has no valid entry for it and cannot be written"
    )
    return (
        f"{key.to_name()} was compiled for this process only: {folder} {why} ({problem}); "
        "set NVFP4_CUTE_CACHE_DIR to a folder of your own that can be written, or to `off`"
    )


def contents(folder: Path) -> Contents:
    """Returns the current contents of ``folder``; nothing if it is missing."""
    entries = _entries(folder)
    files = [file for entry in entries for file in entry.iterdir()]
    return Contents(len(entries), sum(file.lstat().st_size for file in files))


def _entries(folder: Path) -> list[Path]:
    """Returns the complete entries of all versions."""
    manifests = (manifest for manifest in folder.glob(f"*/{MANIFEST}") if manifest.is_file())
    return [manifest.parent for manifest in manifests if ENTRY_NAME.fullmatch(manifest.parent.name)]


def prune(folder: Path) -> None:
    """Removes leftovers of killed processes from ``folder``, and entries of other versions that nobody loaded for UNUSED_DAYS.

    Keeps what a process works on, what cannot be removed, and files of others: the folder may hold a project's own lock
    files.
    """
    for partial in _leftovers(folder, PARTIAL):
        _remove_if_free(partial, of=partial.with_suffix(""))
    for entry in _entries(folder):
        with suppress(OSError):
            if _days_unused(entry) > UNUSED_DAYS and not _is_of_these_versions(entry):
                _remove_if_free(entry, of=entry)
    for lock in _leftovers(folder, LOCK):
        if not lock.with_suffix("").exists():
            _remove_if_free(lock, of=lock.with_suffix(""))


def _leftovers(folder: Path, suffix: str) -> list[Path]:
    return [
        path for path in folder.glob(f"*{suffix}") if ENTRY_NAME.fullmatch(path.name.removesuffix(suffix))
    ]


def _remove_if_free(path: Path, of: Path) -> None:
    with locked_if_free(_beside(of, LOCK)) as is_ours, suppress(OSError):
        if is_ours:
            remove(path)


def _days_unused(entry: Path) -> float:
    return (time.time() - (entry / MANIFEST).stat().st_mtime) / 86400


def _is_of_these_versions(entry: Path) -> bool:
    manifest = _read_manifest(entry)
    identity = manifest.get("identity") if isinstance(manifest, dict) else None
    return isinstance(identity, dict) and versions().items() <= identity.items()


def identity_of(key: Any) -> dict[str, Any]:
    """Returns everything that decides whether an entry can be used here, for JSON."""
    return {"kernel": key.to_name(), "key": repr(key), "arch": key.arch, **versions()}


def versions() -> dict[str, Any]:
    """Returns the versions that every entry of this installation was made with.

    They include Python's version, because the object holds a pickled signature.
    """
    return {
        "sources": source_digest(),
        "dsl": dsl_versions(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "host": f"{sys.platform}-{platform.machine()}",
    }


def entry_name(key: Any, identity: dict[str, Any]) -> str:
    """Returns the name of an entry's folder: readable, with a digest of ``identity``."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{key.to_name()}-{digest[:16]}"


@cache
def dsl_versions() -> dict[str, str]:
    """Returns the version of every nvidia-cutlass-dsl distribution, from the names of their metadata folders.

    Reading the metadata of all installed packages would take longer than loading a kernel.
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
    """Returns the SHA-256 of the sources on disk that generated code depends on."""
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
    """Returns the kernel of an entry, or None if the entry is missing, damaged or made from something else.

    Raises:
        Untrusted: another user may have written it.
    """
    try:
        check_entry(entry)
        files = {name: read_bytes(entry / name) for name in (OBJECT, PTX, CUBIN)}
        ptx = files[PTX].decode()
    except Untrusted:
        raise
    except (OSError, ValueError):
        return None
    if _read_manifest(entry) != _manifest(identity, files):
        return None
    if _days_unused(entry) > 1:
        with suppress(OSError):  # read-only
            os.utime(entry / MANIFEST)
    return load_kernel(key, entry / OBJECT, ptx, files[CUBIN])


def _read_manifest(entry: Path) -> Any:
    """Returns the content of an entry's manifest; None if it is unreadable."""
    try:
        return json.loads(read_bytes(entry / MANIFEST))
    except Untrusted:
        raise
    except (OSError, ValueError, RecursionError):  # RecursionError: deeply nested lists
        return None


def _manifest(identity: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "identity": identity,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }


def _store(entry: Path, kernel: CompiledKernel, identity: dict[str, Any]) -> OSError | None:
    """Stores a kernel in its place under the entry's lock: completely, or, returning the reason, not at all."""
    files = {OBJECT: kernel.object_code, PTX: kernel.ptx.encode(), CUBIN: kernel.cubin}
    manifest = json.dumps(_manifest(identity, files), indent=2).encode()
    partial = _beside(entry, PARTIAL)
    try:
        remove(partial)  # leftover of a killed process
        partial.mkdir(mode=0o755)  # whatever the umask says: files that everybody may write are not loaded
        for name, data in {**files, MANIFEST: manifest}.items():
            (partial / name).touch(mode=0o644)
            (partial / name).write_bytes(data)
        remove(entry)
        partial.rename(entry)
    except OSError as error:
        with suppress(OSError):  # does not leave a full disk full
            remove(partial)
        return error
    return None
