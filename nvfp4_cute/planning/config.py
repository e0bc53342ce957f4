"""KernelConfig says how a problem is computed, without tensors or sizes; problem.py says what is computed."""

import re
from dataclasses import dataclass

_NAME = re.compile(
    r"t(\d+)x(\d+)x(\d+)_s(\d+)a(\d+)(_2cta)?(_ultra)?(_swap)?(_pre)?(_sk)?(_warp)?(?:_m(\d+))?(?:_k(\d+))?(?:_p(\d+))?$"
)

# Fields that every family of architectures has.
SHARED_FIELDS = ("cta_tile_shape_mnk", "num_ab_stage", "num_acc_stage", "num_cta", "swap_ab", "split_k")


@dataclass(frozen=True)
class KernelConfig:
    """Tile shape, pipeline depths and launch width of one kernel.

    Attributes:
        cta_tile_shape_mnk: one CTA's part of an MMA: rows of its M side, all columns of the N side, and elements of K
            per pipeline stage.
        num_ab_stage: shared-memory stages of A, B and their scales; None fits as many as possible.
        num_acc_stage: accumulators per CTA, so that the epilogue of one overlaps the mainloop of the next. Each holds a
            work tile, or a K tile if sums are promoted.
        num_cta: largest number of persistent CTAs to launch; None takes one per SM. Not part of the compiled code.
        use_2cta_instrs: two CTAs issue one MMA of twice the rows (``cta_group::2``), which halves the N side's loads.
        use_k96_instrs: MMAs multiply 96 elements of K instead of 64 (FP4 Ultra in CUTLASS). K tiles do not change.
        swap_ab: rows of ``b`` (weights) are on the M side of the MMA and rows of ``a`` (tokens) on its N side, whose extent is
            finer-grained. Pays for few tokens and many weights.
        multicast_n: number of neighbouring MMAs of a cluster along M that share the N side. Each loads every n-th K
            tile of it for all.
        split_k: CTAs of a cluster that share the K tiles of a work tile and reduce their partial sums.
        decode_first: a preceding launch dequantizes tokens once into device memory; two CTAs with neighbouring rows of
            ``b`` then share loads of tokens.
        stream_k: K tiles rather than work tiles are divided evenly. If clusters share a tile, one of them adds the
            partial sums that the others leave in device memory. If both operands are quantized it needs
            ``decode_first``.
        use_warp_mma: warps load weights into registers and multiply with ``mma.sync``: no stages of weights, no clusters.

    Every architecture family has ``SHARED_FIELDS``. Other fields are options: a family names those it has in ``OPTIONS`` and
    refuses the others. A field means the same in all families. ``unsupported_reason`` of a family says which values it can
    build.
    """

    cta_tile_shape_mnk: tuple[int, int, int] = (128, 128, 256)
    num_ab_stage: int | None = None
    num_acc_stage: int = 2
    num_cta: int | None = None
    use_2cta_instrs: bool = False
    swap_ab: bool = False
    multicast_n: int = 1
    split_k: int = 1
    decode_first: bool = False
    stream_k: bool = False
    use_k96_instrs: bool = False
    use_warp_mma: bool = False

    @property
    def num_mma_cta(self) -> int:
        """CTAs that issue an MMA together: 2 for a pair, otherwise 1."""
        return 2 if self.use_2cta_instrs else 1

    @property
    def num_m_cta(self) -> int:
        """CTAs with rows of a work tile's M side, which issue an MMA together or share the N side."""
        return (2 if self.use_2cta_instrs or self.decode_first else 1) * self.multicast_n

    @property
    def cluster_size(self) -> int:
        """CTAs that work on one tile."""
        return self.num_m_cta * self.split_k

    @property
    def work_tile_mnk(self) -> tuple[int, int, int]:
        """Extents of a work tile in the problem's own terms: rows of ``a``, rows of ``b``, K."""
        m, n, k = self.cta_tile_shape_mnk
        m *= self.num_m_cta
        return (n, m, k) if self.swap_ab else (m, n, k)

    def adds_parts(self, parts: int) -> bool:
        """Returns whether K has ``parts`` parts, each of which one CTA adds up from its beginning.

        All such configs of a kernel give equal bits on random operands, whatever their tile: measured for every candidate on an
        H200 (``bench/notes/2026-11-29-h200-batch-invariance.md``).
        """
        return self.split_k == parts and not self.stream_k and not self.use_k96_instrs

    def to_name(self) -> str:
        """Returns a readable name such as ``t128x128x256_s6a2_2cta_swap_p148``; ``s0`` means all stages that fit."""
        m, n, k = self.cta_tile_shape_mnk
        pair, swap = "_2cta" if self.use_2cta_instrs else "", "_swap" if self.swap_ab else ""
        pair += "_ultra" * self.use_k96_instrs
        first = "_pre" * self.decode_first + "_sk" * self.stream_k + "_warp" * self.use_warp_mma
        shared = f"_m{self.multicast_n}" if self.multicast_n > 1 else ""
        split = f"_k{self.split_k}" if self.split_k > 1 else ""
        width = "" if self.num_cta is None else f"_p{self.num_cta}"
        return f"t{m}x{n}x{k}_s{self.num_ab_stage or 0}a{self.num_acc_stage}{pair}{swap}{first}{shared}{split}{width}"

    @classmethod
    def from_name(cls, name: str) -> "KernelConfig":
        """Inverse of :meth:`to_name`. Raises ValueError if the name has another form."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"config name {name!r} is not of the form t<M>x<N>x<K>_s<stages>a<stages>[_2cta][_ultra][_swap][_pre][_sk][_warp]"
                "[_m<MMAs>][_k<parts>][_p<CTAs>]"
            )
        m, n, k, ab, acc, pair, ultra, swap, first, stream, warp, shared, split, cta = match.groups()
        return cls(
            (int(m), int(n), int(k)),
            int(ab) or None,
            int(acc),
            int(cta) if cta else None,
            use_2cta_instrs=pair is not None,
            swap_ab=swap is not None,
            multicast_n=int(shared or 1),
            split_k=int(split or 1),
            decode_first=first is not None,
            stream_k=stream is not None,
            use_k96_instrs=ultra is not None,
            use_warp_mma=warp is not None,
        )


def check_config(config: object) -> None:
    """Raises TypeError unless ``config`` is a KernelConfig or None."""
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(
            f"config={config!r} is no KernelConfig; pass one, such as "
            f'KernelConfig.from_name("{KernelConfig().to_name()}"), or None'
        )
