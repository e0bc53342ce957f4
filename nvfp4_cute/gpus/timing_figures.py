"""Figures of each GPU for the timing model beyond `targets`, each with its origin; none is fitted to a kernel."""

from types import MappingProxyType

from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.timing.constants import Constants

Figures = dict[str, tuple[float, str]]

PROBE = "bench/probes/h200_probe.cu on an H200 (1.98 GHz, driver 580.159)"
SYNC_PROBE = "bench/probes/h200_small_mma_probe.cu on an H200"
PREFETCH_PROBE = "bench/probes/h200_prefetch_probe.cu on an H200"
GATHER_PROBE = "bench/probes/h100_gather_probe.cu on an H100"
LIKE_H200 = "taken over from the H200, as no measurement is public"
SEMIANALYSIS = "SemiAnalysisAI/microbench-blackwell, B200"
QUICKRUN = "ademeure/QuickRunCUDA, B300"
BLACKWELL_NOTES = "public microbenchmarks of tcgen05 on a B200"

HOPPER: Figures = {
    "l2_bandwidth": (4600, f"{PROBE}: TMA reads of 17 MB that L2 holds, all SMs"),
    "l2_write_bandwidth": (2500, f"{PROBE}: bulk stores of 17 MB, all SMs"),
    "l2_look_ups": (10500, f"{PREFETCH_PROBE}: 8 prefetches of 16 or 32 KB that L2 holds by each of all SMs"),
    "sm_bandwidth": (103, f"{PROBE}: TMA reads of 64 to 192 KB that L2 holds, one SM"),
    "prefetch_bandwidth": (128, f"{PREFETCH_PROBE}: prefetches of 16 and 32 KB that L2 holds, one SM"),
    "prefetch_backlog": (
        800,
        f"{PREFETCH_PROBE}: prefetches of 16 KB by all SMs at once, which delay it that far, are not dropped",
    ),
    "l2_latency": (289, f"{PROBE}: pointer chase"),
    "hbm_latency": (703, f"{PROBE}: pointer chase"),
    "hbm_spread": (
        350,
        f"{PROBE}: single copies of 8 to 64 KB take so much longer than their latency and L2's rate",
    ),
    "line_spread": (
        105,
        f"{GATHER_PROBE}: loads of 4, 16, and 32 lines of rows of their own come 110, 210, and 340 later than a chased pointer",
    ),
    "page_latency": (250, f"{PROBE}: single copies by all SMs at once over those by one"),
    "copy_latency": (67, f"{PROBE}: copy of 128 bytes that L2 holds, less the load's latency"),
    "tma_issue": (10, f"{PROBE}: 16 copies of 1 KB one after the other, 126 to 165 cycles"),
    "tma_reissue": (194, f"{PROBE}: loop of 16 copies of 1 KB, less the last one's latency and the waits"),
    "descriptor_latency": (139, f"{PROBE}: first copy with a tensor map, less the second"),
    "store_latency": (400, f"{PROBE}: bulk store of 2 KB; a store and the GPU's fence, 424"),
    "cta_start": (336, f"{PROBE}: empty kernel of 17 waves of CTAs with 200 KB, by wave"),
    "fetch": (1.4, f"{PROBE}: straight-line code beyond the instruction cache, 2.4 cycles an instruction"),
    "wait_ready": (40, f"{PROBE}: waits for a phase that has ended, without their branch"),
    "wake": (70, f"{PROBE}: two warps that wake one another, 79 a step with its arrival and branch"),
    "arrive_remote": (215, "207 to 223 for an access of another CTA's shared memory, public microbenchmarks"),
    "exchange_bandwidth": (
        16,
        "bench/probes/h200_exchange_probe.cu: 128 CTAs in clusters of 2, 4, 8 send more than the first 16 KB at 19, 15, 13",
    ),
    "cluster_barrier": (400, f"{PROBE}: 412 with its two instructions"),
    "barrier_base": (13, f"{PROBE}: bar.sync of 4, 8, and 12 warps"),
    "barrier_per_warp": (2, f"{PROBE}: bar.sync of 4, 8, and 12 warps"),
    "wgmma_latency": (62, f"{PROBE}: 1, 4, and 16 wgmma and their wait, less their intervals"),
    "wgmma_issue": (
        0.6,
        "bench/probes/h200_issue_probe.cu on an H200: time of loops of computation and wgmma, less that of the computation alone",
    ),
    "sync_share": (
        0.66,
        f"{SYNC_PROBE}: 16 m16n8k16 of each of 8 warps take 97.2 cycles of a scheduler, 64 at wgmma's rate",
    ),
    "sync_issue": (
        1.0,
        f"{SYNC_PROBE}: 64 instructions between 16 of them add 74.5 cycles, 70 alone: nothing else is issued meanwhile",
    ),
    "smem_bandwidth": (128, "128 bytes a cycle and SM, programming guide"),
    "commit_latency": (0, "no tcgen05"),
    "tensor_load_latency": (0, "no tcgen05"),
    "tensor_copy_bandwidth": (1, "no tcgen05"),
    "allocate": (0, "no tcgen05"),
}

