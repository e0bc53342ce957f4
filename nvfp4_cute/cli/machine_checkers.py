"""Other projects' checkers of machine code, shown next to the emulator's findings if they are installed.

basalt (https://github.com/sunnypatell/basalt, package ``basalt-sass``) checks the control bits of sm_120 instructions.
cuxray (https://github.com/KookiesNKareem/cuxray) reports spills, occupancy and bank conflicts. Both disassemble with CUDA's
own tools, from ``PATH`` or from Triton's wheel. Their findings do not change the exit code.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvfp4_cute import env
from nvfp4_cute.emulator.fronts.virtual_gpu import Resources, VirtualGpu
from nvfp4_cute.emulator.kernel_names import short_name

TIMEOUT_SECONDS = 60
MOST_LINES = 12
"""Lines that are shown of a checker's report on one cubin."""


@dataclass(frozen=True)
class Checker:
    """A command that checks a cubin.

    Attributes:
        name: the executable.
        arguments: its arguments; ``{cubin}``, ``{tools}``, ``{threads}`` and ``{shared}`` become the file, the folder of CUDA's
            disassembler, and threads and bytes of dynamic shared memory per CTA.
        archs: architectures that it knows; None for all.
        left_out: regular expression of lines that are not shown.
        environment: variables that it needs.
    """

    name: str
    arguments: tuple[str, ...]
    archs: tuple[str, ...] | None
    left_out: str
    environment: tuple[tuple[str, str], ...] = ()


CHECKERS = (
    Checker(
        "basalt",
        ("--cuda-bin", "{tools}", "verify", "{cubin}"),
        ("sm_120a",),
        r"^\S*\.cubin$|^ *(pair data|latency model|def|use)\b",
    ),
    Checker(
        "cuxray",
        ("advise", "{cubin}", "--threads", "{threads}", "--smem-dynamic", "{shared}"),
        None,
        r"^ *evidence:",
        (("CUXRAY_NO_FETCH", "1"),),
    ),
)


def lines(gpu: VirtualGpu) -> Iterator[str]:
    """Yields the reports of the installed checkers on the machine code of launched kernels, with a heading per checker and cubin.

    A cubin with several launched kernels is checked with the threads and the shared memory of the first one.
    """
    installed = [
        (one, command)
        for one in CHECKERS
        if one.archs is None or gpu.device.arch in one.archs
        if (command := shutil.which(one.name))
    ]
    launched = {row.kernel: row.resources for row in gpu.launches} if installed else {}
    for cubin, program in gpu.modules if installed else ():
        names = [name for name in program.entries if name in launched]
        for one, command in installed if names else ():
            yield f"{one.name} says about the machine code of {', '.join(f'`{short_name(name)}`' for name in names)}:"
            yield from _said(one, command, cubin, launched[names[0]])


def _said(one: Checker, command: str, cubin: bytes, needs: Resources) -> Iterator[str]:
    path = os.pathsep.join(_folders())
    disassembler = shutil.which("nvdisasm", path=path)
    if disassembler is None:
        yield "  nothing: it needs nvdisasm, which CUDA's toolkit and the package `triton` contain"
        return
    values = {
        "tools": Path(disassembler).parent,
        "threads": needs.threads,
        "shared": needs.dynamic_shared_bytes,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        arguments = [argument.format(cubin=file.name, **values) for argument in one.arguments]
        try:
            done = subprocess.run(
                [command, *arguments], cwd=folder, env=env.with_variables({"PATH": path, **dict(one.environment)}),
                timeout=TIMEOUT_SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            yield f"  {error}"
            return
    said = [line for line in done.stdout.splitlines() if line.strip() and not re.search(one.left_out, line)]
    if done.returncode:
        said = [f"exit code {done.returncode}", *said[-1:]]
    yield from (f"  {line.strip()}" for line in said[:MOST_LINES])
    if len(said) > MOST_LINES:
        yield f"  and {len(said) - MOST_LINES} more lines"


def _folders() -> Iterator[str]:
    """Yields the folders of executables: those of ``PATH``, then that of Triton's wheel, which has CUDA's disassemblers."""
    yield env.with_variables({}).get("PATH", os.defpath)
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        yield str(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
