"""Compiles the kernels of all layers in other processes while vLLM loads weights, and loads them before vLLM serves.

vLLM's monitor reports, or refuses, compilations during a request. vLLM's registry of kernels to warm up calls
``Kernels.compile_many`` after all weights are loaded and before graphs are captured.
"""

import atexit
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config

from nvfp4_cute import backends, env
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.parallel import Compilers, default_jobs
from nvfp4_cute.errors import CacheError
from nvfp4_cute.models.vllm.graphs import kind_of
from nvfp4_cute.nn import prepare
from nvfp4_cute.terminal import Progress


class Kernels:
    """The kernels of this process's layers, with the interface of vLLM's registry (``jit_warmup.VllmJitKernel``)."""

    def __init__(self) -> None:
        self._kinds: set[Any] = set()
        self._keys: dict[Any, None] = {}
        self._compilers: Compilers | None = None

    def add_linear(
        self, layer: torch.nn.Module, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Adds the kernels of a linear layer that is called with rows [M, in_features] of ``dtype``."""
        most = _most_tokens()
        self._add(layer, device, lambda: prepare.linear_kernels(layer, in_features, most, dtype, device))

    def add_experts(
        self, layer: Any, hidden_size: int, top_k: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Adds the kernels of a layer's experts, of which each token chooses ``top_k``."""
        most = _most_tokens() * get_current_vllm_config().parallel_config.data_parallel_size
        sizes = hidden_size, layer.num_experts, top_k, most
        self._add(layer, device, lambda: prepare.expert_kernels(layer, *sizes, dtype, device))

    def get_warmup_keys(self) -> list[Any]:
        """Returns all keys, for vLLM's registry."""
        return list(self._keys)

    def compile_many(self, keys: Iterable[Any]) -> None:
        """Waits until the kernels are compiled, and loads them."""
        keys = list(keys)
        if self._compilers is None:
            return
        compilers, self._compilers = self._compilers, None
        for key, future in zip(
            keys, Progress(compilers.submit(keys), desc="kernels", unit="kernel"), strict=True
        ):
            folder: Path | None = compilers.folder
            try:
                future.result()
            except CacheError:  # compiled only for this process
                folder = None
            get_kernel(key, folder=folder)
        compilers.close()

    def _add(self, layer: torch.nn.Module, device: torch.device, keys_of: Callable[[], list[Any]]) -> None:
        if backends.resolve("auto", device) != "cuda":
            return
        kind = kind_of(layer)
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        new = [key for key in keys_of() if key not in self._keys]
        self._keys |= dict.fromkeys(new)
        if self._compilers is None:
            self._compilers = Compilers(env.cache_dir() or _temporary(), _jobs())
        self._compilers.submit(new)
        if not _register(self):
            self.compile_many(new)


KERNELS = Kernels()


def _register(kernels: Kernels) -> bool:
    """Returns whether vLLM will call ``compile_many``, which it does unless started with --enforce-eager."""
    if not getattr(get_current_vllm_config().kernel_config, "enable_jit_warmup", False):
        return False
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    if JitWarmupRegistry._active.get() is None:
        return False
    JitWarmupRegistry.register(kernels)
    return True


def _most_tokens() -> int:
    return get_current_vllm_config().scheduler_config.max_num_batched_tokens


def _jobs() -> int:
    """Returns the number of processes that compile for one rank of a host."""
    return max(default_jobs() // get_current_vllm_config().parallel_config.world_size, 1)


def _temporary() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="nvfp4_cute_")
    atexit.register(folder.cleanup)
    return Path(folder.name)
