"""Registers, shared memory and tensor memory of every candidate config of the sm_100 family, on every architecture.

``python -m nvfp4_cute.bench.sm100_configs`` compiles them (minutes, no GPU) and prints the table of
results/sm100_configs.md.
"""

from collections.abc import Iterator, Sequence

import torch
from tqdm import tqdm

from nvfp4_cute.compile.compiler import compile_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.planning.arch import family_of
from nvfp4_cute.planning.arch.sm100 import limits as sm100
from nvfp4_cute.planning.config import KernelConfig

NUM_GROUPS = 8
HEADER = (
    "| arch | config | registers | stack bytes | code bytes | smem bytes | tensor-memory columns |",
    "|---|---|---|---|---|---|---|",
)


def row(arch: str, config: KernelConfig) -> str:
    """Returns the table's line of one compiled variant: list form of 8 groups, fp16 output, contiguous rows."""
    key = KernelKey(arch, config, NUM_GROUPS, torch.float16, False).validated()
    resources = compile_kernel(key).resources
    smem, tmem = sm100.smem_plan(key.config), sm100.tmem_map(key.config)
    return (
        f"| {arch} | {key.config.to_name()} | {resources.registers} | {resources.stack_bytes} | "
        f"{resources.code_bytes} | {smem.total_bytes} | {tmem.used_cols} |"
    )


def rows(archs: Sequence[str] = sm100.ARCHS) -> Iterator[str]:
    """Yields a line for every candidate on every architecture."""
    tried = [(arch, config) for arch in archs for config in family_of(arch).CANDIDATES]
    for arch, config in tqdm(tried, disable=None):
        yield row(arch, config)


def main() -> None:
    """Prints the table of sm_100."""
    print("\n".join([*HEADER, *rows()]))


if __name__ == "__main__":
    main()
