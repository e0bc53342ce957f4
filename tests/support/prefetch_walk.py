"""Kernels of bench/probes/h200_prefetch_probe.cu as events of the timing model, with the cycles that an H200 took."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from nvfp4_cute.emulator.record.events import ClusterTrace, Event, LaunchTrace, Op
from nvfp4_cute.gpus.targets import H200
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.timing.replay import replay

MEASURED = Path(__file__).parents[2] / "bench/probes/h200_prefetch_probe.txt"
CONSTANTS = constants_of(replace(H200, name="H200 at its boost clock"))
"""Of the probe, which multiplies nothing: tensor cores at work slow the clock."""

SMS, STAGES, BOX_BYTES, K_TILES, LOADS = 132, 4, 16384, 64, 48
OTHERS_AT = 1 << 34
TURNS, SHARES, WORK = ("nobody", "in turn", "everybody"), (2, 4), (0, 300, 400, 500, 700)
DELAYS = (-1, 0, 250, 500, 1000, 1500, 2000, 3000, 5000)
WARMTH = ("warm", "cold")
ENGINES = ((4096, 1, False), (16384, 1, False), (32768, 1, False), (16384, SMS, False), (16384, SMS, True))
LOAD_CYCLES, PREFETCH_CYCLES = 365, 115
"""What the loop of `mixed` takes beside its instructions, divisions mostly: set from the lines of one SM whose L2 is warm."""

SPIN_CYCLES = 135
"""By how much a spin and its barriers take longer than asked: set from the walks with 700 cycles of work, which it bounds."""

Events = list[Event]
Cta = tuple[Events, list[Events]]
"""What a CTA does before its clock begins, and its warps from there on."""
Measurement = tuple[Any, ...]
"""CTAs, kernel, and its arguments."""


# ---- events ----------------------------------------------------------------------------------------------------------
def load(address: int, full: int, instruction: int = 0, nbytes: int = BOX_BYTES) -> Event:
    """Loads a box into a stage."""
    return (Op.LOAD, ((address, nbytes),), nbytes, (full,), (0,), 0, instruction)


def prefetch(address: int, nbytes: int = BOX_BYTES) -> Event:
    """Prefetches a box into L2."""
    return (Op.PREFETCH, ((address, nbytes),), nbytes, 0)


def spend(cycles: float) -> Event:
    """Spends cycles."""
    return (Op.COMPUTE, 0, 0, 0, cycles, 0)


def fetched(boxes: list[int], nbytes: int = BOX_BYTES) -> Events:
    """Prefetches boxes into L2 with long pauses in between."""
    return [event for box in boxes for event in (prefetch(box, nbytes), spend(4000))]


def strip(cta: int, count: int, at: int = 0, nbytes: int = BOX_BYTES) -> list[int]:
    """Addresses of a CTA's boxes."""
    return [at + (cta * count + i) * nbytes for i in range(count)]


def expect(full: int, nbytes: int = BOX_BYTES) -> Events:
    """The only arrival on a stage."""
    return [(Op.TX, full, nbytes), (Op.ARRIVE, full, 1)]


def in_ring(boxes: list[int]) -> Iterator[Events]:
    """For each box: waits until the stage's previous box is there, and loads the next one. At the end waits for all."""
    for i in range(len(boxes) + STAGES):
        full, rounds = i % STAGES, i // STAGES
        step: Events = [(Op.WAIT, full, rounds)] if rounds else []
        yield [*step, *expect(full), load(boxes[i], full)] if i < len(boxes) else step


def barriers(count: int) -> Events:
    """Initialises the barriers."""
    return [(Op.INIT, barrier, 1) for barrier in range(count)]


# ---- kernels ---------------------------------------------------------------------------------------------------------
def requests(cta: int, nbytes: int, is_cold: bool, what: str, count: int) -> Cta:
    """Loads the CTA's own boxes, then a small one that is in L2."""
    boxes, small = strip(cta, 8, nbytes=nbytes), load(OTHERS_AT, 0, instruction=8, nbytes=1024)
    before = barriers(2) + ([] if is_cold else fetched(boxes, nbytes))
    before += [*expect(0, 1024), small, (Op.WAIT, 0, 1), prefetch(boxes[0], nbytes)]
    events = expect(1, count * nbytes) if what == "loads" and count else []
    for i, box in enumerate(boxes[:count]):
        events.append(load(box, 1, i % 4, nbytes) if what == "loads" else prefetch(box, nbytes))
    return before, [[*events, *expect(0, 1024), small, (Op.WAIT, 0, 2)]]


def later(cta: int, nbytes: int, delay: int) -> Cta:
    """Loads a box ``delay`` cycles after its prefetch. A negative delay omits the prefetch."""
    box, other = strip(cta, 2, nbytes=nbytes)
    before = [*barriers(1), *expect(0, nbytes), load(other, 0, 1, nbytes), (Op.WAIT, 0, 1)]
    before += [prefetch(box, nbytes), spend(delay)] if delay >= 0 else []
    return before, [[*expect(0, nbytes), load(box, 0, 0, nbytes), (Op.WAIT, 0, 2)]]


