"""Tensor maps of several groups in the kernel's parameters, and the choice of one at run time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu as cute_nvgpu_ir
from cutlass.cutlass_dsl import dsl_user_op

# CuTe places a tensor map, 128 bytes by value, in an `.align 64` kernel parameter.
DESCRIPTOR_BYTES = 128
DESCRIPTOR_ALIGN_BYTES = 64


@dsl_user_op
def _descriptor_ptr_type(*, loc=None, ip=None):
    return cute_ir.PtrType.get(
        cute_nvgpu_ir.TmaDescriptorTiledType.get(), cute.AddressSpace.generic, DESCRIPTOR_ALIGN_BYTES
    )


@dsl_user_op
def descriptor_address(tma_atom: cute.CopyAtom, *, loc=None, ip=None) -> Int64:
    """Generic address of the tensor map that ``tma_atom`` carries as a kernel parameter."""
    executable = cute_nvgpu_ir.atom_make_exec_tma(tma_atom._trait.value, loc=loc, ip=ip)
    return cute_nvgpu_ir.get_tma_desc_addr(_descriptor_ptr_type(), executable, loc=loc, ip=ip).toint()


@dsl_user_op
def descriptor_ptr(address: Int64, *, loc=None, ip=None) -> cute.Pointer:
    """The tensor map at an address that :func:`descriptor_address` gave."""
    aligned_type = cute_ir.ConstrainedIntType.get(DESCRIPTOR_ALIGN_BYTES, 64)
    aligned = cute_ir.assume(aligned_type, Int64(address).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
    return cute_ir.inttoptr(_descriptor_ptr_type(), aligned, loc=loc, ip=ip)


@cute.jit
def select_descriptor_address(tma_atoms: list, slot: Int32) -> Int64:
    """Address of the tensor map of group ``slot``: found once a tile, so that a K loop issues one TMA an operand.

    The maps are one kernel parameter after the other, and a parameter lies at the next multiple of its alignment behind
    the one before it (CUDA driver API, cuLaunchKernel), so that they are an array. One map serves all groups or one.
    """
    address = descriptor_address(tma_atoms[0])
    if cutlass.const_expr(len(tma_atoms) > 1):
        address += Int64(slot) * DESCRIPTOR_BYTES
    return address


@cute.jit
def select_descriptor(tma_atoms: list, slot: Int32) -> cute.Pointer:
    """Pointer to the tensor map of group ``slot``."""
    return descriptor_ptr(select_descriptor_address(tma_atoms, slot))


@dsl_user_op
def prefetch_descriptor(descriptor: cute.Pointer, *, loc=None, ip=None) -> None:
    """Bring a tensor map into the descriptor cache before its first use."""
    cute_nvgpu_ir.arch_prefetch_tma_desc(descriptor.value, loc=loc, ip=ip)
