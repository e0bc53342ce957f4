"""The host's handling of subnormal numbers and its rounding mode change no bit of the emulator or the reference."""

import ctypes

import numpy as np
import pytest
import torch

from nvfp4_cute import dequantize, gemm, quantize
from nvfp4_cute.backends.host_floats import ieee_floats

TINY = torch.linspace(1e-39, 9e-39, 64).view(2, 32)
ONES, ALPHA = quantize(torch.ones(4, 32)), torch.tensor([1e-40])
SMALL = quantize(TINY, global_scale=1.2e-38)
FE_DOWNWARD = 0x400 if np.finfo(np.longdouble).nmant == 63 else 0x800000  # of x86, else of 64-bit Arm


@pytest.fixture(params=["flushed", "rounded down"])
def changed(request):
    libc = ctypes.CDLL(None)
    rounding = libc.fegetround()
    if request.param == "flushed" and not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    if request.param == "rounded down":
        libc.fesetround(FE_DOWNWARD)
    yield request.param
    torch.set_flush_denormal(False)
    libc.fesetround(rounding)


CALLS = {
    "quantize": lambda backend: quantize(TINY, global_scale=1.2e-38, backend=backend).data,
    "quantize of 16 bits": lambda backend: (
        quantize(TINY.bfloat16(), global_scale=1.2e-38, backend=backend).data
    ),
    "dequantize": lambda backend: dequantize(SMALL, backend=backend),
    "gemm": lambda backend: gemm(ONES, ONES, alpha=ALPHA, out_dtype=torch.float32, backend=backend),
}
EXPECTED = {name: call("reference").view(torch.uint8) for name, call in CALLS.items()}


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("name", CALLS)
def test_no_bit_depends_on_the_host(name, backend, changed):
    assert EXPECTED[name].any()
    assert torch.equal(CALLS[name](backend).view(torch.uint8), EXPECTED[name])


def test_the_host_is_left_as_it_was(changed):
    def results():
        tiny, third = np.float32(1e-39), np.float32(1) / np.float32(3)
        return (tiny * np.float32(1)).tobytes(), third.tobytes()

    before = results()
    with ieee_floats():
        within = results()
    assert results() == before != within
