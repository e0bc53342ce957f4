"""The genuine harness: a user's checkout of gpu-mode/reference-kernels, run as on its server, on a GPU or the emulator.

Its files are copied into a temporary folder by task.yml and run unmodified. Every Python process of that run, including
the spawned worker, first executes ``genuine_process``, which provides members that newer versions of CuTe DSL removed
and, on request, a virtual GPU.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from nvfp4_cute import env
from nvfp4_cute.problems.task_file import Task

# With this name, in a folder of PYTHONPATH, every Python process imports it before anything else.
HOOK_FILE = "sitecustomize.py"
HOOK = """\
from nvfp4_cute.competition.genuine_process import activate

activate({arch!r}, {l2_clear_bytes!r})
"""


def prepare(
    task: Task, folder: Path, arch: str | None, l2_clear_bytes: int | None
) -> tuple[Callable[[str], list[str]], dict[str, str]]:
    """Copies the harness's files to ``folder``.

    Args:
        arch: architecture of a virtual GPU; None uses this machine's GPU.
        l2_clear_bytes: bytes to write before a timing there; None leaves it to the harness.

    Returns:
        (mode -> command that runs the harness there, environment variables of that command).

    Raises:
        ValueError: the checkout lacks one of the task's files.
    """
    for name, source in task.files.items():
        if not source.is_file():
            raise ValueError(f"{source}, which the task.yml names, does not exist")
        shutil.copyfile(source, folder / name)
    hook = folder / "hook"
    hook.mkdir()
    (hook / HOOK_FILE).write_text(HOOK.format(arch=arch, l2_clear_bytes=l2_clear_bytes), encoding="utf-8")
    path = env.python_path([str(hook), str(folder)])
    return lambda mode: [sys.executable, task.main, mode, "cases.txt"], {"PYTHONPATH": path}
