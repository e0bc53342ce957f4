"""Keys of the kernels of a layer of experts: the parameters with which each variant is compiled."""

from dataclasses import dataclass
from typing import Any

import torch

from nvfp4_cute.activation import symbol
from nvfp4_cute.compile.keys import cutlass_dtype
from nvfp4_cute.compile.simt_keys import SimtKey
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.planning.arch import simt
from nvfp4_cute.problem import dtype_name


def _suffix(format: BlockFormat) -> str:
    """Returns the format's part of a kernel name; empty for NVFP4."""
    return "" if format == NVFP4 else f"_{format}"


@dataclass(frozen=True)
class RouteKey(SimtKey):
    """Routing: dtype of the logits, experts per lane, scoring, and optional inputs."""

    KERNEL = "route.RouteKernel"
    dtype: torch.dtype
    slots: int
    scoring: str
    renormalize: bool
    has_bias: bool
    has_correction: bool
    has_groups: bool
    has_ids: bool

    def _name(self) -> str:
        options = {
            "renormalized": self.renormalize,
            "bias": self.has_bias,
            "correction": self.has_correction,
            "groups": self.has_groups,
            "given": self.has_ids,
        }
        chosen = "".join(f"_{name}" for name, is_on in options.items() if is_on)
        return f"moe_route_{self.arch}_{dtype_name(self.dtype)}_{self.slots * simt.WARP_SIZE}_{self.scoring}{chosen}"

    def _arguments(self) -> tuple[Any, ...]:
        given = (
            self.slots,
            self.scoring,
            self.renormalize,
            self.has_bias,
            self.has_correction,
            self.has_groups,
            self.has_ids,
        )
        return cutlass_dtype(self.dtype), *given, self.to_name()


@dataclass(frozen=True)
class PermuteKey(SimtKey):
    """Permutation: room for experts, which of one or two launches it is, and whether it waits for other ranks."""

    KERNEL = "permute.PermuteKernel"
    capacity: int
    phase: str
    waits: bool

    def _name(self) -> str:
        return f"moe_permute_{self.arch}_{self.capacity}_{self.phase}{'_waits' * self.waits}"


@dataclass(frozen=True)
class GatherQuantizeKey(SimtKey):
    """Gather: input dtype, output format, global scales, and whether it finds the order of rows."""

    KERNEL = "gather_quantize.GatherQuantizeKernel"
    CONVERTS = True
    dtype: torch.dtype
    format: BlockFormat | None
    global_scales: str
    finds_order: bool

    def _name(self) -> str:
        order = "_orders" if self.finds_order else ""
        operation, scales = (
            ("gather", "")
            if self.format is None
            else (f"gather_quantize{_suffix(self.format)}", f"_{self.global_scales}")
        )
        return f"moe_{operation}_{self.arch}_{dtype_name(self.dtype)}{scales}{order}"


@dataclass(frozen=True)
class Gather1xKKey(SimtKey):
    """Gather to rows with one float32 scale each: input dtype, output format, and whether it finds the order of rows."""

    KERNEL = "gather_1xk.Gather1xKKernel"
    dtype: torch.dtype
    format: BlockFormat
    finds_order: bool

    def _name(self) -> str:
        order = "_orders" if self.finds_order else ""
        return f"moe_gather_quantize{_suffix(self.format)}_{self.arch}_{dtype_name(self.dtype)}{order}"


@dataclass(frozen=True)
class FinalizeKey(SimtKey):
    """Finalize: dtype of rows, optional addends, whether it waits for other ranks, whether rows are routed, whether it may start
    before the end of the previous launch, and rows per load.
    """

    KERNEL = "finalize.FinalizeKernel"
    dtype: torch.dtype
    has_shared: bool
    has_bias: bool
    waits: bool
    is_routed: bool = False
    is_programmatic: bool = False
    ahead: int = simt.FINALIZE_AHEAD

    def _name(self) -> str:
        options = "_shared" * self.has_shared + "_bias" * self.has_bias + "_waits" * self.waits
        options += "_routed" * self.is_routed + "_early" * self.is_programmatic
        options += f"_{self.ahead}" * (self.ahead != simt.FINALIZE_AHEAD)
        return f"moe_finalize_{self.arch}_{dtype_name(self.dtype)}{options}"


