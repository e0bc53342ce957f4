"""Judgements of the checker's findings in public kernels: whether a finding is a fault, and what it means on a GPU."""

import re
from dataclasses import dataclass

from nvfp4_cute.bench.public_cases import Case


@dataclass(frozen=True)
class Judgement:
    """A judgement of the findings that it matches.

    Attributes:
        case, message: regular expressions that are searched in the case and in the finding.
        text: our judgement.
    """

    case: str
    message: str
    text: str


JUDGEMENTS = (
    Judgement(
        "",
        "ProxyKind|cannot import name|has no attribute|No module named 'cutlass",
        "Not run: the script needs another version of CuTe DSL.",
    ),
    Judgement(
        "test_gemm_split_k",
        "1 failed, 5 passed",
        "Not explained: one of the six tests failed once on a busy host, which kept no message. All six passed in three later "
        "runs in lazy order.",
    ),
    Judgement(
        r"cutlass-4\.3/",
        "Segfault encountered",
        "Not run: the script needs another version of CuTe DSL.",
    ),
    Judgement(
        "",
        r"exit: .*tcgen05\.commit|uninitialised: tcgen05\.mma",
        "Right by the text of PTX, but no GPU is known to fail: the last arrival of attention kernels, and rows past the end of "
        "a sequence. The checker now reports a warning.",
    ),
    Judgement(
        r"sm_120a cute/blackwell_geforce",
        "early-release",
        "Right by the PTX memory model, and the control words of the machine code do not let the arrival wait for the loads. "
        "Harmless if an SM executes a warp's accesses to shared memory in order, which NVIDIA does not document.",
    ),
    Judgement(
        "",
        r"exit: .*(TMA store|bulk store|bulk reduction|st\.async)",
        "A fault by PTX: shared memory must live until the store or reduction has read it. An SM keeps the memory of a CTA "
        "that exited until another CTA gets it, so a failure needs a later CTA on the same SM.",
    ),
    Judgement(
        r"mapa",
        "exit",
        "A fault: the peer may exit before its shared memory is read. A cluster barrier before the exit orders both.",
    ),
    Judgement(
        r"fmha_bwd|cluster_tmem_reduce",
        "race|not allocated|tcgen05",
        "A fault: tensor memory is freed or read without an order to the operation that uses it. The settings lazy and random "
        "run the same program in other orders, which end with an error.",
    ),
    Judgement(
        "",
        "remote-arrival-scope",
        "A fault by PTX: an arrival of CTA scope does not order memory for another CTA of the cluster. CUTLASS #3643 is of "
        "this kind and was fixed.",
    ),
    Judgement(
        "",
        "proxy-fence",
        "Right by the text of PTX: `cp.async` is of the generic proxy. CUTLASS, FlashAttention 4 and FlashInfer omit the fence "
        "and run on GPUs. The checker now reports a warning.",
    ),
    Judgement(
        "cudnn.*nsa-selection",
        "shfl.sync",
        "A fault: lanes 16 to 31 execute a shuffle whose mask names lanes 0 to 15 only, which PTX leaves undefined.",
    ),
    Judgement(
        "sglang.*(fused-a-gemm)",
        "race",
        "A reported fault, SGLang #37287 (`public_bugs.md`).",
    ),
    Judgement(
        "sglang.*kkt",
        "not allocated",
        "A fault, as far as we know not reported upstream: the warp that frees tensor memory waits for an older epilogue "
        "(kernel_kkt_inv_uw.py:298), so later loads and products find it free.",
    ),
    Judgement(
        "sglang.*kkt|sglang.*gdn-output",
        "race|exit|tensor-memory|tcgen05.mma",
        "Reported faults, SGLang #37288 and #37289 (`public_bugs.md`).",
    ),
    Judgement(
        "flashinfer.*test_cute_dsl_decode",
        "mbarrier",
        "A fault by PTX, as far as we know not reported upstream: pipelines made with `defer_sync=True` need "
        "`fence.mbarrier_init` after them, and the kernel's last one comes before (gqa_decode.py:725 and 733).",
    ),
    Judgement("flashinfer.*top-k", "race", "A reported fault, TensorRT-LLM #18338 (`public_bugs.md`)."),
    Judgement(
        "sglang.*dual-gemm",
        "tensor-memory|tcgen05.mma",
        "A fault, as far as we know not reported upstream: the wait for parity 1 of a barrier may pass before phase 0 is "
        "complete, so the second CTA frees tensor memory that a product uses.",
    ),
    Judgement(
        "06_softmax",
        "race",
        "A fault: one barrier is missing between the read of a reduction and its next use.",
    ),
    Judgement(
        "lightmoe.*decode-70-empty",
        "relative error",
        "A fault of LightMoE: its quantizer puts an expert's scales after the last tile of the previous expert, but its product "
        "reads them from tile `cu[e] // 128 + e`.",
    ),
    Judgement(
        "lightmoe.*train",
        "early-release",
        "Right by the PTX memory model: the loads of `preact` are used after the arrival that releases the stage.",
    ),
    Judgement(
        "sglang.*bf16-gemm",
        "bar_tmem|parity|tcgen05|phase",
        "A fault: the wait for parity 1 of `bar_tmem_alloc` may pass before phase 0 is complete. FlashInfer fixed this line.",
    ),
)
"""The first match counts."""


def judgement(case: Case, verdict: str, message: str) -> str:
    """Returns the judgement of a run that did not pass. message: first line of its finding or error."""
    for one in JUDGEMENTS:
        if re.search(one.case, str(case)) and re.search(one.message, message):
            return one.text
    return f"Not judged ({verdict})."
