"""Constants of one GPU for the timing model. The host supplies them with their sources."""

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
    """Speeds and latencies of a GPU. Cycles are those of the SM clock; bandwidths are bytes per cycle.

    Attributes:
        name: name of the GPU.
        arch: PTX target.
        num_sms: number of SMs.
        clock_hz: SM clock under load.
        gpcs: SMs of each group that a cluster must fit in; their sum is `num_sms`.
        hbm_bandwidth: bandwidth of device memory, for all SMs.
        hbm_peak: upper bound of traffic with device memory.
        l2_bandwidth, l2_write_bandwidth: bandwidths of L2, for all SMs.
        l2_bytes: capacity of L2.
        l2_look_ups: bytes that L2 looks up for loads and prefetches of all SMs; prefetches wait for the look-up.
        sm_bandwidth: most that one SM receives or sends.
        prefetch_bandwidth: most boxes that one SM prefetches into L2, in bytes.
        prefetch_backlog: backlog of device memory, in cycles, from which on it drops prefetches that arrive too fast.
        l2_latency, hbm_latency: from a request to its data, unloaded.
        line_spread: part of the latency of device memory that differs between lines: mean of an exponential
            distribution.
        hbm_spread: delay of the last line of a large piece relative to a single line.
        page_latency: first use of a 2 MiB page by a group of SMs.
        copy_latency: extra latency of TMA.
        tma_issue: between two TMA instructions of an SM.
        tma_reissue: between two executions of one TMA instruction by a warp, whose registers it reads late.
        descriptor_latency: first use of a tensor map by an SM.
        store_latency: from a store to the confirmation of its completion.
        launch: time of an empty kernel by CUDA events; half of it before the first instruction.
        next_launch: in a graph, from the end of a launch to the first instruction of the next.
        next_programmatic: from a launch's trigger to the first instruction of the programmatic launch after it.
        released: from the end of a launch until the next one has passed its griddepcontrol.wait.
        cta_start: from the exit of a CTA to the first instruction of its successor.
        fetch: extra cost of an instruction at its first execution on an SM.
        wait_ready: an mbarrier wait that need not wait.
        wake: from the end of a phase to the waiting warp's next step.
        arrive_remote: latency of an arrival in another CTA.
        exchange_bandwidth: bandwidth from an SM to other CTAs of the cluster.
        cluster_barrier: from the last arrival to the next step, including the fence that the assembler puts before an
            arrival.
        barrier_base, barrier_per_warp: from the last arrival at a named barrier to the next step.
        commit_latency: from the end of the last tcgen05.mma to its arrival.
        tensor_load_latency: latency of tcgen05.ld.
        tensor_copy_bandwidth: bandwidth of tcgen05.cp.
        allocate: time of tcgen05.alloc.
        wgmma_latency: from the end of the last wgmma to the end of its wait.
        wgmma_issue: share of a scheduler's issue slots that wgmma uses while it runs.
        sync_share: share of `matrix_rates` that mma.sync reaches.
        sync_issue: share of a scheduler's issue slots that mma.sync uses while it runs.
        follows_stalls: whether a warp issues at the average rate of the kernel's machine code; otherwise at that of its
            PTX.
        smem_bandwidth: bandwidth of one SM's shared memory.
        matrix_rates: dense FLOP per cycle and SM of wgmma and mma.sync, by format.
        sources: source of each number, by field name.
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
        """Converts cycles to microseconds."""
        return 1e6 * cycles / self.clock_hz

    def mma_interval(
        self, kind: str, m: int, n: int, cta_group: int, a_in_tmem: bool, row_bytes: int = OPERAND_ROW_BYTES
    ) -> float:
        """Returns the cycles between tcgen05.mma instructions of a CTA, or of a pair.

        Each instruction reads 32 bytes of K, whatever its kind. This includes integers (kind i8), whose published peak
        is that of fp8. At full rate an instruction takes N/2 cycles (N/4 for 64 rows per CTA of a pair, which use both
        halves of the data path). Reading the operands bounds narrow instructions. An instruction of 4-bit elements with
        K=96 reads 48 bytes in the same time: the published peak of sm_103 is 1.5 times that of sm_100.
        """
        rows, columns = m // cta_group, n // cta_group
        interval = n / 4 if cta_group == 2 and rows < 128 else n / 2
        operands = (0 if a_in_tmem else rows * row_bytes) + columns * row_bytes
        return max(interval, operands / self.smem_bandwidth)

    def wgmma_interval(self, element: str, n: int, a_in_registers: bool) -> float:
        """Returns the cycles for which a wgmma of 64 rows and 32 bytes of K occupies the matrix pipes of its SM."""
        flops = 2 * 64 * n * {"tf32": 8, "f16": 16, "bf16": 16}.get(element, 32)
        operands = (0 if a_in_registers else 64 * 32) + n * 32
        return max(flops / self.matrix_rate(element), operands / self.smem_bandwidth)

    def matrix_rate(self, element: str) -> float:
        """Returns the dense FLOP per cycle and SM of wgmma or mma.sync for an element type.

        Raises:
            EmulatorError: the rate is unknown.
        """
        rate = self.matrix_rates.get(_RATE_NAMES.get(element, element))
        if rate is None:
            raise EmulatorError(f"the matrix rate of {self.name} for {element} elements is not known")
        return rate
