"""What every process of the genuine harness passes through before it runs anything else."""

import importlib
from contextlib import ExitStack

# Closed when the process ends: the virtual GPU lasts as long as it.
_stack = ExitStack()


def activate(arch: str | None) -> None:
    """Provide what the harness's files expect; with ``arch``, a virtual GPU for this process.

    The memory that the harness writes to clear L2, up to 62.5 GiB, is not written on a virtual GPU.
    """
    provide_op_error()
    if arch is None:
        return
    from nvfp4_cute.competition.worker import emulated_process

    emulated_process(arch, _stack)
    try:
        utils = importlib.import_module("utils")  # of the harness: its folder is on the path
    except ImportError:
        return
    for name in ("clear_l2_cache", "clear_l2_cache_large"):
        setattr(utils, name, lambda: None)


def provide_op_error() -> None:
    """``cutlass.cute.nvgpu.common.OpError``, which CuTe DSL no longer has, as a class that nothing raises."""
    import cutlass.cute.nvgpu.common as common

    if not hasattr(common, "OpError"):
        common.OpError = type("OpError", (Exception,), {"__doc__": "Stands for a removed class."})
