"""Operations on operands as ``Parts``: records of data, scales and format.

The public operations call these. Layers and custom ops, which store data and scales apart, call them directly.
"""

from nvfp4_cute.operands.whole import Parts as Parts
from nvfp4_cute.ops.options import Options as Options
from nvfp4_cute.ops.parts.dual_gemm import dual_gemm as dual_gemm
from nvfp4_cute.ops.parts.dual_gemm import gate_up as gate_up
from nvfp4_cute.ops.parts.dual_gemm import grouped_dual_gemm as grouped_dual_gemm
from nvfp4_cute.ops.parts.gemm import gemm as gemm
from nvfp4_cute.ops.parts.gemv import gemv as gemv
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm as grouped_gemm
from nvfp4_cute.ops.quantize import grouped_quantize_parts as grouped_quantize  # noqa: F401
