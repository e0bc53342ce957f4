"""GPUs by name: their features, their peak speeds, and the source of every figure.

A figure that nobody has published or measured is None, and its users say so. ``Target.sources`` has the origin of every known
figure; ``str(target)`` prints them side by side.

There are two kinds of speed. *Published* speeds (``bandwidth_bytes_per_s``, ``peaks``) are the vendor's statements, computed at
some clock for dense operands. *Reached* speeds (``reached_bandwidth_bytes_per_s``, ``rates`` times ``clock_hz``) are the best
of a microbenchmark, so a time computed from them is a floor.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from nvfp4_cute.errors import UnsupportedTarget

if TYPE_CHECKING:
    import torch

KIB, MIB = 1 << 10, 1 << 20
# "fp8" is e4m3 with block scales (mxfp8) where there is such an instruction. "fp16" also stands for bf16. "int8" counts
# operations on integers.
MATH_FORMATS = ("nvfp4", "fp8", "int8", "fp16", "tf32")


@dataclass(frozen=True)
class Target:
    """One GPU product. Bytes, hertz, seconds; rates in floating-point operations, two per multiply-add, dense operands.

    Attributes:
        name: short unique name for :func:`lookup`.
        arch: architecture for which code is compiled, with the chip's own features ("sm_100a").
        device_name: regular expression for the whole name that its driver reports.
        num_sms: number of enabled SMs.
        boost_clock_hz: highest SM clock stated by the vendor or the device.
        load_clock_hz: highest SM clock reported under tensor load.
        smem_per_sm_bytes: shared memory per SM for all CTAs together.
        smem_per_cta_bytes: shared memory that one CTA may opt in to.
        l2_bytes: size of the L2 cache.
        memory_bytes: size of device memory.
        bandwidth_bytes_per_s: theoretical memory bandwidth.
        reached_bandwidth_bytes_per_s: highest measured memory bandwidth.
        launch_s: time of a kernel that does nothing.
        peaks: published dense FLOP/s by math format.
        rates: FLOP per clock and SM by math format.
        sources: origin of every figure above by field name; formats as "peaks.nvfp4".
    """

    name: str
    arch: str
    device_name: str
    num_sms: int
    boost_clock_hz: float
    load_clock_hz: float | None
    smem_per_sm_bytes: int
    smem_per_cta_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth_bytes_per_s: float
    reached_bandwidth_bytes_per_s: float | None
    launch_s: float | None
    peaks: Mapping[str, float] = field(hash=False)
    rates: Mapping[str, int] = field(hash=False)
    sources: Mapping[str, str] = field(hash=False, repr=False)

    @property
    def gpu(self) -> "Gpu":
        """The properties on which the choice of a config depends."""
        return Gpu(self.arch, self.num_sms, self.name)

    @property
    def clock_hz(self) -> float:
        """The highest known clock, since a floor has to hold for a GPU that exceeds its stated boost clock."""
        return max(self.boost_clock_hz, self.load_clock_hz or 0.0)

    @property
    def floor_bandwidth_bytes_per_s(self) -> float:
        """The bandwidth for floors: the highest reached one, otherwise the theoretical one."""
        return self.reached_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s

    def math_flops_per_s(self, math: str) -> float | None:
        """Returns FLOP/s of all SMs at :attr:`clock_hz` in a math format; None if the format or its rate is unknown.

        Raises:
            ValueError: ``math`` is not one of ``MATH_FORMATS``.
        """
        if math not in MATH_FORMATS:
            raise ValueError(f"math={math!r} is unknown; use one of {', '.join(MATH_FORMATS)}")
        rate = self.rates.get(math)
        return None if rate is None else rate * self.num_sms * self.clock_hz

    def figures(self) -> Iterator[tuple[str, float | None, str]]:
        """Yields (field, value, source) of every figure; the source of a missing one is the empty string."""
        for name in FIGURES:
            yield name, getattr(self, name), self.sources.get(name, "")
        for group in ("peaks", "rates"):
            for math in MATH_FORMATS:
                key = f"{group}.{math}"
                yield key, getattr(self, group).get(math), self.sources.get(key, "")

    def __str__(self) -> str:
        """Lists every figure with its source, one per line."""
        rows = [
            (name, "unknown" if value is None else f"{value:.6g}", source)
            for name, value, source in self.figures()
        ]
        width = max(len(name) for name, _, _ in rows)
        lines = (f"  {name:<{width}}  {value:>12}  {source}".rstrip() for name, value, source in rows)
        return "\n".join([f"{self.name} ({self.arch})", *lines])


class Gpu(NamedTuple):
    """The properties on which the choice of a config depends. The name is that of a :class:`Target`, or else the driver's."""

    arch: str
    num_sms: int
    name: str


