"""Loads a kernel's object file (host code including the cubin) without CuTe DSL, whose import takes seconds.

CuTe DSL writes x86-64 ELF objects of the large code model. Their relocations are of five kinds (System V ABI, AMD64
Architecture Processor Supplement 1.0, table 4.9). An object with other relocations raises UnsupportedObject.
"""

import ctypes
import mmap
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

R_X86_64_64, R_X86_64_PC64, R_X86_64_GOTOFF64, R_X86_64_GOT64, R_X86_64_GOTPC64 = 1, 24, 25, 27, 29
SHT_PROGBITS, SHT_SYMTAB, SHT_RELA, SHT_NOBITS, SHF_ALLOC, SHF_EXECINSTR = 1, 2, 4, 8, 2, 4
ELF_X86_64 = b"\x7fELF\x02\x01\x01"
EM_X86_64, ET_REL, HEADER_BYTES = 62, 1, 64
UNDEFINED, ABSOLUTE, FIRST_RESERVED = 0, 0xFFF1, 0xFF00
PROT_READ, PROT_EXEC = 1, 4
GOT_SYMBOL = "_GLOBAL_OFFSET_TABLE_"
UNWINDING = ".eh_frame"
"""Tables that C++ exceptions need; host code raises none."""


class UnsupportedObject(ValueError):
    """An object file of another machine, or with unknown relocations."""


@dataclass(frozen=True)
class Section:
    """One section of an ELF file (Elf64_Shdr)."""

    name: int
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int

    @property
    def is_loaded(self) -> bool:
        """Whether it occupies memory in a running program."""
        return bool(self.flags & SHF_ALLOC and self.size)


class LoadedObject:
    """An object file in this process's memory, until the process ends.

    Args:
        content: content of the file.
        resolve: returns the address of a symbol that the file does not define; raises KeyError.
    """

    def __init__(self, content: bytes, resolve: Callable[[str], int]):
        if platform.machine() != "x86_64" or len(content) < HEADER_BYTES or content[:7] != ELF_X86_64:
            raise UnsupportedObject("not an object file for x86-64")
        kind, machine = struct.unpack_from("<HH", content, 16)
        if (kind, machine) != (ET_REL, EM_X86_64):
            raise UnsupportedObject("not a relocatable object file for x86-64")
        (start,), (count, names) = (
            struct.unpack_from("<Q", content, 40),
            struct.unpack_from("<HH", content, 60),
        )
        self._content, self._resolve = content, resolve
        self._sections = [_section(content, start + 64 * number) for number in range(count)]
        self._name_of = lambda section: _text(content, self._sections[names].offset + section.name)
        self._place()
        self.symbols: dict[str, int] = {}
        """Addresses of the symbols that the file defines."""
        self._values = self._symbol_values()
        for section in self._sections:
            if section.kind == SHT_RELA and self._addresses.get(section.info) is not None:
                self._relocate(section)
        if libc.mprotect(self._base, self._code_bytes, PROT_READ | PROT_EXEC):
            raise OSError(ctypes.get_errno(), "mprotect")

    def _place(self) -> None:
        """Copies every section into memory: code first, on separate pages, then data, then the table of addresses."""
        loaded = [
            (number, section)
            for number, section in enumerate(self._sections)
            if section.is_loaded and self._name_of(section) != UNWINDING
        ]
        offsets: dict[int, int] = {}
        end = 0
        for is_code in (True, False):
            for number, section in loaded:
                if bool(section.flags & SHF_EXECINSTR) == is_code:
                    if section.kind not in (SHT_PROGBITS, SHT_NOBITS):
                        raise UnsupportedObject(f"section of type {section.kind}")
                    offsets[number] = _aligned(end, section.align)
                    end = offsets[number] + section.size
            if is_code:
                self._code_bytes = end = _aligned(end, mmap.PAGESIZE)
        symbols = next(section for section in self._sections if section.kind == SHT_SYMTAB)
        self._got_offset = _aligned(end, 8)
        self._memory = mmap.mmap(-1, self._got_offset + symbols.size // 24 * 8)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._got = self._base + self._got_offset
        self._addresses = {number: self._base + offset for number, offset in offsets.items()}
        for number, section in loaded:
            if section.kind == SHT_PROGBITS:
                data = self._content[section.offset : section.offset + section.size]
                self._memory[offsets[number] : offsets[number] + section.size] = data

    def _symbol_values(self) -> list[int]:
        """Returns the address of every symbol, in the order of the table."""
        table = next(section for section in self._sections if section.kind == SHT_SYMTAB)
        names, values = self._sections[table.link].offset, []
        for at in range(table.offset, table.offset + table.size, 24):
            name, _, _, number, value, _ = struct.unpack_from("<IBBHQQ", self._content, at)
            text = _text(self._content, names + name)
            if number == UNDEFINED:
                value = 0 if not text else self._got if text == GOT_SYMBOL else self._resolve(text)
            elif number < FIRST_RESERVED:
                value += self._addresses.get(number, 0)
                self.symbols[text] = value
            elif number != ABSOLUTE:
                raise UnsupportedObject(f"symbol {text} in section {number:#x}")
            values.append(value)
        self._memory[self._got_offset :] = struct.pack(f"<{len(values)}Q", *values)
        return values

    def _relocate(self, section: Section) -> None:
        start = self._addresses[section.info]
        for at in range(section.offset, section.offset + section.size, 24):
            offset, info, addend = struct.unpack_from("<QQq", self._content, at)
            number, kind = info >> 32, info & 0xFFFFFFFF
            if kind == R_X86_64_64:
                value = self._values[number]
            elif kind == R_X86_64_PC64:
                value = self._values[number] - start - offset
            elif kind == R_X86_64_GOTOFF64:
                value = self._values[number] - self._got
            elif kind == R_X86_64_GOT64:
                value = 8 * number
            elif kind == R_X86_64_GOTPC64:
                value = self._got - start - offset
            else:
                raise UnsupportedObject(f"relocation {kind}")
            struct.pack_into(
                "<Q", self._memory, start - self._base + offset, (value + addend) & 0xFFFFFFFFFFFFFFFF
            )


def _section(content: bytes, at: int) -> Section:
    name, kind, flags, _, offset, size, link, info, align, _ = struct.unpack_from("<IIQQQQIIQQ", content, at)
    return Section(name, kind, flags, offset, size, link, info, align)


def _text(content: bytes, at: int) -> str:
    return content[at : content.index(b"\0", at)].decode()


def _aligned(number: int, to: int) -> int:
    return -(-number // max(to, 1)) * max(to, 1)


libc: Any = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
