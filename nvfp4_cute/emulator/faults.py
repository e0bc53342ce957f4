"""Errors that an emulated program causes, by the kind of rule that it broke."""

from nvfp4_cute.errors import EmulatorError


class Fault(EmulatorError):
    """A broken rule of the machine. `kind`: its name in the hazard report."""

    kind = "rule"


class BoundsFault(Fault):
    """An access outside shared memory or every live range of global memory."""

    kind = "out-of-bounds"


class AlignmentFault(Fault):
    """A misaligned address, descriptor, or size, in shared or global memory."""

    kind = "alignment"


class TensorMemoryFault(Fault):
    """Tensor memory that is not allocated, not reachable by the warp, or allocated wrongly."""

    kind = "tensor-memory"


class MbarrierFault(Fault):
    """An mbarrier used before its initialisation, or with more arrivals than it expects."""

    kind = "mbarrier"


class RegisterFault(Fault):
    """A register that is read before its asynchronous writer has been awaited, or that was never written."""

    kind = "register"


class HangFault(Fault):
    """Every live warp is blocked."""

    kind = "hang"


class SiliconFault(Fault):
    """A broken rule of the chip (`silicon`) that the description of the instruction does not state."""

    kind = "silicon"
