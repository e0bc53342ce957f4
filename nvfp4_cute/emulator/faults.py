"""Errors that an emulated program causes, told apart by what kind of rule it broke."""

from nvfp4_cute.errors import EmulatorError


class Fault(EmulatorError):
    """A broken rule of the machine. `kind`: what the hazard report calls it."""

    kind = "rule"


class BoundsFault(Fault):
    """An access outside shared memory or every live range of global memory."""

    kind = "out-of-bounds"


class AlignmentFault(Fault):
    """A misaligned address, descriptor, or size."""

    kind = "alignment"


class TensorMemoryFault(Fault):
    """Tensor memory that is not allocated, not reachable by the warp, or allocated wrongly."""

    kind = "tensor-memory"


class MbarrierFault(Fault):
    """An mbarrier used before its initialisation, or with more arrivals than it expects."""

    kind = "mbarrier"


class RegisterFault(Fault):
    """A register read before the asynchronous operation that writes it is waited for, or never written."""

    kind = "register"


class HangFault(Fault):
    """Every live warp is blocked."""

    kind = "hang"


class SiliconFault(Fault):
    """A broken rule of the chip that is no part of an instruction's description (`silicon`)."""

    kind = "silicon"
