"""Parameters of a layer while vLLM loads it, under the names that the checkpoint's tool gives its tensors."""

import torch
from vllm.config import get_current_vllm_config

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.models.checkpoints.checks import check_factor
from nvfp4_cute.models.checkpoints.convention import Convention

DUMMY = "dummy"  # the load format of vLLM that fills parameters with random numbers


def matrices(rows: tuple[int, ...], k: int, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for NVFP4 weights and their block scales.

    Args:
        rows: (..., N). k: of this rank. what: the layer, for messages.

    Returns:
        uint8 [..., N, K/2] and float8_e4m3fn [..., N, K/16], of zeros.

    Raises:
        UnsupportedProblem: the rank's part of K is no whole number of blocks.
    """
    if k % NVFP4.block_k:
        raise UnsupportedProblem(
            f"{what} has {k} input features on each rank, and blocks of {NVFP4.block_k} are not cut; use fewer ranks"
        )
    data = torch.zeros((*rows, NVFP4.row_bytes(k)), dtype=torch.uint8)
    scale = torch.zeros((*rows, NVFP4.num_k_blocks(k)), dtype=torch.uint8)
    return data, scale.view(torch.float8_e4m3fn)


def unknown_numbers(*shape: int) -> torch.Tensor:
    """Room for global scales, float32, of NaN: what no file has is seen after loading."""
    return torch.full(shape, torch.nan, dtype=torch.float32)


def make_up_dummies(*parameters: torch.Tensor | None) -> None:
    """Where vLLM loads no files but random numbers, make scales of them: positive ones."""
    if get_current_vllm_config().load_config.load_format == DUMMY:
        for parameter in parameters:
            if parameter is not None:
                parameter.data.copy_(parameter.data.float().abs().clamp(min=2**-9))


def factors(name: str, stored: torch.Tensor, convention: Convention) -> torch.Tensor:
    """Global scales that multiply. Raises CheckpointError where one is missing, zero, negative or not finite."""
    check_factor(name, stored)
    return 1 / stored if convention.is_reciprocal else stored.clone()
