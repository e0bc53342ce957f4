"""Every probe's body by name, for an architecture."""

from collections.abc import Callable

from . import clocks, exchange, tensor_memory, warpgroup
from .body import Body

SMALL_SMS = ("sm_120a", "sm_121a")
CLUSTER_SIZES = (1, 2, 4, 8)


def _most_of_an_sm(arch: str) -> int:
    """Returns the bytes of shared memory with which only one CTA fits an SM."""
    return (90 if arch in SMALL_SMS else 200) * 1024


BODIES: dict[str, Callable[[], Body]] = {
    "st_async": lambda: exchange.st_async(False),
    "st_async_v4": lambda: exchange.st_async(True),
    "arrives_in_order": exchange.arrives_in_order,
    "cluster_exit": exchange.cluster_exit,
    "pdl": lambda: exchange.dependent_launch(1),
    "pdl_cluster": lambda: exchange.dependent_launch(2),
    "early_release": lambda: warpgroup.early_release(False),
    "early_release_waits": lambda: warpgroup.early_release(True),
    "register_counts": warpgroup.register_counts,
    "wgmma_wait": warpgroup.wgmma_wait,
    **{f"mma_n{n}": lambda n=n: tensor_memory.scaled_mma(n, 0) for n in (32, 96, 160, 192, 224, 256)},
    **{f"mma_n{n}_column1": lambda n=n: tensor_memory.scaled_mma(n, 1) for n in (32, 96)},
    "mma_n32_column2": lambda: tensor_memory.scaled_mma(32, 2),
    "pair_alloc": tensor_memory.pair_alloc,
    "empty": clocks.empty,
    "chase": clocks.chase,
    "remote_chase": clocks.remote_chase,
    **{f"barriers_{n}": lambda n=n: clocks.barriers(n) for n in (128, 256, 384)},
    "cluster_barriers": clocks.cluster_barriers,
    "bulk_reads": clocks.bulk_reads,
    "wgmma_run": clocks.wgmma_run,
    **{f"scaled_run_{n}": lambda n=n: clocks.scaled_run(n) for n in (4, 20)},
    "scaled_sync_run": clocks.scaled_sync_run,
}
FILLING: dict[str, Callable[[int], Body]] = {
    **{f"meet_{size}": lambda nbytes, size=size: exchange.meet(size, nbytes) for size in CLUSTER_SIZES},
    "empty_filling": clocks.empty,
    "meet_cooperative": lambda nbytes: exchange.meet(1, nbytes, is_cooperative=True),
}
"""Those whose CTAs fill an SM."""


def body_of(name: str, arch: str) -> Body:
    """The body of a probe for an architecture. Raises KeyError for a name that is not there."""
    return FILLING[name](_most_of_an_sm(arch)) if name in FILLING else BODIES[name]()
