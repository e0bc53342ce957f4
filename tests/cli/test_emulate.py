"""`nvfp4-cute emulate`: scripts that use a GPU run unmodified, and end as with Python."""

import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from new_process import run_python

from nvfp4_cute.cli import main

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"


def emulate(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return run_python("-m", "nvfp4_cute.cli", "emulate", *arguments, env={**os.environ, **environment})


# ---- operations of scripts: each check of support/scripts is a test
# ---------------------------------------------------
def checks_of(script: str) -> list[str]:
    lines = (SCRIPTS / f"{script}.py").read_text().split("\n")
    return [line[len("def ") :].partition("(")[0] for line in lines if line.startswith("def check_")]


@cache
def run(script: str, *options: str) -> tuple[dict[str, str | None], str]:
    """Returns the outcome of each check of a script, and its output. Runs the script once."""
    done = emulate(*options, SCRIPTS / f"{script}.py")
    assert done.stdout.strip(), done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == any(found.values())
    return found, done.stderr


@pytest.mark.parametrize("check", checks_of("torch_calls"))
def test_torch_calls(check):
    assert run("torch_calls")[0][check] is None


LAUNCHES = ("--stats", "--mode", "random:7")


@pytest.mark.parametrize("check", checks_of("launches"))
def test_launches(check):
    assert run("launches", *LAUNCHES)[0][check] is None


def test_stats_list_every_launch_in_order():
    rows = [line.split() for line in run("launches", *LAUNCHES)[1].splitlines() if line[:1].isdigit()]
    numbered = [row for row in rows if len(row) == 9]
    assert [row[0] for row in numbered] == [str(i) for i in range(len(numbered))]
    assert [row[1:5] for row in numbered[:2]] == [
        ["add", "2x1x1", "1x1x1", "2"],
        ["double", "2x1x1", "1x1x1", "2"],
    ]
    assert ["ranks", "8x1x1", "4x1x1", "8"] in [row[1:5] for row in numbered]
    assert [f"{len(numbered)}", "launches,"] in [row[:2] for row in rows]


needs_tvm_ffi = pytest.mark.skipif(
    importlib.util.find_spec("tvm_ffi") is None, reason="needs the package apache-tvm-ffi"
)


@needs_tvm_ffi
@pytest.mark.parametrize("check", checks_of("tvm_ffi_calls"))
def test_tvm_ffi(check):
    assert run("tvm_ffi_calls")[0][check] is None


@pytest.mark.parametrize("kind", ["plain", pytest.param("ffi", marks=[needs_tvm_ffi, pytest.mark.slow])])
def test_exported_objects_run_in_another_process(tmp_path, kind):
    """Two kernels of the same name are distinguished by their machine code; their PTX was kept."""
    settings = {"NVFP4_CUTE_CACHE_DIR": str(tmp_path / "cache")}
    for step in ("export", "load"):
        done = emulate(SCRIPTS / "exports.py", step, tmp_path, kind, **settings)
        assert (done.returncode, done.stdout) == (0, "PASS\n"), done.stderr
    # Without kept PTX the error says what to do, and PTX next to the object is enough.
    done = emulate(SCRIPTS / "exports.py", "load", tmp_path, kind, NVFP4_CUTE_CACHE_DIR="off")
    assert done.returncode == 1 and "put the .ptx next to it" in done.stderr
    kept = sorted((tmp_path / "cache" / "ptx").iterdir())
    assert len(kept) == 2
    texts = [gzip.decompress(path.read_bytes()).decode() for path in kept]
    for path in tmp_path.glob("add7*"):
        path.unlink()
    (five,) = [text for text in texts if ", 5;" in text]
    (tmp_path / "add5.ptx").write_text(five)
    done = emulate(SCRIPTS / "exports.py", "load", tmp_path, kind, NVFP4_CUTE_CACHE_DIR="off")
    assert "add7.o" in done.stderr and "add5" not in done.stderr


def test_own_operations_run_again(tmp_path):
    """Runs twice in one process, and in another one that finds the kernels in the disk cache, without the PTX of exports."""
    for process in ("compiles", "loads"):
        done = emulate(SCRIPTS / "own_operations.py", NVFP4_CUTE_CACHE_DIR=str(tmp_path))
        assert (done.returncode, done.stdout) == (0, "PASS\n"), f"{process}: {done.stderr}"
        # A process without the emulator does not change the kernel.
        shutil.rmtree(tmp_path / "ptx", ignore_errors=True)


# ---- how a script ends -----------------------------------------------------------------------------------------------
ENDS = """
import sys
import torch
from neighbour import NAME

def work(x):
    assert x.sum() == 3, f"{NAME}: the sum is {x.sum().item()}"

print(__name__, sys.argv[1:])
what = sys.argv[1]
if what == "assert":
    work(torch.ones(2, device="cuda"))
if what == "exit":
    sys.exit(int(sys.argv[2]))
if what == "text":
    sys.exit("gave up")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "neighbour.py").write_text("NAME = 'beside the script'\n")
    path = tmp_path / "ends.py"
    path.write_text(ENDS)
    return path


def test_a_failing_assertion_gives_its_traceback(script):
    done = emulate(script, "assert")
    assert done.returncode == 1 and done.stdout == "__main__ ['assert']\n"
    assert "AssertionError: beside the script: the sum is 2.0" in done.stderr
    assert 'ends.py", line 7, in work' in done.stderr and "script.py" not in done.stderr


def test_the_command_of_its_own(script):
    """`cute-emulate`, as pyproject.toml installs it."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (target,) = re.findall(r'^cute-emulate = "(.+)"$', text, re.MULTILINE)
    module, _, function = target.partition(":")
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    done = run_python("-c", program, "--arch", "sm_120a", script, "exit", "7")
    assert (done.returncode, done.stdout) == (7, "__main__ ['exit', '7']\n")
    done = run_python("-c", program, "doctor", script)
    assert done.returncode == 0 and "has every name that the script uses" in done.stdout, done.stderr


WANTS = """# /// script
# dependencies = ["nvidia-cutlass-dsl==4.3.5", "torch"]
# ///
import cutlass.cute as cute
import nosuchpackage.inner
from cutlass.cute.nvgpu import warpgroup, nosuchpart
from beside import helper

def kernel(x):
    made = cute.make_fragment(4, cute.Float32)
    return cute.arch.thread_idx(), x.anything, helper.nothing, nosuchpart.deep
"""


def test_what_a_script_wants(tmp_path, capsys):
    """Lists architecture, names that the installed CuTe DSL lacks, packages, and the project's requirements. Executes nothing."""
    path = tmp_path / "wants.py"
    path.write_text(WANTS)
    (tmp_path / "beside.py").write_text("raise SystemExit('executed')\n")
    (tmp_path / "requirements.txt").write_text("torch\nnvidia-cutlass-dsl >=4.2,<4.4  # old\n")
    assert main(["doctor", str(path)]) == 1
    said = capsys.readouterr().out
    assert "architecture: sm_90a (warpgroup): cute-emulate --arch sm_90a" in said
    assert re.search(r"has no cutlass.cute.make_fragment \(line 10\): pip install .*==4.3.5. has it", said)
    assert re.search(r"has no cutlass.cute.nvgpu.nosuchpart \(line 6\): another version", said)
    assert "missing package: nosuchpackage (line 5)" in said and said.count("missing package") == 1
    assert "wants.py asks for nvidia-cutlass-dsl==4.3.5" in said
    assert "requirements.txt asks for nvidia-cutlass-dsl >=4.2,<4.4" in said
    (tmp_path / "bad.py").write_text("def\n")
    assert main(["doctor", str(tmp_path / "bad.py")]) == 1
    assert "bad.py:1: not Python" in capsys.readouterr().err


def test_exit_codes_and_arguments_are_the_scripts_own(script):
    done = emulate("--arch", "sm_120a", script, "exit", "7", "--arch", "x")
    assert (done.returncode, done.stdout) == (7, "__main__ ['exit', '7', '--arch', 'x']\n")
    done = emulate(script, "text")
    assert done.returncode == 1 and "gave up" in done.stderr


def test_what_cannot_run_is_said(tmp_path):
    done = emulate(tmp_path / "none.py")
    assert done.returncode != 0 and "none.py" in done.stderr
    done = emulate("--arch", "sm_75", SCRIPTS / "torch_calls.py")
    assert done.returncode != 0 and "sm_75" in done.stderr and "sm_100a" in done.stderr


HOPPER = """
import cutlass
import cutlass.cute as cute
from cutlass.cute import nvgpu

@cute.jit
def go():
    op = {name}
    op.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (64, 128, 16), op.OperandSource.SMEM,
                    nvgpu.OperandMajorMode.K, nvgpu.OperandMajorMode.K)

go()
"""


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("nvgpu.warpgroup", 0, "names warpgroup: running with --arch sm_90a"),
        # The text does not show the architecture; CuTe DSL's error does.
        ("getattr(nvgpu, 'warp' 'group')", 1, "the script compiles for sm_90a and this virtual GPU is sm_100a: pass --arch sm_90a"),
    ],
)  # fmt: skip
def test_a_hopper_script_runs_or_names_the_option(tmp_path, name, code, said):
    path = tmp_path / "hopper.py"
    path.write_text(HOPPER.format(name=name))
    done = emulate(path)
    assert done.returncode == code and said in done.stderr, done.stderr


