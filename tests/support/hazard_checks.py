"""Runs small kernels under the checker, and tests what it reports about a piece of PTX."""

import re

import numpy as np
import pytest
import small_kernels as small

from nvfp4_cute.emulator.check.ledger import HazardError
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.machine import Machine

MODES = ("eager", "lazy", "random:3")
WORDS = np.arange(1, 1025, dtype=np.uint32)
OPERANDS = np.ones((small.A_BYTES + small.B_BYTES) // 2, np.float16)


def run(body, *, src=WORDS, words=2048, block=64, target="sm_100a", **launch):
    """Outputs of a checked launch."""
    out = np.zeros(words, np.uint32)
    ptx = small.kernel(body, target)
    run_ptx(ptx, None, block=block, args=[src, out], smem_bytes=32768, check=True, **launch)
    return out


def hazards(body, **kwargs):
    with pytest.raises(HazardError) as error:
        run(body, **kwargs)
    return error.value.hazards


def remarks(body, *, src=WORDS, mode="eager", block=64, grid=1):
    """Returns (severity, kind, text) of each warning and note of a launch without errors."""
    machine = Machine(148, mode=mode, check=True)
    out = np.zeros(2048, np.uint32)
    run_ptx(small.kernel(body), None, grid, block, [src, out], smem_bytes=32768, machine=machine)
    return [(h.severity, h.kind, h.text) for h in machine.checker.hazards]


def assert_found(body, kind, text, *, modes=MODES, **kwargs):
    """Checks that every mode reports a hazard of this kind with a matching text."""
    for mode in modes:
        found = hazards(body, mode=mode, **kwargs)
        matching = [h for h in found if h.kind == kind and re.search(text, h.text)]
        assert matching, f"{mode}: no {kind} with {text!r} in\n" + "\n".join(map(str, found))


def assert_clean(body, *, modes=MODES, **kwargs):
    results = [run(body, mode=mode, **kwargs) for mode in modes]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
