"""Parameters of a layer while vLLM loads it, under the names of the checkpoint's tool.

vLLM's loaders slice tensors for each rank. They convert other dtypes, and leave a parameter unchanged if no file has it; either
would silently give wrong results. Each loader here therefore wraps vLLM's with checks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from nvfp4_cute.errors import CheckpointError, UnsupportedProblem
from nvfp4_cute.formats.block_format import INT4_BLOCKS
from nvfp4_cute.models.checkpoints.axes import BLOCK, Axes
from nvfp4_cute.models.checkpoints.checks import check_factor
from nvfp4_cute.models.checkpoints.convention import Convention

UE8M0_ONE = 127
DUMMY = "dummy"  # vLLM's load format that fills parameters with random numbers
# How RoutedExperts.weight_loader treats a parameter: sliced among ranks, whole along the width of experts, or one number per
# expert and projection.
CUT, WHOLE, NUMBER = (
    getattr(FusedMoeWeightScaleSupported, name).value for name in ("GROUP", "CHANNEL", "TENSOR")
)
QKV = {"q": 0, "k": 1, "v": 2}  # vLLM's names of parts of a merged tensor


@dataclass(frozen=True)
class Matrix:
    """A matrix of quantized weights, as one rank stores it.

    Attributes:
        name: name of the tensor, for messages.
        axes: axes in the file.
        experts: E for experts; None for a layer.
        n, k: sizes of the rank's weights.
        all_k: K of all ranks together.
    """

    name: str
    axes: Axes
    experts: int | None
    n: int
    k: int
    all_k: int

    def empty(self) -> torch.Tensor:
        """Allocates zeros. Where the file decides the dtype and the blocks of scales, the first loaded tensor replaces them.

        Raises:
            UnsupportedProblem: the rank's part does not consist of whole elements.
        """
        for letter, size, values in (
            ("output", self.n, self.axes.n_values),
            ("input", self.k, self.axes.k_values),
        ):
            if values and size % values:
                raise UnsupportedProblem(
                    f"{self.name} has {size} {letter} features on each rank, and {values} lie in one element, which is not cut; "
                    "use fewer ranks"
                )
        block = next((b for b in reversed(INT4_BLOCKS) if self.k % b == 0), self.k)
        return self.zeros(block, self.axes.dtype or torch.get_default_dtype())

    def zeros(self, block_k: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates zeros for blocks of ``block_k`` values along K."""
        lead = () if self.experts is None else (self.experts,)
        return torch.zeros((*lead, *self.axes.shape(self.n, self.k, block_k)), dtype=dtype)

    def fit(self, param: torch.nn.Parameter, loaded: torch.Tensor, is_first: bool) -> bool:
        """Resizes ``param`` for what is loaded into it.

        Returns whether each rank loads all of its K, because a row is one block.

        Raises:
            CheckpointError: it has another dtype than its format, or than what was loaded before.
            UnsupportedProblem: blocks are not whole on each rank.
        """
        dtype = param.dtype if self.axes.dtype is None and not is_first else self.axes.dtype
        if dtype is not None and loaded.dtype != dtype:
            raise CheckpointError(
                f"{self.name} has dtype {loaded.dtype}, and {dtype} is expected: files of different exports; export it again"
            )
        if self.axes.k_values != BLOCK:
            return False
        blocks = loaded.shape[self.axes.k - 2]
        is_whole = blocks == 1 and self.k != self.all_k
        if not is_whole and blocks * self.k % self.all_k:
            raise UnsupportedProblem(
                f"{self.name} has {blocks} blocks along K = {self.all_k}, which ranks of {self.k} cut; use fewer ranks"
            )
        step = self.k if is_whole else max(self.all_k // max(blocks, 1), 1)
        made = self.zeros(step, loaded.dtype)
        if is_first:
            param.data = made.to(param.device)
        elif made.shape != param.shape:
            raise CheckpointError(
                f"{self.name} has blocks of {step} values, and other parts of the tensor have other blocks; export them alike"
            )
        return is_whole


class MatrixLoader:
    """Loads a matrix of a linear layer, part by part where vLLM merges several layers.

    Args:
        matrix: description of the matrix.
        loader: vLLM's loader.
        parts: number of parts.
    """

    def __init__(self, matrix: Matrix, loader: Any, parts: int):
        self.matrix, self.loader, self.parts = matrix, loader, parts
        self.seen: set[Any] = set()

    def __call__(self, param: Any, loaded: torch.Tensor, part: Any = None, *rest: Any, **options: Any) -> Any:
        """Loads one part; vLLM calls this."""
        if self.matrix.fit(param, loaded, not self.seen):
            param.tp_rank = 0  # K is sliced, so N is not
        self.seen.update(part if isinstance(part, tuple) else (part,))
        more = () if part is None else (part,)
        return self.loader(param, loaded, *more, *rest, **options)

    def is_complete(self) -> bool:
        """Whether files had all parts."""
        return None in self.seen or len(self.seen) >= self.parts


class ExpertsLoader:
    """Loads a matrix of all experts. ``loader`` is that of RoutedExperts, ``parts`` counts projections of all experts."""

    def __init__(self, matrix: Matrix, loader: Any, parts: int):
        self.matrix, self.loader, self.parts = matrix, loader, parts
        self.seen: set[Any] = set()
        self.has_all = False

    def __call__(
        self,
        param: Any,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        """Loads one expert's projection; vLLM calls this. No ``shard_id``: loads all experts, cut to the rank (gpt-oss)."""
        if shard_id is None:
            self.matrix.fit(param, loaded_weight, not self.seen)
            copy_leading(param, loaded_weight)
            self.seen.add(weight_name)
            self.has_all = True
            return True if return_success else None
        if self.matrix.fit(param, loaded_weight, not self.seen):
            param.quant_method = WHOLE
        arguments = (weight_name, shard_id, expert_id)
        is_done = bool(self.loader(param, loaded_weight, *arguments, return_success=True))
        self.seen.add((shard_id, expert_id) if is_done else None)  # None: it belongs to another rank
        self.has_all |= loaded_weight.ndim == 3
        return is_done if return_success else None

    def is_complete(self) -> bool:
        """Whether files had all experts of this rank."""
        return self.has_all or len(self.seen - {None}) >= self.parts


def copy_leading(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *rest: Any, **options: Any) -> None:
    """Loads a tensor into the first rows and columns of ``param``; the others pad the rank's share."""
    param.data[tuple(slice(size) for size in loaded_weight.shape)] = loaded_weight


class VectorLoader:
    """Loads numbers along K, of which a rank keeps its own, or a few numbers per part, into a parameter [parts, size]."""

    def __init__(self, name: str, rank: int):
        self.name, self.rank = name, rank
        self.seen: set[Any] = set()

    def __call__(
        self, param: Any, loaded: torch.Tensor, part: Any = None, *rest: Any, **options: Any
    ) -> None:
        """Loads the numbers of one part; vLLM calls this."""
        size = param.shape[1]
        own = loaded.reshape(-1)
        if own.numel() != size and own.numel() % size == 0:
            own = own[self.rank * size : (self.rank + 1) * size]
        if own.numel() != size:
            raise CheckpointError(
                f"{self.name} has shape {list(loaded.shape)}, and its layer has {size} on each rank: of different exports"
            )
        if param.dtype != own.dtype:
            param.data = param.data.to(own.dtype)
        parts = part if isinstance(part, tuple) else (part,)
        for one in parts:
            param.data[slice(None) if one is None else QKV.get(one, one)] = own
        self.seen.update(parts)


def vector(
    parts: int, size: int, value: float, dtype: torch.dtype, loader: VectorLoader
) -> torch.nn.Parameter:
    """Makes a parameter [parts, size] filled with ``value``, which a VectorLoader loads."""
    made = torch.nn.Parameter(torch.full((parts, size), value, dtype=dtype), requires_grad=False)
    set_weight_attrs(made, {"weight_loader": loader})
    return made


def check_complete(
    matrices: dict[str, Any], given: dict[str, torch.nn.Parameter], optional: set[str]
) -> set[str]:
    """Returns the roles among ``matrices`` that files had.

    Args:
        matrices: role -> MatrixLoader or ExpertsLoader.
        given: role -> parameter.
        optional: roles that may be missing.

    Raises:
        CheckpointError: a role or a part of it is missing.
    """
    if is_dummy():
        return set(matrices) - optional
    for role, loader in matrices.items():
        # A model may replace the loader of a tensor with its own.
        is_own = getattr(given[role], "weight_loader", None) is not loader
        if is_own or loader.is_complete() or (role in optional and not loader.seen):
            continue
        raise CheckpointError(
            f"{loader.matrix.name} is in no file of the checkpoint, or not all of its parts; a file is missing, or the layer is "
            "not quantized and the config does not say so"
        )
    return {
        r for r, one in matrices.items() if one.seen or getattr(given[r], "weight_loader", None) is not one
    }


def unknown_numbers(*shape: int) -> torch.Tensor:
    """Allocates float32 global scales filled with NaN, so that those missing from all files are noticed after loading."""
    return torch.full(shape, torch.nan, dtype=torch.float32)


def is_dummy() -> bool:
    """Returns whether vLLM loads no files."""
    return get_current_vllm_config().load_config.load_format == DUMMY


def make_up_dummies(*parameters: torch.Tensor | None) -> None:
    """Turns the random numbers that vLLM loads instead of files into positive scales; MXFP4's exponents become those of 1."""
    if is_dummy():
        for parameter in parameters:
            if parameter is not None and parameter.dtype == torch.uint8:
                parameter.data.fill_(UE8M0_ONE)
            elif parameter is not None:
                parameter.data.copy_(parameter.data.float().abs().clamp(min=2**-9))


def factors(name: str, stored: torch.Tensor, convention: Convention) -> torch.Tensor:
    """Returns global scales that multiply. Raises CheckpointError where one is missing, zero, negative or not finite."""
    check_factor(name, stored)
    return 1 / stored if convention.is_reciprocal else stored.clone()
