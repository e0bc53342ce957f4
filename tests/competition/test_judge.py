"""A submission cannot decide its own verdict: attacks on the harness's processes, and the parts that withstand them."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cheats import HONEST

from nvfp4_cute.competition import contain, evaluate, evaluator, protocol, runner, wire, witness, worker
from nvfp4_cute.competition.gpu_link import GpuServer
from nvfp4_cute.competition.protocol import CaseResult
from nvfp4_cute.problems import registry

ZEROS = "\ndef custom_kernel(data):\n    return [torch.zeros_like(c) for _, _, c in data[0]]\n"
COMPUTE = "\ndef custom_kernel(data):\n    return compute(data)\n"
# Finds the harness's object in its own process through frames and the garbage collector.
FIND = """
import gc, sys
def find(name):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if type(value).__name__ == name:
                return value
        frame = frame.f_back
    return next(value for value in gc.get_objects() if type(value).__name__ == name)
"""
TRICKS = {
    "empties the guard and stops the clock": (
        FIND + "player = find('Player')\nplayer.__dict__.update(noted=[], _before=[])\n"
        "torch.cuda.Event.elapsed_time = lambda self, end: 1e-9\n" + COMPUTE,
        "replaced Event.elapsed_time",
    ),
    "changes the code of a function that is watched": (
        "torch.cuda.Event.elapsed_time.__code__ = (lambda self, end: 1e-3).__code__\n" + COMPUTE,
        "replaced Event.elapsed_time",
    ),
    "puts a method into a class that inherits it": (
        "torch.Tensor.cpu = lambda self: self\n" + COMPUTE,
        "replaced Tensor.cpu",
    ),
    "makes a queue of the recorded class's base": (
        "\ndef custom_kernel(data):\n    getattr(torch.cuda, 'Str' + 'eam').__mro__[1]()\n    return compute(data)\n",
        "made a queue of its own",
    ),
    "changes its inputs and says that it did not": (
        FIND + "\ndef custom_kernel(data):\n    answer = [c.clone() for c in compute(data)]\n"
        "    find('Player').ask = lambda *a: {}\n    data[0][0][0].view(torch.uint8).zero_()\n    return answer\n",
        "changed its inputs",
    ),
    "answers with an object that is unpickled": (
        "\nclass Evil:\n    def __reduce__(self):\n        return exec, ('import os; os._exit(0)',)\n"
        "def custom_kernel(data):\n    return Evil()\n",
        "output is a Evil: an answer is made of plain tensors",
    ),
    "forges an answer outside the shared memory": (
        "from nvfp4_cute.competition import wire\n"
        "wire.describe = lambda tensor, offset: {'offset': 1 << 47, 'dtype': 'float16', 'shape': [9], 'strides': [1]}\n"
        + COMPUTE,
        "outside the shared memory",
    ),
    "writes what is no message": (
        FIND
        + "\ndef custom_kernel(data):\n    find('Player').judge.sendall(b'\\xff' * 4096)\n    return compute(data)\n",
        "sent a message of",
    ),
    "ends its process": ("\ndef custom_kernel(data):\n    import os\n    os._exit(0)\n", "exit code 0"),
    "exits": ("\ndef custom_kernel(data):\n    raise SystemExit(0)\n", "Encountered SystemExit: 0"),
    "raises what is no Exception": (
        "\nclass Stop(BaseException):\n    pass\ndef custom_kernel(data):\n    raise Stop('now')\n",
        "Encountered Stop: now\n submission.py, line",
    ),
    "writes lines of results": (
        "\ndef custom_kernel(data):\n    raise ValueError('x\\ntest.0.status: pass\\u2028check: pass\\x1b[2J')\n",
        "Encountered ValueError: x\n test.0.status: pass",
    ),
    "ends the process that judges": (
        "\ndef custom_kernel(data):\n    import os, signal\n    os.kill(os.getppid(), signal.SIGKILL)\n    return compute(data)\n",
        "Encountered PermissionError",
    ),
    "writes into the package": (
        "\ndef custom_kernel(data):\n    import nvfp4_cute\n    open(nvfp4_cute.__file__, 'a').close()\n    return compute(data)\n",
        "Encountered PermissionError",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_on_the_harness_is_a_verdict(verdict, name):
    text, expected = TRICKS[name]
    if "Permission" in expected and not _has_landlock(signals="judges" in name):
        pytest.skip("the kernel has no Landlock")
    results = verdict(HONEST + text, strict=True)
    assert not results.passed and results.exit_code == protocol.REJECTED
    assert expected in results.cases[0].message and not results.cases[0].passed


def _has_landlock(signals: bool) -> bool:
    return contain._libc.syscall(444, None, 0, 1) >= (6 if signals else 1)


CONFINED = """
import os, sys, threading
open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("named")
for path in (f"/proc/{os.getppid()}/mem", sys.argv[1]):
    try:
        open(path, "r+b")
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif(not _has_landlock(signals=False), reason="the kernel has no Landlock")
def test_a_confined_process_names_its_threads(tmp_path):
    """CUDA's driver does so through /proc when it starts. Memory of the parent and other files are refused."""
    folder, file = tmp_path / "own", tmp_path / "file"
    folder.mkdir(), file.touch()
    command = [sys.executable, "-c", CONFINED, str(file)]
    done = subprocess.run(
        command, preexec_fn=lambda: contain.confine([folder]), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["refused", "refused"]


def test_times_are_kept_where_the_submission_cannot_reach_them(verdict):
    """A list that the submission extends does not change times. A case after one whose process ended is also judged."""
    text = FIND + (
        "\nclass Timing:\n    us = 0.001\ndef custom_kernel(data):\n"
        "    [value.timings.append(Timing()) for value in gc.get_objects() if type(value).__name__ == 'LinkedGpu']\n"
        "    return compute(data)\n"
    )
    results = verdict(HONEST + text, strict=True, mode="benchmark")
    assert results.passed and results.cases[0].source == "not timed"


def test_a_time_below_what_memory_allows_is_refused():
    case = registry.load("nvfp4_gemm").benchmarks[0]
    answer = worker.Answer(durations_ns=[8.0e3], source="measured")
    assert "moving the operands takes at least 8.0" in evaluator._verdict(case, answer, 1).message
    answer.durations_ns = [8.3e3]
    assert evaluator._verdict(case, answer, 1).stats is not None


STORES = """
.version 8.7
.target sm_100a
.address_size 64
.visible .entry stores(.param .u64 to) {
    .reg .u64 %p; .reg .u32 %t; .reg .u64 %o;
    ld.param.u64 %p, [to];
    mov.u32 %t, %tid.x;
    mul.wide.u32 %o, %t, 4;
    add.u64 %p, %p, %o;
    st.global.u32 [%p], 7;
    ret;
}
"""


def test_only_what_launches_wrote_has_a_time():
    """An answer computed on the host, next to a launch, has no time."""
    arena = wire.Arena()
    server = GpuServer("sm_100a", arena, modelled=False)
    view = arena.allocate(256).view(np.uint32)
    view[:] = 7
    address = int(view.ctypes.data)
    number = server.answer({"do": "register", "text": len(STORES)}, STORES.encode())["number"]
    launch = {"do": "launch", "number": number, "entry": "stores", "grid": [1, 1, 1], "block": [32, 1, 1]} | {
        "cluster": [0, 0, 0],
        "shared_bytes": 0,
        "attributes": 0,
        "ranges": [["c", address, 256]],
    }
    params = address.to_bytes(8, "little").ljust(16, b"\0")
    assert server.answer(launch, params) == {}
    assert server.made_by_launches(address, [64], [1], 4) == 0  # the sevens were there before
    view[:] = 0
    assert server.answer(launch, params) == {} and view[31] == 7 and view[32] == 0
    assert server.made_by_launches(address, [32], [1], 4) == 1
    assert server.made_by_launches(address, [64], [1], 4) == 0.5
    view[:16] = 9
    assert server.made_by_launches(address, [32], [1], 4) == 0.5
    assert "outside the shared one" in server.answer(launch | {"ranges": [["x", 4096, 8]]}, params)["error"]
    assert "KeyError" in server.answer({"do": "exec"}, b"")["error"]


def test_messages_are_read_with_suspicion():
    ours, theirs = socket.socketpair()
    wire.send(theirs, {"a": [1, 2]}, b"xyz")
    assert wire.receive(ours) == ({"a": [1, 2]}, b"xyz")
    for text in (b"[1]", b"{", b"[" * 100_000):
        theirs.sendall(wire._HEADER.pack(len(text), 0) + text)
        with pytest.raises(wire.Refused):
            wire.receive(ours)
    theirs.close()
    with pytest.raises(EOFError):
        wire.receive(ours)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "Tensor"},
        {"dtype": 4},
        {"shape": [-1]},
        {"shape": [1 << 40, 1 << 40]},
        {"strides": [1.5]},
        {"strides": []},
        {"shape": [True]},
        {"shape": "abc"},
        {"shape": [1 << 44], "strides": [1 << 40]},
    ],
)
def test_a_tensor_that_cannot_be_is_refused(change):
    record = {"offset": 0, "dtype": "float16", "shape": [4], "strides": [1]}
    assert wire.layout(record)[3] == 8
    with pytest.raises(wire.Refused):
        wire.layout(record | change)


