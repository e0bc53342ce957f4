"""The host's floating-point arithmetic with IEEE 754 defaults, whatever a program or a library has changed."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# glibc and musl, on every processor: the floating-point environment at program start.
_FE_DFL_ENV = ctypes.c_void_p(-1)
_MAX_ENVIRONMENT_BYTES = 128
_libc = ctypes.CDLL(None)


@contextmanager
def ieee_floats() -> Iterator[None]:
    """Context manager in which this thread keeps subnormal numbers and rounds to nearest.

    ``torch.set_flush_denormal(True)`` turns subnormal numbers into zeros, and so does loading a library that was
    compiled with ``-ffast-math``. Kernels on a GPU do not depend on the host's settings, so neither do the emulator and
    the reference. Torch's worker threads keep their initial settings: threads that start after
    ``set_flush_denormal(True)`` flush subnormal numbers here as well. ``torch.set_num_threads(1)`` avoids them.
    """
    before = ctypes.create_string_buffer(_MAX_ENVIRONMENT_BYTES)
    _libc.fegetenv(before)
    _libc.fesetenv(_FE_DFL_ENV)
    try:
        yield
    finally:
        _libc.fesetenv(before)
