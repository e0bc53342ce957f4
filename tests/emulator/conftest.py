"""Fixtures that run a few PTX instructions on many operands, for the tests of instructions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}
STORAGE = {1: "u8", 2: "b16", 4: "b32", 8: "b64"}


def kernel_text(
    body: str,
    params: int = 1,
    declarations: str = "",
    module: str = "",
    name: str = "k",
    arch: str = "sm_100a",
) -> str:
    """A module with one kernel. It loads parameters %rd0, %rd1, ... and executes the given body."""
    names = [f".param .u64 p{i}" for i in range(params)]
    loads = "\n".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(params))
    return f"""{HEADER.replace("sm_100a", arch)}{module}
.visible .entry {name}({", ".join(names)})
{{
.reg .pred %p<32>;
.reg .b16 %rs<32>;
.reg .b32 %r<64>;
.reg .b64 %rd<64>;
{declarations}
{loads}
{body}
ret;
}}
"""


def elementwise_text(body: str, inputs: dict[str, np.ndarray], outputs: dict[str, Any]) -> str:
    """A kernel that loads element i of every input into the register of the same name, runs `body`, and stores the outputs."""
    lines = [
        "mov.u32 %r60, %tid.x;",
        "mov.u32 %r61, %ctaid.x;",
        "mov.u32 %r62, %ntid.x;",
        "mad.lo.u32 %r63, %r61, %r62, %r60;",
    ]
    declarations = []
    for i, (name, array) in enumerate(inputs.items()):
        size = array.dtype.itemsize
        declarations.append(f".reg .{REGISTER[size]} %{name};")
        lines += [
            f"mad.wide.u32 %rd40, %r63, {size}, %rd{i};",
            f"ld.global.{STORAGE[size]} %{name}, [%rd40];",
        ]
    lines.append(body)
    for i, (name, dtype) in enumerate(outputs.items()):
        if dtype is bool:
            declarations.append(f".reg .pred %{name};")
            lines.append(f"selp.b32 %r59, 1, 0, %{name};")
            size, register = 4, "%r59"
        else:
            size, register = np.dtype(dtype).itemsize, f"%{name}"
            declarations.append(f".reg .{REGISTER[size]} %{name};")
        lines += [
            f"mad.wide.u32 %rd40, %r63, {size}, %rd{len(inputs) + i};",
            f"st.global.{STORAGE[size]} [%rd40], {register};",
        ]
    return kernel_text("\n".join(lines), len(inputs) + len(outputs), "\n".join(declarations))


def run_elementwise(
    body: str, inputs: dict[str, np.ndarray], outputs: dict[str, Any], threads: int
) -> dict[str, np.ndarray]:
    """Runs `body` once per element. One thread takes the uniform path (Python scalars), 32 threads the NumPy path."""
    count = len(next(iter(inputs.values())))
    padded = -(-count // threads) * threads
    arrays = [np.concatenate([a, np.repeat(a[-1:], padded - count)]) for a in inputs.values()]
    results = [np.zeros(padded, np.uint32 if d is bool else d) for d in outputs.values()]
    run_ptx(elementwise_text(body, inputs, outputs), None, padded // threads, threads, [*arrays, *results])
    return {
        name: result[:count].astype(bool) if dtype is bool else result[:count]
        for (name, dtype), result in zip(outputs.items(), results, strict=True)
    }


@pytest.fixture(params=[32, 1], ids=["lanes", "uniform"])
def elementwise(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs run_elementwise with 32 lanes and with one, which takes a sample of long inputs. Returns the output arrays."""

    def run(
        body: str, inputs: dict[str, np.ndarray], outputs: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        if request.param == 1:
            keep = slice(None, None, max(1, len(next(iter(inputs.values()))) // 24))
            inputs = {k: v[keep] for k, v in inputs.items()}
            expected = {k: v[keep] for k, v in expected.items()}
        got = run_elementwise(body, inputs, outputs, request.param)
        for name, want in expected.items():
            wrong = np.flatnonzero(got[name] != want.astype(got[name].dtype, copy=False))
            assert wrong.size == 0, "\n".join(
                f"{body}: { ({k: hex(int(v[i])) for k, v in inputs.items()}) } gave {got[name][i]}, expected {want[i]}"
                for i in wrong[:5]
            )

    return run


@pytest.fixture
def ptx_kernel() -> Callable[..., str]:
    """Returns kernel_text."""
    return kernel_text
