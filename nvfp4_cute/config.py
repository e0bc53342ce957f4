"""KernelConfig: how a problem is computed. Never mentions tensors or sizes; what is computed is in problem.py."""

import re
from dataclasses import dataclass

_NAME = re.compile(r"t(\d+)x(\d+)x(\d+)_s(\d+)a(\d+)(?:_p(\d+))?$")


@dataclass(frozen=True)
class KernelConfig:
    """Tile shape, pipeline depths and launch width of one kernel.

    Attributes:
        cta_tile_shape_mnk: elements of the output tile that one CTA computes, and of K in one pipeline stage.
        num_ab_stage: shared-memory stages of A, B and their scales; None takes as many as fit.
        num_acc_stage: accumulators in tensor memory, so that the epilogue of one tile overlaps the next mainloop.
        num_cta: persistent CTAs to launch at most; None takes one per SM. Not part of the compiled code.

    Which values an architecture can build is decided by ``arch.<name>.unsupported_reason``.
    """

    cta_tile_shape_mnk: tuple[int, int, int] = (128, 128, 256)
    num_ab_stage: int | None = None
    num_acc_stage: int = 2
    num_cta: int | None = None

    def to_name(self) -> str:
        """Readable name, for example ``t128x128x256_s6a2`` or ``..._p148``; ``s0`` stands for as many as fit."""
        m, n, k = self.cta_tile_shape_mnk
        width = "" if self.num_cta is None else f"_p{self.num_cta}"
        return f"t{m}x{n}x{k}_s{self.num_ab_stage or 0}a{self.num_acc_stage}{width}"

    @classmethod
    def from_name(cls, name: str) -> "KernelConfig":
        """Inverse of :meth:`to_name`. Raises ValueError where the name has another form."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"config name {name!r} is not of the form t<M>x<N>x<K>_s<stages>a<stages>[_p<CTAs>]"
            )
        m, n, k, ab, acc, cta = match.groups()
        return cls((int(m), int(n), int(k)), int(ab) or None, int(acc), int(cta) if cta else None)
