"""`pytest --cute-emulate` runs a test suite that expects a GPU on the virtual one."""

import json
import re

import pytest
from new_process import run_python

CONFTEST = """
import torch

CUDA = torch.cuda.is_available()  # suites look for a GPU before collection
"""
SUITE = """
import pytest, torch
import cutlass
import cutlass.cute as cute
from conftest import CUDA
from cutlass.cute.runtime import from_dlpack

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a GPU")


@cute.kernel
def exchange(x: cute.Tensor, out: cute.Tensor, ordered: cutlass.Constexpr):
    tidx, _, _ = cute.arch.thread_idx()
    shared = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(32), 16)
    if tidx < 32:
        shared[tidx] = x[tidx]
    if cutlass.const_expr(ordered):
        cute.arch.sync_threads()
    if tidx >= 32:
        out[tidx - 32] = shared[tidx - 32]


@cute.kernel
def overrun(x: cute.Tensor):
    x[cute.arch.thread_idx()[0] + 16] = x[0]


@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor, ordered: cutlass.Constexpr):
    exchange(x, out, ordered).launch(grid=(1, 1, 1), block=(64, 1, 1))


@cute.jit
def launch_overrun(x: cute.Tensor):
    overrun(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


def exchanged(ordered):
    x = torch.arange(32, dtype=torch.float32, device="cuda")
    out = torch.zeros(32, device="cuda")
    launch(from_dlpack(x), from_dlpack(out), ordered)
    torch.cuda.synchronize()
    return torch.equal(out, x)


def test_ordered():
    assert exchanged(True)


def test_unordered():
    assert exchanged(False)


def test_that_ignores_a_fault():
    try:
        launch_overrun(from_dlpack(torch.zeros(32, device="cuda")))
        torch.cuda.synchronize()
    except Exception:
        pass


def test_after_them():
    assert exchanged(True)
"""


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(SUITE)

    def run(*options: str) -> tuple[dict[str, str], str]:
        command = ["-m", "pytest", "-p", "nvfp4_cute.cli.pytest_plugin", "-p", "no:cacheprovider", "-rA"]
        done = run_python(*command, *options, cwd=tmp_path)
        ends = [line.split() for line in done.stdout.splitlines() if "::" in line and line[:1].isupper()]
        return {name.partition("::")[2]: end for end, name, *_ in ends}, done.stdout

    return run


def test_without_the_option_nothing_changes(suite):
    found, said = suite()
    assert "4 skipped" in said and not found


def test_options_without_a_virtual_gpu_are_refused(tmp_path):
    done = run_python(
        "-m", "pytest", "-p", "nvfp4_cute.cli.pytest_plugin", "--cute-check", "errors", cwd=tmp_path
    )
    assert done.returncode == 4 and "need a virtual GPU: also pass --cute-emulate" in done.stderr


def test_failures_of_kernels_are_those_of_their_tests(suite):
    found, said = suite("--cute-emulate", "sm_100a", "--cute-sm-count", "4")
    assert found == {
        "test_ordered": "PASSED",
        "test_unordered": "PASSED",
        "test_that_ignores_a_fault": "FAILED",
        "test_after_them": "PASSED",
    }
    assert "outside every live range" in said and "NVIDIA B200 (sm_100a), 4 SMs" in said
    assert re.search(r"4 launches, \d+ warp instructions on the virtual GPU; 1 finding: 1 error\n", said)


def test_hazards_fail_their_test(suite, tmp_path):
    found, said = suite("--cute-emulate", "sm_90a", "--cute-check", "errors", "--cute-sarif", "found.sarif")
    assert found["test_unordered"] == "FAILED" and found["test_after_them"] == "PASSED"
    assert "race: ld.shared" in said and "nothing orders them" in said
    line = SUITE.split("\n").index("        out[tidx - 32] = shared[tidx - 32]") + 1
    assert f"error: race in `exchange` at test_suite.py:{line}, in test_suite.py::test_unordered" in said
    results = json.loads((tmp_path / "found.sarif").read_text())["runs"][0]["results"]
    assert sorted(result["ruleId"] for result in results) == ["out-of-bounds", "race"]
    race = next(result for result in results if result["ruleId"] == "race")
    place = race["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("test_suite.py", line)


def test_warnings_of_a_passing_run_are_named(tmp_path):
    suite = SUITE[: SUITE.index("@cute.kernel\ndef exchange")] + WARNING
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(suite)
    command = ["-m", "pytest", "-p", "nvfp4_cute.cli.pytest_plugin", "-p", "no:cacheprovider", "-q"]
    done = run_python(*command, "--cute-emulate", "sm_100a", "--cute-check", "errors", cwd=tmp_path)
    assert done.returncode == 0
    assert "1 finding: 1 warning\n" in done.stdout and "--cute-check all" in done.stdout
    line = suite.split("\n").index("    x[tidx] = shared[tidx]") + 1
    assert (
        f"warning: uninitialised in `reads` at test_suite.py:{line}, in test_suite.py::test_it" in done.stdout
    )


WARNING = """
@cute.kernel
def reads(x: cute.Tensor):
    tidx, _, _ = cute.arch.thread_idx()
    shared = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(32), 16)
    x[tidx] = shared[tidx]


@cute.jit
def launch(x: cute.Tensor):
    reads(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


def test_it():
    launch(from_dlpack(torch.zeros(32, device="cuda")))
"""
