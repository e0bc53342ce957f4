"""Run-time choice among tensor maps of several groups in the kernel's parameters."""

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
    """Returns the generic address of the tensor map that ``tma_atom`` carries as a kernel parameter."""
    executable = cute_nvgpu_ir.atom_make_exec_tma(tma_atom._trait.value, loc=loc, ip=ip)
    return cute_nvgpu_ir.get_tma_desc_addr(_descriptor_ptr_type(), executable, loc=loc, ip=ip).toint()


@dsl_user_op
def descriptor_ptr(address: Int64, *, loc=None, ip=None) -> cute.Pointer:
    """Returns a pointer to the tensor map at an address from :func:`descriptor_address`."""
    aligned_type = cute_ir.ConstrainedIntType.get(DESCRIPTOR_ALIGN_BYTES, 64)
    aligned = cute_ir.assume(aligned_type, Int64(address).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
    return cute_ir.inttoptr(_descriptor_ptr_type(), aligned, loc=loc, ip=ip)


@cute.jit
def select_descriptor_address(tma_atoms: list, slot: Int32) -> Int64:
    """Returns the address of the tensor map of group ``slot``; computed once per tile, outside the K loop.

    Maps are consecutive kernel parameters. Each parameter is placed at the next multiple of its alignment (CUDA driver API,
    cuLaunchKernel), so the maps form an array. A single map serves all groups.
    """
    address = descriptor_address(tma_atoms[0])
    if cutlass.const_expr(len(tma_atoms) > 1):
        address += Int64(slot) * DESCRIPTOR_BYTES
    return address


@cute.jit
def select_descriptor(tma_atoms: list, slot: Int32) -> cute.Pointer:
    """Returns a pointer to the tensor map of group ``slot``."""
    return descriptor_ptr(select_descriptor_address(tma_atoms, slot))


@dsl_user_op
def prefetch_descriptor(descriptor: cute.Pointer, *, loc=None, ip=None) -> None:
    """Prefetches a tensor map into the descriptor cache."""
    cute_nvgpu_ir.arch_prefetch_tma_desc(descriptor.value, loc=loc, ip=ip)
