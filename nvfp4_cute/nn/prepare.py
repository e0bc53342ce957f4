"""Kernels of a layer compiled and loaded before its first call: all that any number of rows may take.

A layer is called with every representative number of rows while nothing is launched (``compile.cache.planning``). Several
processes compile what it asks for.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nvfp4_cute.compile.cache import planning
from nvfp4_cute.compile.parallel import load_all
from nvfp4_cute.planning.rows import representative_rows

MAX_ROWS = 8192
"""Rows of a call that layers prepare for by default."""


def kernels_of(call: Callable[[int], Any], rows: Iterable[int]) -> list[Any]:
    """Keys of all kernels that ``call(n)`` takes for the numbers of rows ``n``. Nothing is launched or compiled."""
    with torch.no_grad(), planning() as asked:
        for n in rows:
            call(n)
    return list(asked)


def linear_kernels(
    layer: Callable[[torch.Tensor], Any], in_features: int, max_rows: int, dtype: torch.dtype, device: Any
) -> list[Any]:
    """Keys of the kernels of a linear layer.

    Args:
        layer: called with [rows, in_features] of ``dtype`` on ``device``. max_rows: the most rows of a call.
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
    """Keys of the kernels of a layer of experts.

    Args:
        layer: called with tokens [T, hidden_size] of ``dtype`` on ``device``, and int32 ids and float32 weights [T, top_k].
        max_tokens: the most tokens of a call.
    """

    def call(n: int) -> None:
        ids = torch.zeros((n, top_k), dtype=torch.int32, device=device)
        layer(torch.empty((n, hidden_size), dtype=dtype, device=device), ids, torch.ones_like(ids).float())

    return kernels_of(call, tokens_of(num_experts, top_k, max_tokens))


def tokens_of(num_experts: int, top_k: int, max_tokens: int) -> Iterator[int]:
    """Representative numbers of tokens: kernels are chosen by tokens, by choices in all, and by rows per expert."""
    return representative_rows(
        max_tokens, lambda n: n, lambda n: n * top_k, lambda n: -(-n * top_k // num_experts)
    )


def load(keys: Iterable[Any], device: torch.device, jobs: int | None = None) -> int:
    """Compile what is in no cache by several processes, and load all of it for layers on ``device``.

    Returns:
        How many kernels this process did not have.
    """
    return load_all(keys, for_emulator=device.type != "cuda", jobs=jobs)