def walk(cta: int, share: int, work: int, turns: str) -> Cta:
    """One warp loads and prefetches strips that CTAs share, and another one works ``work`` cycles for each K tile."""
    row, member = divmod(cta, share)
    copies: Events = [(Op.BARRIER, 0, 64, True)]
    compute: Events = [(Op.BARRIER, 0, 64, True)]
    for k in range(K_TILES):
        full, rounds = k % STAGES, k // STAGES
        if rounds:
            copies.append((Op.WAIT, STAGES + full, rounds))
        weights, tokens = (row * K_TILES + k) * BOX_BYTES, OTHERS_AT + (member * K_TILES + k) * BOX_BYTES
        copies += [*expect(full, 2 * BOX_BYTES), load(weights, full), load(tokens, full, 1)]
        ahead = k + STAGES
        if ahead < K_TILES and (turns == "everybody" or (turns == "in turn" and ahead % share == member)):
            copies.append(prefetch(weights + STAGES * BOX_BYTES))
        compute += [(Op.WAIT, full, rounds + 1), spend(work + SPIN_CYCLES), (Op.ARRIVE, STAGES + full, 1)]
    return barriers(2 * STAGES), [copies, compute]


def mixed(cta: int, is_cold: bool, extra: int) -> Cta:
    """Loads, with a prefetch of another strip at every second load."""
    count = LOADS if is_cold else STAGES
    loaded, others = strip(cta, count), strip(cta, count, at=OTHERS_AT)
    before = barriers(STAGES) + ([] if is_cold else fetched(loaded + others))
    events: Events = []
    fetches = 0
    for i, step in enumerate(in_ring([loaded[i % count] for i in range(LOADS)])):
        events += step
        if i < LOADS:
            events.append(spend(LOAD_CYCLES))
        for _ in range(extra if i < LOADS and i % 2 else 0):
            events += [spend(PREFETCH_CYCLES), prefetch(others[fetches % count])]
            fetches += 1
    return before, [events]


def burst(cta: int, count: int, is_prefetched: bool) -> Cta:
    """Prefetches boxes in a row, and loads them long after."""
    boxes = strip(cta, count)
    before = barriers(STAGES) + [prefetch(box) for box in boxes if is_prefetched] + [spend(100000)]
    return before, [[event for step in in_ring(boxes) for event in step]]


# ---- lines -----------------------------------------------------------------------------------------------------------
def busy(ctas: list[list[Events]]) -> float:
    """Mean cycles of CTAs that each have an SM."""
    clusters = [ClusterTrace((i, 0, 0), [warps]) for i, warps in enumerate(ctas)]
    return mean(filter(None, replay(CONSTANTS, LaunchTrace("probe", 1, clusters)).sm_busy))


def cycles(ctas: int, kernel: Callable[..., Cta], *arguments: object) -> float:
    """Modelled cycles from the start of the clock to the end of a CTA, the mean of all CTAs."""
    made = [kernel(cta, *arguments) for cta in range(ctas)]
    return busy([[before + warps[0], *warps[1:]] for before, warps in made]) - busy(
        [[before] for before, _ in made]
    )


def lines() -> Iterator[tuple[str, Measurement]]:
    """The probe's label for each of its measurements."""
    for nbytes, ctas, is_cold in product((4096, 8192, 16384, 32768), (1, SMS), (False, True)):
        for what, count in product(("loads", "prefetches"), (0, 4, 8)):
            words = f"{count} {what:10} of {nbytes:5} bytes, {ctas:3} CTAs, {WARMTH[is_cold]}"
            yield words, (ctas, requests, nbytes, is_cold, what, count)
    for nbytes, ctas, delay in product((4096, 16384), (1, SMS), DELAYS):
        words = f"box of {nbytes:5} bytes, {ctas:3} CTAs, {delay} cycles after its prefetch"
        yield words, (ctas, later, nbytes, delay)
    for share, work, turns in product(SHARES, WORK, TURNS):
        words = f"walk of {K_TILES} K tiles, {share} share weights, {work:3} cycles of work, prefetches by {turns:9}"
        yield words, (SMS, walk, share, work, turns)
    for ctas, is_cold, extra in product((1, SMS), (False, True), (0, 1, 2, 4)):
        words = f"{LOADS} loads of {BOX_BYTES} bytes and {extra * LOADS // 2:2} prefetches of as many, {ctas:3} CTAs"
        yield f"{words}, {WARMTH[is_cold]}", (ctas, mixed, is_cold, extra)
    for count, is_prefetched in product((4, 8, 12), (False, True)):
        words = (
            f"{count:2} boxes of {BOX_BYTES} bytes, {SMS} CTAs, 100000 cycles after their prefetch in a burst"
        )
        yield words + (not is_prefetched) * " that was left out", (SMS, burst, count, is_prefetched)


def measured() -> dict[str, float]:
    """Cycles of the H200 by the probe's labels."""
    split = (line.split(": ", 1) for line in MEASURED.read_text().splitlines())
    return {words: float(re.findall(r"[\d.]+", said.split(", latest")[0])[-1]) for words, said in split}