FIGURES = (
    "num_sms",
    "boost_clock_hz",
    "load_clock_hz",
    "smem_per_sm_bytes",
    "smem_per_cta_bytes",
    "l2_bytes",
    "memory_bytes",
    "bandwidth_bytes_per_s",
    "reached_bandwidth_bytes_per_s",
    "launch_s",
)

Figure = tuple[float, str]


def _target(
    name: str,
    arch: str,
    device_name: str,
    *,
    peaks: dict[str, Figure],
    rates: dict[str, Figure],
    **figures: Figure | None,
) -> Target:
    """Makes a target from figures with their sources; missing figures are unknown."""
    given = {key: figure for key, figure in figures.items() if figure is not None}
    sources = {key: source for key, (_, source) in given.items()}
    sources |= {f"peaks.{key}": source for key, (_, source) in peaks.items()}
    sources |= {f"rates.{key}": source for key, (_, source) in rates.items()}
    return Target(
        name,
        arch,
        device_name,
        **{key: given[key][0] if key in given else None for key in FIGURES},  # type: ignore[arg-type]
        peaks=MappingProxyType({key: value for key, (value, _) in peaks.items()}),
        rates=MappingProxyType({key: int(value) for key, (value, _) in rates.items()}),
        sources=MappingProxyType(sources),
    )


def _formats(source: str, **values: float) -> dict[str, Figure]:
    """Makes figures by math format with a common source."""
    return {key: (value, source) for key, value in values.items()}


# ---- sources ---------------------------------------------------------------------------------------------------

GUIDE = "CUDA C++ programming guide, technical specifications by compute capability"
XLA = "device query recorded in openxla/xla, xla/backends/gpu/target_config/specs/"
SEMIANALYSIS = "SemiAnalysisAI/microbench-blackwell, on a B200 at 1.965 GHz"
QUICKRUN = "ademeure/QuickRunCUDA, b300_clean, measured on a B300"
HGX_B200 = "NVIDIA Blackwell data sheet, HGX B200 (1000 W), as tabulated at glennklockwood.com, dense"
GB200_SHEET = "NVIDIA Blackwell data sheet, GB200 (1200 W), as tabulated at glennklockwood.com, dense"
B300_SHEET = "NVIDIA Blackwell Ultra figures as tabulated at verda.com, GB300 NVL72 architecture, dense"
H100_SHEET = "NVIDIA H100 data sheet, half of the figures with sparsity"
GB202_SPEC = "NVIDIA RTX Blackwell GPU architecture, GB202 specifications"
HMC_PRO = "hmc-tech.com, specifications of RTX PRO 6000 Blackwell, dense"
HOPPER_RATE = (
    "NVIDIA H100: 989 TFLOP/s fp16 dense = 132 SMs x 4096 x 1.83 GHz; fp8 and int8 twice, tf32 half of it"
)
INT8_RATE = "the peak of int8 is that of fp8"
MEASURED_H200 = "measured for this table on an H200 (700 W, driver 580.159, CUDA 13)"
PRO_RATE = "peaks / (188 SMs x 2.617 GHz)"
A100_SHEET = "NVIDIA A100 data sheet, dense (312 TFLOP/s fp16), before rounding: rates x 108 SMs x 1.41 GHz"
A100_RATE = "NVIDIA A100 white paper: 256 fp16 multiply-adds a clock of each of 4 tensor cores; int8 twice, tf32 half of it"
GA102 = "NVIDIA Ampere GA102 white paper"
ADA = "NVIDIA Ada white paper"
A10_SHEET, L4_SHEET = "NVIDIA A10 data sheet", "NVIDIA L4 data sheet"
L40S_SHEET, RTX_6000_SHEET = "NVIDIA L40S data sheet", "NVIDIA RTX 6000 Ada data sheet"
LAPTOP_4060 = "NVIDIA GeForce RTX 4060 Laptop, at 115 W: 3072 cores, 2.37 GHz, 128 bits x 16 Gb/s"
WITH_FP32_SUMS = "with fp32 accumulation"

