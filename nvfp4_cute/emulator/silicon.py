"""What the chip demands beyond the text of an instruction: rules that hold on silicon, by name, with their sources.

PTX ISA states some of them in passing, others are known from reports only. A rule that the chip answers with a fault, a
hang or wrong results, or that PTX ISA demands in so many words, is an "error". A "warning" goes wrong only where the GPU is
shared, or public kernels that break the rule were seen to run. A "note" rests on weak evidence. What `everywhere` marks is
raised in every mode of the machine as a fault of kind ``silicon``; the rest needs the clocks of the hazard checker and is
found under it.
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
    """A demand of the chip.

    Attributes:
        name: in reports.  demand: in a sentence.  fix: what to do about a violation.
        where: architectures.  source: where it is written down or was measured.
        severity: "error", "warning", or "note".  everywhere: raised without the checker, too.
    """

    name: str
    demand: str
    fix: str
    where: str
    source: str
    severity: str = "error"
    everywhere: bool = False

    def text(self, what: str) -> str:
        """The report of a violation: `what` tells what was done where."""
        return f"{self.name}: {what}. {self.fix} ({self.source})"

    def fault(self, what: str) -> SiliconFault:
        """The fault to raise for a violation."""
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
        "A warp executes `tcgen05.alloc.cta_group::2` when it knows that the peer CTA runs.",
        "Allocate behind a wait for the cluster barrier, or behind another message of the peer",
        TENSOR_MEMORY,
        "PTX ISA tcgen05.alloc; CUTLASS #3316; Triton #10735; no failures in CUTLASS #3435 on B300, nor in its own examples",
        "warning",
    ),
    Rule(
        "pair-dealloc-order",
        "The leader executes `tcgen05.dealloc.cta_group::2` when the peer's allocation is complete.",
        "Free behind a cluster barrier or another message that the peer sends after its allocation",
        TENSOR_MEMORY,
        "CUTLASS #3435: launch failure in 25 of 25 runs on B300",
        everywhere=True,
    ),
    Rule(
        "one-cta-group",
        "All `tcgen05` instructions of a kernel have the same `.cta_group`.",
        "Give all of them one value",
        TENSOR_MEMORY,
        "PTX ISA tcgen05.alloc",
        everywhere=True,
    ),
    Rule(
        "commit-group",
        "The `.cta_group` of a `tcgen05.commit` is that of the MMAs that it commits.",
        "Give the commit the MMAs' value",
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
        "A multicast `tcgen05.commit` has operations of its warp to wait for.",
        "Commit behind an MMA, or arrive on the barriers: such a commit arrives in its own CTA only",
        TENSOR_MEMORY,
        "flash-attention AI/DEBUG_2CTA.md, one author",
        "note",
    ),
    Rule(
        "pdl-order",
        "Behind a kernel that executes `griddepcontrol.launch_dependents`, a launch with the programmatic attribute touches "
        "what that kernel writes, and writes what it reads, only after `griddepcontrol.wait`, in a warp that waited or "
        "knows of one that did.",
        "Execute griddepcontrol.wait before the access, or order it behind a warp that did",
        ALL,
        "PTX ISA griddepcontrol; QuACK #206; CUTLASS #2962; CCCL #9134",
    ),
    Rule(
        "pdl-chain",
        "Every CTA of a launch with the programmatic attribute waits (`griddepcontrol.wait`) behind a kernel that executes "
        "`griddepcontrol.launch_dependents`: where none does, the launch after it may start before that kernel ends.",
        "Let one warp of every CTA execute griddepcontrol.wait",
        ALL,
        "CUDA programming guide on programmatic dependent launches; CCCL #11569",
        "note",
    ),
    Rule(
        "remote-access-order",
        "A warp accesses another CTA's shared memory when it knows that this CTA runs.",
        "Access it behind a wait for the cluster barrier, or behind another message of that CTA",
        ALL,
        "CUDA programming guide on distributed shared memory; facebookexperimental/triton #2292",
    ),
    Rule(
        "remote-arrival-scope",
        "Ordinary stores that another CTA of the cluster relies on are not ordered by an arrival on its mbarrier alone: without "
        "`.release.cluster` an arrival has the scope of its CTA. Nor does `barrier.cluster.arrive.relaxed` order them.",
        "Use mbarrier.arrive.release.cluster and a wait with .acquire.cluster, or a fence.acq_rel.cluster before the arrival",
        ALL,
        "PTX ISA mbarrier.arrive, barrier.cluster; CUTLASS #3643 and #3647 on Thor and B200; SGLang #38829",
    ),
    Rule(
        "async-store-scope",
        "Who reads what another CTA sent by `st.async` waits for it with `.acquire.cluster`.",
        "Use mbarrier.try_wait.acquire.cluster",
        ALL,
        "PTX ISA st.async; public kernels do without",
        "note",
    ),
    Rule(
        "cancel-after-failure",
        "A CTA that has seen a `clusterlaunchcontrol.try_cancel` fail executes no other one.",
        "End the loop when nothing is left to take over",
        "sm_100a and later",
        "PTX ISA clusterlaunchcontrol.try_cancel: undefined behaviour",
    ),
    Rule(
        "register-pool",
        "What the warps of a CTA ask for by `setmaxnreg` fits into the registers that the CTA was launched with.",
        "Make the sum over the warps fit: a setmaxnreg.inc waits until others have released enough",
        ALL,
        "PTX ISA setmaxnreg; CUTLASS #3406",
        everywhere=True,
    ),
    Rule(
        "register-direction",
        "`setmaxnreg.inc` does not lower and `setmaxnreg.dec` does not raise what an earlier one set.",
        "Use the other of .inc and .dec",
        ALL,
        "PTX ISA setmaxnreg; TileLang #2406: a hang on sm_120",
        everywhere=True,
    ),
    Rule(
        "register-warpgroup",
        "All warps of a warpgroup execute the same `setmaxnreg`.",
        "Give the four warps of a warpgroup one budget",
        ALL,
        "PTX ISA setmaxnreg; CUTLASS #3618; Helion #3620",
        "warning",
    ),
    Rule(
        "register-bounds",
        "A kernel with `setmaxnreg` bounds its registers: `.maxnreg`, or `.reqntid` or `.maxntid` with `.minnctapersm`.",
        "Bound them, or the assembler leaves out the setmaxnreg",
        ALL,
        "PTX ISA setmaxnreg; CUTLASS #2007",
        "note",
    ),
    Rule(
        "spin-without-co-residency",
        "CTAs that wait for one another through global memory are launched cooperatively: nothing else makes sure that those "
        "waited for are running.",
        "Launch cooperatively, or hand out the tiles so that a CTA waits only for CTAs that started before it",
        "all",
        "CUDA programming guide on grid synchronisation; TensorRT-LLM #14376",
        "warning",
    ),
    Rule(
        "swizzle-phase",
        "A swizzled tensor copy of 8 rows or more begins in shared memory where the swizzle's pattern does: at a multiple of "
        "256 (32B), 512 (64B) or 1024 bytes (128B).",
        "Align the stage so, or read it by absolute addresses: the copy permutes chunks by these, wherever the tile begins",
        ALL,
        "CUDA driver API on tensor maps; TileLang #2379: wrong values",
        "warning",
    ),
    Rule(
        "small-tensor-map",
        "The tensor map of a tensor with gaps between its rows lies in an allocation of 128 KiB or more.",
        "Allocate 128 KiB or more: some drivers set a wrong bit otherwise",
        ALL,
        "Triton #11011 and #9235 (drivers to 13.3); torch's allocator takes 2 MiB at a time",
        "note",
    ),
)  # fmt: skip

BY_NAME = {rule.name: rule for rule in RULES}


def fault(name: str, what: str) -> SiliconFault:
    """The fault to raise for a violation of a rule: `what` tells what was done where."""
    return BY_NAME[name].fault(what)


def check_groups(insts: Sequence[Inst]) -> None:
    """Hold the tcgen05 instructions of a kernel to one `.cta_group`.

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
    """The rule that the text of a fault or a hazard names."""
    return next((rule for rule in RULES if f"{rule.name}: " in text), None)


def markdown() -> str:
    """The table of the rules in GUIDE.md."""
    lines = ["| rule | demands | on | severity | source |", "|---|---|---|---|---|"]
    for rule in RULES:
        severity = rule.severity if rule.everywhere else f"{rule.severity}, `--check`"
        lines.append(f"| `{rule.name}` | {rule.demand} | {rule.where} | {severity} | {rule.source} |")
    return "\n".join(lines) + "\n"
