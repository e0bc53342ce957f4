"""Runs one foreign kernel on the virtual GPU, in a process of its own: modelled times and compared results, as JSON lines.

    python -m nvfp4_cute.bench.foreign.run KERNEL TARGET < cells

Each line of the input is a cell, a tab and a tile, or the only line is a layer and a tab.
"""

import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign import layers, ours
from nvfp4_cute.bench.foreign import operands as operands_module
from nvfp4_cute.bench.foreign.cells import cells
from nvfp4_cute.bench.foreign.compare import compare
from nvfp4_cute.bench.foreign.kernels import FOREIGN, Prepared, Tile
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.emulator.fronts.script import emulation
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.emulator.record.representatives import NotAlike, choose
from nvfp4_cute.emulator.state import Launch
from nvfp4_cute.gpus.targets import Target, lookup
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.roofline.modelled import replayed_tiles
from nvfp4_cute.timing.clock import Clock
from nvfp4_cute.timing.replay import replay_chain

REASON_CHARACTERS = 300


class ModellingGpu(VirtualGpu):
    """A virtual GPU that models the launches of one kernel. If the work of its clusters is known, it executes only a few."""

    def __init__(self, target: Target):
        """Starts without an expected kernel."""
        self.constants = constants_of(target)
        super().__init__(target.arch, target.num_sms, timing=Clock(self.constants))
        self.machine.jobs = 1  # processes would copy the memory of all experts
        self.expected: Prepared | None = None
        self.modelled: list[float] = []

    def run(self, launch: Launch) -> None:
        """Runs a launch."""
        mine = self._is_expected(launch.code.entry.name)
        self.expect(self.expected.work if mine and self.expected is not None else None)
        super().run(launch)

    def recorded(self, trace: LaunchTrace) -> None:
        """Models the time of an expected launch."""
        if self._is_expected(trace.kernel):
            self.modelled.append(replay_chain(self.constants, [trace], explained=False).us)

    def _is_expected(self, kernel: str) -> bool:
        return self.expected is not None and re.search(self.expected.kernel, kernel) is not None


def measure(gpu: ModellingGpu, prepared: Prepared) -> dict[str, Any]:
    """Runs a call and returns its record."""
    began = time.monotonic()
    prepared.operands.out.fill_(torch.nan)
    gpu.expected, gpu.modelled = prepared, []
    prepared.run()
    if gpu.failed is not None:
        raise gpu.failed
    found = compare(prepared.operands, prepared.work)
    return {
        "us": sum(gpu.modelled),
        "launches": len(gpu.modelled),
        "executed_clusters": None if prepared.work is None else len(set(choose(prepared.work))),
        "clusters": None if prepared.work is None else len(prepared.work.clusters),
        "compared": found.compared,
        "differing": found.differing,
        "outside": found.outside,
        "seconds": round(time.monotonic() - began, 1),
    }


def record(
    gpu: ModellingGpu, kernel: str, case: Case, operands: GroupedOperands, tile: Tile, sms: int
) -> dict[str, Any]:
    """Returns the record of a kernel with a tile on a cell."""
    adapter = FOREIGN[kernel].load()
    prepared = adapter.prepare(case, operands, tile, sms)
    if prepared.work is not None:
        prepared = replace(prepared, work=replace(prepared.work, most_tiles=replayed_tiles(prepared.work)))
    try:
        return measure(gpu, prepared)
    except NotAlike:
        gpu.take_failure()
        return measure(gpu, replace(prepared, work=None))


def main() -> None:
    """Reads lines with a cell, a tab and a tile, and prints a record for each."""
    kernel, target = sys.argv[1], lookup(sys.argv[2])
    by_name = {str(case): case for case in cells()}
    lines = [line.rstrip("\n").split("\t") for line in sys.stdin]
    if found := {str(layer): layer for layer in layers.layers()}.get(lines[0][0]):
        say(found, "", attempt(None, layers.record, kernel, found, target))
        return
    wanted = [(by_name[cell], tile) for cell, tile in lines]
    if kernel == ours.NAME:
        for case, _, made in with_operands(wanted):
            say(case, "", attempt(None, ours.record, case, made, target))
        return
    adapter, gpu = FOREIGN[kernel].load(), ModellingGpu(target)
    with emulation(gpu):
        for case, name, made in with_operands(wanted, gpu):
            if reason := adapter.refuses(case):
                say(case, name, {"reason": reason})
                continue
            tile = next(tile for tile in adapter.tiles(case) if str(tile) == name)
            say(case, name, attempt(gpu, record, gpu, kernel, case, made, tile, target.num_sms))


def with_operands(
    wanted: Sequence[tuple[Case, str]], gpu: ModellingGpu | None = None
) -> Iterator[tuple[Case, str, GroupedOperands]]:
    """Yields cells and tiles with operands."""
    before, made = None, None
    for case, tile in wanted:
        if case != before:
            before, made = case, None  # frees the memory of the last cell first
            made = operands_module.make(case, gpu)
        yield case, tile, made


def attempt(gpu: ModellingGpu | None, work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Returns a record, or the error that prevented it."""
    try:
        return work(*args)
    except Exception as raised:  # packages raise errors of their own
        error = (gpu and gpu.take_failure()) or raised
        traceback.print_exception(error)
        return {"reason": f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]}


def say(case: Case | layers.Layer, tile: str, found: dict[str, Any]) -> None:
    """Prints a record."""
    print(json.dumps({"cell": str(case), "tile": tile, **found}), flush=True)


if __name__ == "__main__":
    main()
