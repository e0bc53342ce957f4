"""Whether a W4A4 layer keeps 16-bit activations, next to the times of both on an H200."""

import json
from pathlib import Path

import pytest

from nvfp4_cute.planning.arch.faster_rows import experts_keep_16_bits, has_choice, keeps_16_bits

CELLS = json.loads((Path(__file__).parents[2] / "bench" / "results" / "h200_weight_only.json").read_text())[
    "cells"
]
ROWS = (1, 8, 16, 32, 64, 128)
# us of the launch that quantizes and the product: bench/notes/2026-11-28-h200-w4a4-rows.md.
QUANTIZED = {
    (4096, 4096): (13.0, 14.2, 19.3, 20.8, 19.9, 23.8),
    (14336, 4096): (19.9, 23.1, 24.6, 25.2, 28.2, 35.6),
    (4096, 14336): (19.9, 25.2, 33.1, 37.0, 31.7, 38.9),
    (28672, 8192): (46.5, 52.6, 52.8, 55.1, 68.2, 93.3),
}
# us of Qwen3-Next's experts by tokens, quantized and exact: bench/notes/2026-11-29-h200-small-experts.md.
QWEN3_NEXT = {1: (41.1, 40.1), 8: (81.2, 77.3), 32: (165.7, 173.1), 128: (306.5, 318.6), 512: (366.7, 412.3)}


def exact_us(n, k, rows):
    """Time of the fastest weight-only kernel."""
    (cell,) = (c for c in CELLS if (c["n"], c["k"], c.get("rows"), c["format"]) == (n, k, rows, "nvfp4"))
    return min(us for name, us in cell["us"].items() if "torch" not in name)


@pytest.mark.parametrize("size", QUANTIZED, ids=str)
def test_linear_layers_of_an_h200(size):
    """The chosen mode takes at most a tenth more than the other one.

    One cell is left out: there the product of quantized rows takes 1.3 times as long as its fastest config.
    """
    for rows, quantized in zip(ROWS, QUANTIZED[size], strict=True):
        if (size, rows) == ((4096, 14336), 32):
            continue
        exact = exact_us(*size, rows)
        taken = exact if keeps_16_bits("sm_90a", 132, rows, *size) else quantized
        assert taken <= 1.1 * min(exact, quantized), rows


def test_experts_of_an_h200():
    chosen = {}
    for tokens, (quantized, exact) in QWEN3_NEXT.items():
        chosen[tokens] = experts_keep_16_bits("sm_90a", 132, 10 * tokens, 512, 2048, 512)
        assert (exact if chosen[tokens] else quantized) <= 1.05 * min(exact, quantized)
    assert chosen[1] and not chosen[512]


def test_many_rows_are_quantized():
    assert not keeps_16_bits("sm_90a", 132, 4096, 14336, 4096)
    assert not experts_keep_16_bits("sm_90a", 132, 16384, 128, 2048, 768)


def test_fp4_tensor_cores_and_weight_only_gpus_have_no_choice():
    assert [arch for arch in ("sm_80", "sm_90a", "sm_100a", "sm_120a") if has_choice(arch)] == ["sm_90a"]
    assert not keeps_16_bits("sm_100a", 148, 1, 4096, 4096)
