"""Kernels that must leave the same bits on the emulator and on a real sm_90a device, by name.

`PYTHONPATH=tests/support python -m probes.record OUT.npz` records the results of a device;
`tests/emulator/test_probes.py` compares the emulator with them.
"""

from probes import copies, scalar, threads
from probes.backends import Bound, Probe

OPERANDS, MANY, ALL_HALVES = 96, 4096, 1 << 16

PROBES: dict[str, Probe] = {
    **{name: scalar.group_probe(name, group, OPERANDS) for name, group in scalar.GROUPS.items()},
    **threads.PROBES,
    **copies.PROBES,
}

WIDE: dict[str, Probe] = {
    name: scalar.group_probe(name, group, ALL_HALVES if scalar.every_half in group.inputs.values() else MANY)
    for name, group in scalar.GROUPS.items()
}
"""The same with many operands: too much to record, compared while a device is there."""

BOUNDS: dict[str, dict[str, Bound]] = {
    name: {row: group.bounds.get(row, group.bound) for row in group.rows}
    for name, group in scalar.GROUPS.items()
    if group.bound
}
"""How far results may be off, by probe and label: approximations only."""
