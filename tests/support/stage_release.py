"""Checks in machine code that no read of a stage is under way when the stage is released.

An instruction that reads shared memory or tensor memory is done when its *scoreboard* is: it raises one of six
counters, and an instruction that needs its values names the counter in its wait mask. An arrival on an mbarrier needs
no values. Without a wait in between, the arrival may overtake the read, and TMA may fill the stage before the read has
its words, which was observed on an H200. The order in PTX does not prevent this: ptxas moves arithmetic, MMAs and
shuffles after an arrival that follows them in PTX.

Encoding, as ``nvdisasm -hex`` prints it from sm_90 to sm_120: an instruction has 128 bits, with the opcode in bits
0..11. Bits 105..125 are stall cycles (4), yield (1), the scoreboard that the result raises (3, 7 for none), the one
that reading the operands raises (3), and the mask of scoreboards to wait for (6). Fences do not count as waits here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from nvfp4_cute.emulator.cubin import read_branch_targets, read_instructions

READS = {0x984: "LDS", 0x83B: "LDSM", 0x9EE: "LDTM"}
SYNCS_EXCH, SYNCS_PHASECHK, SYNCS_ARRIVE = 0x5B2, 0x5A7, 0x9A7
"""mbarrier.init, .try_wait and .test_wait, .arrive."""

BRANCH, UNIFORM_BRANCH, INDIRECT_BRANCH = 0x947, 0x547, 0x949
EXIT, RET = 0x94D, 0x950
ALWAYS = 7
"""Number of the predicate that is true."""

NO_SCOREBOARD = 7
UNKNOWN = 0
"""Offset of a SYNCS whose whole address is in a register: a barrier of another CTA."""

MOST_HELD = 3
"""Stages that a warp is followed holding at a time; kernels hold two."""


@dataclass(frozen=True)
class Read:
    """A read that may be under way: its place, its scoreboard, and the number of stages acquired after the one that it reads."""

    at: int
    scoreboard: int
    age: int = 0


@dataclass(frozen=True)
class Path:
    """Possible state of a warp at an instruction.

    Attributes:
        held: stages of the ring that it acquired and has not released.
        fresh: whether it acquired a stage and has not read from it.
        reading: whether its last wait was for this ring, so that its reads are of the ring's stages.
    """

    held: int = 0
    fresh: bool = False
    reading: bool = False


@dataclass(frozen=True)
class Finding:
    """An arrival and the reads that may be under way there, as byte offsets in the kernel's code."""

    arrival: int
    reads: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        """Describes the finding in words."""
        reads = ", ".join(f"{name} at {at:#x}" for at, name in self.reads)
        return f"SYNCS.ARRIVE at {self.arrival:#x} does not wait for {reads}"


@dataclass(frozen=True)
class RingOffsets:
    """Offsets of a ring's barriers in shared memory. `empty` is None if arrivals use addresses of other CTAs."""

    full: range
    empty: range | None

    def releases(self, offset: int) -> bool:
        """Whether an arrival at this offset may release a stage."""
        return offset == UNKNOWN if self.empty is None else offset in self.empty


def field(word: int, low: int, count: int) -> int:
    """Extracts bits of an instruction."""
    return word >> low & (1 << count) - 1


def offset_of(word: int) -> int:
    """Immediate offset of the address of a SYNCS instruction."""
    return field(word, 40, 24)


def unfinished_reads(cubin: bytes, stage_counts: Sequence[int] = (), kernel: str = "") -> list[Finding]:
    """Finds arrivals that may overtake reads of the stage that they release.

    Args:
        cubin: machine code with exactly one kernel whose name begins with ``kernel``.
        stage_counts: stages of rings from the first barrier on. Full barriers of a ring precede its empty barriers in
            shared memory. Each contiguous range of the remaining barriers is a ring. A read belongs to the ring that
            the warp last waited for, and stages are released in the order in which they were acquired. Without counts,
            any arrival may release what any read reads.

    Raises:
        ValueError: the kernel's barriers do not match ``stage_counts``.
    """
    code = Code(cubin, kernel)
    if not stage_counts:
        return code.findings(None)
    rings = code.rings(stage_counts)
    return [f for ring in rings for f in code.findings(ring, [other for other in rings if other is not ring])]


