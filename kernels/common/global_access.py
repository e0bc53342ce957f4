"""Memory access by address: vectors of words, with a cache hint for global memory, and single elements."""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .versions import inline_ptx

# Data that is read once bypasses L1; data that every CTA reads again stays there.
READ_ONCE = "ld.global.nc.L1::no_allocate"
KEEP = "ld.global.nc"
# Opcode for shared memory, which has 32-bit addresses.
SHARED = "ld.shared"


def load_words(address: Int32 | Int64, num_words: int, opcode: str, predicate=None) -> list:
    """Loads ``num_words`` consecutive words in one instruction, aligned to their total size.

    Where ``predicate`` is false, nothing is read and the words are undefined.
    """
    vector = "" if num_words == 1 else f".v{num_words}"
    names = ", ".join(f"{{$w{i}}}" for i in range(num_words))
    loaded = inline_ptx(
        f"{opcode}{vector}.b32 {names if num_words == 1 else '{' + names + '}'}, [{{$r0}}];",
        write_only_types=[Uint32] * num_words,
        read_only_args=[address],
        predicate=predicate,
    )
    return [loaded] if num_words == 1 else list(loaded)


def store_words(address: Int64, words: list, predicate=None) -> None:
    """Stores consecutive words in one instruction, aligned to their total size; nothing where ``predicate`` is false."""
    vector = "" if len(words) == 1 else f".v{len(words)}"
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    inline_ptx(
        f"st.global{vector}.b32 [{{$r0}}], {names if len(words) == 1 else '{' + names + '}'};",
        read_only_args=[address, *words],
        predicate=predicate,
    )


def store_word(address: Int64, word: Uint32) -> None:
    """Stores one word."""
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def store_half(address: Int64, word: Uint32) -> None:
    """Stores the low half of a word."""
    inline_ptx("st.global.u16 [{$r0}], {$r1};", read_only_args=[address, word])


def store_byte(address: Int64, word: Uint32) -> None:
    """Stores the low byte of a word."""
    inline_ptx("st.global.u8 [{$r0}], {$r1};", read_only_args=[address, word])


def load_acquire(address: Int64) -> Int32:
    """Loads, with acquire, a 32-bit integer that another CTA stores with release."""
    return inline_ptx(
        "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def global_scalar(dtype: type, address: Int64) -> cute.Tensor:
    """Returns a tensor of one element in global memory."""
    ptr = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(ptr, cute.make_layout(1))
