"""Resources of a compiled kernel, read from its cubin without CUDA's own tools: registers, stack and shared memory.

Format: 64-bit ELF. The section ``.nv.info`` holds attribute records (format byte, attribute byte, 16-bit size, payload)
as ``cuobjdump -elf`` prints them. The payload of the two attributes used here is (symbol index, value), 32 bits each.
The sections ``.symtab`` and ``.strtab`` name the symbols.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ELF = b"\x7fELF"
"""First bytes of a cubin."""
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REGCOUNT = 0x2F
_EIATTR_INDIRECT_BRANCH_TARGETS = 0x34
_FORMAT_SIZED_VALUE = 4
_SYMBOL_BYTES = 24
_OPCODE = 0xFFF
_GLOBAL_LOAD, _MMA_SYNC = 0x981, 0x23C
"""Low bits of LDG and HMMA."""
_LOCAL = (0x983, 0x387)
"""Low bits of LDL and STL."""
_WGMMA, _WGMMA_BITS = 0x1F0, 0x1FC
"""Bits that HGMMA, IGMMA and QGMMA have in common, and their mask."""
_SIZE_BIT, _SIZES = 9, (1, 1, 2, 2, 4, 8, 16, 0)
_NO_ALLOCATE_BIT = 22
"""In an LDG's upper 64 bits: three bits with the bytes per lane, and one that tells L1 not to keep them."""
_STALL_BIT = 41
"""In an instruction's upper 64 bits: the first of four bits with the cycles before its warp issues the next instruction."""
_SCOREBOARD_BIT, _WAITS_BIT = 46, 52
"""First of three bits with the scoreboard of its result; first of six bits with the scoreboards that it waits for."""
_BRANCH = 0x947
_FLAGS_AT, _ABI_AT, _OLD_ABI = 0x30, 8, 7
"""Offsets of an ELF file's flags and ABI version; the version whose flags begin with the architecture."""


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel, or the maximum over several kernels.

    Attributes:
        registers: 32-bit registers per thread.
        stack_bytes: local memory per thread; a value above 0 means spills or a dynamically indexed array.
        code_bytes: size of the machine code, summed over the kernels.
    """

    registers: int
    stack_bytes: int
    code_bytes: int


@dataclass(frozen=True)
class PlacedLoad:
    """A load from global memory in a kernel's machine code.

    Attributes:
        nbytes: bytes per lane.
        allocates: whether L1 keeps the bytes.
        multiplied: mma.sync instructions before it.
        waited: mma.sync instructions before the first later instruction that waits for its scoreboard, in the loop that
            contains it, if there is one. Such an instruction waits for everything that the scoreboard counts.
    """

    nbytes: int
    allocates: bool
    multiplied: int
    waited: int | None = None


@dataclass(frozen=True)
class Stretch:
    """A part of a kernel's machine code.

    Attributes:
        instructions: number of instructions, without padding.
        stalls: cycles for which their control words keep a warp from issuing the next instruction.
        products: mma.sync and wgmma instructions.
    """

    instructions: int = 0
    stalls: int = 0
    products: int = 0


@dataclass(frozen=True)
class MachineCode:
    """Machine code that the assembler made of one kernel.

    Attributes:
        registers: 32-bit registers per thread.
        whole: the complete code.
        main: loops that multiply, without the loops around them.
        loads: loads from global memory, in order.
        products: number of mma.sync instructions.
        stack_bytes: local memory per thread; a value above 0 means spills or a dynamically indexed array.
        local_accesses: instructions that load from or store to local memory.
        code_bytes: size of the machine code.
    """

    registers: int
    whole: Stretch
    main: Stretch = Stretch()
    loads: tuple[PlacedLoad, ...] = ()
    products: int = 0
    stack_bytes: int = 0
    local_accesses: int = 0
    code_bytes: int = 0


def read_resources(cubin: bytes) -> KernelResources:
    """Resources of the kernels in ``cubin``. Raises ValueError if it is not a cubin."""
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
    """Machine code of every kernel in ``cubin``, by name. Raises ValueError if it is not a cubin."""
    sections = dict(_sections(cubin))
    symbols, names = sections.get(".symtab", b""), sections.get(".strtab", b"")
    found = {}
    attributes = list(_attributes(sections.get(".nv.info", b"")))
    splits = _splits_distances(cubin)
    frames = dict(struct.unpack("<II", payload) for kind, payload in attributes if kind == _EIATTR_FRAME_SIZE)
    for attribute, payload in attributes:
        if attribute == _EIATTR_REGCOUNT:
            symbol, registers = struct.unpack("<II", payload)
            (start,) = struct.unpack_from("<I", symbols, symbol * _SYMBOL_BYTES)
            name = names[start : names.index(b"\0", start)].decode()
            words = list(struct.iter_unpack("<QQ", sections.get(f".text.{name}", b"")))
            multiplies = [low & _OPCODE == _MMA_SYNC or low & _WGMMA_BITS == _WGMMA for low, _ in words]
            main = main_loops(list(loops(words, splits)), multiplies)
            products = sum(1 for low, _ in words if low & _OPCODE == _MMA_SYNC)
            found[name] = MachineCode(
                registers,
                whole=_stretch(words, multiplies, range(len(words))),
                main=_stretch(words, multiplies, main),
                loads=tuple(placed_loads(words, splits)),
                products=products,
                stack_bytes=frames.get(symbol, 0),
                local_accesses=sum(1 for low, _ in words if low & _OPCODE in _LOCAL),
                code_bytes=16 * len(words),
            )
    return found


def _stretch(words: Sequence[tuple[int, int]], multiplies: Sequence[bool], places: Iterable[int]) -> Stretch:
    found = [(words[i][1] >> _STALL_BIT & 15, multiplies[i]) for i in places]
    return Stretch(
        sum(1 for stall, _ in found if stall), sum(s for s, _ in found), sum(is_one for _, is_one in found)
    )


def main_loops(known: Sequence[tuple[int, int]], multiplies: Sequence[bool]) -> list[int]:
    """Returns the instructions of the innermost loops that multiply.

    Args:
        known: first instruction of each loop, and the instruction after it.
        multiplies: whether each instruction multiplies.
    """
    found = sorted(
        {loop for loop in known if any(multiplies[slice(*loop)])}, key=lambda loop: loop[1] - loop[0]
    )
    inner: list[tuple[int, int]] = []
    for first, end in found:
        if all(end <= other[0] or other[1] <= first for other in inner):
            inner.append((first, end))
    return [place for loop in inner for place in range(*loop)]


def placed_loads(words: Sequence[tuple[int, int]], splits: bool = True) -> Iterator[PlacedLoad]:
    """Yields the loads of a kernel's machine code.

    Args:
        words: both halves of every instruction, the low half first.
        splits: see ``loops``.
    """
    before = [0, *accumulate(low & _OPCODE == _MMA_SYNC for low, _ in words)]
    around = list(loops(words, splits))
    for place, (low, high) in enumerate(words):
        if low & _OPCODE == _GLOBAL_LOAD:
            nbytes, scoreboard = _SIZES[high >> _SIZE_BIT & 7], high >> _SCOREBOARD_BIT & 7
            end = min((last for first, last in around if first <= place < last), default=len(words))
            waits = (i for i in range(place + 1, end) if words[i][1] >> _WAITS_BIT & 63 & 1 << scoreboard)
            waited = next((before[i] for i in waits), None)
            yield PlacedLoad(nbytes, not high >> _NO_ALLOCATE_BIT & 1, before[place], waited)


def loops(words: Sequence[tuple[int, int]], splits: bool = True) -> Iterator[tuple[int, int]]:
    """Yields the first instruction of each loop, and the instruction after it.

    A loop reaches from a backward branch's target to the branch.

    ``splits``: whether the low bits of a branch's distance are stored apart, as they are from sm_90 on.
    """
    for place, (low, high) in enumerate(words):
        if low & _OPCODE == _BRANCH:
            far = low >> 34 | (high & 0x3FFFF) << 30
            far -= far >> 47 << 48
            offset = (far << 10) + (low >> 16 & 0xFF) * 4 if splits else far * 4
            if offset < 0:
                yield place + 1 + offset // 16, place + 1


def _splits_distances(cubin: bytes) -> bool:
    """Whether ``cubin`` is for sm_90 or later. Older files have the architecture in the low byte of their flags."""
    return cubin[_ABI_AT] != _OLD_ABI or cubin[_FLAGS_AT] >= 90


def read_opcodes(cubin: bytes) -> list[int]:
    """Returns the opcode of every machine instruction of the only kernel in ``cubin``: the low 12 bits of its 16 bytes.

    Raises ValueError unless ``cubin`` is a cubin with one kernel.
    """
    return [word & 0xFFF for word in read_instructions(cubin)]


def read_instructions(cubin: bytes, kernel: str = "") -> list[int]:
    """Returns every machine instruction (128 bits) of the only kernel in ``cubin`` whose name begins with ``kernel``.

    Raises ValueError unless ``cubin`` is a cubin with one such kernel.
    """
    return [low | high << 64 for low, high in struct.iter_unpack("<QQ", _only_code(_sections(cubin), kernel))]


def read_branch_targets(cubin: bytes, kernel: str = "") -> dict[int, list[int]]:
    """Returns the possible targets of each indirect branch of a kernel: byte offsets in the code, by the branch's offset.

    A record is (branch, 0, number of targets, targets), 32 bits each.
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
