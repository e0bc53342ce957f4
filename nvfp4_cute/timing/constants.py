"""The numbers of one GPU that the timing model needs. The host fills them in, with their sources."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nvfp4_cute.emulator.descriptors import OPERAND_ROW_BYTES
from nvfp4_cute.errors import EmulatorError

_RATE_NAMES = {
    "bf16": "fp16",
    "f16": "fp16",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "s8": "int8",
    "u8": "int8",
    "e2m1": "nvfp4",
}
"""Element type of an instruction -> name of its rate."""


@dataclass(frozen=True)
class Constants:
    """Speeds and latencies of a GPU. Cycles are those of the SM clock; bandwidths are bytes a cycle.

    Attributes:
        name: of the GPU.  arch: PTX target.  num_sms: SMs.  clock_hz: SM clock under load.
        gpcs: SMs of each group that a cluster must lie in; their sum is `num_sms`.
        hbm_bandwidth: device memory, all SMs.  hbm_peak: what traffic with it never exceeds.
        l2_bandwidth / l2_write_bandwidth: L2, all SMs.  l2_bytes: its capacity.
        l2_look_ups: bytes that L2 looks for, of loads and prefetches of all SMs; prefetches wait for it.
        sm_bandwidth: what one SM receives or sends at most.  prefetch_bandwidth: of boxes that it has brought into L2.
        prefetch_backlog: of device memory, in cycles, from which on it drops prefetches that come too fast.
        l2_latency / hbm_latency: from a request to its data, unloaded.
        line_spread: of the latency of device memory, what differs from line to line: an exponential distribution's mean.
        hbm_spread: how much later the last line of a large piece comes than a single line.
        page_latency: first use of a 2 MiB page by a group of SMs.
        copy_latency: what TMA adds.  tma_issue: between two TMA instructions of an SM.
        tma_reissue: between two executions of the same TMA instruction by a warp, whose registers it reads late.
        descriptor_latency: first use of a tensor map by an SM.
        store_latency: of a store, until its completion is known.
        launch: what an empty kernel takes, as CUDA events measure it; half of it before the first instruction.
        next_launch: in a graph, from the end of a launch to the first instruction of the next.
        next_programmatic: from when a launch lets a programmatic one start to that one's first instruction.
        released: from the end of a launch until the next one is past its griddepcontrol.wait.
        cta_start: from the exit of a CTA to the first instruction of the next in its place.
        fetch: what an instruction costs more the first time that an SM executes it.
        wait_ready: an mbarrier wait that need not wait.  wake: from the end of a phase to the waiting warp's next step.
        arrive_remote: of an arrival in another CTA.  exchange_bandwidth: of an SM, to other CTAs of the cluster.
        cluster_barrier: from the last arrival to the next step, with the fence that the assembler puts in front of an arrival.
        barrier_base / barrier_per_warp: of a named barrier, likewise.
        commit_latency: from the end of the last tcgen05.mma to its arrival.
        tensor_load_latency: of tcgen05.ld.  tensor_copy_bandwidth: of tcgen05.cp.  allocate: tcgen05.alloc.
        wgmma_latency: from the end of the last wgmma to the end of its wait.
        wgmma_issue: share of a scheduler's issue that wgmma takes while it runs.
        sync_share: of `matrix_rates` that mma.sync reaches.  sync_issue: share of a scheduler's issue that it takes as it runs.
        follows_stalls: whether a warp issues as fast as the kernel's machine code lets it, on average; else as its PTX does.
        smem_bandwidth: shared memory of one SM.
        matrix_rates: dense FLOP a cycle and SM of wgmma and mma.sync by format.
        sources: where each number comes from, by field name.
    """

    name: str
    arch: str
    num_sms: int
    clock_hz: float
    gpcs: tuple[int, ...]
    hbm_bandwidth: float
    hbm_peak: float
    l2_bandwidth: float
    l2_write_bandwidth: float
    l2_look_ups: float
    l2_bytes: int
    sm_bandwidth: float
    prefetch_bandwidth: float
    prefetch_backlog: float
    l2_latency: float
    hbm_latency: float
    hbm_spread: float
    line_spread: float
    page_latency: float
    copy_latency: float
    tma_issue: float
    tma_reissue: float
    descriptor_latency: float
    store_latency: float
    launch: float
    next_launch: float
    next_programmatic: float
    released: float
    cta_start: float
    fetch: float
    wait_ready: float
    wake: float
    arrive_remote: float
    exchange_bandwidth: float
    cluster_barrier: float
    barrier_base: float
    barrier_per_warp: float
    commit_latency: float
    tensor_load_latency: float
    tensor_copy_bandwidth: float
    allocate: float
    wgmma_latency: float
    wgmma_issue: float
    sync_share: float
    sync_issue: float
    follows_stalls: bool
    smem_bandwidth: float
    matrix_rates: Mapping[str, float] = field(hash=False)
    sources: Mapping[str, str] = field(hash=False, repr=False)

    def us(self, cycles: float) -> float:
        """Cycles in microseconds."""
        return 1e6 * cycles / self.clock_hz

    def mma_interval(
        self, kind: str, m: int, n: int, cta_group: int, a_in_tmem: bool, row_bytes: int = OPERAND_ROW_BYTES
    ) -> float:
        """Cycles between tcgen05.mma instructions of a CTA, or of a pair.

        Each reads 32 bytes of K whatever its kind: of integers (kind i8), too, whose published peak is that of fp8. At full rate
        an instruction takes N/2 cycles (N/4 for 64 rows a CTA of a pair, which use both halves of the data path); narrow ones are
        bound by reading their operands. One of 4-bit elements with K=96 reads 48 bytes in as many cycles: the published peak of
        sm_103 is 1.5 times that of sm_100.
        """
        rows, columns = m // cta_group, n // cta_group
        interval = n / 4 if cta_group == 2 and rows < 128 else n / 2
        operands = (0 if a_in_tmem else rows * row_bytes) + columns * row_bytes
        return max(interval, operands / self.smem_bandwidth)

    def wgmma_interval(self, element: str, n: int, a_in_registers: bool) -> float:
        """Cycles that a wgmma of 64 rows and 32 bytes of K keeps the matrix pipes of its SM busy."""
        flops = 2 * 64 * n * {"tf32": 8, "f16": 16, "bf16": 16}.get(element, 32)
        operands = (0 if a_in_registers else 64 * 32) + n * 32
        return max(flops / self.matrix_rate(element), operands / self.smem_bandwidth)

    def matrix_rate(self, element: str) -> float:
        """Dense FLOP a cycle and SM for an element type of wgmma or mma.sync.

        Raises:
            EmulatorError: the rate is not known.
        """
        rate = self.matrix_rates.get(_RATE_NAMES.get(element, element))
        if rate is None:
            raise EmulatorError(f"the matrix rate of {self.name} for {element} elements is not known")
        return rate
