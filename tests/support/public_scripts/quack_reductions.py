"""Runs QuACK's softmax and RMSNorm on long rows, whose sums the CTAs of a cluster exchange: `--n 32768`."""

import argparse

import torch
from quack.rmsnorm import rmsnorm_fwd, rmsnorm_ref
from quack.softmax import softmax_fwd

TOLERANCE = 1e-2


def main() -> None:
    """Computes both and compares with torch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, required=True)
    n = parser.parse_args().n
    torch.manual_seed(0)
    x = torch.randn(2, n, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(softmax_fwd(x), torch.softmax(x, -1), atol=TOLERANCE, rtol=TOLERANCE)
    result = rmsnorm_fwd(x, weight)
    out = result[0] if isinstance(result, tuple) else result
    torch.testing.assert_close(out, rmsnorm_ref(x, weight), atol=0.1, rtol=TOLERANCE)


if __name__ == "__main__":
    main()
