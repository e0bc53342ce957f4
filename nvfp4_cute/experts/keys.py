"""Keys of the kernels of a layer of experts: the parameters with which each variant is compiled."""

from dataclasses import dataclass
from typing import Any

import torch

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

    dtype: torch.dtype
    slots: int
    scoring: str
    renormalize: bool
    has_bias: bool
    has_correction: bool
    has_groups: bool

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the routing kernel begins."""
        options = {
            "renormalized": self.renormalize,
            "bias": self.has_bias,
            "correction": self.has_correction,
            "groups": self.has_groups,
        }
        chosen = "".join(f"_{name}" for name, is_on in options.items() if is_on)
        return f"moe_route_{self.arch}_{dtype_name(self.dtype)}_{self.slots * simt.WARP_SIZE}_{self.scoring}{chosen}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the routing kernel."""
        from nvfp4_cute.kernels.simt.route import RouteKernel

        return RouteKernel(
            cutlass_dtype(self.dtype),
            self.slots,
            self.scoring,
            self.renormalize,
            self.has_bias,
            self.has_correction,
            self.has_groups,
            self.to_name(),
        )


@dataclass(frozen=True)
class PermuteKey(SimtKey):
    """Permutation: room for experts, which of one or two launches it is, and whether it waits for other ranks."""

    capacity: int
    phase: str
    waits: bool

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the permutation kernel begins."""
        return f"moe_permute_{self.arch}_{self.capacity}_{self.phase}{'_waits' * self.waits}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the permutation kernel."""
        from nvfp4_cute.kernels.simt.permute import PermuteKernel

        return PermuteKernel(self.capacity, self.phase, self.waits, self.to_name())


@dataclass(frozen=True)
class GatherQuantizeKey(SimtKey):
    """Gather: input dtype, output format, global scales, and whether it finds the order of rows."""

    dtype: torch.dtype
    format: BlockFormat | None
    global_scales: str
    finds_order: bool

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the gather kernel begins."""
        order = "_orders" if self.finds_order else ""
        operation, scales = (
            ("gather", "")
            if self.format is None
            else (f"gather_quantize{_suffix(self.format)}", f"_{self.global_scales}")
        )
        return f"moe_{operation}_{self.arch}_{dtype_name(self.dtype)}{scales}{order}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the gather kernel."""
        from nvfp4_cute.kernels.simt.gather_quantize import GatherQuantizeKernel

        return GatherQuantizeKernel(
            self.dtype == torch.bfloat16,
            self.format,
            self.global_scales,
            self.finds_order,
            simt.has_fp4_convert(self.arch),
            self.to_name(),
        )


@dataclass(frozen=True)
class FinalizeKey(SimtKey):
    """Finalize: dtype of the rows, optional addends, and whether it waits for other ranks."""

    dtype: torch.dtype
    has_shared: bool
    has_bias: bool
    waits: bool

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the finalize kernel begins."""
        options = "_shared" * self.has_shared + "_bias" * self.has_bias + "_waits" * self.waits
        return f"moe_finalize_{self.arch}_{dtype_name(self.dtype)}{options}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the finalize kernel."""
        from nvfp4_cute.kernels.simt.finalize import FinalizeKernel

        options = (self.has_shared, self.has_bias, self.waits)
        return FinalizeKernel(self.dtype == torch.bfloat16, *options, self.to_name())


@dataclass(frozen=True)
class ActivateKey(SimtKey):
    """Activation: input dtype, output format, layout of gate and up, and the activation itself."""

    dtype: torch.dtype
    format: BlockFormat | None
    activation: str
    gate_layout: str
    has_limit: bool
    has_bias: bool
    has_global_scale: bool

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the activation kernel begins."""
        options = "_limit" * self.has_limit + "_bias" * self.has_bias + "_scaled" * self.has_global_scale
        operation = "activate_16bit" if self.format is None else f"activate{_suffix(self.format)}"
        return f"moe_{operation}_{self.arch}_{dtype_name(self.dtype)}_{self.activation}_{self.gate_layout}{options}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the activation kernel."""
        from nvfp4_cute.kernels.simt.activate import ActivateKernel

        return ActivateKernel(
            self.dtype == torch.bfloat16,
            self.format,
            self.activation,
            self.gate_layout,
            self.has_limit,
            self.has_bias,
            self.has_global_scale,
            simt.has_fp4_convert(self.arch),
            self.to_name(),
        )