H100_PROBE = "bench/probes/h100_probe.cu on an H100 (1.98 GHz, driver 580.159)"
PROVED = "bench/results/prove-h100_sxm.json"

H100: Figures = {
    **HOPPER,
    "l2_bandwidth": (3860, f"{PROVED}: bulk reads of 16 MiB that L2 holds, all SMs"),
    "l2_write_bandwidth": (
        1950,
        f"{H100_PROBE}: kernels whose CTAs store 64 KB, less those that store 128 bytes",
    ),
    "store_latency": (680, f"{H100_PROBE}: a store and the GPU's fence, 704"),
    "cta_start": (305, f"{PROVED}: empty kernels of 1 and 17 waves"),
    "descriptor_latency": (
        900,
        f"{H100_PROBE}: an empty kernel with two tensor maps after a flush over one without, 0.41 us; H200's",
    ),
    "cluster_barrier": (
        1230,
        f"{H100_PROBE}: 66 clusters of two CTAs with 12 warps each; one with a warp each takes 775",
    ),
}

BLACKWELL: Figures = {
    **{name: (value, LIKE_H200) for name, (value, _) in HOPPER.items()},
    "l2_bandwidth": (9700, f"18 to 20.5 TB/s of hits, {QUICKRUN}"),
    "l2_write_bandwidth": (5300, "H200's share of its read bandwidth, as no measurement is public"),
    "l2_look_ups": (22100, "H200's ratio to its read bandwidth, as no measurement is public"),
    "sm_bandwidth": (125, f"240 to 260 GB/s of hits an SM, {SEMIANALYSIS}"),
    "l2_latency": (
        450,
        "300 on the near die and 300 more on the far one, public microbenchmarks: their mean",
    ),
    "hbm_latency": (900, "700 to 790 on the near die and 300 more on the far one: their mean"),
    "hbm_spread": (
        900,
        f"copies of 4 to 64 KB by all SMs take 680 to 1840 longer than latency and rate, {SEMIANALYSIS}",
    ),
    "line_spread": (0, "not measured; 105 on an H100"),
    "tma_issue": (48, f"48 to 65 cycles an instruction and SM, {SEMIANALYSIS}"),
    "cluster_barrier": (380, "370 to 395, public microbenchmarks"),
    "arrive_remote": (215, "207 to 223 for an access of another CTA's shared memory, public microbenchmarks"),
    "barrier_base": (22, "22 + 2 a warp, public microbenchmarks"),
    "wake": (70, "54 to 123 from an arrival to the end of a wait, public microbenchmarks"),
    "commit_latency": (137, f"N/2 + 137 from issue to arrival, {SEMIANALYSIS}"),
    "tensor_load_latency": (56, f"56 + N for ld.32x32b.xN, {BLACKWELL_NOTES}"),
    "tensor_copy_bandwidth": (60, f"4 KB in 68 cycles, {BLACKWELL_NOTES}"),
    "allocate": (250, BLACKWELL_NOTES),
    "wgmma_latency": (0, "no wgmma"),
    "wgmma_issue": (0, "no wgmma"),
    "sync_share": (1, "the rates of sm_120 are those of mma.sync"),
    "sync_issue": (0, "not measured; 1 on an H200"),
}

DESKTOP: Figures = {
    **BLACKWELL,
    "l2_latency": (300, "about 300, public microbenchmarks of GB202"),
    "hbm_latency": (780, "about 780, GDDR7, public microbenchmarks of GB202"),
    "sm_bandwidth": (64, "64 bytes a cycle and SM, as before Hopper; not measured"),
    "l2_look_ups": (9350, "H200's ratio to its read bandwidth, as no measurement is public"),
    "l2_bandwidth": (4096, "not measured: 64 bytes a cycle of 64 slices"),
    "l2_write_bandwidth": (2048, "not measured: half of reading"),
}

