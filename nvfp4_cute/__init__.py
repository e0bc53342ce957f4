"""CuTe DSL kernels for block-scaled GEMM, grouped GEMM and layers of experts (NVFP4, MX formats, FP8, INT8, int4).

The package also has a PTX emulator on which the kernels are proven. Importing the package registers custom ops with torch as
soon as torch is imported, because loaded and compiled graphs refer to them. A public name's module is imported when the name is
first used.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nvfp4_cute.clone import find_folders as _find_folders
from nvfp4_cute.custom_ops import register_with_torch as _register_with_torch

if TYPE_CHECKING:
    from nvfp4_cute.activation import Activation as Activation
    from nvfp4_cute.batch_invariance import set_batch_invariant as set_batch_invariant
    from nvfp4_cute.errors import CacheError as CacheError
    from nvfp4_cute.errors import ConfigError as ConfigError
    from nvfp4_cute.errors import EmulatorError as EmulatorError
    from nvfp4_cute.errors import RankError as RankError
    from nvfp4_cute.errors import UnsupportedProblem as UnsupportedProblem
    from nvfp4_cute.errors import UnsupportedTarget as UnsupportedTarget
    from nvfp4_cute.experts.moe import moe as moe
    from nvfp4_cute.experts.placement import Placement as Placement
    from nvfp4_cute.experts.records import ActivationFormat as ActivationFormat
    from nvfp4_cute.experts.records import Experts as Experts
    from nvfp4_cute.experts.records import Parallel as Parallel
    from nvfp4_cute.experts.routing import route as route
    from nvfp4_cute.formats.block_format import BlockFormat as BlockFormat
    from nvfp4_cute.formats.block_format import int4_format as int4_format
    from nvfp4_cute.formats.block_scaled import BlockScaledTensor as BlockScaledTensor
    from nvfp4_cute.formats.block_scaled import NVFP4Tensor as NVFP4Tensor
    from nvfp4_cute.formats.exact_fp8 import mxfp4_for_fp8 as mxfp4_for_fp8
    from nvfp4_cute.formats.int4 import int4_tensor as int4_tensor
    from nvfp4_cute.models.transformers import load as load
    from nvfp4_cute.nn.fused import fuse as fuse
    from nvfp4_cute.nn.latent import LatentMoE as LatentMoE
    from nvfp4_cute.nn.linear import LinearNVFP4 as LinearNVFP4
    from nvfp4_cute.nn.linear import QuantizedLinear as QuantizedLinear
    from nvfp4_cute.nn.moe import MoE as MoE
    from nvfp4_cute.nn.persistent_mlp import PersistentMLP as PersistentMLP
    from nvfp4_cute.nn.replace import replace_linears as replace_linears
    from nvfp4_cute.operands.group_sizes import debug as debug
    from nvfp4_cute.ops.dequantize import dequantize as dequantize
    from nvfp4_cute.ops.dual_gemm import dual_gemm as dual_gemm
    from nvfp4_cute.ops.dual_gemm import grouped_dual_gemm as grouped_dual_gemm
    from nvfp4_cute.ops.gemm import gemm as gemm
    from nvfp4_cute.ops.gemv import gemv as gemv
    from nvfp4_cute.ops.grouped_gemm import grouped_gemm as grouped_gemm
    from nvfp4_cute.ops.options import GateUp as GateUp
    from nvfp4_cute.ops.options import Options as Options
    from nvfp4_cute.ops.quantize import grouped_quantize as grouped_quantize
    from nvfp4_cute.ops.quantize import quantize as quantize
    from nvfp4_cute.planning.config import KernelConfig as KernelConfig
    from nvfp4_cute.tuning.autotune import tune as tune

NVFP4: "BlockFormat"
"""NVFP4: e2m1 elements, one ue4m3 scale per 16 values, one global scale."""
MXFP4: "BlockFormat"
"""MXFP4: e2m1 elements, one ue8m0 scale per 32 values (OCP Microscaling Formats v1.0)."""
MXFP8_E4M3: "BlockFormat"
"""MXFP8 with e4m3 elements, one ue8m0 scale per 32 values (OCP Microscaling Formats v1.0)."""
MXFP8_E5M2: "BlockFormat"
"""MXFP8 with e5m2 elements, one ue8m0 scale per 32 values (OCP Microscaling Formats v1.0)."""
FP8_1x128: "BlockFormat"
"""FP8 activations: e4m3 elements, one float32 scale per 128 values of a row (DeepSeek-V3)."""
FP8_128x128: "BlockFormat"
"""FP8 weights: e4m3 elements, one float32 scale per 128 x 128 values (DeepSeek-V3)."""
FP8_1xK: "BlockFormat"
"""FP8_1xK: e4m3 elements, one float32 scale per row, that is per token."""
MXFP4_FP8: "BlockFormat"
"""MXFP4_FP8: MXFP4 weights prepared for products with FP8_1xK rows on sm_90a; ``mxfp4_for_fp8`` makes such tensors."""
INT8: "BlockFormat"
"""INT8: int8 elements, one float32 scale per row, that is per token or per output channel (SmoothQuant)."""

# Public name -> its module. The imports above repeat this for type checkers.
_MODULES = {
    "Activation": "activation",
    "ActivationFormat": "experts.records",
    "BlockFormat": "formats.block_format",
    "BlockScaledTensor": "formats.block_scaled",
    "CacheError": "errors",
    "ConfigError": "errors",
    "EmulatorError": "errors",
    "Experts": "experts.records",
    "FP8_128x128": "formats.block_format",
    "FP8_1x128": "formats.block_format",
    "GateUp": "ops.options",
    "FP8_1xK": "formats.block_format",
    "MXFP4_FP8": "formats.block_format",
    "INT8": "formats.block_format",
    "RankError": "errors",
    "KernelConfig": "planning.config",
    "QuantizedLinear": "nn.linear",
    "MXFP4": "formats.block_format",
    "MXFP8_E4M3": "formats.block_format",
    "MXFP8_E5M2": "formats.block_format",
    "LatentMoE": "nn.latent",
    "LinearNVFP4": "nn.linear",
    "MoE": "nn.moe",
    "NVFP4": "formats.block_format",
    "NVFP4Tensor": "formats.block_scaled",
    "Options": "ops.options",
    "Parallel": "experts.records",
    "PersistentMLP": "nn.persistent_mlp",
    "UnsupportedProblem": "errors",
    "UnsupportedTarget": "errors",
    "debug": "operands.group_sizes",
    "dequantize": "ops.dequantize",
    "dual_gemm": "ops.dual_gemm",
    "fuse": "nn.fused",
    "gemm": "ops.gemm",
    "gemv": "ops.gemv",
    "grouped_dual_gemm": "ops.dual_gemm",
    "grouped_gemm": "ops.grouped_gemm",
    "grouped_quantize": "ops.quantize",
    "int4_format": "formats.block_format",
    "int4_tensor": "formats.int4",
    "load": "models.transformers",
    "moe": "experts.moe",
    "mxfp4_for_fp8": "formats.exact_fp8",
    "quantize": "ops.quantize",
    "Placement": "experts.placement",
    "replace_linears": "nn.replace",
    "route": "experts.routing",
    "set_batch_invariant": "batch_invariance",
    "tune": "tuning.autotune",
}
# Names that need other packages; `import *` leaves them out.
_NEEDS_TRANSFORMERS = ("load",)
__all__ = [name for name in _MODULES if name not in _NEEDS_TRANSFORMERS]
__version__: str
"""Version of the installed distribution."""

_find_folders()
_register_with_torch()


if not TYPE_CHECKING:  # a type checker that saw it would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value = globals()[name] = version("nvfp4-cute")
            return value
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    # `help(nvfp4_cute)` imports every name of this list.
    hidden = () if find_spec("transformers") else _NEEDS_TRANSFORMERS
    return sorted({*(name for name in globals() if name.startswith("__")), *_MODULES}.difference(hidden))
