"""Puts the groups of a list-form case together as arguments of the ragged and the masked form, and runs these."""

import cases
import torch
from flat_parts import grouped_gemm
from oracle import poisoned

N, K = 200, 320


def operands(
    form, rows, *, n=N, k=K, seed=0, slack=0, out_dtype=torch.float16, has_alpha=True, m_major=False
):
    """Returns arguments of ``grouped_gemm`` for groups of ``rows``, with ``slack`` more rows that belong to no group."""
    case = cases.Case("device", tuple((m, n, k) for m in rows), seed, out_dtype, has_alpha)
    listed = cases.make_operands(case)
    m_max = max(rows) + slack
    if form == "ragged":
        a = torch.cat([*listed.a, torch.full((slack, k // 2), 0x77, dtype=torch.uint8)])
        unused = torch.full((-(-slack // 128) * -(-k // 64) * 512,), cases.NAN_CODE, dtype=torch.uint8)
        a_scale = torch.cat([*listed.a_scale, unused])
        sizes = {"offs": torch.tensor(rows).cumsum(0).to(torch.int32)}
        shape = (sum(rows) + slack, n)
    else:
        a = torch.full((len(rows), m_max, k // 2), 0x77, dtype=torch.uint8)
        block_bytes = -(-m_max // 128) * (-(-k // 64)) * 512
        a_scale = torch.full((len(rows), block_bytes), cases.NAN_CODE, dtype=torch.uint8)
        for g, m in enumerate(rows):
            a[g, :m] = listed.a[g]
            a_scale[g, : listed.a_scale[g].numel()] = listed.a_scale[g]
        sizes = {"masked_m": torch.tensor(rows, dtype=torch.int32)}
        shape = (len(rows), m_max, n)
    if m_major:
        out = poisoned(*shape[:-2], n, shape[-2], dtype=out_dtype).transpose(-1, -2)
    else:
        out = poisoned(*shape, dtype=out_dtype)
    return {
        "a": a,
        "b": torch.stack(list(listed.b)),
        "a_scale": a_scale,
        "b_scale": torch.stack(list(listed.b_scale)),
        "alpha": listed.alpha,
        "out": out,
        "out_dtype": out_dtype,
        **sizes,
    }


def run(arguments, backend, **changed):
    """Returns the output of ``grouped_gemm``, written to a new copy of the output tensor."""
    out = arguments["out"].clone(memory_format=torch.preserve_format)
    result = grouped_gemm(**{**arguments, "out": out, **changed}, backend=backend)
    assert result is out
    return out