def test_ctrl_c_is_silent(tmp_path):
    """Exit code 130, as with other verbs, also if the script catches the interrupt."""
    path = tmp_path / "stopped.py"
    for text in (
        "raise KeyboardInterrupt",
        "import torch\ntorch.ones(2, device='cuda')\nraise KeyboardInterrupt",
    ):
        path.write_text(text)
        done = emulate("--check", path)
        assert (done.returncode, done.stderr) == (130, "")


# The kernel writes past its tensor, and the script ignores the result of its launch.
FAULTY = """
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def overrun(x: cute.Tensor):
    x[cute.arch.thread_idx()[0] + 16] = x[0]

@cute.jit
def launch(x: cute.Tensor):
    overrun(x).launch(grid=(1, 1, 1), block=(32, 1, 1))

x = torch.zeros(32, device="cuda")
try:
    launch(from_dlpack(x))
    torch.cuda.synchronize()
except Exception:
    print("ignored")
"""


def test_a_kernel_failure_counts_even_if_the_script_ignores_it(tmp_path):
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY)
    done = emulate(path)
    assert (done.returncode, done.stdout) == (1, "ignored\n")
    assert "outside every live range" in done.stderr and "float32 tensor of shape (32,)" in done.stderr
    assert "st.global" in done.stderr and "PTX line" in done.stderr and "overrun" in done.stderr
    assert done.stderr.endswith(
        "pass --check to look for races, and to see lines of Python in faults of kernels\n"
    )


def test_tiles_of_an_atomic_counter_take_the_time_of_tiles_dealt_out(tmp_path):
    """Modelled times of the same work with static and dynamic tiles differ by at most 25 %."""
    done = emulate("--timing", "b200", "--json", tmp_path / "found.json", SCRIPTS / "work_counter.py")
    assert done.stdout.split() == ["close", "True"] * 2, done.stderr
    launches = json.loads((tmp_path / "found.json").read_text())["launches"]
    static, dynamic = (launch["modelled"]["us"] for launch in launches)
    assert abs(dynamic / static - 1) < 0.25