SM100_SMEM = {
    "smem_per_sm_bytes": (228 * KIB, GUIDE),
    "smem_per_cta_bytes": (227 * KIB, GUIDE),
}
SM120_SMEM = {
    "smem_per_sm_bytes": (100 * KIB, GUIDE),
    "smem_per_cta_bytes": (99 * KIB, GUIDE),
}
SM80_SMEM = {
    "smem_per_sm_bytes": (164 * KIB, GUIDE),
    "smem_per_cta_bytes": (163 * KIB, GUIDE),
}
# Cycles per MMA: 64 for 128x128x64 nvfp4, and also for K=32 fp8, K=16 fp16, K=8 tf32.
SM100_RATES = _formats(
    f"tcgen05.mma intervals of {SEMIANALYSIS}", nvfp4=32768, fp8=16384, fp16=8192, tf32=4096
)
# The tensor cores of sm_103 do not multiply integers.
SM100_INT8 = _formats(INT8_RATE, int8=16384)
HOPPER_RATES = _formats(HOPPER_RATE, fp8=8192, int8=8192, fp16=4096, tf32=2048)
A100_RATES = _formats(A100_RATE, int8=4096, fp16=2048, tf32=1024)
A100_PEAKS = _formats(A100_SHEET, int8=623.7e12, fp16=311.8e12, tf32=155.9e12)
GEFORCE_ADA_RATES = _formats(
    f"{ADA}, {WITH_FP32_SUMS}: peaks / (SMs x clock)", fp8=1024, int8=2048, fp16=512, tf32=256
)

# ---- the table -------------------------------------------------------------------------------------------------

B200 = _target(
    "B200",
    "sm_100a",
    r"NVIDIA B200",
    num_sms=(148, XLA + "b200.txtpb"),
    boost_clock_hz=(1.965e9, XLA + "b200.txtpb"),
    load_clock_hz=(1.965e9, "top of the 1.84 to 1.965 GHz that microbenchmarks report as sustained"),
    **SM100_SMEM,
    l2_bytes=(132_644_864, XLA + "b200.txtpb"),
    memory_bytes=(191_514_411_008, XLA + "b200.txtpb"),
    bandwidth_bytes_per_s=(7.672e12, "7680 bits x 3.996 GHz x 2: pytorch/ao#4002 and " + XLA + "b200.txtpb"),
    reached_bandwidth_bytes_per_s=(
        7.5e12,
        "top of the 7.2 to 7.5 TB/s of public microbenchmarks; GEMM kernels report less: 5.9 TB/s "
        "(gau-nernst/gpu-mode-kernels)",
    ),
    launch_s=(2e-6, "QuickRunCUDA, about 2 us on a B300, the same launch hardware; approximate"),
    peaks=_formats(HGX_B200, nvfp4=9e15, fp8=4.5e15, int8=4.5e15, fp16=2.25e15, tf32=1.1e15),
    rates=SM100_RATES | SM100_INT8,
)

B300 = _target(
    "B300",
    "sm_103a",
    r"NVIDIA B300( .*)?",
    num_sms=(148, QUICKRUN + "; the full die has 160"),
    boost_clock_hz=(2.032e9, QUICKRUN),
    load_clock_hz=(1.94e9, QUICKRUN + ", 1.92 to 1.94 GHz"),
    **SM100_SMEM,
    l2_bytes=(126 * MIB, "about 126 MB, third-party specification pages"),
    memory_bytes=(288_000_000_000, "NVIDIA, Inside Blackwell Ultra: 288 GB"),
    bandwidth_bytes_per_s=(8e12, "NVIDIA, Inside Blackwell Ultra: 8 TB/s"),
    launch_s=(2e-6, QUICKRUN + ", about 2 us; approximate"),
    peaks=_formats(B300_SHEET, nvfp4=14e15, fp8=4.5e15, fp16=2.25e15, tf32=1.1e15),
    rates=SM100_RATES
    | _formats("inferred from the peak: 14 PFLOP/s = 148 SMs x 49152 x 1.92 GHz (the K=96 MMA)", nvfp4=49152),
)

