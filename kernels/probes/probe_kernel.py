"""The frame around a probe's PTX: arguments from a launch table, shared memory, the launch."""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm

from nvfp4_cute.launch_table import Probe

from ..common.versions import SmemAllocator
from .body import Body, whole

SMEM_ALIGN_BYTES = 1024


class ProbeKernel:
    """One probe."""

    def __init__(self, body: Body, name: str):
        self.body, self.name = body, name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launch CTAs along x.

        Args:
            table: Int64 in host memory: ``launch_table.Probe``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Probe)))
        body = self.body
        self.kernel.set_name_prefix(self.name)
        self.kernel(t[Probe.OUT], t[Probe.DATA], Int32(t[Probe.ARG0]), Int32(t[Probe.ARG1])).launch(
            grid=(Int32(t[Probe.CTAS]), 1, 1),
            block=(body.threads, 1, 1),
            cluster=(body.cluster, 1, 1) if body.cluster > 1 else None,
            use_pdl=body.use_pdl,
            cooperative=body.is_cooperative,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, out: Int64, data: Int64, arg0: Int32, arg1: Int32):
        """Execute the text."""
        smem = SmemAllocator().allocate(self.body.smem_bytes, SMEM_ALIGN_BYTES)
        # Not cute.arch.inline_ptx, in whose text a special register cannot be named.
        llvm.inline_asm(
            None,
            [value.ir_value() for value in (out, data, arg0, arg1, Int32(smem.toint()))],
            whole(self.body),
            "l,l,r,r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
