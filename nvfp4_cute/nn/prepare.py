"""Compiles and loads the kernels of a layer before its first call, for any number of rows.

The layer is called with representative numbers of rows while launches are disabled (``compile.cache.planning``). Several
processes then compile the kernels that these calls asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nvfp4_cute.compile.cache import planning
from nvfp4_cute.compile.parallel import load_all
from nvfp4_cute.planning.rows import representative_rows

MAX_ROWS = 8192
"""Default for the largest number of rows per call."""


def kernels_of(call: Callable[[int], Any], rows: Iterable[int]) -> list[Any]:
    """Returns the keys of all kernels that ``call(n)`` needs for each n of ``rows``, without a launch or a compilation."""
    with torch.no_grad(), planning() as asked:
        for n in rows:
            call(n)
    return list(asked)


def linear_kernels(
    layer: Callable[[torch.Tensor], Any], in_features: int, max_rows: int, dtype: torch.dtype, device: Any
) -> list[Any]:
    """Returns the keys of the kernels of a linear layer.

    Args:
        layer: called with [rows, in_features] of ``dtype`` on ``device``.
        in_features: K.
        max_rows: largest number of rows per call.
        dtype, device: dtype and device of the rows.
    """
    call = lambda n: layer(torch.empty((n, in_features), dtype=dtype, device=device))
    return kernels_of(call, representative_rows(max_rows))


def expert_kernels(
    layer: Callable[..., Any],
    hidden_size: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: Any,
) -> list[Any]:
    """Returns the keys of the kernels of a layer of experts.

    Args:
        layer: called with tokens [T, hidden_size] of ``dtype`` on ``device``, and int32 ids and float32 weights [T, top_k].
        hidden_size, num_experts, top_k: sizes of the layer.
        max_tokens: largest number of tokens per call.
        dtype, device: dtype and device of the tokens.
    """

    def call(n: int) -> None:
        ids = torch.zeros((n, top_k), dtype=torch.int32, device=device)
        layer(torch.empty((n, hidden_size), dtype=dtype, device=device), ids, torch.ones_like(ids).float())

    return kernels_of(call, tokens_of(num_experts, top_k, max_tokens))


def tokens_of(num_experts: int, top_k: int, max_tokens: int) -> Iterator[int]:
    """Returns representative numbers of tokens. Kernels depend on tokens, on tokens times experts, and on rows per expert."""
    return representative_rows(
        max_tokens, lambda n: n, lambda n: n * top_k, lambda n: -(-n * top_k // num_experts)
    )


def load(keys: Iterable[Any], device: torch.device, jobs: int | None = None) -> int:
    """Compiles kernels that are in no cache in several processes, and loads all of them for layers on ``device``.

    Returns:
        The number of kernels that this process did not have.
    """
    return load_all(keys, for_emulator=device.type != "cuda", jobs=jobs)
