"""Starts processes without the seconds that importing torch and the package takes.

A process imports them once and then forks for each request. The child continues as ``python ARGUMENTS`` would, or calls
a function.
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# Does not import CuTe DSL, which reads its environment at import: programs set it first.
IMPORTED = (
    "nvfp4_cute.cli.emulate",
    "nvfp4_cute.competition.worker",
    "nvfp4_cute.competition.trace.session",
    "nvfp4_cute.experts.moe",
    "nvfp4_cute.backends.reference",
)


def forking() -> multiprocessing.context.BaseContext:
    """A context of ``multiprocessing`` that forks its processes from one that has also imported CuTe DSL."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, "cutlass.cute"])
    return context


def run_python(
    *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """Runs a module (``-m``), a program (``-c``) or a file in a separate process.

    Args:
        env: the whole environment, read after the imports; this process's by default.
        cwd: where it runs; here by default.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        request = {
            "arguments": [*map(str, arguments)],
            "outputs": [*map(str, outputs)],
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
        }
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = (path.read_text() for path in outputs)
    return subprocess.CompletedProcess(request["arguments"], code, out, err)


@cache
def _server() -> subprocess.Popen:
    """Returns the server process of this process. It ends when its input ends."""
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _serve() -> dict | None:
    """Forks a child for every request and answers with its exit code, until the input ends. Returns the request in a child."""
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _go_on(request: dict) -> None:
    """Continues as the requested process."""
    for number, path in enumerate((os.devnull, *request["outputs"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    first, *rest = request["arguments"]
    sys.path[0] = os.getcwd() if first in ("-m", "-c") else os.path.dirname(first)
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    if (request := _serve()) is not None:
        _go_on(request)