GB200 = _target(
    "GB200",
    "sm_100a",
    r"NVIDIA GB200",
    num_sms=(152, XLA + "gb200.txtpb"),
    boost_clock_hz=(2.062e9, XLA + "gb200.txtpb"),
    **SM100_SMEM,
    l2_bytes=(135_528_448, XLA + "gb200.txtpb"),
    memory_bytes=(197_897_748_480, XLA + "gb200.txtpb"),
    bandwidth_bytes_per_s=(7.928e12, XLA + "gb200.txtpb"),
    peaks=_formats(GB200_SHEET, nvfp4=10e15, fp8=5e15, int8=5e15, fp16=2.5e15, tf32=1.25e15),
    rates=SM100_RATES | SM100_INT8,
)

RTX_PRO_6000 = _target(
    "RTX PRO 6000",
    "sm_120a",
    r"NVIDIA RTX PRO 6000 Blackwell.*",
    num_sms=(188, XLA + "rtx6000pro.txtpb"),
    boost_clock_hz=(2.617e9, HMC_PRO + " (workstation edition)"),
    **SM120_SMEM,
    l2_bytes=(128 * MIB, XLA + "rtx6000pro.txtpb"),
    memory_bytes=(103_079_215_104, XLA + "rtx6000pro.txtpb"),
    bandwidth_bytes_per_s=(1.792e12, GB202_SPEC + ": 512 bits x 28 Gb/s"),
    peaks=_formats(HMC_PRO, nvfp4=2.015e15, fp8=1.0076e15, fp16=503.8e12, tf32=251.9e12),
    rates=_formats(PRO_RATE, nvfp4=4096, fp8=2048, fp16=1024, tf32=512)
    | _formats("inferred: the tensor core of RTX 5090", int8=2048),
)

RTX_5090 = _target(
    "RTX 5090",
    "sm_120a",
    r"NVIDIA GeForce RTX 5090",
    num_sms=(170, GB202_SPEC),
    boost_clock_hz=(2.407e9, GB202_SPEC),
    load_clock_hz=(2.9e9, "from 2019 TFLOP/s nvfp4 measured (kekzl/imp#606) = 170 SMs x 4096 x 2.90 GHz"),
    **SM120_SMEM,
    l2_bytes=(96 * MIB, GB202_SPEC),
    memory_bytes=(32 << 30, "32 GB GDDR7, " + GB202_SPEC),
    bandwidth_bytes_per_s=(1.792e12, GB202_SPEC + ": 512 bits x 28 Gb/s"),
    reached_bandwidth_bytes_per_s=(1.6745e12, "sustained read, Don-Chad/ninfer-3090#17"),
    peaks=_formats("half of NVIDIA's 3352 AI TOPS, which count sparsity", nvfp4=1.676e15)
    | _formats("half of the sparse figure at spheron.network, RTX 5090 specs", fp8=838e12)
    | _formats("a quarter of NVIDIA's 3352 AI TOPS, as analysis.castromedia.org has it", int8=838e12)
    | _formats("codesota.com, RTX 5090, dense with fp32 accumulation", fp16=209.5e12),
    rates=_formats("peaks / (170 SMs x 2.407 GHz)", nvfp4=4096, fp16=512)
    | _formats(
        "block-scaled mxfp8: peaks / (170 SMs x 2.407 GHz); 728 TFLOP/s measured at 8192^3 (Dao-AILab/quack). "
        "e4m3 without block scales and with fp32 accumulation has half of it",
        fp8=2048,
    )
    | _formats(INT8_RATE, int8=2048)
    | _formats("inferred: 122 TFLOP/s measured (torch-performance-test-data#124) at 2.8 GHz", tf32=256),
)

