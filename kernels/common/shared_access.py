"""Vector reads and writes of shared memory by address."""

from cutlass import Int32, Uint8, Uint16, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, vector

# LLVM's address space of shared memory.
SHARED_SPACE = 3


def load_shared(address: Int32, count: int, is_volatile: bool = False) -> list:
    """Loads ``count`` consecutive words, aligned to their total size, in one instruction. A volatile load is not moved.

    Emits LLVM's load directly: a copy between tensors gives the same instruction after compiling tens of operations.
    """
    word = Uint32.mlir_type
    loaded = llvm.load(
        ir.VectorType.get([count], word), _shared_pointer(address), alignment=4 * count, volatile_=is_volatile
    )
    return [Uint32(vector.extract(loaded, [], [i])) for i in range(count)]


def load_shared_half(address: Int32) -> Uint32:
    """Loads two bytes, zero-extended."""
    return Uint16(llvm.load(Uint16.mlir_type, _shared_pointer(address), alignment=2)).to(Uint32)


def load_shared_byte(address: Int32) -> Uint32:
    """Loads a byte, zero-extended."""
    return Uint8(llvm.load(Uint8.mlir_type, _shared_pointer(address), alignment=1)).to(Uint32)


def store_shared_byte(address: Int32, value: Uint32) -> None:
    """Stores the low byte of a word."""
    llvm.store(value.to(Uint8).ir_value(), _shared_pointer(address), alignment=1)


def store_shared(address: Int32, values: list) -> None:
    """Stores consecutive words, aligned to their total size, in one instruction."""
    words = [value.ir_value() for value in values]
    packed = vector.from_elements(ir.VectorType.get([len(words)], Uint32.mlir_type), words)
    llvm.store(packed, _shared_pointer(address), alignment=4 * len(words))


def _shared_pointer(address: Int32):
    return llvm.inttoptr(llvm.PointerType.get(SHARED_SPACE), address.ir_value())
