"""Resources of every config of Blackwell's families, bank conflicts of sm_120a, device memory of the competition's cases.

``python -m nvfp4_cute.bench.configs sm_100`` compiles the configs (minutes, no GPU) and prints the table of
results/sm100_configs.md. ``sm_120`` also runs them on the emulator and prints the first table of results/sm120_configs.md. With
numbers of ``nvfp4_group_gemm`` cases as further arguments, it counts their bytes instead, one launch of the full problem
each (minutes).
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
from tqdm import tqdm

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.bench.cases import select
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.compile.compiler import compile_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.emulator.cubin import read_opcodes
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.gpus.targets import RTX_PRO_6000
from nvfp4_cute.ops.parts import Options, Parts, grouped_gemm
from nvfp4_cute.planning.arch import family_of, sm120
from nvfp4_cute.planning.arch.sm100 import limits as sm100
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.schedule import make_schedule
from nvfp4_cute.roofline.modelled import modelled_times

# Opcode of OMMA in nvdisasm: the block-scaled MMA of 4-bit operands.
OMMA = 0x47F
FP16_BYTES = 2
# Problem for bank conflicts: tiles that are cut on both sides, two K tiles of 256.
M, N, K = 130, 136, 512
SM100_GROUPS = 8
SM100_HEADER = (
    "| arch | config | registers | stack bytes | code bytes | smem bytes | tensor-memory columns |",
    "|---|---|---|---|---|---|---|",
)
CONFIG_HEADER = (
    "| config | registers | stack bytes | smem bytes | block-scaled MMAs in PTX, in SASS | accesses of operands in shared "
    "memory | of them with bank conflicts |",
    "|---|---|---|---|---|---|---|",
)
BYTES_HEADER = (
    "| case | config | modelled us | read, MB | least | ratio | stored, MB | least | read and stored / least |",
    "|---|---|---|---|---|---|---|---|---|",
)


def sm100_row(arch: str, config: KernelConfig) -> str:
    """Returns the line of a config of the sm_100 family: list form of 8 groups, fp16 output, contiguous rows."""
    key = KernelKey(arch, config, SM100_GROUPS, torch.float16, False).validated()
    resources = compile_kernel(key).resources
    smem, tmem = sm100.smem_plan(key.config), sm100.tmem_map(key.config)
    return (
        f"| {arch} | {key.config.to_name()} | {resources.registers} | {resources.stack_bytes} | "
        f"{resources.code_bytes} | {smem.total_bytes} | {tmem.used_cols} |"
    )


def sm100_rows(archs: Sequence[str] = sm100.ARCHS) -> Iterator[str]:
    """Yields a line for every candidate on every architecture of the sm_100 family."""
    tried = [(arch, config) for arch in archs for config in family_of(arch).CANDIDATES]
    for one, config in tqdm(tried, disable=None):
        yield sm100_row(one, config)


def config_row(config: KernelConfig) -> str:
    """Returns the line of a config of sm_120a: list form of 1 group, fp16 output."""
    key = KernelKey("sm_120a", config, 1, torch.float16, False).validated()
    kernel = compile_kernel(key)
    accesses, conflicts = bank_accesses(config)
    return (
        f"| {key.config.to_name()} | {kernel.resources.registers} | {kernel.resources.stack_bytes} | "
        f"{sm120.smem_plan(key.config).total_bytes} | {kernel.ptx.count('mma.sync')}, "
        f"{read_opcodes(kernel.cubin).count(OMMA)} | {accesses} | {conflicts} |"
    )


def bank_accesses(config: KernelConfig) -> tuple[int, int]:
    """Returns warp accesses to shared memory of one small product, and those of instructions with any conflict."""

    def zeros(rows: int) -> torch.Tensor:
        return torch.zeros(rows, NVFP4.row_bytes(K), dtype=torch.uint8)

    scales = [torch.zeros(NVFP4.scale_bytes(rows, K), dtype=torch.uint8) for rows in (M, N)]
    with observe(count_banks=True) as observer:
        grouped_gemm(
            Parts([zeros(M)], scales[:1]),
            Parts([zeros(N)], scales[1:]),
            backend="emulator:sm_120a",
            options=Options(config),
        )
    use = observer.stats[0].banks
    return sum(a.count for a in use.values()), sum(a.count for a in use.conflicts().values())


def bytes_row(number: int) -> str:
    """Returns a competition case's line: L2 read misses and stored sectors of its launch on RTX PRO 6000 in the default tile."""
    (case,) = select(("competition",), f"nvfp4_group_gemm case {number}")
    config, x = sm120.DEFAULT_CONFIG, empty_operands(case)
    (timing,) = modelled_times(
        lambda backend: grouped_gemm(
            *x.sides, out=list(x.out), out_dtype=torch.float16, options=Options(config), backend=backend
        ),
        RTX_PRO_6000,
    )
    read = make_schedule(case.sizes, config.work_tile_mnk, RTX_PRO_6000.num_sms).hbm_bytes
    stored = sum(m * n * FP16_BYTES for m, n, _ in case.sizes)
    ratio = (timing.hbm_bytes + timing.stored_bytes) / (read + stored)
    return (
        f"| {number} | {config.to_name()} | {timing.us:.2f} | {timing.hbm_bytes / 1e6:.3f} | {read / 1e6:.3f} | "
        f"{timing.hbm_bytes / read:.3f} | {timing.stored_bytes / 1e6:.3f} | {stored / 1e6:.3f} | {ratio:.3f} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=("sm_100", "sm_120"))
    parser.add_argument(
        "cases", nargs="*", type=int, metavar="CASE", help="sm_120: count the bytes of these, 0 to 3"
    )
    args = parser.parse_args(argv)
    wrong = [case for case in args.cases if not 0 <= case <= 3 or args.family == "sm_100"]
    if wrong:
        parser.error(f"{wrong[0]} is no case of nvfp4_group_gemm on sm_120: those are 0 to 3")
    if args.family == "sm_100":
        rows = [*SM100_HEADER, *sm100_rows()]
    elif args.cases:
        rows = [*BYTES_HEADER, *(bytes_row(number) for number in tqdm(args.cases, disable=None))]
    else:
        rows = [*CONFIG_HEADER, *(config_row(config) for config in tqdm(sm120.CANDIDATES, disable=None))]
    print("\n".join(rows))


if __name__ == "__main__":
    main()
