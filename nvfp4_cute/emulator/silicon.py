"""Rules that the chip enforces beyond the description of an instruction, by name, with their sources.

PTX ISA states some of these rules in passing; others are known only from reports. A rule is an "error" if breaking it
causes a fault, a hang or wrong results, or if PTX ISA demands it explicitly. It is a "warning" if breaking it causes harm
only on a shared GPU, or if public kernels that break it were seen to run. A "note" rests on weak evidence. Rules marked
`everywhere` raise a fault of kind ``silicon`` in every mode of the machine. The other rules need the clocks of the hazard
checker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nvfp4_cute.emulator.faults import SiliconFault
from nvfp4_cute.emulator.ptx import Inst

TENSOR_MEMORY = "sm_100a, sm_103a, sm_110a"
ALL = "sm_90a and later"
GROUPS = frozenset(("cta_group::1", "cta_group::2"))
TESTED_SCALE_WIDTHS = (8, 16, 32, 64, 128, 192, 256)
"""N of block-scaled MMAs in public kernels."""

SMALL_ALLOCATION = 128 * 1024
"""Bytes below which a driver may set a wrong bit in the tensor map of a tensor with gaps between its rows."""


@dataclass(frozen=True)
class Rule:
    """A rule of the chip.

    Attributes:
        name: name in reports.
        demand: the rule in one sentence.
        fix: how to mend a violation.
        where: architectures.
        source: document, report or measurement that states the rule.
        severity: "error", "warning", or "note".
        everywhere: raised even without the checker.
    """

    name: str
    demand: str
    fix: str
    where: str
    source: str
    severity: str = "error"
    everywhere: bool = False

    def text(self, what: str) -> str:
        """Returns the report of a violation. `what`: the violation and its place."""
        return f"{self.name}: {what}. {self.fix} ({self.source})"

    def fault(self, what: str) -> SiliconFault:
        """Returns the fault to raise for a violation. `what`: see `text`."""
        return SiliconFault(self.text(what))


RULES = (
    Rule(
        "even-scale-column",
        "Scale factors in tensor memory begin at an even column: operands of a block-scaled `tcgen05.mma` and the target of "
        "`tcgen05.cp.32x128b.warpx4`.",
        "Begin at an even column: scales move through tensor memory two columns (64 rows) at a time",
        TENSOR_MEMORY,
        "QuACK gemm_sm100.py, measured on B300; gau-nernst on B200; Modular's block-scaled MMA; Triton #8172",
        everywhere=True,
    ),
    Rule(
        "scale-width",
        "A block-scaled `tcgen05.mma` has N 8, 16, 32, 64, 128, 192 or 256.",
        "Use one of 8, 16, 32, 64, 128, 192 and 256: no public kernel has another",
        TENSOR_MEMORY,
        "PTX ISA permits it; QuACK gemm_sm100.py calls odd multiples of 32 unreachable",
        "note",
    ),
    Rule(
        "pair-alloc-order",
        "A warp executes `tcgen05.alloc.cta_group::2` only after it knows that the peer CTA runs.",
        "Allocate after a wait for the cluster barrier, or after another message from the peer",
        TENSOR_MEMORY,
        "PTX ISA tcgen05.alloc; CUTLASS #3316; Triton #10735; no failures in CUTLASS #3435 on B300, nor in its own examples",
        "warning",
    ),
    Rule(
        "pair-dealloc-order",
        "The leader executes `tcgen05.dealloc.cta_group::2` only after the peer's allocation is complete.",
        "Free after a cluster barrier, or after another message that the peer sends after its allocation",
        TENSOR_MEMORY,
        "CUTLASS #3435: launch failure in 25 of 25 runs on B300",
        everywhere=True,
    ),
    Rule(
        "one-cta-group",
        "All `tcgen05` instructions of a kernel have the same `.cta_group`.",
        "Use one value in all of them",
        TENSOR_MEMORY,
        "PTX ISA tcgen05.alloc",
        everywhere=True,
    ),
    Rule(
        "commit-group",
        "A `tcgen05.commit` has the `.cta_group` of the MMAs that it commits.",
        "Use the MMAs' value in the commit",
        TENSOR_MEMORY,
        "TileLang #2287: illegal instruction",
        everywhere=True,
    ),
    Rule(
        "pair-leader",
        "The CTA of even rank issues the `tcgen05.mma`, `.cp` and `.commit` of a pair.",
        "Let the CTA of even rank issue it",
        TENSOR_MEMORY,
        "Triton #9460: a hang",
        everywhere=True,
    ),
    Rule(
        "empty-multicast-commit",
        "A multicast `tcgen05.commit` follows operations of its warp.",
        "Commit after an MMA, or arrive on the barriers: an empty commit arrives only in its own CTA",
        TENSOR_MEMORY,
        "flash-attention AI/DEBUG_2CTA.md, one author",
        "note",
    ),
    Rule(
        "pdl-order",
        "After a kernel that executes `griddepcontrol.launch_dependents`, a launch with the programmatic attribute touches "
        "memory that this kernel writes, and writes memory that it reads, only after `griddepcontrol.wait`, in a warp that "
        "waited or knows of one that did.",
        "Execute griddepcontrol.wait before the access, or order it after a warp that did",
        ALL,
        "PTX ISA griddepcontrol; QuACK #206; CUTLASS #2962; CCCL #9134",
    ),
    Rule(
        "pdl-chain",
        "After a kernel that executes `griddepcontrol.launch_dependents`, every CTA of a launch with the programmatic attribute "
        "executes `griddepcontrol.wait`. Otherwise the next launch may start before that kernel ends.",
        "Let one warp of every CTA execute griddepcontrol.wait",
        ALL,
        "CUDA programming guide on programmatic dependent launches; CCCL #11569",
        "note",
    ),
    Rule(
        "remote-access-order",
        "A warp accesses another CTA's shared memory only after it knows that this CTA runs.",
        "Access it after a wait for the cluster barrier, or after another message from that CTA",
        ALL,
        "CUDA programming guide on distributed shared memory; facebookexperimental/triton #2292",
    ),
    Rule(
        "remote-arrival-scope",
        "An arrival on another CTA's mbarrier orders earlier ordinary stores and `cp.async` only with `.release.cluster`: "
        "without it the arrival has CTA scope. `barrier.cluster.arrive.relaxed` does not order them either.",
        "Use mbarrier.arrive.release.cluster and a wait with .acquire.cluster, or a fence.acq_rel.cluster before the arrival",
        ALL,
        "PTX ISA mbarrier.arrive, barrier.cluster; CUTLASS #3643 and #3647 on Thor and B200; SGLang #38829",
    ),
    Rule(
        "async-store-scope",
        "A warp waits with `.acquire.cluster` before it reads data that another CTA sent by `st.async`.",
        "Use mbarrier.try_wait.acquire.cluster",
        ALL,
        "PTX ISA st.async; public kernels wait without it",
        "note",
    ),
    Rule(
        "cancel-after-failure",
        "A CTA executes no further `clusterlaunchcontrol.try_cancel` after it has seen one fail.",
        "End the loop when no cluster is left",
        "sm_100a and later",
        "PTX ISA clusterlaunchcontrol.try_cancel: undefined behaviour",
    ),
    Rule(
        "register-pool",
        "The registers that the warps of a CTA request by `setmaxnreg` fit into those that the CTA was launched with.",
        "Make the sum over the warps fit: a setmaxnreg.inc waits until others have released enough",
        ALL,
        "PTX ISA setmaxnreg; CUTLASS #3406",
        everywhere=True,
    ),
    Rule(
        "register-direction",
        "`setmaxnreg.inc` does not lower the count of an earlier `setmaxnreg`, and `setmaxnreg.dec` does not raise it.",
        "Swap .inc and .dec",
        ALL,
        "PTX ISA setmaxnreg; TileLang #2406: a hang on sm_120",
        everywhere=True,
    ),
    Rule(
        "register-warpgroup",
        "All warps of a warpgroup execute the same `setmaxnreg`.",
        "Use one register count for the four warps of a warpgroup",
        ALL,
        "PTX ISA setmaxnreg; CUTLASS #3618; Helion #3620",
        "warning",
    ),
    Rule(
        "register-bounds",
        "A kernel with `setmaxnreg` bounds its registers: `.maxnreg`, or `.reqntid` or `.maxntid` with `.minnctapersm`.",
        "Add the bound; without it the assembler drops setmaxnreg",
        ALL,
        "PTX ISA setmaxnreg; CUTLASS #2007",
        "note",
    ),
    Rule(
        "spin-without-co-residency",
        "CTAs that wait for one another through global memory are launched cooperatively. Nothing else guarantees that they run "
        "at the same time.",
        "Launch cooperatively, or order the tiles so that a CTA waits only for CTAs that started before it",
        "all",
        "CUDA programming guide on grid synchronisation; TensorRT-LLM #14376",
        "warning",
    ),
    Rule(
        "swizzle-phase",
        "A swizzled tensor copy of 8 rows or more starts in shared memory at the start of a swizzle pattern: a multiple of 256 "
        "(32B), 512 (64B) or 1024 bytes (128B).",
        "Align the stage, or read it by absolute addresses: the copy permutes chunks by absolute address",
        ALL,
        "CUDA driver API on tensor maps; TileLang #2379: wrong values",
        "warning",
    ),
    Rule(
        "small-tensor-map",
        "A tensor with gaps between its rows, used through a tensor map, lies in an allocation of at least 128 KiB.",
        "Allocate 128 KiB or more: some drivers set a wrong bit otherwise",
        ALL,
        "Triton #11011 and #9235 (drivers to 13.3); torch's allocator takes 2 MiB at a time",
        "note",
    ),
)  # fmt: skip

BY_NAME = {rule.name: rule for rule in RULES}


def fault(name: str, what: str) -> SiliconFault:
    """Returns the fault to raise for a violation of the rule `name`. `what`: the violation and its place."""
    return BY_NAME[name].fault(what)


def check_groups(insts: Sequence[Inst]) -> None:
    """Checks that the tcgen05 instructions of a kernel have one `.cta_group`.

    Raises:
        EmulatorError: there are two; names an instruction with each.
    """
    first: dict[tuple[str, str], Inst] = {}
    for inst in insts:
        if inst.opcode == "tcgen05":
            for group in GROUPS.intersection(inst.mods):
                first.setdefault((inst.mods[0], group), inst)
    for rule, kinds, others in (("commit-group", ("commit",), ("mma", "cp")), ("one-cta-group", None, None)):
        found = [
            [inst for (kind, group), inst in first.items() if group == wanted and (among is None or kind in among)]
            for wanted, among in (
                ("cta_group::1", kinds), ("cta_group::2", others), ("cta_group::2", kinds), ("cta_group::1", others)
            )
        ]  # fmt: skip
        for one, two in (found[:2], found[2:]):
            if one and two:
                raise fault(rule, f"{one[0].place} and {two[0].place} differ in .cta_group")


def named(text: str) -> Rule | None:
    """Returns the rule that the text of a fault or a hazard names, or None."""
    return next((rule for rule in RULES if f"{rule.name}: " in text), None)


def markdown() -> str:
    """Returns the table of the rules in the guide."""
    lines = ["| rule | demand | on | severity | source |", "|---|---|---|---|---|"]
    for rule in RULES:
        severity = rule.severity if rule.everywhere else f"{rule.severity}, `--check`"
        lines.append(f"| `{rule.name}` | {rule.demand} | {rule.where} | {severity} | {rule.source} |")
    return "\n".join(lines) + "\n"
