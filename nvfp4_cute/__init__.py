"""NVFP4 block-scaled grouped GEMM in CuTe DSL: operations, emulator, schedule, and formats."""

from nvfp4_cute.autotune import tune
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.errors import CacheError, ConfigError, EmulatorError, UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.formats import NVFP4Tensor, dequantize
from nvfp4_cute.nn import LinearNVFP4, PersistentMLP
from nvfp4_cute.ops import library as _library  # noqa: F401 (registers the custom ops)
from nvfp4_cute.ops.dual_gemm import dual_gemm, grouped_dual_gemm
from nvfp4_cute.ops.gemm import gemm
from nvfp4_cute.ops.gemv import gemv
from nvfp4_cute.ops.grouped_gemm import grouped_gemm
from nvfp4_cute.ops.quantize import grouped_quantize, quantize

__all__ = [
    "CacheError",
    "ConfigError",
    "EmulatorError",
    "KernelConfig",
    "LinearNVFP4",
    "NVFP4Tensor",
    "PersistentMLP",
    "UnsupportedProblem",
    "UnsupportedTarget",
    "dequantize",
    "dual_gemm",
    "gemm",
    "gemv",
    "grouped_dual_gemm",
    "grouped_gemm",
    "grouped_quantize",
    "quantize",
    "tune",
]