GB10 = _target(
    "GB10",
    "sm_121a",
    r"NVIDIA GB10",
    num_sms=(48, "warehack.ing and chipsandcheese.com, GB10"),
    boost_clock_hz=(
        2.545e9,
        "from 500 TFLOP/s nvfp4 = 48 SMs x 4096 x 2.545 GHz; 31 TFLOP/s fp32 (NVIDIA, Hot Chips 2025) gives 2.52",
    ),
    **SM120_SMEM,
    l2_bytes=(24 * MIB, "third-party specification pages; not confirmed by a device query"),
    memory_bytes=(128_000_000_000, "128 GB LPDDR5x, shared with the CPU (NVIDIA DGX Spark)"),
    bandwidth_bytes_per_s=(273e9, "NVIDIA DGX Spark: 273 GB/s"),
    reached_bandwidth_bytes_per_s=(234e9, "saturating read kernel, antirez/ds4#773: 231 to 234 GB/s"),
    peaks=_formats("half of NVIDIA's 1 PFLOP/s FP4, which counts sparsity", nvfp4=500e12),
    rates=_formats("inferred: the tensor core of RTX PRO 6000", nvfp4=4096, fp8=2048, int8=2048)
    | _formats(
        "inferred: the tensor core of RTX PRO 6000; 95 TFLOP/s bf16 measured (flashinfer#3897) exceed 512",
        fp16=1024,
    ),
)

THOR = _target(
    "Thor",
    "sm_110a",
    r"NVIDIA Thor",
    num_sms=(20, "device query, forums.developer.nvidia.com/t/356355"),
    boost_clock_hz=(1.58e9, "from 1035 TFLOP/s nvfp4 (NVIDIA) = 20 SMs x 32768 x 1.58 GHz"),
    smem_per_sm_bytes=(228 * KIB, "device query, forums.developer.nvidia.com/t/356355"),
    smem_per_cta_bytes=(227 * KIB, GUIDE),
    l2_bytes=(32 * MIB, "device query, forums.developer.nvidia.com/t/356355"),
    memory_bytes=(128_000_000_000, "128 GB LPDDR5X, shared with the CPU (NVIDIA Jetson AGX Thor)"),
    bandwidth_bytes_per_s=(273e9, "NVIDIA Jetson AGX Thor: 273 GB/s"),
    peaks=_formats("NVIDIA, Introducing Jetson Thor, dense", nvfp4=1035e12, fp8=517e12)
    | _formats("half of NVIDIA's sparse fp16 figure", fp16=258.5e12),
    rates=_formats(
        "inferred: the tensor core of sm_100, tcgen05.mma",
        nvfp4=32768,
        fp8=16384,
        int8=16384,
        fp16=8192,
        tf32=4096,
    ),
)

H200 = _target(
    "H200",
    "sm_90a",
    r"NVIDIA H200",
    num_sms=(132, MEASURED_H200 + ": device query"),
    boost_clock_hz=(1.98e9, MEASURED_H200 + ": highest SM clock of nvidia-smi"),
    **SM100_SMEM,
    l2_bytes=(60 * MIB, MEASURED_H200 + ": device query"),
    memory_bytes=(143_155 * MIB, MEASURED_H200 + ": device query"),
    bandwidth_bytes_per_s=(4.8e12, "NVIDIA H200 data sheet: 4.8 TB/s"),
    reached_bandwidth_bytes_per_s=(4.69e12, MEASURED_H200 + ": best of 15 reads of 16 GiB"),
    launch_s=(0.54e-6, MEASURED_H200 + ": empty kernel of 132 CTAs, 1000 in a CUDA graph"),
    peaks=_formats(
        H100_SHEET + "; the H200 has the same", fp8=1979e12, int8=1979e12, fp16=989.4e12, tf32=494.7e12
    ),
    rates=HOPPER_RATES,
)