def test_values_cross_as_they_are():
    arena = wire.Arena()
    value = [torch.arange(6).reshape(2, 3).t(), (None, 1, "x"), torch.empty(0, 3)]

    kept: list = []

    def put(tensor: torch.Tensor) -> dict:
        content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        kept.append(arena.allocate(content.size))
        kept[-1][: content.size] = content
        return wire.describe(tensor, arena.offset_of(kept[-1]))

    tree = wire.to_tree(value, put)

    def take(record: dict) -> torch.Tensor:
        dtype, shape, strides, nbytes = wire.layout(record)
        return wire.tensor_over(arena.view(record["offset"], nbytes), dtype, shape, strides)

    again = wire.from_tree(tree, take)
    assert torch.equal(again[0], value[0]) and again[1] == (None, 1, "x") and again[2].shape == (0, 3)
    for wrong in ({"tensor": 3}, {"list": 1}, {"a": 1, "b": 2}, {"other": "generator"}, [1]):
        with pytest.raises(wire.Refused):
            wire.from_tree(wrong, take)


def test_a_message_names_the_users_file():
    case = CaseResult("", False, "Encountered KeyError: 'oops'\n submission.py, line 9, in custom_kernel: x")
    (shown,) = evaluate.named(protocol.Results((case,), False), Path("/somewhere/mine.py")).cases
    assert shown.message.endswith("\n mine.py, line 9, in custom_kernel: x")


