"""sm_90a kernels whose tokens need no dequantizing (FP8 and 16 bits): common parts of their configs.

Weights are on MMA-M, accumulators are in registers, and all loads go through one ring of stages. With ``multicast_n=2``, two
CTAs with neighbouring weights share loads of tokens. With ``split_k``, the CTAs of a cluster share a tile's K tiles.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from nvfp4_cute.planning.arch.base import foreign_option_reason
from nvfp4_cute.planning.arch.sm90 import (
    MAX_AB_STAGE,
    SMEM_RESERVED_BYTES,
    launch_reason,
    smem_capacity_bytes,
)
from nvfp4_cute.planning.config import KernelConfig

CTAS_OF_PAIR = 2
MIN_STAGES = 2


@dataclass(frozen=True)
class RingSmem:
    """Shared memory of a CTA: plain integers, printable.

    Attributes:
        num_ab_stage: stages.
        partial_bytes: partial sums that the first CTA of a cluster receives.
    """

    num_ab_stage: int
    partial_bytes: int

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        raise NotImplementedError

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages and of everything else in shared memory."""
        return self.stage_bytes * self.num_ab_stage + self.partial_bytes + SMEM_RESERVED_BYTES


Smem = TypeVar("Smem", bound=RingSmem)


def filled(smem: Smem, num_ctas: int) -> Smem:
    """Returns ``smem`` with the largest number of stages that fits ``num_ctas`` CTAs per SM."""
    free = smem_capacity_bytes(num_ctas) - replace(smem, num_ab_stage=0).total_bytes
    return replace(smem, num_ab_stage=min(free // smem.stage_bytes, MAX_AB_STAGE))


def options_reason(config: KernelConfig, options: Sequence[str], why: str) -> str | None:
    """Returns why such kernels refuse fields that they lack or have only one value of; None if they accept ``config``.

    Args:
        options: options of the family.
        why: reason why there is no other value, the middle of the message.
    """
    foreign = foreign_option_reason(config, options)
    if foreign is not None:
        return foreign
    for name, value in {"swap_ab": True, "num_acc_stage": 1}.items():
        if getattr(config, name) != value:
            return f"{name}={getattr(config, name)} {why}; use {name}={value}"
    return None


def ring_reason(
    config: KernelConfig,
    splits: Mapping[int, int],
    smem_plan: Callable[[KernelConfig], RingSmem],
    num_ctas: int,
) -> str | None:
    """Returns why the cluster is impossible, stages do not fit, or too few CTAs are launched; None if all is well.

    Args:
        splits: split-K -> tokens of the largest tile whose partial sums fit the first CTA's memory.
        smem_plan: function from a config to its shared memory.
        num_ctas: CTAs per SM.
    """
    tokens = config.cta_tile_shape_mnk[1]
    if config.multicast_n not in (1, CTAS_OF_PAIR) or (config.multicast_n > 1 and config.split_k > 1):
        return (
            f"multicast_n={config.multicast_n}, split_k={config.split_k}: a cluster is two CTAs that share tokens, or CTAs that "
            f"share K tiles; use multicast_n=1"
        )
    if tokens > splits.get(config.split_k, 0):
        allowed = max(split for split, most in splits.items() if tokens <= most)
        return f"split_k={config.split_k} with N tile {tokens}: the sums do not fit; use split_k={allowed}"
    smem, capacity = smem_plan(config), smem_capacity_bytes(num_ctas)
    if smem.num_ab_stage < MIN_STAGES or smem.total_bytes > capacity:
        fitting = smem_plan(replace(config, num_ab_stage=None)).num_ab_stage
        fix = f"{MIN_STAGES} to {fitting}" if fitting >= MIN_STAGES else "a smaller tile"
        return f"num_ab_stage={config.num_ab_stage}: {smem.total_bytes} bytes of shared memory, {capacity} exist; use {fix}"
    return launch_reason(config)