H100_SXM = _target(
    "H100 SXM",
    "sm_90a",
    r"NVIDIA H100 80GB HBM3",
    num_sms=(132, XLA + "h100_sxm.txtpb"),
    boost_clock_hz=(1.98e9, XLA + "h100_sxm.txtpb"),
    **SM100_SMEM,
    l2_bytes=(50 * MIB, XLA + "h100_sxm.txtpb"),
    memory_bytes=(84_942_979_072, XLA + "h100_sxm.txtpb"),
    reached_bandwidth_bytes_per_s=(3.16e12, "bulk reads of all SMs, bench/results/prove-h100_sxm.json"),
    bandwidth_bytes_per_s=(3.352e12, XLA + "h100_sxm.txtpb"),
    peaks=_formats(H100_SHEET, fp8=1979e12, int8=1979e12, fp16=989.4e12, tf32=494.7e12),
    rates=HOPPER_RATES,
)

H100_PCIE = _target(
    "H100 PCIe",
    "sm_90a",
    r"NVIDIA H100 PCIe",
    num_sms=(114, XLA + "h100_pcie.txtpb"),
    boost_clock_hz=(1.755e9, XLA + "h100_pcie.txtpb"),
    **SM100_SMEM,
    l2_bytes=(50 * MIB, XLA + "h100_pcie.txtpb"),
    memory_bytes=(84_942_979_072, XLA + "h100_pcie.txtpb"),
    bandwidth_bytes_per_s=(2.039e12, XLA + "h100_pcie.txtpb"),
    peaks=_formats(H100_SHEET, fp8=1513e12, fp16=756e12, tf32=378e12),
    rates=HOPPER_RATES,
)

A100_80GB = _target(
    "A100 80GB",
    "sm_80",
    r"NVIDIA A100-SXM4-80GB",
    num_sms=(108, XLA + "a100_sxm_80.txtpb"),
    boost_clock_hz=(1.41e9, XLA + "a100_sxm_80.txtpb"),
    **SM80_SMEM,
    l2_bytes=(40 * MIB, XLA + "a100_sxm_80.txtpb"),
    memory_bytes=(85_100_068_864, XLA + "a100_sxm_80.txtpb"),
    bandwidth_bytes_per_s=(2.039e12, XLA + "a100_sxm_80.txtpb"),
    peaks=A100_PEAKS,
    rates=A100_RATES,
)

A100_40GB = _target(
    "A100 40GB",
    "sm_80",
    r"NVIDIA A100-(SXM4|PCIE)-40GB",
    num_sms=(108, XLA + "a100_sxm_40.txtpb"),
    boost_clock_hz=(1.41e9, XLA + "a100_sxm_40.txtpb"),
    **SM80_SMEM,
    l2_bytes=(40 * MIB, XLA + "a100_sxm_40.txtpb"),
    memory_bytes=(42_331_013_120, XLA + "a100_sxm_40.txtpb"),
    bandwidth_bytes_per_s=(1.5552e12, XLA + "a100_sxm_40.txtpb"),
    peaks=A100_PEAKS,
    rates=A100_RATES,
)

A10 = _target(
    "A10",
    "sm_86",
    r"NVIDIA A10",
    num_sms=(72, "sysrqmts.com, NVIDIA A10 PCIe"),
    boost_clock_hz=(1.695e9, "sysrqmts.com, NVIDIA A10 PCIe"),
    **SM120_SMEM,
    l2_bytes=(6 * MIB, GA102),
    memory_bytes=(24 << 30, A10_SHEET + ": 24 GB GDDR6"),
    bandwidth_bytes_per_s=(600.2e9, A10_SHEET + ": 384 bits x 12.5 Gb/s"),
    peaks=_formats(f"{A10_SHEET}, dense, before rounding", int8=249.9e12, fp16=124.9e12, tf32=62.4e12),
    rates=_formats("peaks / (72 SMs x 1.695 GHz)", int8=2048, fp16=1024, tf32=512),
)

RTX_3090 = _target(
    "RTX 3090",
    "sm_86",
    r"NVIDIA GeForce RTX 3090",
    num_sms=(82, GA102),
    boost_clock_hz=(1.695e9, GA102),
    **SM120_SMEM,
    l2_bytes=(6 * MIB, GA102),
    memory_bytes=(24 << 30, GA102 + ": 24 GB GDDR6X"),
    bandwidth_bytes_per_s=(936.2e9, GA102 + ": 384 bits x 19.5 Gb/s"),
    peaks=_formats(f"{GA102}, dense {WITH_FP32_SUMS}", int8=284e12, fp16=71e12, tf32=35.5e12),
    rates=_formats("peaks / (82 SMs x 1.695 GHz)", int8=2048, fp16=512, tf32=256),
)

