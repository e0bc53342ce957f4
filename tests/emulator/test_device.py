"""The emulator returns the same bits as hardware: as recorded on an NVIDIA H200, and live on a present sm_90a device."""

from pathlib import Path

import numpy as np
import pytest
from matrix_cases import device_cases

CASES = device_cases()
RECORDED = Path(__file__).with_name("sm_90a.npz")
"""Written by tests/support/record_device.py."""


@pytest.mark.parametrize("name", CASES)
def test_recorded(name):
    case = CASES[name]()
    with np.load(RECORDED) as recorded:
        assert case.fingerprint() == str(recorded[f"{name} fingerprint"]), "inputs changed: record them again"
        np.testing.assert_array_equal(case.emulate(), recorded[name])


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("name", CASES)
def test_live(name):
    case = CASES[name]()
    np.testing.assert_array_equal(case.emulate(), case.on_device())
