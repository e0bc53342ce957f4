"""Records the probes' results on a real sm_90a device, and compares the emulator with them.

Usage: PYTHONPATH=tests/support python -m probes.record OUT.npz [PROBE ...]. Prints differences.
"""

import multiprocessing
import sys

import numpy as np

from probes import BOUNDS, PROBES, WIDE
from probes.backends import Device, Emulated, mismatches, pack

SECONDS = 120
"""How long one probe may take."""


def record(name: str) -> tuple[np.ndarray, str, list[str]]:
    """Packed results of a probe on the device, its fingerprint, and a line for each difference to the emulator."""
    device, emulated = Device(), Emulated()
    results, fingerprint = PROBES[name](device), device.fingerprint()
    lines = mismatches(PROBES[name](emulated), results, BOUNDS.get(name))
    if fingerprint != emulated.fingerprint():
        lines.append("fingerprints differ")
    if name in WIDE:
        wide = mismatches(WIDE[name](emulated), WIDE[name](device), BOUNDS.get(name))
        lines += [f"many operands: {line}" for line in wide]
    return pack(results), fingerprint, lines


def main(path: str, names: list[str]) -> None:
    recorded: dict[str, np.ndarray] = {}
    # Each probe has its own process, because a kernel that faults makes the CUDA context unusable.
    with multiprocessing.get_context("fork").Pool(14, maxtasksperchild=1) as pool:
        jobs = {name: pool.apply_async(record, (name,)) for name in names or PROBES}
        for name, job in jobs.items():
            try:
                data, fingerprint, lines = job.get(SECONDS)
            except Exception as error:
                print(f"{name}: {type(error).__name__} {error}", flush=True)
                continue
            print(f"{name}: {len(lines)} differences", *lines, sep="\n  ", flush=True)
            recorded[name], recorded[f"{name} fingerprint"] = data, np.array(fingerprint)
    np.savez_compressed(path, **recorded)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