def test_texts_are_shown_without_what_a_terminal_obeys():
    assert (
        wire.printable("a\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J\u2028b\r\n\tc")
        == "ared\ufffd2J\ufffdb\ufffd\n\tc"
    )
    assert wire.printable("x" * 50, 10) == "x" * 10 + " ..."


def test_a_parent_reads_what_its_child_replaced(tmp_path):
    class Base:
        def record(self):
            """Nothing."""

    class Event(Base):
        pass

    noted = witness.note([(time, "perf_counter"), (Event, "record")])
    changes = {
        (): lambda: None,
        ("time.perf_counter",): lambda: setattr(time, "perf_counter", len),
        ("Event.record",): lambda: setattr(Event, "record", len),
        ("Event.record", "base"): lambda: setattr(
            Base.record, "__code__", test_messages_are_read_with_suspicion.__code__
        ),
    }
    for expected, change in changes.items():
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            change()
            os.write(writer, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(reader, 1)
        memory = witness.Memory(child)
        assert memory.replaced(noted) == list(expected[:1])
        memory.close()
        os.kill(child, 9)
        os.waitpid(child, 0)


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not (os.path.exists(sys.argv[1]) and open(sys.argv[1]).read()):
    time.sleep(0.01)
"""


def test_processes_in_sessions_of_their_own_end_as_well(tmp_path):

    with contain.descendants_end():
        subprocess.run([sys.executable, "-c", DAEMON, str(tmp_path / "pid")], check=True)
        left = int((tmp_path / "pid").read_text())
        assert Path(f"/proc/{left}").exists()
    assert not Path(f"/proc/{left}").exists()


def test_a_limit_ends_every_process_of_a_run(tmp_path):
    """The harness, the worker and the processes of a submission all end."""
    command = ["sh", "-c", f"setsid sleep 600 & echo $! > {tmp_path}/pid; while true; do sleep 1; done"]
    results = runner.run_harness(command, tmp_path, {}, 1)
    assert not results.passed and results.exit_code == protocol.TIMED_OUT
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()


def test_a_run_has_no_standard_input(tmp_path):
    """A submission that reads standard input, or waits for it, gets nothing."""
    program = "import os; os.write(int(os.environ['POPCORN_FD']), os.readlink('/proc/self/fd/0').encode())"
    lines, code = runner.run_judge([sys.executable, "-c", program], tmp_path, {}, 30)
    assert (lines, code) == (["/dev/null"], 0)


def test_the_harness_takes_no_module_from_its_folder(tmp_path):

    (tmp_path / "base64.py").write_text("open('mark', 'w')\n")
    (tmp_path / "cases.txt").write_text("nonsense")
    request = evaluate.Request(Path("submission.py"))
    command = evaluate._own_harness(request, registry.load("nvfp4_gemv"), "sm_100a")("test")
    reader, writer = os.pipe()
    environment = os.environ | {"POPCORN_FD": str(writer), "PYTHONPATH": os.pathsep}
    done = subprocess.run(command, cwd=tmp_path, env=environment, pass_fds=(writer,), capture_output=True)
    assert done.returncode == protocol.BAD_CASES and not (tmp_path / "mark").exists()


def test_an_import_step_leaves_nothing_for_the_harness(tmp_path, monkeypatch):
    """The harness starts in folders that are created after the import step, so files and processes of that step do not reach it."""
    seen = {}

    def run_harness(command, folder, variables, limit, writable=None):
        seen["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        seen["command"] = command
        place = Path(command[command.index("--folder") + 1])
        seen["place"] = sorted(path.name for path in place.iterdir())
        return protocol.Results((CaseResult("", True),), True)

    monkeypatch.setattr("nvfp4_cute.competition.runner.run_harness", run_harness)
    monkeypatch.setattr(evaluate, "emulated_arch", lambda device: None)
    submission = tmp_path / "mine.py"
    submission.write_text("open('base64.py', 'w')\nopen('cases.txt', 'w')\n")
    assert evaluate.evaluate(evaluate.Request(submission, "nvfp4_gemv")).passed
    assert seen["files"] == ["cases.txt"] and seen["place"] == ["submission.py", "task.py"]
