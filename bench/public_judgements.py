"""Our judgement of findings in public kernels: whose fault it is, and what it means on a GPU."""

import re
from dataclasses import dataclass

from nvfp4_cute.bench.public_cases import Case


@dataclass(frozen=True)
class Judgement:
    """A judgement of findings.

    Attributes:
        case, message: regular expressions on the case and on the finding.
        text: what we hold of it.
    """

    case: str
    message: str
    text: str


JUDGEMENTS = (
    Judgement(
        "",
        "ProxyKind|cannot import name|has no attribute|No module named 'cutlass|Segfault encountered",
        "Not run: the script needs another version of CuTe DSL.",
    ),
    Judgement(
        "",
        r"exit: .*tcgen05\.commit|uninitialised: tcgen05\.mma",
        "Right by the text of PTX, and no GPU was seen to do wrong: the last arrival of attention kernels, and rows past the end "
        "of a sequence. A warning since.",
    ),
    Judgement(
        r"sm_120a cute/blackwell_geforce",
        "early-release",
        "Right by the PTX memory model, harmless if the machine code waits for the load before the arrival; we did not read it.",
    ),
    Judgement(
        "",
        r"exit: .*(TMA store|bulk store|st\.async)",
        "A fault by PTX: shared memory must live until the store has read it. An SM keeps the memory of a CTA "
        "that exits until another CTA takes it, so a failure needs a later CTA on the same SM.",
    ),
    Judgement(
        r"mapa",
        "exit",
        "A fault: the peer may exit before its shared memory is read. A cluster barrier before the exit orders both.",
    ),
    Judgement(
        r"fmha_bwd|cluster_tmem_reduce",
        "race|not allocated|tcgen05",
        "A fault: tensor memory is freed or read without an order to the operation that uses it; other orders of the same "
        "program give an error (lazy, random).",
    ),
    Judgement(
        "",
        "remote-arrival-scope",
        "A fault by PTX: an arrival of CTA scope does not order memory for another CTA of the cluster. CUTLASS #3643 is of "
        "this kind and was mended.",
    ),
    Judgement(
        "",
        "proxy-fence",
        "Right by the text of PTX: `cp.async` is of the generic proxy. CUTLASS, FlashAttention 4 and FlashInfer omit the "
        "fence on silicon; a warning since.",
    ),
    Judgement(
        "cudnn.*nsa-selection",
        "shfl.sync",
        "A fault: lanes 16 to 31 execute a shuffle whose mask names lanes 0 to 15 only: undefined in PTX.",
    ),
    Judgement(
        "sglang.*(fused-a-gemm)",
        "race",
        "A reported fault, SGLang #37287 (`public_bugs.md`).",
    ),
    Judgement(
        "sglang.*kkt|sglang.*gdn-output",
        "race|exit|tensor-memory",
        "Reported faults, SGLang #37288 and #37289 (`public_bugs.md`).",
    ),
    Judgement("flashinfer.*top-k", "race", "A reported fault, TensorRT-LLM #18338 (`public_bugs.md`)."),
    Judgement(
        "sglang.*dual-gemm",
        "tensor-memory",
        "A fault, not reported upstream that we know: the wait for parity 1 of a barrier may pass before phase 0 is complete, "
        "so the second CTA frees tensor memory that a product uses.",
    ),
    Judgement(
        "06_softmax",
        "race",
        "A fault: one barrier is missing between the read of a reduction and its next use.",
    ),
    Judgement(
        "lightmoe.*decode-70-empty",
        "relative error",
        "A fault of LightMoE: its quantizer puts an expert's scales after the last tile of the previous expert, its product "
        "reads tile `cu[e] // 128 + e`.",
    ),
    Judgement(
        "lightmoe.*train",
        "early-release",
        "Right by the PTX memory model: the loads of `preact` are used after the arrival that releases the stage.",
    ),
    Judgement(
        "sglang.*bf16-gemm",
        "bar_tmem|parity|tcgen05|phase",
        "A fault: the wait for parity 1 of `bar_tmem_alloc` may pass before phase 0 is complete; FlashInfer mended the line.",
    ),
)
"""The first one that matches counts."""


def judgement(case: Case, verdict: str, message: str) -> str:
    """Returns the judgement of a run that did not pass."""
    for one in JUDGEMENTS:
        if re.search(one.case, str(case)) and re.search(one.message, message):
            return one.text
    return f"Not judged ({verdict})."