NO_TMA = "no TMA, no clusters"
AMPERE: Figures = {
    **{name: (value, LIKE_H200) for name, (value, _) in HOPPER.items()},
    "l2_bandwidth": (
        4600,
        "not measured: NVIDIA A100 white paper, 5120 bytes a cycle; H200's share of as many",
    ),
    "sm_bandwidth": (64, "64 bytes a cycle and SM, NVIDIA A100 white paper"),
    **dict.fromkeys(
        (
            "copy_latency",
            "tma_issue",
            "tma_reissue",
            "descriptor_latency",
            "arrive_remote",
            "cluster_barrier",
        ),
        (0, NO_TMA),
    ),
    "exchange_bandwidth": (1, NO_TMA),
    **dict.fromkeys(("wgmma_latency", "wgmma_issue"), (0, "no wgmma")),
    "sync_share": (1, "the rates of sm_80 to sm_89 are those of mma.sync"),
    "sync_issue": (0, "not measured; 1 on an H200"),
}
ADA: Figures = {
    **AMPERE,
    "l2_latency": (279, "an L40's, 222 to 339 from SM to SM: arXiv 2606.22588"),
    "l2_bandwidth": (3072, "not measured: 64 bytes a cycle of 48 slices"),
    "l2_write_bandwidth": (1536, "not measured: half of reading"),
    "l2_look_ups": (7000, "H200's ratio to its read bandwidth, as no measurement is public"),
}

LAUNCH_US = {
    "H100 SXM": (
        3.33,
        f"{H100_PROBE}: a kernel of 1.4 us between CUDA events, less what an empty interval takes beyond the H200's",
    ),
    "H200": (2.75, f"{PROBE}: empty kernel between CUDA events"),
    "": (2.75, f"H200's, between CUDA events; {QUICKRUN} says about 2 us"),
}
NEXT_LAUNCH = "bench/probes/h200_launch_probe.txt: a kernel that does nothing in front of another in a graph, with and without"
NEXT_US = {
    "H100 SXM": (
        (1.12, 0.70, 0.48),
        f"{H100_PROBE}: clocks of two launches in a graph, with and without programmatic launch",
    ),
    "sm_90a": ((0.86, 0.86, 0.86), f"{NEXT_LAUNCH} programmatic launch"),
    "": ((0.67, 0.67, 0.67), f"10 empty kernels in a graph less one, {QUICKRUN}"),
}
"""In us: `next_launch`, `next_programmatic` and `released` of ``Constants``."""
MODEL_ERROR = (
    "Modelled, not measured. On 43 launches measured on an H200 the model's median error is 6 %, the worst 25 % "
    "(tiles of 64 x 64). Six sets of calls were predicted before an H100 ran them: 24 % in the first, 4 % in the last. No launch "
    "was measured on Blackwell, Ada or Ampere (bench/results/timing_model.md)."
)

CLOCK = {
    "H200": (
        1.70e9,
        f"{PROBE}: all SMs run wgmma on random data (1.80 GHz on zeros; 1.98 GHz without wgmma)",
    ),
    "H100 SXM": (
        1.64e9,
        f"{H100_PROBE}: all SMs run wgmma on random data for 20 us after a flush of L2 (1.54 in the first 5, 1.70 later)",
    ),
    "B200": (1.90e9, "1.84 to 1.965 GHz under load, public microbenchmarks: their mean"),
}
FREE_CLOCK = {
    "H100 SXM": (1.92e9, f"{H100_PROBE}: all SMs decode, or stream 64 MB, for 20 us after a flush of L2"),
}
"""Clock of launches without wgmma where it was measured; other GPUs have one clock."""
MEASURED_AT = 1.98e9
"""Clock at which the probe counted cycles of L2 and memory, whose speeds do not follow the SM clock."""

MEMORY_LATENCIES = (
    "l2_latency",
    "hbm_latency",
    "hbm_spread",
    "line_spread",
    "page_latency",
    "store_latency",
    "prefetch_backlog",
)
MEMORY_BANDWIDTHS = ("l2_bandwidth", "l2_look_ups", "l2_write_bandwidth")

TILES = {
    "H100 SXM": (0.92, f"{H100_PROBE}: boxes of 128 rows walked along K, 2.90 TB/s"),
    "": (0.94, f"{PROBE}, tiles of 128 rows walked along K"),
}
"""Fraction of the best streaming rate that GEMM-like reads of device memory reach."""

