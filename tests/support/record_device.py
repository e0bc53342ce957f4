"""Records the results of matrix_cases.device_cases() on a real sm_90a device.

Usage: python tests/support/record_device.py OUT.npz. The file holds, for each case, the bits of D and a fingerprint of
the kernel and its inputs; tests/emulator/test_device.py compares the emulator with it.
"""

import sys

import numpy as np
from matrix_cases import device_cases


def main(path: str) -> None:
    recorded: dict[str, np.ndarray] = {}
    for name, make in device_cases().items():
        case = make()
        bits = case.on_device()
        print(f"{name}: {bits.shape[0]} x {bits.shape[1]}", flush=True)
        recorded[name] = bits.astype(np.uint16) if bits.max() < 1 << 16 else bits
        recorded[f"{name} fingerprint"] = np.array(case.fingerprint())
    np.savez_compressed(path, **recorded)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1])
