"""Which variants of a test with many are fast: ``sampled`` of conftest.py."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
SAMPLED = "kernels/test_dual_gemm.py::test_machine_code_of_sm120"


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    listed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if "::" in line]


def test_so_many_variants_are_fast_and_all_others_slow():
    name = f"tests/{SAMPLED}"
    every, fast, slow = (collected(name, *marks) for marks in ((), ("-m", "not slow"), ("-m", "slow")))
    assert len(fast) == 3 and sorted(fast + slow) == sorted(every)
    assert fast == collected(name, "-m", "not slow")
