"""The host's own floating-point arithmetic, as IEEE 754 has it, whatever a program or a library has made of it."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# glibc and musl, on every processor: the environment that a program starts with.
_FE_DFL_ENV = ctypes.c_void_p(-1)
_MAX_ENVIRONMENT_BYTES = 128
_libc = ctypes.CDLL(None)


@contextmanager
def ieee_floats() -> Iterator[None]:
    """Subnormal numbers are kept and results rounded to nearest inside the block, by this thread.

    ``torch.set_flush_denormal(True)`` turns subnormal numbers into zeros, and so does loading a library that was compiled with
    ``-ffast-math``. Kernels on a GPU do not ask the host, so neither the emulator nor the reference does.
    Torch's own threads keep what they began with: those that begin after ``set_flush_denormal(True)`` turn subnormal numbers into
    zeros here, too. ``torch.set_num_threads(1)`` leaves them out.
    """
    before = ctypes.create_string_buffer(_MAX_ENVIRONMENT_BYTES)
    _libc.fegetenv(before)
    _libc.fesetenv(_FE_DFL_ENV)
    try:
        yield
    finally:
        _libc.fesetenv(before)
