"""Operations on the parts of operands: data and scales as separate tensors, with the format and layout as arguments.

The public operations split BlockScaledTensors and call these. Layers and custom ops, which store parts, call them directly.
"""

from nvfp4_cute.ops.parts.dual_gemm import dual_gemm as dual_gemm
from nvfp4_cute.ops.parts.dual_gemm import grouped_dual_gemm as grouped_dual_gemm
from nvfp4_cute.ops.parts.gemm import gemm as gemm
from nvfp4_cute.ops.parts.gemv import gemv as gemv
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm as grouped_gemm
from nvfp4_cute.ops.quantize import grouped_quantize_parts as grouped_quantize  # noqa: F401
