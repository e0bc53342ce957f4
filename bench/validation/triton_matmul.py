"""Triton's matrix product from its tutorial, in bf16: its PTX is modelled, its kernel measured. Needs Triton."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from nvfp4_cute.emulator.cubin import read_machine_code
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.timing.clock import record_ptx

TILE, WARPS, STAGES = (128, 128, 64), 8, 3
PREFIX = "Triton's matmul "


def is_there() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def sizes_of(name: str) -> tuple[int, ...]:
    """Returns M, N and K of a call's name."""
    return tuple(map(int, name.removeprefix(PREFIX).split(" x ")))


def compiled(arch: str) -> Any:
    """Compiles it for an architecture such as sm_90a, on any machine."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nvfp4_cute.bench.validation.triton_kernel import matmul

    signature = {"a": "*bf16", "b": "*bf16", "c": "*bf16", "n": "i32", "k": "i32"}
    constants = dict(zip(("tile_m", "tile_n", "tile_k"), TILE, strict=True))
    divisible = {(place,): [["tt.divisibility", 16]] for place in range(5)}
    source = ASTSource(
        matmul,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs=divisible,
    )
    capability = int(arch.removeprefix("sm_").rstrip("a"))
    options = {"num_warps": WARPS, "num_stages": STAGES}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def recorded(name: str, target: Target) -> LaunchTrace:
    """Returns the trace of the kernel's launch."""
    m, n, k = sizes_of(name)
    found = compiled(target.arch)
    ptx = found.asm["ptx"]
    a, b, c = (np.zeros(rows * columns, np.uint16) for rows, columns in ((m, k), (k, n), (m, n)))
    entry = next(line for line in ptx.splitlines() if ".entry" in line).split(".entry")[1].strip(" (")
    given = ptx.split(".entry")[1].split(")")[0].count(".param")
    arguments = [a, b, c, n, k, *[0] * (given - 5)]
    return record_ptx(
        target.num_sms, ptx, entry, (m // TILE[0], n // TILE[1]), 32 * WARPS, arguments,
        smem_bytes=found.metadata.shared, machine_code=read_machine_code(found.asm["cubin"])[entry],
    )  # fmt: skip


def call(name: str) -> Callable[[], object]:
    """Returns the kernel with random operands on this machine's GPU, after a check of its result.

    Raises:
        ValueError: the result is wrong.
    """
    from nvfp4_cute.bench.validation.triton_kernel import matmul

    m, n, k = sizes_of(name)
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in ((m, k), (k, n)))
    c = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
    grid = (m // TILE[0], n // TILE[1])
    run = lambda: matmul[grid](a, b, c, n, k, *TILE, num_warps=WARPS, num_stages=STAGES)
    run()
    if not torch.allclose(c.float(), (a @ b).float(), rtol=0.05, atol=1.0):
        raise ValueError(f"{name}: the result is wrong")
    return run