GPCS = {
    "H200": ((18, 18, 18, 18, 18, 16, 16, 10), f"{PROBE}: 66, 30, and 15 clusters of 2, 4, and 8 CTAs fit"),
    "H100 SXM": (
        (18, 18, 18, 18, 18, 16, 16, 10),
        "bench/results/prove-h100_sxm.md: 66, 30, 15, and 7 clusters of 2, 4, 8, and 16 CTAs fit",
    ),
    "B200": (
        (20, 18, 18, 18, 20, 18, 18, 18),
        "8 groups on two dies of 74; how they divide is not published",
    ),
}
_FIGURES = {
    "H100 SXM": H100,
    "sm_80": AMPERE,
    "sm_86": ADA,
    "sm_89": ADA,
    "sm_90a": HOPPER,
    "sm_120a": DESKTOP,
    "sm_121a": DESKTOP,
}


def constants_of(target: Target, *, multiplies: bool = True) -> Constants:
    """Returns the timing model's numbers for a GPU. Unpublished figures are copied from the H200 and marked as such.

    Args:
        target: the GPU.
        multiplies: whether launches run wgmma, which lowers an H100's clock.
    """
    figures = _FIGURES.get(target.name, _FIGURES.get(target.arch, BLACKWELL))
    clock, clock_source = CLOCK.get(target.name, (target.boost_clock_hz, "targets: boost clock"))
    if not multiplies:
        clock, clock_source = FREE_CLOCK.get(target.name, (clock, clock_source))
    launch_us, launch_source = LAUNCH_US.get(target.name, LAUNCH_US[""])
    next_us, next_source = NEXT_US.get(target.name, NEXT_US.get(target.arch, NEXT_US[""]))
    tiles, tiles_source = TILES.get(target.name, TILES[""])
    gpcs, gpc_source = GPCS.get(target.name, (_even(target.num_sms), "not published: groups of 18 or less"))
    bandwidth, hbm_source = target.reached_bandwidth_bytes_per_s, "the highest measured (targets)"
    if bandwidth is None:
        bandwidth, hbm_source = 0.96 * target.bandwidth_bytes_per_s, "0.96 of the theoretical one (targets)"
    sources = {name: source for name, (_, source) in figures.items()}
    sources |= {
        "launch": launch_source,
        **dict.fromkeys(("next_launch", "next_programmatic", "released"), next_source),
        "gpcs": gpc_source,
        "clock_hz": clock_source,
        "hbm_bandwidth": f"{hbm_source}, times {tiles}: {tiles_source}",
        "hbm_peak": hbm_source,
        "follows_stalls": "compared with launches on an H100; on other GPUs nothing was",
        **dict.fromkeys(("num_sms", "l2_bytes", "matrix_rates"), "targets"),
    }
    values = {name: float(value) for name, (value, _) in figures.items()}
    slower = clock / MEASURED_AT if target.arch == "sm_90a" else 1.0
    values |= {name: values[name] * slower for name in MEMORY_LATENCIES}
    values |= {name: values[name] / slower for name in MEMORY_BANDWIDTHS}
    return Constants(
        name=target.name,
        arch=target.arch,
        num_sms=target.num_sms,
        clock_hz=clock,
        gpcs=gpcs,
        hbm_bandwidth=tiles * bandwidth / clock,
        hbm_peak=bandwidth / clock,
        l2_bytes=target.l2_bytes,
        follows_stalls=target.arch == "sm_90a",
        launch=launch_us * 1e-6 * clock,
        next_launch=next_us[0] * 1e-6 * clock,
        next_programmatic=next_us[1] * 1e-6 * clock,
        released=next_us[2] * 1e-6 * clock,
        matrix_rates=MappingProxyType({name: float(rate) for name, rate in target.rates.items()}),
        sources=MappingProxyType(sources),
        **values,
    )


def _even(num_sms: int) -> tuple[int, ...]:
    """Divides SMs into groups of even size, at most 18 each."""
    groups = -(-num_sms // 18)
    pairs = [num_sms // 2 // groups + (i < num_sms // 2 % groups) for i in range(groups)]
    return tuple(2 * pair for pair in pairs)


DEFAULT_TARGETS = {
    "sm_80": targets.A100_80GB,
    "sm_86": targets.A10,
    "sm_89": targets.L40S,
    "sm_90a": targets.H200,
    "sm_100a": targets.B200,
    "sm_103a": targets.B300,
    "sm_110a": targets.THOR,
    "sm_120a": targets.RTX_PRO_6000,
    "sm_121a": targets.GB10,
}
"""The GPU to model if only the architecture is known."""
