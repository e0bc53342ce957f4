"""Device code inside host code: fat binaries and cubins, and the PTX from which objects on disk were compiled.

The emulator cannot execute machine code, and an exported object contains nothing else. So every export on the emulator
writes its PTX to a folder, under the hash of its cubin, and a process that loads the object finds it there.
"""

import ctypes
import gzip
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

FAT_BINARY_MAGIC = 0xBA55ED50
FAT_HEADER, ENTRY_HEADER = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
PTX_ENTRY, CUBIN_ENTRY = 1, 2
ELF_MAGIC, ELF_HEADER_BYTES = b"\x7fELF", 64


def image_at(address: int | None) -> bytes:
    """Returns the device code at this address of host code; empty if its format does not state its size."""
    if not address:
        return b""
    start = ctypes.string_at(address, FAT_HEADER.size)
    magic, _version, header_bytes, nbytes = FAT_HEADER.unpack(start)
    if magic == FAT_BINARY_MAGIC:
        return ctypes.string_at(address, header_bytes + nbytes)
    if start.startswith(ELF_MAGIC):
        return ctypes.string_at(address, _elf_bytes(ctypes.string_at(address, ELF_HEADER_BYTES)))
    return b""


def _elf_bytes(header: bytes) -> int:
    """Returns the size of a 64-bit ELF file, which ends with the table of its sections or of its segments."""
    segments, sections = struct.unpack_from("<QQ", header, 0x20)
    segment_bytes, segment_count, section_bytes, section_count = struct.unpack_from("<4H", header, 0x36)
    return max(segments + segment_bytes * segment_count, sections + section_bytes * section_count)


def entries(image: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (kind, content) of the parts of an image: a fat binary's entries, or the cubin itself."""
    if image.startswith(ELF_MAGIC):
        yield CUBIN_ENTRY, image
        return
    position = FAT_HEADER.size
    while position + ENTRY_HEADER.size <= len(image):
        kind, _version, header_bytes, nbytes = ENTRY_HEADER.unpack_from(image, position)
        yield kind, image[position + header_bytes : position + header_bytes + nbytes]
        position += header_bytes + nbytes


class KernelStore:
    """A folder of PTX texts, by the cubins made of them."""

    def __init__(self, folder: Path):
        """`folder`: created when the first text is stored."""
        self.folder = folder

    def keep(self, ptx: str, cubin: bytes) -> None:
        """Stores a text. An unwritable folder is ignored, because only later processes miss the text."""
        path = self._path(cubin)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(gzip.compress(ptx.encode()))
            unfinished.replace(path)
        except OSError:
            return

    def find(self, image: bytes) -> tuple[str, bytes] | None:
        """Returns the PTX of an image and its cubin: the image's own text, or a stored one."""
        for kind, content in entries(image):
            if kind == PTX_ENTRY and b".entry" in content:
                return content.rstrip(b"\0").decode(), content
            path = self._path(content)
            if kind == CUBIN_ENTRY and path.is_file():
                return gzip.decompress(path.read_bytes()).decode(), content
        return None

    def _path(self, cubin: bytes) -> Path:
        return self.folder / f"{hashlib.sha256(cubin).hexdigest()}.ptx.gz"