@dataclass(frozen=True)
class ActivateKey(SimtKey):
    """Activation: input dtype, output format, layout of gate and up, the activation itself, and whether it may start before the
    end of the previous launch.
    """

    KERNEL = "activate.ActivateKernel"
    CONVERTS = True
    dtype: torch.dtype
    format: BlockFormat | None
    activation: str
    gate_layout: str
    has_limit: bool
    has_bias: bool
    has_global_scale: bool
    finds_scales: bool = False
    is_programmatic: bool = False

    def _name(self) -> str:
        options = "_limit" * self.has_limit + "_bias" * self.has_bias + "_scaled" * self.has_global_scale
        options += "_rows" * self.finds_scales + "_early" * self.is_programmatic
        operation = "activate_16bit" if self.format is None else f"activate{_suffix(self.format)}"
        return f"moe_{operation}_{self.arch}_{dtype_name(self.dtype)}_{symbol(self.activation)}_{self.gate_layout}{options}"


@dataclass(frozen=True)
class RankChoicesKey(SimtKey):
    """Lookup of the ranks and local ids of choices."""

    KERNEL = "rank_choices.RankChoicesKernel"

    def _name(self) -> str:
        return f"moe_rank_choices_{self.arch}"


@dataclass(frozen=True)
class PackRowsKey(SimtKey):
    """Packing of rows to send: input dtype, whether and how rows are quantized, and whether there is a capacity."""

    KERNEL = "pack_rows.PackRowsKernel"
    CONVERTS = True
    dtype: torch.dtype
    quantizes: bool
    has_global_scale: bool
    has_capacity: bool

    def _name(self) -> str:
        options = (
            "_quantize" * self.quantizes + "_scaled" * self.has_global_scale + "_fixed" * self.has_capacity
        )
        return f"moe_pack_rows_{self.arch}_{dtype_name(self.dtype)}{options}"


@dataclass(frozen=True)
class UnpackRowsKey(SimtKey):
    """Unpacking of received rows: whether the kernel finds their order, and whether it waits for other ranks."""

    KERNEL = "unpack_rows.UnpackRowsKernel"
    finds_order: bool
    waits: bool

    def _name(self) -> str:
        return f"moe_unpack_rows_{self.arch}{'_orders' * self.finds_order}{'_waits' * self.waits}"


@dataclass(frozen=True)
class CollectRowsKey(SimtKey):
    """Collection of rows to send back, and whether their places are given."""

    KERNEL = "collect_rows.CollectRowsKernel"
    has_goals: bool

    def _name(self) -> str:
        return f"moe_collect_rows_{self.arch}{'_goals' * self.has_goals}"


@dataclass(frozen=True)
class PushRowsKey(SimtKey):
    """Push of tokens into peers' buffers: number of peers, input dtype, whether rows are quantized, with or without a factor."""

    KERNEL = "push_rows.PushRowsKernel"
    CONVERTS = True
    num_ranks: int
    dtype: torch.dtype
    quantizes: bool
    has_global_scale: bool

    def _name(self) -> str:
        options = "_quantize" * self.quantizes + "_scaled" * self.has_global_scale
        return f"moe_push_rows_{self.arch}_{self.num_ranks}_{dtype_name(self.dtype)}{options}"


@dataclass(frozen=True)
class PushResultsKey(SimtKey):
    """Push of results into peers' buffers: number of peers."""

    KERNEL = "push_results.PushResultsKernel"
    num_ranks: int

    def _name(self) -> str:
        return f"moe_push_results_{self.arch}_{self.num_ranks}"
