"""Checkers of machine code next to the emulator's findings, with stand-ins for the executables."""

import sys
from types import SimpleNamespace

import pytest

from nvfp4_cute.cli import machine_checkers
from nvfp4_cute.emulator.fronts.virtual_gpu import Resources

STAND_IN = f"""#!{sys.executable}
import os, sys
print("kernel.cubin")
print("pair data: nothing")
print(*sys.argv[1:], open("kernel.cubin", "rb").read(4), os.environ.get("CUXRAY_NO_FETCH"))
for number in range(20):
    print("line", number)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs stand-ins as the only executables of PATH, and hides Triton."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine_checkers.importlib.util, "find_spec", lambda name: None)

    def add(*names, text=STAND_IN):
        for name in names:
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)

    return add


def said(arch):
    """What is said about a virtual GPU that launched one of the two kernels of a cubin, and none of another."""
    rows = [SimpleNamespace(kernel="copy", resources=Resources(64, 2560, 2048, 1, None))] * 2
    modules = [(b"\x7fELF", SimpleNamespace(entries=names)) for names in (["copy", "other"], ["third"])]
    return [
        *machine_checkers.lines(
            SimpleNamespace(device=SimpleNamespace(arch=arch), launches=rows, modules=modules)
        )
    ]


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_each_checker_gets_the_cubin_and_the_launch(install, tmp_path, arch):
    install("basalt", "cuxray", "nvdisasm")
    headings = [f"{name} says about the machine code of `copy`:" for name in ("basalt", "cuxray")]
    lines = said(arch)
    assert [line for line in lines if "says" in line] == headings[arch == "sm_100a" :]
    assert "  advise kernel.cubin --threads 64 --smem-dynamic 2048 b'\\x7fELF' 1" in lines
    if arch == "sm_120a":  # the only architecture that basalt knows
        assert f"  --cuda-bin {tmp_path} verify kernel.cubin b'\\x7fELF' None" in lines
        assert "  line 10" in lines  # two of basalt's lines are left out
    assert lines[-2:] == ["  line 8", "  and 11 more lines"]


def test_nothing_is_said_without_a_checker(install):
    install("nvdisasm")
    assert said("sm_120a") == []


def test_a_checker_that_fails_gives_its_last_line(install):
    install("nvdisasm", "cuxray", text="#!/bin/sh\necho first\necho the reason\nexit 2\n")
    assert said("sm_120a")[1:] == ["  exit code 2", "  the reason"]


def test_a_missing_disassembler_is_named_or_taken_from_triton(install, tmp_path, monkeypatch):
    install("cuxray")
    assert said("sm_90a")[1:] == [
        "  nothing: it needs nvdisasm, which CUDA's toolkit and the package `triton` contain"
    ]
    folder = tmp_path / "triton" / "backends" / "nvidia" / "bin"
    folder.mkdir(parents=True)
    install(folder / "nvdisasm")
    spec = SimpleNamespace(origin=str(tmp_path / "triton" / "__init__.py"))
    monkeypatch.setattr(machine_checkers.importlib.util, "find_spec", lambda name: spec)
    assert "  line 0" in said("sm_90a")
