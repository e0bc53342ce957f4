"""Reproduced bug reports of public kernels: the checker finds each fault in every mode, and nothing in the repaired kernel."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import cutlass.cute as cute
import torch
from bug_reports import copies, exchange, operands, order, stages, visibility
from cutlass.cute.runtime import from_dlpack

from nvfp4_cute import emulator
from nvfp4_cute.compile.compiler import compile_jit
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.errors import EmulatorError

KERNELS = (stages, exchange, order, visibility, operands, copies)
WORDS = 2048
MODES = ("eager", "lazy", "random:3")


@dataclass(frozen=True)
class Report:
    """A kernel of one of `KERNELS` and the checker's finding.

    Attributes:
        source: who reported the fault, and in which kernel.
        kind, text: kind and text of a finding that describes the fault.
        shape: number of CTAs, threads per CTA, CTAs per cluster.
        wrong: modes that show the fault without the checker, by an error or by different results.
        arch: architecture of the compiled kernel.
        before: kernels launched before it, each of which lets the next one start early.
    """

    kernel: str
    source: str
    kind: str
    text: str
    shape: tuple[int, int, int] = (1, 64, 1)
    wrong: tuple[str, ...] = ()
    severity: str = "error"
    arch: str = "sm_100a"
    before: tuple[str, ...] = ()


LATE, ALWAYS = ("lazy", "random:3"), MODES
TWO_CTAS, FOUR_WARPS, EIGHT_WARPS = (2, 64, 2), (1, 128, 1), (1, 256, 1)
TWO_BLOCKS, HOPPER = (2, 64, 1), "sm_90a"
REPORTS = (
    Report("issuer_waits", "TransformerEngine #3417", "race", "bulk store", wrong=LATE),
    Report("groups_off_by_one", "DeepEP #657", "race", r"bulk load .* while bulk store .* may still read"),
    Report("store_in_a_loop", "Fuser #5448", "race", "bulk store", wrong=LATE),
    Report("no_proxy_fence", "FlashKDA #24", "proxy-fence", r"bulk store .* no fence\.proxy\.async"),
    Report("epilogue_alias", "Fuser #3960", "race", r"ld\.shared .* st\.shared", wrong=ALWAYS),
    Report("copies_after_the_loop", "Fuser #2005", "race", r"cp\.async"),
    Report("mailbox", "cuda-oxide #1066", "hang", "barrier", wrong=ALWAYS),
    Report("parity_of_a_ring", "TileLang #3087", "race|mbarrier", "bulk load|arrivals", wrong=ALWAYS),
    Report("producer_overtakes", "TIRx-kernels #42", "mbarrier", "a slower warp misses it", (1, 288, 1), severity="warning"),
    Report("every_lane_arrives", "Triton #9498", "mbarrier", "32 arrivals with 1 of 1", wrong=ALWAYS),
    Report("two_initialisers", "TIRx-kernels #6", "mbarrier", "again while it is in use", wrong=ALWAYS),
    Report("no_init_fence", "TIRx-kernels #9", "mbarrier", r"without a fence\.mbarrier_init"),
    Report("barrier_of_more_threads", "FlashMLA #57", "hang", "1 of 2 warps", wrong=ALWAYS),
    Report("two_arrivals", "vLLM #26026", "named-barrier", "its warp arrived before|last round is complete", wrong=("eager", "lazy")),
    Report("one_barrier_for_two_pairs", "FlashInfer #4533", "named-barrier", "its last round is complete", FOUR_WARPS, ("random:3",)),
    Report("peer_not_started", "facebookexperimental/triton #2292", "silicon", "remote-access-order: ", TWO_CTAS),
    Report("peer_barrier_not_ready", "facebookexperimental/triton #652", "mbarrier", "nothing orders them", TWO_CTAS),
    Report("local_arrival_elsewhere", "TVM #20074", "rule", "not in the shared memory", TWO_CTAS, ALWAYS),
    Report("peer_still_reads", "humming #56", "race", r"bulk load .* of cta 1,0,0", TWO_CTAS, ("random:3",)),
    Report("flag_then_bulk_copy", "DeepEP #621", "proxy-fence", r"bulk load .* global memory", (2, 64, 1)),
    Report("address_not_published", "CUTLASS #2835", "race", r"tcgen05\.alloc", FOUR_WARPS, ALWAYS),
    Report("freed_by_the_first", "TIRx-kernels #19", "race", r"tcgen05\.dealloc .* frees", FOUR_WARPS, ALWAYS),
    Report("not_allocated", "CUTLASS #2230", "tensor-memory", "not allocated", FOUR_WARPS, ALWAYS),
    Report("split_without_fence", "Fuser #2391", "race", "global memory", (2, 64, 1)),
    Report("flag_after_read_wait", "Triton #10415", "race", "bulk store", (2, 64, 1)),
    Report("box_of_more_bytes", "mirage #705", "hang", "more bytes were copied", wrong=ALWAYS),
    Report("zeros_without_barrier", "TileLang #2699", "race", r"st\.bulk"),
    Report("commit_after_wait", "csarofeen/pytorch #2457", "race", r"cp\.async", wrong=LATE),
    Report("one_barrier_in_a_loop", "HeCBench #253", "race", r"st\.shared", wrong=ALWAYS),
    Report("refill_under_loads", "DeepEP #642", "early-release", "bulk load"),
    Report("released_before_store", "facebookexperimental/triton #430", "race", "bulk load .* bulk store"),
    Report("no_warp_barrier", "ik_llama.cpp #2502", "race", "another lane of the warp", severity="warning"),
    Report("mask_beyond_cluster", "CUTLASS #3658", "rule", "multicast mask 0x7 in a cluster of 2", TWO_CTAS, ALWAYS),
    Report("half_of_the_peer", "CUTLASS #3643", "race", "bulk load", TWO_CTAS),
    Report("relaxed_cluster_barrier", "SGLang #38829; Triton #11404", "silicon", "remote-arrival-scope: ", TWO_CTAS),
    Report("one_lane_announces", "cudnn-frontend #426", "race", r"ld\.shared .* only another lane announced", severity="warning"),
    Report("copies_announced_to_the_peer", "CUTLASS #3643", "silicon", r"remote-arrival-scope: .* cp\.async", TWO_CTAS),
    Report("relaxed_wait", "CUTLASS #2974", "race", r"ld\.shared .* bulk load"),
    Report("receiver_does_not_expect", "flashinfer-bench #183", "race|hang", "bulk load|blocked", TWO_CTAS, ALWAYS),
    Report("data_over_barrier", "Triton #3858", "mbarrier", r"writes over mbarrier .*execute mbarrier\.inval first"),
    Report("invalid_too_early", "Triton #10409", "mbarrier", "no mbarrier was|while it is in use", TWO_CTAS, ("eager", "lazy")),
    Report("rewritten_scalar", "TensorRT-LLM #18339", "race", r"st\.shared .* ld\.shared", wrong=ALWAYS),
    Report("next_chunk", "SGLang #37289", "race", r"st\.shared .* ld\.shared", (1, 96, 1), ALWAYS),
    Report("copies_of_others", "Fuser #3438", "race", r"cp\.async", wrong=("lazy",)),
    Report("read_only_path", "DeepEP #136", "race", "read-only path"),
    Report("map_in_flight", "DeepGEMM #343", "race", "edits the tensor map .* TMA load .* may still use it"),
    Report("map_not_acquired", "cudnn-frontend #898", "proxy-fence", r"no fence\.proxy\.tensormap::generic\.acquire"),
    Report("statistics_not_stored", "CUTLASS #3653", "race", r"tcgen05\.ld .* tcgen05\.st", EIGHT_WARPS),
    Report("slot_released_while_loading", "FlashInfer #5335", "race", r"tcgen05\.st .* tcgen05\.ld", EIGHT_WARPS),
    Report("response_overwritten", "Triton #10922", "race", r"try_cancel .* writes smem", (6, 64, 2), ("eager",)),
    Report("asks_again", "PTX ISA", "silicon", "cancel-after-failure: "),
    Report("another_lane_waits", "Fuser #3961", "race", "bulk store", wrong=LATE),
    Report("elected_lane_waits", "cudnn-frontend #448", "race", r"only another lane of the warp waited|bulk load .* ld\.shared", wrong=ALWAYS),
    Report("loaded_over_zeros", "PTX ISA", "proxy-fence", r"bulk load .* writes .* no fence\.proxy\.async"),
    Report("stored_over_zeros", "PTX ISA", "proxy-fence", r"bulk store .* writes global memory .* no fence\.proxy\.async"),
    Report("fence_of_shared_memory", "PTX ISA", "proxy-fence", r"bulk load .* reads global memory .* no fence\.proxy\.async of global"),
    Report("fence_of_global_memory", "PTX ISA", "proxy-fence", r"bulk store .* reads smem.* no fence\.proxy\.async"),
    Report("map_of_ordinary_stores", "PTX ISA", "proxy-fence", r"st\.global .* no fence\.proxy\.tensormap::generic\.release"),
    Report("small_copies_of_other_lanes", "PTX ISA", "race", r"another lane of the warp accessed in cp\.async", severity="warning"),
    Report("elected_lane_frees_a_stage", "PTX ISA", "race", "stores over the copy of bulk store .* only another lane", severity="warning"),
    Report("expected_too_early", "PTX ISA", "mbarrier", r"mbarrier\.expect_tx .* nothing orders them"),
    Report("expected_in_another_cta", "PTX ISA", "mbarrier", r"mbarrier\.expect_tx .* without a fence\.mbarrier_init", TWO_CTAS),
    Report("relaxed_barrier_of_a_cluster", "PTX ISA", "silicon", "remote-arrival-scope: .* global memory", TWO_CTAS),
    Report("stored_again_behind_a_relaxed_barrier", "PTX ISA", "silicon", "remote-arrival-scope: st.global", TWO_CTAS),
    Report("wait_that_may_give_up", "PTX ISA", "race", r"bulk load .* may answer false after a while: repeat it"),
    Report("waits_twice_at_most", "PTX ISA", "race", r"bulk load .* may answer false after a while: repeat it"),
    Report("lanes_without_use", "CUTLASS #3652", "race", r"tcgen05\.dealloc .* frees .* put tcgen05\.wait::ld", FOUR_WARPS, severity="warning"),
    Report("packed_over_others", "FastVideo #1819; facebookexperimental/triton #1993", "race", r"tcgen05\.st .* while tcgen05\.ld", EIGHT_WARPS, ALWAYS),
    Report("next_product", "cudnn-frontend #396", "race|hang", r"tcgen05\.mma .* tcgen05\.ld|the warp has found 0 of the 2", (1, 160, 1), ("eager", "random:3")),
    Report("operand_under_product", "TIRx-kernels #7", "race|tensor-memory", r"tcgen05\.(st|mma) .* tcgen05\.(st|mma)|not allocated", FOUR_WARPS, LATE),
    Report("operand_past_the_end", "Triton #11366", "out-of-bounds", r"tcgen05\.mma.* shared access of 2048 bytes", FOUR_WARPS, ALWAYS),
    Report("operand_rewritten", "Triton #9433 and #11781", "register", r"writes a register of A while wgmma", FOUR_WARPS, arch=HOPPER),
    Report("written_behind_the_fence", "Triton #9530", "register", r"a register of A .* no wgmma\.fence", FOUR_WARPS, arch=HOPPER),
    Report("operand_not_fenced", "TileLang #2634", "proxy-fence", r"wgmma\.mma_async .* no fence\.proxy\.async", FOUR_WARPS, arch=HOPPER),
    Report("no_barrier_back", "TileLang #2613", "race", r"st\.shared .* while wgmma\.mma_async", EIGHT_WARPS, arch=HOPPER),
    Report("lanes_still_load", "cudnn-frontend #993", "early-release", r"mbarrier\.arrive .* bulk load .* overwrites it"),
    Report("staging_of_a_reduction", "cudnn-frontend #1049 and #1135", "race", r"bulk reduction .* st\.shared", wrong=ALWAYS),
    Report("never_initialised", "CUTLASS #2364", "mbarrier", "no mbarrier was initialised", wrong=ALWAYS),
    Report("fence_of_another_thread", "Triton #11498", "mbarrier", r"without a fence\.mbarrier_init"),
    Report("bytes_of_the_cluster", "TileLang #2644", "hang", "more bytes are expected than copied", (4, 64, 4), ALWAYS),
    Report("bytes_without_arrival", "TileLang #2566", "hang", "pending 1 of 1 arrivals, 0 tx bytes", wrong=ALWAYS),
    Report("leader_signals_early", "Triton #10035", "mbarrier", "a slower warp misses it", (1, 288, 1), severity="warning"),
    Report("bytes_of_the_tail", "TileLang #2525 and #2506", "alignment", "multiple of 16", wrong=ALWAYS),
    Report("slot_of_64_bytes", "emmy #176", "alignment", "multiple of 128 bytes", wrong=ALWAYS),
    Report("offset_of_the_box", "TileLang #2527", "alignment", "20 bytes into", wrong=ALWAYS),
    Report("rows_of_92_bytes", "vLLM #45466", "alignment", r"st\.global\.v4.* not aligned to the 16 bytes", wrong=ALWAYS),
    Report("vector_behind_sums", "FlashInfer #634", "alignment", r"ld\.shared\.v4.* not aligned to the 16 bytes", wrong=ALWAYS),
    Report("over_the_next_row", "AITER #5290", "double-store", r"cta 1,0,0 .*cta 0,0,0 .* writes too", TWO_BLOCKS, ALWAYS),
    Report("row_times_stride", "MSLK #303; flash-attention #1500", "out-of-bounds", r"-4 x 2\^32 bytes .* overflowed 32 bits", wrong=ALWAYS),
    Report("fill_over_copy", "TileLang #2698", "race", r"st\.shared .* may still be writing", wrong=ALWAYS),
    Report("load_after_store", "vLLM #34991", "race", r"ld\.global .* st\.global .* writes", wrong=ALWAYS),
    Report("mask_of_the_first_half", "SGLang #9620", "rule", "does not name them"),
    Report("elected_in_a_branch", "cudnn-frontend #717", "hang", r"elect\.sync.* have not arrived", wrong=ALWAYS),
    Report("misaligned_barriers", "llama.cpp #13469", "race", r"st\.shared .* ld\.shared", wrong=ALWAYS),
    Report("leader_exits", "Triton #11730", "exit", r"may exit before ld\.shared::cluster", TWO_CTAS),
    Report("last_block", "PyTorch #128455", "race", r"ld\.global .*relaxed accesses order nothing", TWO_BLOCKS),
    Report("counted_without_fence", "FlashInfer #4742", "race", r"ld\.global .* bulk store", TWO_BLOCKS),
    Report("counts_over_zeros", "vLLM #13140", "race", r"red\.shared .* st\.shared|st\.shared .* red\.shared", wrong=ALWAYS),
    Report("release_of_one_thread", "FlashInfer #5251", "race", r"ld\.global .* red\.global", TWO_BLOCKS),
    Report("one_warp_waits", "flash-attention #2498", "silicon", "pdl-order: .* without griddepcontrol", before=("preprocess",)),
    Report("merge", "CCCL #3131", "silicon", "pdl-order: .* and no launch in between waited for its end", before=("preprocess", "partition")),
    Report("tile_off_the_pattern", "TileLang #2379", "silicon", r"swizzle-phase: .* not a multiple of 1024", wrong=ALWAYS, severity="warning"),
    Report("widened_not_fenced", "SGLang #39124", "proxy-fence", r"tcgen05\.mma .* no fence\.proxy\.async", FOUR_WARPS),
    Report("released_under_product", "Fuser #3561", "race", r"bulk load .* wgmma\.mma_async", (1, 160, 1), arch=HOPPER),
    Report("other_warpgroup_multiplies", "Triton #11047", "race", r"bulk load .* wgmma\.mma_async", EIGHT_WARPS, arch=HOPPER),
)  # fmt: skip


@cache
def ptx_of(report: Report, fixed: bool) -> str:
    grid, block, cluster = report.shape
    kernel = next(getattr(module, report.kernel) for module in KERNELS if hasattr(module, report.kernel))

    @cute.jit
    def launch(src: cute.Tensor, out: cute.Tensor):
        kernel(src, out, fixed).launch(grid=(grid, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1))

    tensors = [from_dlpack(torch.zeros(WORDS, dtype=torch.int32)) for _ in range(2)]
    return compile_jit(report.arch, launch, *tensors, no_jit_engine=True)[1]


def run(report: Report, mode: str, *, fixed: bool, check: bool = False):
    """Returns (words that the kernel stored, findings, error or None)."""
    grid, block, cluster = report.shape
    machine, out, error = Machine(148, mode=mode, check=check), np.zeros(WORDS, np.int32), None
    args = [np.arange(1, WORDS + 1, dtype=np.int32), out]
    try:
        for name in (*report.before, report.kernel):
            ptx = ptx_of(replace(report, kernel=name), fixed)
            run_ptx(
                ptx, None, grid, block, args, cluster=cluster, smem_bytes=8192, machine=machine,
                programmatic=name not in report.before[:1] and bool(report.before),
            )  # fmt: skip
    except EmulatorError as raised:
        error = raised
    return out, machine.checker.hazards if check else [], error


@pytest.mark.sampled(6)
@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.kernel)
def test_report(report):
    right, _, error = run(report, "eager", fixed=True)
    assert error is None
    wrong = []
    for mode in MODES:
        out, found, error = run(report, mode, fixed=True, check=True)
        assert (error, found) == (None, [])
        np.testing.assert_array_equal(out, right)
        _, found, _ = run(report, mode, fixed=False, check=True)
        named = [h for h in found if h.severity == report.severity and re.fullmatch(report.kind, h.kind)]
        assert any(re.search(report.text, h.text) for h in named), f"{mode}: {found}"
        out, _, error = run(report, mode, fixed=False)
        if error is not None or not np.array_equal(out, right):
            wrong.append(mode)
    assert tuple(wrong) == report.wrong


def test_page_lists_every_report():
    page = (Path(emulator.__file__).parent / "COMPARISON.md").read_text()
    assert f"contains {len(REPORTS)} faults" in page and f"| all | {len(REPORTS)} |" in page
    for report in REPORTS:
        for number in re.findall(r"#\d+", report.source):
            assert re.search(rf"{number}\b", page), report.source
    shown = [sum(mode in report.wrong for report in REPORTS) for mode in MODES]
    assert f"| all | {len(REPORTS)} | {' | '.join(map(str, shown))} |" in page
