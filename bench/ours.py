"""Our operations on the operands of a case, for any backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import Operands
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.operands.whole import in_form
from nvfp4_cute.ops import parts
from nvfp4_cute.ops.parts import Options
from nvfp4_cute.planning.arch.simt import FEW_ROWS

NAME = "ours"
DUAL_ALPHA = 2.0**-9
"""Factor of both products of a dual GEMM. It brings sums of thousands of random terms into the curved range of SiLU."""


@dataclass(frozen=True)
class Prepared:
    """One prepared input set.

    Attributes:
        run: enqueues the computation; for a grouped GEMM with the given config, if any.
        out: its output, [M, N] per group.
    """

    run: Callable[..., object]
    out: Sequence[torch.Tensor | BlockScaledTensor]


def prepare(case: Case, operands: Operands, backend: str) -> Prepared:
    """Prepares everything but the call itself."""
    if case.operation == "gemv":
        return _gemv(operands, backend)
    if case.operation == "dual_gemm":
        return _dual_gemm(operands, backend)
    if case.operation == "w4a16":
        return _weight_only(case, operands, backend)
    if case.form == "ragged":
        return _ragged(case, operands, backend)
    if case.operation == "gemm" and case.sizes[0][0] <= FEW_ROWS:
        return _gemm(operands, backend)
    (a, b), out = operands.sides, list(operands.out)
    call = lambda config=None: parts.grouped_gemm(
        a, b, options=Options(config), out=out, **_options(operands, backend)
    )
    return Prepared(call, out)


def _options(operands: Operands, backend: str) -> dict[str, Any]:
    """Returns the options of every call."""
    first = operands.out[0]
    out_dtype = first.dtype if isinstance(first, torch.Tensor) else first.format.name
    return {"out_dtype": out_dtype, "backend": backend}


def _gemm(operands: Operands, backend: str) -> Prepared:
    """Prepares few rows of activations, for which ``gemm`` may have a different kernel."""
    (a, b), (out,) = operands.of_group(0), operands.out
    call = lambda: parts.gemm(a, b, out=out, **_options(operands, backend))
    return Prepared(call, [out])


def _weight_only(case: Case, operands: Operands, backend: str) -> Prepared:
    """Prepares rows of bfloat16: ``gemm`` for one group, one grouped product for several."""
    b, out = operands.sides[1], list(operands.out)
    rows = parts.Parts(operands.bf16_a)
    options = {"out_dtype": out[0].dtype, "backend": backend}
    if case.form == "ragged":
        (x, weights), y = in_form("ragged", rows, b), torch.cat(out)
        offs, out = _offs(case, y.device), list(y.split([len(one) for one in rows.data]))
        call = lambda: parts.grouped_gemm(x, weights, offs, out=y, **options)
    elif len(out) == 1:
        _, weight = operands.of_group(0)
        call = lambda: parts.gemm(rows.data[0], weight, out=out[0], **options)
    else:
        call = lambda: parts.grouped_gemm(rows, b, out=out, **options)
    return Prepared(call, out)


def _gemv(operands: Operands, backend: str) -> Prepared:
    """Prepares the groups as one batch: [M, K/2, L] views of stacked memory."""
    a, b = in_form("batched", *operands.sides)
    b = b._replace(data=b.data[0])
    out = torch.stack(operands.out).squeeze(2).T
    call = lambda: parts.gemv(a, b, out=out, **_options(operands, backend))
    return Prepared(call, [column.unsqueeze(1) for column in out.unbind(1)])


def _ragged(case: Case, operands: Operands, backend: str) -> Prepared:
    """Prepares the rows of all groups one after the other, with stacked weights and each group's padded scales."""
    (a, b), out = in_form("ragged", *operands.sides), torch.cat(operands.out)
    rows, offs = [m for m, _, _ in case.sizes], _offs(case, a.data.device)
    call = lambda config=None: parts.grouped_gemm(
        a, b, offs, options=Options(config), out=out, **_options(operands, backend)
    )
    return Prepared(call, out.split(rows))


def _offs(case: Case, device: torch.device) -> torch.Tensor:
    """Returns the row where each group ends."""
    return torch.tensor(list(accumulate(m for m, _, _ in case.sizes)), dtype=torch.int32, device=device)


def _dual_gemm(operands: Operands, backend: str) -> Prepared:
    (a, gate, up), (out,) = operands.of_group(0), operands.out
    w = parts.gate_up(gate, up, "separate", DUAL_ALPHA, DUAL_ALPHA)
    call = lambda: parts.dual_gemm(a, w, out=out, **_options(operands, backend))
    return Prepared(call, operands.out)
