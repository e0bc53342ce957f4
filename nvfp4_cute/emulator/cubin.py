"""Resources of a compiled kernel, read from its cubin: registers, stack and shared memory, without CUDA's own tools.

Format: 64-bit ELF; the section ``.nv.info`` holds attribute records (format byte, attribute byte, 16-bit size, payload)
as printed by ``cuobjdump -elf``; the payload of the two attributes used here is (symbol index, value), 32 bits each. The
sections ``.symtab`` and ``.strtab`` name the symbols.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ELF = b"\x7fELF"
"""What a cubin begins with."""
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REGCOUNT = 0x2F
_EIATTR_INDIRECT_BRANCH_TARGETS = 0x34
_FORMAT_SIZED_VALUE = 4
_SYMBOL_BYTES = 24
_OPCODE = 0xFFF
_GLOBAL_LOAD, _MMA_SYNC = 0x981, 0x23C
"""Low bits of LDG and HMMA."""
_SIZE_BIT, _SIZES = 9, (1, 1, 2, 2, 4, 8, 16, 0)
_NO_ALLOCATE_BIT = 22
"""Of an LDG's upper 64 bits: three that say how many bytes a lane loads, and one that L1 is not to keep them."""
_STALL_BIT = 41
"""Of an instruction's upper 64 bits: the first of four that say how many cycles its warp waits before it issues the next one."""


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs, or the most that one of several does.

    Attributes:
        registers: 32-bit registers a thread.
        stack_bytes: local memory a thread; anything above 0 is a spill or a dynamically indexed array.
        code_bytes: size of the machine code, of all of them.
    """

    registers: int
    stack_bytes: int
    code_bytes: int


@dataclass(frozen=True)
class PlacedLoad:
    """A load of global memory in a kernel's text.

    Attributes:
        nbytes: of a lane.  allocates: whether L1 is to keep them.
        multiplied: mma.sync in front of it.
    """

    nbytes: int
    allocates: bool
    multiplied: int


@dataclass(frozen=True)
class MachineCode:
    """What the assembler made of one kernel.

    Attributes:
        registers: 32-bit registers a thread.
        instructions: that it has, without the padding at its end.
        stalls: cycles that they keep a warp from issuing the next one, after what its control word says.
        loads: of global memory, in order.  products: mma.sync that it has.
    """

    registers: int
    instructions: int
    stalls: int
    loads: tuple[PlacedLoad, ...] = ()
    products: int = 0


def read_resources(cubin: bytes) -> KernelResources:
    """Resources of the kernels in ``cubin``. Raises ValueError where it is not a cubin."""
    sections = _sections(cubin)
    code = _code(sections)
    values = {_EIATTR_REGCOUNT: 0, _EIATTR_FRAME_SIZE: 0}
    for name, data in sections:
        if name == ".nv.info":
            for attribute, payload in _attributes(data):
                if attribute in values:
                    values[attribute] = max(values[attribute], struct.unpack("<II", payload)[1])
    return KernelResources(values[_EIATTR_REGCOUNT], values[_EIATTR_FRAME_SIZE], sum(map(len, code)))


def read_machine_code(cubin: bytes) -> dict[str, MachineCode]:
    """Every kernel in ``cubin`` by name. Raises ValueError where it is not a cubin."""
    sections = dict(_sections(cubin))
    symbols, names = sections.get(".symtab", b""), sections.get(".strtab", b"")
    found = {}
    for attribute, payload in _attributes(sections.get(".nv.info", b"")):
        if attribute == _EIATTR_REGCOUNT:
            symbol, registers = struct.unpack("<II", payload)
            (start,) = struct.unpack_from("<I", symbols, symbol * _SYMBOL_BYTES)
            name = names[start : names.index(b"\0", start)].decode()
            words = list(struct.iter_unpack("<QQ", sections.get(f".text.{name}", b"")))
            stalls = [high >> _STALL_BIT & 15 for _, high in words]
            instructions = sum(1 for stall in stalls if stall)
            products = sum(1 for low, _ in words if low & _OPCODE == _MMA_SYNC)
            found[name] = MachineCode(registers, instructions, sum(stalls), tuple(_loads(words)), products)
    return found


def _loads(words: Iterable[tuple[int, int]]) -> Iterator[PlacedLoad]:
    multiplied = 0
    for low, high in words:
        if low & _OPCODE == _MMA_SYNC:
            multiplied += 1
        elif low & _OPCODE == _GLOBAL_LOAD:
            nbytes = _SIZES[high >> _SIZE_BIT & 7]
            yield PlacedLoad(nbytes, not high >> _NO_ALLOCATE_BIT & 1, multiplied)


def read_opcodes(cubin: bytes) -> list[int]:
    """Opcode of every machine instruction of the only kernel in ``cubin``: the low 12 bits of its 16 bytes.

    Raises ValueError where it is not a cubin with one kernel.
    """
    return [word & 0xFFF for word in read_instructions(cubin)]


def read_instructions(cubin: bytes, kernel: str = "") -> list[int]:
    """Every machine instruction of the only kernel in ``cubin`` whose name begins with ``kernel``: 128 bits.

    Raises ValueError where it is not a cubin with one such kernel.
    """
    return [low | high << 64 for low, high in struct.iter_unpack("<QQ", _only_code(_sections(cubin), kernel))]


def read_branch_targets(cubin: bytes, kernel: str = "") -> dict[int, list[int]]:
    """Where each indirect branch of that kernel may go: byte offsets in the code, by the branch's own.

    A record is branch, 0, number of targets, targets: 32 bits each.
    """
    found = {}
    for name, data in _sections(cubin):
        for attribute, payload in _attributes(data) if name.startswith(f".nv.info.{kernel}") else ():
            if attribute == _EIATTR_INDIRECT_BRANCH_TARGETS:
                words = [word for (word,) in struct.iter_unpack("<I", payload)]
                while words:
                    end = 3 + words[2]
                    found[words[0]], words = words[3:end], words[end:]
    return found


def _only_code(sections: list[tuple[str, bytes]], kernel: str) -> bytes:
    code = _code(sections, kernel)
    if len(code) != 1:
        raise ValueError(f"expected a cubin with one kernel, found {len(code)}")
    return code[0]


def _code(sections: list[tuple[str, bytes]], kernel: str = "") -> list[bytes]:
    return [data for name, data in sections if name.startswith(f".text.{kernel}")]


def _sections(elf: bytes) -> list[tuple[str, bytes]]:
    if not elf.startswith(ELF):
        raise ValueError("not an ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_idx = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_idx][4]
    result = []
    for name, kind, _, _, offset, size in headers:
        start = names + name
        text = elf[start : elf.index(b"\0", start)].decode()
        result.append((text, b"" if kind == 8 else elf[offset : offset + size]))  # 8: SHT_NOBITS
    return result


def _attributes(data: bytes):
    at = 0
    while at + 4 <= len(data):
        fmt, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if fmt == _FORMAT_SIZED_VALUE:
            yield attribute, data[at : at + size]
            at += size
