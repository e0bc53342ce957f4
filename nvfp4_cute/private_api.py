"""Undocumented interfaces of torch and of CuTe DSL that this package uses, each under a name of ours.

``tests/test_private_api.py`` checks that the installed versions have all of them, with the required parameters. The fronts of
the emulator, which replace torch, CUDA and the DSL, have their own list. Names are looked up in each call, because a front may
have replaced torch's.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd import forward_ad

from nvfp4_cute import env
from nvfp4_cute.custom_ops import of_thread
from nvfp4_cute.errors import UnsupportedProblem

TensorGuards: Any
try:
    # Signature (*, dynamic_dims_sizes, dynamic_dims_strides): torch.compile's comparison of tensors; check(*tensors) -> bool.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None


def is_traced() -> bool:
    """Returns whether torch records the call, and so sees custom ops but no launches: compile, export, make_fx, dispatch modes.

    Returns False if torch records a custom op while the op itself runs on real tensors, as in ``torch.export.draft_export``.
    Raises UnsupportedProblem inside torch.func's transforms, forward_ad.dual_level and torch.jit.trace, which see neither.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_dynamo_compiling() or not of_thread.runs_op
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedProblem(
            "kernels have no rule for torch.vmap, nor for grad, jvp and functionalize of torch.func: call outside of the "
            "transform; many matrices of one shape are a batch of gemm, and others the groups of grouped_gemm"
        )
    if forward_ad._current_level >= 0:
        raise UnsupportedProblem(
            "kernels have no forward-mode derivative: call outside of torch.autograd.forward_ad.dual_level"
        )
    if torch._C._get_tracing_state() is not None:
        raise UnsupportedProblem(
            "torch.jit.trace does not record kernels: use torch.compile, or torch.export of a whole module"
        )
    return torch._C._len_torch_dispatch_stack() > 0 and not of_thread.runs_op


def current_stream(device_index: int) -> int:
    """Returns the handle ``torch.cuda.current_stream(index).cuda_stream`` without making a Stream."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def capture_id(stream: int) -> int | None:
    """Returns the number of the capture that a stream is part of, unique in the process; None if it is unknown."""
    from cuda.bindings import driver

    error, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    return None if int(error) else int(number)


def current_device() -> int:
    """Returns the index of the current device without the checks of ``torch.cuda.current_device``."""
    return torch._C._cuda_getDevice()


def outside_of_pools(device_index: int, make: Callable[[], Any]) -> Any:
    """Returns ``make()`` of another thread on the current stream, so that it allocates from torch's common pool.

    What this thread allocates may be routed to a pool that ends before the memory does: inside ``torch.cuda.use_mem_pool``, and
    in the first runs of ``torch.compile(mode="reduce-overhead")``, which refuse what is left in theirs.
    """
    stream = torch.cuda.current_stream(device_index)

    def on_stream() -> Any:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_stream).result()


def spin(cycles: int) -> None:
    """Enqueues a kernel that spins for ``cycles`` cycles."""
    torch.cuda._sleep(cycles)


def symmetric_memory(nbytes: int, device: torch.device, group: Any) -> tuple[list[torch.Tensor], Any]:
    """Allocates uint8 [nbytes] per rank on its GPU, maps them all into this process, and returns them with their owner.

    Uses peer pointers of the "CUDA" backend; NVLink multicast stays off. All ranks make this call. Raises RuntimeError if a GPU
    cannot be reached.
    """
    import torch.distributed._symmetric_memory as symmetric

    env.disable_multicast()
    backend_of = getattr(symmetric, "get_backend", None)
    if backend_of is not None and backend_of(device) != "CUDA":
        symmetric.set_backend("CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later versions of torch do this themselves
        symmetric.enable_symm_mem_for_group(group.group_name)
    own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group.group_name)
    buffers = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(handle.world_size)]
    if any(buffer.device != device for buffer in buffers):
        raise RuntimeError(f"buffers of ranks are on {[str(buffer.device) for buffer in buffers]}")
    return buffers, (own, handle)


def has_torch_kernel(name: str, key: str) -> bool:
    """Returns whether torch's operator ``aten::name`` has a kernel for a dispatch key, such as "CUDA"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def dsl_settings() -> Any:
    """Returns the settings that CuTe DSL read from its environment; ``arch`` is its idea of this machine's GPU."""
    from cutlass.cutlass_dsl import CuTeDSL

    return CuTeDSL._get_dsl().envar


def dsl_runtime_libraries() -> list[str]:
    """Returns the paths of the libraries that CuTe DSL's host code calls."""
    from cutlass.cutlass_dsl import CuTeDSL

    return CuTeDSL._get_dsl().get_shared_libs()


def dump_folder(folder: str) -> Any:
    """Returns the option of ``cute.compile`` for the folder of kept files."""
    from cutlass.base_dsl.compiler import DumpDir

    return DumpDir(folder)


def dsl_archs() -> set[str]:
    """Returns the names of the architectures that CuTe DSL knows."""
    from cutlass.base_dsl.enums import Arch

    return {arch.name for arch in Arch}
