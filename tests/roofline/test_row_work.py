"""roofline.row_work: CTAs of launches around the products of a layer of experts, of which a few represent all."""

import pytest
import torch

from nvfp4_cute.backends import emulator
from nvfp4_cute.emulator.record.events import SECTOR, Op
from nvfp4_cute.emulator.record.representatives import choose, everyone
from nvfp4_cute.experts.combine import finalize
from nvfp4_cute.experts.gather import gather
from nvfp4_cute.experts.routing import route
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.roofline import row_work
from nvfp4_cute.timing.clock import Chain

TOKENS, EXPERTS, TOP_K = 21, 16, 4


def sectors(clusters) -> tuple[list[int], list[int]]:
    """Returns the sectors that are read and written, with repetitions."""
    found: dict[Op, list[int]] = {Op.READ: [], Op.WRITE: []}
    for event in (event for cluster in clusters for cta in cluster.warps for warp in cta for event in warp):
        if event[0] in found:
            pieces = event[2 if event[0] is Op.READ else 1]
            found[event[0]] += [at for start, size in pieces for at in range(start, start + size, SECTOR)]
    return sorted(found[Op.READ]), sorted(found[Op.WRITE])


@pytest.mark.parametrize("hidden", [2048, 2880])
def test_a_few_ctas_stand_for_all(hidden):
    logits = torch.randn((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(0))
    x = torch.zeros((TOKENS, hidden), dtype=torch.bfloat16)
    h = torch.zeros((TOKENS * TOP_K, hidden), dtype=torch.bfloat16)
    chain, works = Chain(), []

    def keep(task, launch, arch):
        works.append(row_work.of_rows(task))
        return [None]

    with emulator.observe(timing=True, work_of=keep, chain=chain):
        ids, weights = route(logits, TOP_K, backend="emulator:B200")
        _, order = gather(x, ids, EXPERTS, format=NVFP4, backend="emulator:B200")
        finalize(h, order.rows, weights, backend="emulator:B200")
    names = [trace.kernel.partition("_sm_100a")[0] for trace in chain.traces]
    assert names == ["moe_route", "moe_permute", "moe_gather_quantize", "moe_finalize"]
    assert [work is None for work in works] == [False, True, False, False]
    for trace, work in zip(chain.traces, works, strict=True):
        if work is None:
            continue
        placed = work.placed(chain.memory)
        executed = sorted(set(choose(placed)))
        assert 2 * len(executed) <= len(trace.clusters) == len(work.clusters)
        few = everyone([trace.clusters[i] for i in executed], placed, [one.origin for one in trace.clusters])
        (reads, writes), (all_reads, all_writes) = sectors(few), sectors(trace.clusters)
        # Neighbours share some sectors: of integers that tokens share, and of scales if two tokens of a CTA chose the
        # same expert.
        assert (len(reads), len(writes)) == (len(all_reads), len(all_writes))
        missing = len(set(all_reads) - set(reads)), len(set(all_writes) - set(writes))
        assert missing[0] <= TOKENS * TOP_K * 4 // SECTOR and missing[1] <= 0.03 * len(all_writes)
        assert hidden != 2048 or not missing[1]
        count = lambda clusters: [[len(warp) for cta in one.warps for warp in cta] for one in clusters]
        assert count(few) == count(trace.clusters)


def test_launches_that_find_the_order_or_do_something_else_are_executed():
    x, ids = torch.zeros((2, 64), dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    tasks = []

    def keep(task, launch, arch):
        tasks.append(task)
        return [None]

    with emulator.observe(timing=True, work_of=keep, chain=Chain()):
        gather(x, ids, 2, format=NVFP4, backend="emulator:B200")
    assert tasks[0].finds_order and row_work.of_rows(tasks[0]) is None
