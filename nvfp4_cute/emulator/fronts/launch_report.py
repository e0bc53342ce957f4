"""Executed work of launches and resources of their kernels, as tables for people and records for machines."""

from collections.abc import Sequence
from typing import Any

from nvfp4_cute.emulator.banks import BankUse
from nvfp4_cute.emulator.fronts.virtual_gpu import LaunchRow
from nvfp4_cute.emulator.kernel_names import short_name

TIMES_NOTE = (
    "host s: time of the emulation on this machine. Neither it nor any time that the script prints (events, benchmark "
    "helpers) is a GPU time."
)
HEADER = ("launch", "kernel", "grid", "cluster", "CTAs", "warp instr.", "MMAs", "TMA bytes", "host s")
NEEDS_HEADER = (
    "kernel",
    "threads",
    "registers",
    "stack B",
    "local ld/st",
    "shared B",
    "code B",
    "CTAs/SM",
    "warps/SM",
)
NEEDS_NOTE = (
    "registers and stack are per thread, from the assembler's machine code; a stack above 0 is a spill or an array that is "
    "indexed at run time, and local ld/st counts the instructions that access it."
)
MODELLED = "modelled us"
WARP = 32


def cells(index: int, row: LaunchRow) -> tuple[str, ...]:
    """Returns the row of a launch under `HEADER`, with its modelled time if it has one."""
    work = row.work
    timed = () if row.timing is None else (f"{row.timing.us:.2f}",)
    return (
        str(index),
        short_name(row.kernel),
        "x".join(map(str, row.grid)),
        "x".join(map(str, row.cluster)),
        str(row.ctas) if row.finished else f"failed after {work.ctas} of {row.ctas}",
        f"{work.instructions:,}",
        f"{work.mmas:,}",
        f"{work.tma_load_bytes + work.tma_store_bytes:,}",
        f"{work.seconds:.2f}",
        *timed,
    )


def launch_cells(rows: Sequence[LaunchRow]) -> list[tuple[str, ...]]:
    """Returns the header and one row per launch. A column holds modelled times if any launch has one."""
    timed = any(row.timing is not None for row in rows)
    header = (*HEADER, MODELLED) if timed else HEADER
    found = [cells(i, row) for i, row in enumerate(rows)]
    return [header, *(line + ("",) * (len(header) - len(line)) for line in found)]


def needs_cells(rows: Sequence[LaunchRow]) -> list[tuple[str, ...]]:
    """Returns the header and one row per kernel and CTA shape: its SM resources, and the number of CTAs that fit."""
    found: dict[Any, tuple[str, ...]] = {}
    for row in rows:
        needs, code = row.resources, row.resources.code
        made = ("?",) * 4
        if code is not None:
            made = (
                str(code.registers),
                str(code.stack_bytes),
                str(code.local_accesses),
                f"{code.code_bytes:,}",
            )
        registers, stack, local, nbytes = made
        warps = needs.ctas_per_sm * -(-needs.threads // WARP)
        found.setdefault(
            (row.kernel, needs),
            (short_name(row.kernel), str(needs.threads), registers, stack, local, f"{needs.shared_bytes:,}", nbytes,
             str(needs.ctas_per_sm), str(warps)),
        )  # fmt: skip
    return [NEEDS_HEADER, *found.values()]


def launch_table(rows: Sequence[LaunchRow]) -> str:
    """Returns a table of the work of every launch, and the sum."""
    seconds = sum(row.work.seconds for row in rows)
    instructions = sum(row.work.instructions for row in rows)
    launches = "1 launch" if len(rows) == 1 else f"{len(rows)} launches"
    total = f"{launches}, {instructions:,} warp instructions, {seconds:.1f} s"
    return f"{_aligned(launch_cells(rows))}\n{total}\n{TIMES_NOTE}"


def needs_table(rows: Sequence[LaunchRow]) -> str:
    """Returns a table of the SM resources of every kernel."""
    return f"{_aligned(needs_cells(rows))}\n{NEEDS_NOTE}" if rows else "no kernel was launched"


def bank_table(rows: Sequence[LaunchRow]) -> str:
    """Returns a table of the bank accesses of each kernel's instructions, over all its launches."""
    tables = []
    for kernel in dict.fromkeys(row.kernel for row in rows):
        use = sum((row.work.banks for row in rows if row.kernel == kernel), BankUse())
        if use:
            tables.append(f"shared memory of {short_name(kernel)}\n{use.table()}")
    return "\n".join(tables) or "no access to shared memory by ld, st, ldmatrix or stmatrix"


def record(row: LaunchRow) -> dict[str, Any]:
    """Returns a launch as a JSON record. `seconds` is host time; `modelled` is GPU time in microseconds."""
    needs, code = row.resources, row.resources.code
    found: dict[str, Any] = {
        "kernel": short_name(row.kernel),
        "symbol": row.kernel,
        "grid": list(row.grid),
        "cluster": list(row.cluster),
        "finished": row.finished,
        "warp_instructions": row.work.instructions,
        "seconds": round(row.work.seconds, 3),
        "threads": needs.threads,
        "shared_bytes": needs.shared_bytes,
        "ctas_per_sm": needs.ctas_per_sm,
    }
    if code is not None:
        found |= {"registers": code.registers, "stack_bytes": code.stack_bytes, "code_bytes": code.code_bytes}
    if row.timing is not None:
        timing = row.timing
        us = timing.constants.us
        found["modelled"] = {
            "gpu": timing.constants.name,
            "us": round(timing.us, 3),
            "hbm_bytes": timing.hbm_bytes,
            "l2_bytes": timing.l2_bytes,
            "hbm_busy_percent": round(timing.hbm_percent, 1),
            "mma_busy_percent": round(timing.mma_percent, 1),
            "critical_path_us": {cause: round(us(cycles), 3) for cause, cycles in timing.critical.items()},
        }
    return found


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