class Code:
    """A kernel's instructions, and the possible successors of each."""

    def __init__(self, cubin: bytes, kernel: str):
        """Decodes the only kernel in ``cubin`` whose name begins with ``kernel``."""
        self.words = read_instructions(cubin, kernel)
        self.targets = read_branch_targets(cubin, kernel)
        self.successors = [
            [s for s in self._successors(at) if s < len(self.words)] for at in range(len(self.words))
        ]

    def _successors(self, at: int) -> list[int]:
        word = self.words[at]
        opcode, conditional = field(word, 0, 12), field(word, 12, 3) != ALWAYS
        if opcode in (BRANCH, UNIFORM_BRANCH):
            distance = field(word, 34, 48) << 8 | field(word, 16, 8)  # in words of 4 bytes
            distance -= field(word, 81, 1) << 56
            conditional |= opcode == UNIFORM_BRANCH or field(word, 87, 3) != ALWAYS
            return [at + 1 + distance // 4, *([at + 1] if conditional else [])]
        if opcode == INDIRECT_BRANCH:
            return [target // 16 for target in self.targets[16 * at]]
        return [at + 1] if conditional or opcode not in (EXIT, RET) else []

    def _offsets(self, opcode: int) -> set[int]:
        return {offset_of(word) for word in self.words if field(word, 0, 12) == opcode}

    def rings(self, stage_counts: Sequence[int]) -> list[RingOffsets]:
        """Returns rings with these stage counts, from the lowest barrier on, and rings of the remaining barriers."""
        barriers, arrivals = sorted(self._offsets(SYNCS_EXCH)), self._offsets(SYNCS_ARRIVE)
        if (
            len(barriers) % 2
        ):  # nobody waits for the barrier after these rings, so an arrival on it releases nothing
            del barriers[2 * sum(stage_counts)]
        left = barriers[2 * sum(stage_counts) :]
        ends = [i for i in range(1, len(left) + 1) if i == len(left) or left[i] != left[i - 1] + 8]
        found = []
        for count in (*stage_counts, *((end - first) // 2 for first, end in pairwise([0, *ends]))):
            own, barriers = barriers[: 2 * count], barriers[2 * count :]
            if own != [own[0] + 8 * i for i in range(2 * count)]:
                raise ValueError(f"no ring of {count} stages has its barriers at {own}")
            full, empty = range(own[0], own[count]), range(own[count], own[-1] + 8)
            found.append(RingOffsets(full, empty if any(a in empty for a in arrivals) else None))
        return found

    def findings(self, ring: RingOffsets | None, others: Sequence[RingOffsets] = ()) -> list[Finding]:
        """Returns arrivals that may overtake reads of the ring's stages; without a ring, any arrivals and any reads."""
        states: list[dict[Path, frozenset[Read]]] = [{} for _ in self.words]
        states[0][Path()] = frozenset()
        work, found = [(0, Path())], {}
        while work:
            at, path = work.pop()
            behind, reads, late = self._step(at, path, states[at][path], ring, others)
            if late:
                found.setdefault(at, set()).update(late)
            for successor in self.successors[at]:
                known = states[successor].get(behind)
                if known is None or not reads <= known:
                    states[successor][behind] = reads | (known or frozenset())
                    work.append((successor, behind))
        return [
            Finding(
                16 * at, tuple(sorted({(16 * r.at, READS[field(self.words[r.at], 0, 12)]) for r in late}))
            )
            for at, late in sorted(found.items())
        ]

    def _step(
        self,
        at: int,
        path: Path,
        reads: frozenset[Read],
        ring: RingOffsets | None,
        others: Sequence[RingOffsets],
    ) -> tuple[Path, frozenset[Read], frozenset[Read]]:
        """Returns the path and pending reads after an instruction, and the reads that an arrival does not wait for."""
        word = self.words[at]
        opcode, waits, raises = field(word, 0, 12), field(word, 116, 6), field(word, 110, 3)
        reads = frozenset(read for read in reads if not waits >> read.scoreboard & 1)
        late: frozenset[Read] = frozenset()
        if opcode in READS and raises != NO_SCOREBOARD and (ring is None or path.reading):
            reads, path = reads | {Read(at, raises)}, replace(path, fresh=False)
        elif opcode == SYNCS_PHASECHK and ring is not None:
            if offset_of(word) in ring.full and not path.fresh:
                reads = frozenset(replace(read, age=min(read.age + 1, MOST_HELD)) for read in reads)
                path = Path(min(path.held + 1, MOST_HELD), True, True)
            elif any(offset_of(word) in other.full for other in others):
                path = replace(path, reading=False)
        elif opcode == SYNCS_ARRIVE and (ring is None or ring.releases(offset_of(word))):
            late = frozenset(read for read in reads if read.age >= path.held - 1)
            path = replace(path, held=max(path.held - 1, 0))
        return path, reads, late
