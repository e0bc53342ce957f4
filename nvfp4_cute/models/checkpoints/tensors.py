"""The tensors of a folder of safetensors files: reads them without copies, and writes them one after the other.

A file has three parts. Eight little-endian bytes hold the length of the header. The header is JSON: for every tensor its dtype,
shape, and first and last offset in the data. The data are the bytes of all tensors.
(https://github.com/huggingface/safetensors, README, Format.)
"""

import contextlib
import gc
import json
import math
import mmap
import os
import reprlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

import torch

from nvfp4_cute.errors import CheckpointError, printable
from nvfp4_cute.models.checkpoints.json_files import MAX_BYTES, parse_object, read_object
from nvfp4_cute.models.checkpoints.patterns import MAX_NAME

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Bits per element by dtype as files name it; torch lacks some of these dtypes.
BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "U32": 32, "U64": 64, "C64": 64}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**63
POINTER = b"version "  # beginning of the file that Git LFS leaves in place of one that was not fetched
ALIGN_BYTES = 8  # alignment of the header's end in the format


class Entry(NamedTuple):
    """Location of a tensor.

    Attributes:
        file: the safetensors file.
        dtype: dtype as the file names it.
        shape: shape of the tensor.
        start, end: byte range, counted from the beginning of the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.start


class TensorFiles:
    """The tensors of a checkpoint folder by name. Bytes are read when they are used.

    Files are mapped into memory. A tensor is a view of pages that the system reads on access and may drop again. Writing to a
    tensor changes a private copy of the page, never the file.

    Args:
        folder: folder of a checkpoint.
        files: safetensors files to read, in the folder or below it. None reads those of the index
            (``model.safetensors.index.json``), else ``model.safetensors``, else every ``*.safetensors``.

    Raises:
        FileNotFoundError: a file does not exist.
        CheckpointError: a header is damaged, two files have the same tensor, the index names a tensor that its file lacks or a
            file outside the folder, or ``model.safetensors`` is next to an index of other files, which are two checkpoints.
    """

    def __init__(self, folder: str | os.PathLike, files: Sequence[str | os.PathLike] | None = None):
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        names, index = _files(self.folder) if files is None else ([str(file) for file in files], {})
        with _no_collection():
            for name in names:
                self._add(name, _header(self.folder / name))
        missing = sorted(index.keys() - self.entries.keys())
        if missing:
            raise CheckpointError(
                f"{INDEX} names {len(missing)} tensors that no file has, first {missing[0]!r} in "
                f"{index[missing[0]]}; fetch the checkpoint again"
            )

    def _add(self, file: str, entries: dict[str, Entry]) -> None:
        both = self.entries.keys() & entries.keys()
        if both:
            key = min(both)
            raise CheckpointError(
                f"tensor {key!r} is in {self.entries[key].file.name} and in {file}; one file may have it: remove one"
            )
        self.entries |= entries

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"tensor {name!r} has dtype {entry.dtype}; known are {', '.join(DTYPES)}: convert it with the tool that made it"
            )
        count = entry.nbytes // dtype.itemsize
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        view = torch.frombuffer(
            self._map(entry.file), dtype=torch.uint8, count=entry.nbytes, offset=entry.start
        )
        # Files may place tensors at unaligned offsets; a copy is aligned.
        aligned = view if view.data_ptr() % dtype.itemsize == 0 else view.clone()
        return aligned.view(dtype).reshape(entry.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]


def _files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the names of a folder's files, and the index: tensor to file."""
    path = folder / INDEX
    if path.is_file():
        return _files_of_index(folder, path)
    if (folder / SINGLE).is_file():  # transformers reads this file, whatever else exists
        return [SINGLE], {}
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder / absent[0]} is not a file, or is a dangling link; fetch all files")
    if not names:
        pickled = next((p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt")) if p.is_file()), None)
        way_out = (
            "pass the folder of a checkpoint, with its config.json"
            if pickled is None
            else f"{pickled} is not read here: save the model as safetensors with its tool"
        )
        raise FileNotFoundError(f"{folder} has no *.safetensors; {way_out}")
    return names, {}


def _files_of_index(folder: Path, path: Path) -> tuple[list[str], dict[str, str]]:
    index = read_object(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path} has no weight_map of tensors and files; fetch it again")
    if not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{path} has a weight_map whose files are not names; fetch it again")
    names = sorted(set(index.values()))
    for name in names:
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
            raise CheckpointError(
                f"{path} names {name[:200]!r}, which is not in its folder: the file is damaged or hostile; fetch it again"
            )
        if not _is_file(folder / name):
            raise FileNotFoundError(
                f"{path} names {printable(name[:200])}, which {folder} does not have; fetch all files"
            )
    if (folder / SINGLE).is_file() and names != [SINGLE]:
        raise CheckpointError(
            f"{folder} has {SINGLE} and {INDEX}, which names {len(names)} files, first {names[0]}: these are two checkpoints, or "
            "two exports of one; remove the older one, or the index"
        )
    return names, index


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pauses the garbage collector, whose repeated walks over the entries of a large model take half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def _header(path: Path) -> dict[str, Entry]:
    """Returns name -> entry of every tensor of a file, in the order of the header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        if first == POINTER:
            raise CheckpointError(
                f"{path} has {size} bytes of text in the place of tensors, as Git LFS leaves it; run `git lfs pull` in its folder"
            )
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > min(size - 8, MAX_BYTES):
            raise CheckpointError(
                f"{path} has {size} bytes and no header of {length}: the file is damaged or cut; fetch it again"
            )
        header = parse_object(file.read(length), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(one, str) for one in metadata.values()):
        raise CheckpointError(
            f"{path} has __metadata__ that is not an object of strings: the file is damaged; fetch it again"
        )
    begin = 8 + length
    entries = {name: _entry(path, name, given, begin, size) for name, given in header.items()}
    places = sorted((entry.start, entry.end, name) for name, entry in entries.items())
    at, before = begin, "the header"
    for start, end, name in places:
        if start != at:
            where = "in the same bytes" if start < at else f"{start - at} bytes of no tensor apart"
            raise CheckpointError(
                f"{path} has {before!r} and {name!r} {where}: the file is damaged; fetch it again"
            )
        at, before = end, name
    if at != size:
        raise CheckpointError(
            f"{path} has {size - at} bytes after the last tensor: the file is damaged; fetch it again"
        )
    return entries


def _entry(path: Path, name: str, given: Any, begin: int, size: int) -> Entry:
    """Parses a header's entry of a tensor, whose bytes must lie from ``begin`` to ``size`` of the file."""
    try:
        dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    except (TypeError, KeyError):
        raise CheckpointError(
            f"{path} does not say what {name!r} is and where it lies: the file is damaged; fetch it again"
        ) from None
    is_typed = type(dtype) is str and type(shape) is list and type(offsets) is list and len(offsets) == 2
    if not is_typed or any(type(n) is not int or n < 0 for n in (*offsets, *shape)):
        raise CheckpointError(
            f"{path} says of {name!r} {reprlib.repr(given)}, and sizes are whole and not negative: the file is damaged; fetch "
            "it again"
        )
    if len(name) > MAX_NAME:
        raise CheckpointError(
            f"{path} has a tensor whose name has {len(name)} characters, {name[:100]!r} at its begin; at most {MAX_NAME} are "
            "read: the file is damaged; fetch it again"
        )
    start, end = begin + offsets[0], begin + offsets[1]
    bits = BITS.get(dtype)
    if (
        not start <= end <= size
        or (bits and 8 * (end - start) != bits * math.prod(shape))
        or len(shape) > MAX_DIMENSIONS
        or (start == end and math.prod(n or 1 for n in shape) >= MAX_ELEMENTS)
    ):
        raise CheckpointError(
            f"{path} says that {name!r}, {reprlib.repr(dtype)} {reprlib.repr(shape)}, lies at bytes {start} to {end} of {size}: "
            "the file is damaged or cut; fetch it again"
        )
    return Entry(path, dtype, tuple(shape), start, end)


def check_has_no_tensors(folder: Path) -> None:
    """Raises FileExistsError for a folder that has safetensors files; it need not exist."""
    if any(folder.glob("*.safetensors")):
        raise FileExistsError(f"{folder} has safetensors files already; name an empty folder")


class TensorWriter:
    """Writes a checkpoint folder, tensor after tensor, in files of at most ``shard_bytes``. Holds one tensor at a time.

    Use it as a context. The index is written at the end if there is more than one file. After an error inside the context, no
    file is left.

    Args:
        folder: created if necessary.
        shapes: name, dtype and shape of every tensor, in the order of writing.
        shard_bytes: maximum size of a file's tensors; a single larger tensor gets a file of its own.

    Raises:
        FileExistsError: the folder has safetensors files.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        shapes: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
        shard_bytes: int = 5 * 10**9,
    ):
        self.folder = Path(folder)
        check_has_no_tensors(self.folder)
        self._is_own = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._shards = _shards(shapes, shard_bytes)
        self._place = {name: number for number, shard in enumerate(self._shards) for name in shard}
        self._files: dict[int, tuple[BinaryIO, int]] = {}
        self._left = set(self._place)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        for file, _ in self._files.values():
            file.close()
        if kind is not None:
            for shard in self._files:
                (self.folder / self._name(shard)).unlink(missing_ok=True)
            if self._is_own:
                with contextlib.suppress(OSError):  # another program has put something there
                    self.folder.rmdir()
            return
        if self._left:
            raise ValueError(
                f"{len(self._left)} tensors were announced and not written, such as {min(self._left)!r}"
            )
        if len(self._shards) > 1:
            total = sum(entry["data_offsets"][1] for s in self._shards for entry in list(s.values())[-1:])
            index = {
                "metadata": {"total_size": total},
                "weight_map": {n: self._name(i) for n, i in self._place.items()},
            }
            (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor of ``shapes``. Raises ValueError for another dtype or shape, or if it was written before."""
        shard = self._place.get(name)
        entry = None if shard is None else self._shards[shard][name]
        given = {"dtype": DTYPE_NAMES.get(tensor.dtype), "shape": list(tensor.shape)}
        if entry is None or name not in self._left or any(entry[key] != given[key] for key in given):
            raise ValueError(f"{name!r} is {given}; announced was {entry}, to be written once")
        assert shard is not None
        file, start = self._open(shard)
        file.seek(start + entry["data_offsets"][0])
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        file.write(flat.numpy().data)
        self._left.discard(name)

    def _name(self, shard: int) -> str:
        count = len(self._shards)
        return SINGLE if count == 1 else f"model-{shard + 1:05}-of-{count:05}.safetensors"

    def _open(self, shard: int) -> tuple[BinaryIO, int]:
        """Opens the file of a shard; returns it and the offset of its tensors."""
        if shard not in self._files:
            header = {"__metadata__": {"format": "pt"}} | self._shards[shard]
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % ALIGN_BYTES)
            file = (self.folder / self._name(shard)).open("wb")
            file.write(struct.pack("<Q", len(text)) + text)
            self._files[shard] = file, 8 + len(text)
        return self._files[shard]


def _shards(shapes, shard_bytes: int) -> list[dict[str, dict]]:
    """Returns the header entries of every file."""
    shards: list[dict[str, dict]] = [{}]
    offset = 0
    for name, dtype, shape in shapes:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if offset and offset + nbytes > shard_bytes:
            shards.append({})
            offset = 0
        shards[-1][name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    return shards
