"""Copies, barriers, atomics, arithmetic and conversions return the same bits as hardware, as recorded on an NVIDIA H200."""

from pathlib import Path

import numpy as np
import pytest
from probes import BOUNDS, PROBES
from probes.backends import Device, Emulated, mismatches, unpack

RECORDED = Path(__file__).with_name("probes_sm_90a.npz")
"""Written by probes.record."""


@pytest.mark.parametrize("name", PROBES)
def test_recorded(name):
    backend = Emulated()
    results = PROBES[name](backend)
    with np.load(RECORDED) as recorded:
        assert backend.fingerprint() == str(recorded[f"{name} fingerprint"]), (
            "inputs changed: record them again"
        )
        expected = unpack(recorded[name], like=results)
    assert mismatches(results, expected, BOUNDS.get(name)) == []


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("name", PROBES)
def test_live(name):
    expected = PROBES[name](Device())
    assert mismatches(PROBES[name](Emulated()), expected, BOUNDS.get(name)) == []