@dataclass(frozen=True)
class RankChoicesKey(SimtKey):
    """Lookup of the ranks and local ids of choices."""

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the lookup kernel begins."""
        return f"moe_rank_choices_{self.arch}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the lookup kernel."""
        from nvfp4_cute.kernels.simt.rank_choices import RankChoicesKernel

        return RankChoicesKernel(self.to_name())


@dataclass(frozen=True)
class PackRowsKey(SimtKey):
    """Packing of rows to send: input dtype, whether and how rows are quantized, and whether there is a capacity."""

    dtype: torch.dtype
    quantizes: bool
    has_global_scale: bool
    has_capacity: bool

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the packing kernel begins."""
        options = (
            "_quantize" * self.quantizes + "_scaled" * self.has_global_scale + "_fixed" * self.has_capacity
        )
        return f"moe_pack_rows_{self.arch}_{dtype_name(self.dtype)}{options}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the packing kernel."""
        from nvfp4_cute.kernels.simt.pack_rows import PackRowsKernel

        return PackRowsKernel(
            self.dtype == torch.bfloat16,
            self.quantizes,
            self.has_global_scale,
            self.has_capacity,
            simt.has_fp4_convert(self.arch),
            self.to_name(),
        )


@dataclass(frozen=True)
class UnpackRowsKey(SimtKey):
    """Unpacking of received rows: whether the kernel finds their order, and whether it waits for other ranks."""

    finds_order: bool
    waits: bool

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the unpacking kernel begins."""
        return f"moe_unpack_rows_{self.arch}{'_orders' * self.finds_order}{'_waits' * self.waits}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the unpacking kernel."""
        from nvfp4_cute.kernels.simt.unpack_rows import UnpackRowsKernel

        return UnpackRowsKernel(self.finds_order, self.waits, self.to_name())


@dataclass(frozen=True)
class CollectRowsKey(SimtKey):
    """Collection of rows to send back, and whether their places are given."""

    has_goals: bool

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the collecting kernel begins."""
        return f"moe_collect_rows_{self.arch}{'_goals' * self.has_goals}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the collecting kernel."""
        from nvfp4_cute.kernels.simt.collect_rows import CollectRowsKernel

        return CollectRowsKernel(self.has_goals, self.to_name())


@dataclass(frozen=True)
class PushRowsKey(SimtKey):
    """Push of tokens into peers' buffers: number of peers, input dtype, whether rows are quantized, with or without a factor."""

    num_ranks: int
    dtype: torch.dtype
    quantizes: bool
    has_global_scale: bool

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the row push kernel begins."""
        options = "_quantize" * self.quantizes + "_scaled" * self.has_global_scale
        return f"moe_push_rows_{self.arch}_{self.num_ranks}_{dtype_name(self.dtype)}{options}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the row push kernel."""
        from nvfp4_cute.kernels.simt.push_rows import PushRowsKernel

        return PushRowsKernel(
            self.num_ranks,
            self.dtype == torch.bfloat16,
            self.quantizes,
            self.has_global_scale,
            simt.has_fp4_convert(self.arch),
            self.to_name(),
        )


@dataclass(frozen=True)
class PushResultsKey(SimtKey):
    """Push of results into peers' buffers: number of peers."""

    num_ranks: int

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the result push kernel begins."""
        return f"moe_push_results_{self.arch}_{self.num_ranks}"

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object of the result push kernel."""
        from nvfp4_cute.kernels.simt.push_results import PushResultsKernel

        return PushResultsKernel(self.num_ranks, self.to_name())
