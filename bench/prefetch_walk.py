"""What the timing model says of the walks that h200_prefetch_probe.cu measures: CTAs that share weights and prefetch them.

``python -m nvfp4_cute.bench.prefetch_walk`` prints its lines in the words of results/h200_prefetch_probe.txt (seconds, no GPU).
"""

from nvfp4_cute.emulator.timing import replay
from nvfp4_cute.emulator.timing_events import ClusterTrace, Event, LaunchTrace, Op
from nvfp4_cute.targets import H200
from nvfp4_cute.timing_constants import constants_of

K_TILES, STAGES, BOX_BYTES, SMS = 64, 4, 16384, 132
TOKENS_AT = 1 << 34
TURNS = ("nobody", "in turn", "everybody")


def walk(cta: int, share: int, work: int, turns: str) -> ClusterTrace:
    """One CTA: a warp that loads and prefetches, and one that takes ``work`` cycles for each K tile."""
    strip, member = divmod(cta, share)
    load: list[Event] = [(Op.INIT, barrier, 1) for barrier in range(2 * STAGES)]
    load.append((Op.BARRIER, 0, 64, True))
    compute: list[Event] = [(Op.BARRIER, 0, 64, True)]
    for k in range(K_TILES):
        full, rounds = k % STAGES, k // STAGES
        if rounds:
            load.append((Op.WAIT, STAGES + full, rounds))
        load += [(Op.TX, full, 2 * BOX_BYTES), (Op.ARRIVE, full, 1)]
        weights, tokens = (strip * K_TILES + k) * BOX_BYTES, TOKENS_AT + (member * K_TILES + k) * BOX_BYTES
        for instruction, piece in enumerate((weights, tokens)):
            load.append((Op.LOAD, ((piece, BOX_BYTES),), BOX_BYTES, (full,), (0,), 0, instruction))
        ahead = k + STAGES
        if ahead < K_TILES and (turns == "everybody" or (turns == "in turn" and ahead % share == member)):
            load.append((Op.PREFETCH, ((weights + STAGES * BOX_BYTES, BOX_BYTES),), BOX_BYTES, 0))
        compute += [
            (Op.WAIT, full, rounds + 1),
            (Op.COMPUTE, 0, 0, 0, work, 0),
            (Op.ARRIVE, STAGES + full, 1),
        ]
    return ClusterTrace((cta, 0, 0), [[load, compute]])


def main() -> None:
    """Print a line a walk."""
    constants = constants_of(H200)
    for share in (2, 4):
        for work in (0, 300, 400, 500, 700):
            for turns in TURNS:
                clusters = [walk(cta, share, work, turns) for cta in range(SMS)]
                cycles = replay(constants, LaunchTrace("walk", 1, clusters)).cycles - constants.launch
                print(
                    f"walk of {K_TILES} K tiles, {share} share weights, {work:3} cycles of work, prefetches by {turns:9}: "
                    f"{cycles:6.0f} modelled"
                )


if __name__ == "__main__":
    main()