L40S = _target(
    "L40S",
    "sm_89",
    r"NVIDIA L40S",
    num_sms=(142, L40S_SHEET + ": 568 tensor cores, 4 an SM"),
    boost_clock_hz=(2.52e9, "itcreations.com, NVIDIA L40S"),
    **SM120_SMEM,
    l2_bytes=(96 * MIB, ADA + ": L40, the same chip"),
    memory_bytes=(48 << 30, L40S_SHEET + ": 48 GB GDDR6"),
    bandwidth_bytes_per_s=(864e9, L40S_SHEET),
    peaks=_formats(L40S_SHEET + ", dense, before rounding", fp8=732.8e12, int8=732.8e12)
    | _formats(L40S_SHEET + ", dense", fp16=362.05e12, tf32=183e12),
    rates=_formats("peaks / (142 SMs x 2.52 GHz)", fp8=2048, int8=2048, fp16=1024, tf32=512),
)

L4 = _target(
    "L4",
    "sm_89",
    r"NVIDIA L4",
    num_sms=(58, L4_SHEET + ": 7424 cores, 128 an SM"),
    boost_clock_hz=(2.04e9, "fpsbench.com, NVIDIA L4"),
    **SM120_SMEM,
    l2_bytes=(48 * MIB, ADA),
    memory_bytes=(24 << 30, L4_SHEET + ": 24 GB GDDR6"),
    bandwidth_bytes_per_s=(300.1e9, L4_SHEET + ": 192 bits x 12.5 Gb/s"),
    peaks=_formats(
        L4_SHEET + ", half of the figures with sparsity", fp8=242e12, int8=242e12, fp16=121e12, tf32=60e12
    ),
    rates=_formats("peaks / (58 SMs x 2.04 GHz)", fp8=2048, int8=2048, fp16=1024, tf32=512),
)

RTX_4090 = _target(
    "RTX 4090",
    "sm_89",
    r"NVIDIA GeForce RTX 4090",
    num_sms=(128, ADA),
    boost_clock_hz=(2.52e9, ADA),
    **SM120_SMEM,
    l2_bytes=(72 * MIB, ADA),
    memory_bytes=(24 << 30, ADA + ": 24 GB GDDR6X"),
    bandwidth_bytes_per_s=(1.008e12, ADA + ": 384 bits x 21 Gb/s"),
    reached_bandwidth_bytes_per_s=(
        923.7e9,
        "copies inside device memory, tinygrad/open-gpu-kernel-modules#6",
    ),
    peaks=_formats(
        f"{ADA}, dense {WITH_FP32_SUMS}", fp8=330.3e12, int8=660.6e12, fp16=165.1e12, tf32=82.5e12
    ),
    rates=GEFORCE_ADA_RATES,
)

RTX_6000_ADA = _target(
    "RTX 6000 Ada",
    "sm_89",
    r"NVIDIA RTX 6000 Ada Generation",
    num_sms=(142, RTX_6000_SHEET + ": 568 tensor cores, 4 an SM"),
    boost_clock_hz=(2.505e9, RTX_6000_SHEET + ": 91.1 TFLOP/s fp32 = 18176 cores x 2 x 2.505 GHz"),
    **SM120_SMEM,
    l2_bytes=(96 * MIB, ADA),
    memory_bytes=(48 << 30, RTX_6000_SHEET + ": 48 GB GDDR6"),
    bandwidth_bytes_per_s=(960e9, RTX_6000_SHEET),
    peaks=_formats(
        "half of the 1457 TFLOP/s fp8 of the "
        + RTX_6000_SHEET.removeprefix("NVIDIA ")
        + ", which count sparsity",
        fp8=728.4e12,
    ),
    rates=_formats(
        "fp8: peaks / (142 SMs x 2.505 GHz); others from the L40S", fp8=2048, int8=2048, fp16=1024, tf32=512
    ),
)

