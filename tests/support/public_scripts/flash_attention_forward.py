"""Runs FlashAttention's forward CuTe DSL kernel for the GPU: `--lengths 128,128 --heads 2,1 --dim 64 [--causal]`."""

import argparse

import torch
from flash_attn.cute.interface import flash_attn_func
from flash_attn.cute.testing import attention_ref

TOLERANCE = 2e-2


def main() -> None:
    """Computes attention and compares with the project's reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--causal", action="store_true")
    args = parser.parse_args()
    rows, keys = map(int, args.lengths.split(","))
    heads, kv_heads = map(int, args.heads.split(","))
    torch.manual_seed(0)
    shapes = ((rows, heads), (keys, kv_heads), (keys, kv_heads))
    q, k, v = (torch.randn(1, n, h, args.dim, device="cuda", dtype=torch.bfloat16) for n, h in shapes)
    with torch.no_grad():
        result = flash_attn_func(q, k, v, causal=args.causal)
    out = result[0] if isinstance(result, tuple) else result
    want = attention_ref(q, k, v, causal=args.causal)[0]
    torch.testing.assert_close(out, want, atol=TOLERANCE, rtol=TOLERANCE)


if __name__ == "__main__":
    main()
