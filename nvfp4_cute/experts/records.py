"""Records that describe a layer of experts: its weights, the format of its activations, and the ranks that divide it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from nvfp4_cute.activation import Activation
from nvfp4_cute.experts.checks import PerRowActivations, check_first_expert
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.operands.rules import check_choice
from nvfp4_cute.problem import ResultName

ExpertLayout = Literal[
    "concatenated", "interleaved", "interleaved_64_up_first", "interleaved_32_gate_first", "none"
]
LAYOUTS = get_args(ExpertLayout)
Activations = Literal[ResultName, PerRowActivations, "fp8_1x128", "fp8_1xk", "int8", "16bit"]
Division = Literal["experts", "tensor"]
Weights = BlockScaledTensor | ExpertWeights


@dataclass(frozen=True, eq=False)
class Experts:
    """Weights of one projection of all experts, with their layout, biases and factors.

    Attributes:
        weight: [E, N, K].
        layout: order of the first projection's rows: "concatenated" [gate; up], "interleaved" with alternating rows, "none"
            without a gate, or an interleaved layout of :class:`nvfp4_cute.GateUp`.
        bias: [E, N] in the dtype of x.
        alpha: factors of the product, float32 [E]; for the first projection also a pair, for gate and up. None computes them
            from global scales. If the rows also have a global scale, torch multiplies the two in small launches.
    """

    weight: Weights
    layout: ExpertLayout = "concatenated"
    bias: torch.Tensor | None = None
    alpha: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class ActivationFormat:
    """Format of the rows of both products, and where router weights multiply.

    Attributes:
        format: "nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "fp8_1x128" (with weights in FP8_128x128), "fp8_1xk" (with those
            of ``mxfp4_for_fp8``), "int8" (with INT8), or "16bit" for rows that stay in x's dtype (W4A16, sm_80 and newer).
        input_scale: calibrated global scale of x (NVFP4): float32 with one element, or [E]. "per_row": every row of both products
            has its own, found by the launches that quantize; nothing is calibrated, and rows are independent of each other.
        hidden_scale: calibrated global scale of the rows between both products; None with "per_row".
        weight_on_input: whether router weights multiply tokens before the first product (Llama-4) instead of results after the
            second one. The weighted tokens are rounded to the dtype of x.
    """

    format: Activations = "nvfp4"
    input_scale: torch.Tensor | Literal["per_row"] | None = None
    hidden_scale: torch.Tensor | None = None
    weight_on_input: bool = False


@dataclass(frozen=True, eq=False)
class Parallel:
    """How a layer of experts is divided over ranks.

    Attributes:
        group: a ``torch.distributed.ProcessGroup``. Each rank passes its own tokens, its own experts, ids of all experts, and
            the second projection's bias of all experts. All ranks make the same calls. None: this process computes alone.
        capacity: largest number of tokens per rank in any call. Nothing then waits for the device, and a CUDA graph can capture
            the layer after one call without it. None exchanges sizes first, for which the host waits.
        placement: which ranks hold which experts; None for equal shares, in order.
        divide: "experts"; or "tensor": every rank has the same tokens and a share of the width of every expert
            (``experts.tensor_parallel.shard``), and the results are added in float32.
        first_expert: without a group: id of the first local expert.

    Raises:
        TypeError, ValueError: an attribute has the wrong type or value, or contradicts another one.
    """

    group: dist.ProcessGroup | None = None
    capacity: int | None = None
    placement: Placement | None = None
    divide: Division = "experts"
    first_expert: int = 0

    def __post_init__(self):
        group, placement, divides_width = self.group, self.placement, self.divide == "tensor"
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is a {type(group).__name__}; pass a torch.distributed.ProcessGroup")
        if placement is not None and not isinstance(placement, Placement):
            raise TypeError(f"placement is a {type(placement).__name__}; pass a Placement, or None")
        check_choice("divide", self.divide, get_args(Division))
        check_first_expert(self.first_expert)
        is_placed = placement is not None or self.capacity is not None
        if group is None and (is_placed or divides_width):
            raise ValueError(
                "placement, capacity and divide describe the ranks of a group: also pass the group"
            )
        if divides_width and is_placed:
            raise ValueError(
                'placement or capacity with divide="tensor", where no token moves; leave them out'
            )
        if group is not None and not divides_width and self.first_expert:
            raise ValueError(
                f"first_expert={self.first_expert} with a group: its placement says where experts lie"
            )


class LayerOfExperts(NamedTuple):
    """A layer of experts of one process. A tuple, because each call makes one.

    Attributes:
        w13, w2: the two projections.
        activation: the function between them.
        activations: format of the rows of both products.
        first_expert: id of the first local expert.
        backend: see ``moe``.
    """

    w13: Experts
    w2: Experts
    activation: Activation
    activations: ActivationFormat
    first_expert: int = 0
    backend: str = "auto"