RTX_4060_LAPTOP = _target(
    "RTX 4060 Laptop",
    "sm_89",
    r"NVIDIA GeForce RTX 4060 Laptop GPU",
    num_sms=(24, LAPTOP_4060),
    boost_clock_hz=(2.37e9, LAPTOP_4060),
    **SM120_SMEM,
    l2_bytes=(32 * MIB, "fpsbench.com, GeForce RTX 4060 Mobile"),
    memory_bytes=(8 << 30, LAPTOP_4060 + ", 8 GB GDDR6"),
    bandwidth_bytes_per_s=(256e9, LAPTOP_4060),
    peaks=_formats(
        "hmc-tech.com at 2.3 GHz, dense " + WITH_FP32_SUMS, fp8=56.5e12, fp16=28.26e12, tf32=14.13e12
    ),
    rates=GEFORCE_ADA_RATES,
)

AMPERE_AND_ADA = (A100_80GB, A100_40GB, A10, RTX_3090, L40S, L4, RTX_4090, RTX_6000_ADA, RTX_4060_LAPTOP)
TARGETS = (B200, B300, GB200, RTX_PRO_6000, RTX_5090, GB10, THOR, H200, H100_SXM, H100_PCIE, *AMPERE_AND_ADA)
ALIASES = MappingProxyType({"DGX Spark": GB10, "Jetson Thor": THOR, "H100": H100_SXM, "A100": A100_80GB})


FIRST_SPECIFIC = (9, 0)
"""From this compute capability on, chips have features that need code with the suffix "a" (PTX ISA 11.1.2, .target)."""


# ---- finding a target ------------------------------------------------------------------------------------------


def arch_of_capability(capability: tuple[int, int]) -> str:
    """Returns the architecture for a compute capability, with the chip's own features: "sm_100a", "sm_80"."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if capability >= FIRST_SPECIFIC else ''}"


def lookup(name: str) -> Target:
    """Returns the target called ``name``; case, spaces, and punctuation do not matter ("rtx-5090", "dgx spark").

    An architecture ("sm_120a") selects its first target in the table.

    Raises:
        UnsupportedTarget: there is no such target.
    """
    by_arch = {_key(target.arch): target for target in reversed(TARGETS)}
    known = (
        by_arch
        | {_key(target.name): target for target in TARGETS}
        | {_key(alias): target for alias, target in ALIASES.items()}
    )
    target = known.get(_key(name))
    if target is None:
        names = [target.name for target in TARGETS]
        near = difflib.get_close_matches(_key(name), known, n=1, cutoff=0.8)
        hint = f"did you mean {known[near[0]].name}? " if near else ""
        if _key(name).startswith("sm"):
            names, hint = sorted({target.arch for target in TARGETS}), ""
        raise UnsupportedTarget(f"target {name!r} is not in the table; {hint}use one of {', '.join(names)}")
    return target


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))


def match(device_name: str, num_sms: int) -> Target | None:
    """Returns the target of a GPU with this name and SM count; None for another product or a part of one (MIG)."""
    for target in TARGETS:
        if re.fullmatch(target.device_name, device_name.strip()) and target.num_sms == num_sms:
            return target
    return None


def gpu_of(device: "torch.device") -> Gpu:
    """Returns the properties of a CUDA device, whether or not it is in the table."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return _gpu(properties.name, properties.multi_processor_count, capability)


@cache
def gpu_at(device: "torch.device") -> Gpu:
    """Returns :func:`gpu_of` of a device with an index, remembered because torch needs many Python calls to answer."""
    return gpu_of(device)


@lru_cache(maxsize=64)
def _gpu(device_name: str, num_sms: int, capability: tuple[int, int]) -> Gpu:
    target = match(device_name, num_sms)
    return Gpu(arch_of_capability(capability), num_sms, target.name if target else device_name)


def detect(device: "torch.device | int | str | None" = None) -> Target | None:
    """Returns the target of a CUDA device, by default the current one; None without a GPU or if it is not in the table."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    return match(properties.name, properties.multi_processor_count)
