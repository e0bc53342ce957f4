"""Our grouped GEMM on the operands of a cell."""

import time
from typing import Any

import torch

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign.compare import compare
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.ops import parts
from nvfp4_cute.ops.parts import Parts
from nvfp4_cute.roofline.modelled import modelled_times

NAME = "ours"


def record(case: Case, operands: GroupedOperands, target: Target) -> dict[str, Any]:
    """Returns the record of the config that the product chooses."""
    began = time.monotonic()
    operands.out.fill_(torch.nan)
    timings = modelled_times(
        lambda backend: parts.grouped_gemm(
            Parts(operands.a, operands.a_scale), Parts(operands.b, operands.b_scale), operands.offs(),
            out=operands.out, out_dtype=case.out_dtype, backend=backend,
        ),
        target,
        by_representatives=True,
        with_data=True,
    )  # fmt: skip
    found = compare(operands, None)
    return {
        "us": sum(timing.us for timing in timings),
        "launches": len(timings),
        "compared": found.compared,
        "differing": found.differing,
        "outside": found.outside,
        "seconds": round(time.monotonic() - began, 1),
    }
