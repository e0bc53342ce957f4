"""WeightOnlyKey: the parameters of a grouped GEMM of 16-bit activations and quantized weights."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from nvfp4_cute.activation import symbol
from nvfp4_cute.compile.keys import bias_suffix, cutlass_dtype, kernel_class
from nvfp4_cute.errors import ConfigError, UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.planning.arch import weight_only_family_of
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import OUT_DTYPES, Form, Gate, dtype_name, num_weights


@dataclass(frozen=True)
class WeightOnlyKey:
    """Everything that changes the generated code, and nothing else: no sizes, no data.

    Attributes:
        arch: architecture such as ``sm_90a``.
        config: KernelConfig with all choices made, without a CTA count.
        num_groups: slots of the list form; 1 in the other forms.
        dtype: dtype of the activations, float16 or bfloat16.
        out_dtype: float16, bfloat16 or float32.
        has_alpha: whether a factor per group is read.
        form: form of the operands.
        gate: gate of a dual GEMM, whose limit is True or None because the kernel reads its value; None for one product.
        b_format: format of the weights.
        bias_dtype: dtype of the bias that is added to every column; None without a bias.
    """

    arch: str
    config: KernelConfig
    num_groups: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    has_alpha: bool
    form: Form
    gate: Gate | None = None
    b_format: BlockFormat = NVFP4
    bias_dtype: torch.dtype | None = None

    def validated(self) -> "WeightOnlyKey":
        """Returns the key with a resolved config, without a CTA count and without fields that do not affect the code.

        Raises UnsupportedTarget for an arch without a kernel, ConfigError for a refused config, UnsupportedProblem for
        result types that no kernel writes.
        """
        family, gate, num_b = weight_only_family_of(self.arch, self.config), self.gate, weights_of(self.gate)
        if self.out_dtype not in OUT_DTYPES:
            raise UnsupportedProblem(
                f"out_dtype={dtype_name(self.out_dtype)!r} with 16-bit a: results have 16 or 32 bits; quantize them"
            )
        reason = family.unsupported_reason(self.config, num_b, self.b_format)
        if reason is not None:
            raise ConfigError(f"{self.arch}: {reason}")
        if gate is not None:
            gate = replace(gate, limit=None if gate.limit is None else True)
        resolved = replace(family.resolve(self.config, num_b, self.b_format), num_cta=None)
        groups = self.num_groups if self.form == "list" else 1
        return replace(self, config=resolved, num_groups=groups, gate=gate)

    def workspace_bytes(self, num_cta: int) -> int:
        """Returns the bytes of ``WeightOnlyFamily.workspace_bytes``."""
        return weight_only_family_of(self.arch, self.config).workspace_bytes(self.config, num_cta)

    def to_name(self) -> str:
        """Returns a readable, unique name; the kernel's symbol begins with it."""
        groups = f"g{self.num_groups}" if self.form == "list" else self.form
        operation, suffix = "weight_only_gemm", "_alpha" * self.has_alpha + bias_suffix(self.bias_dtype)
        if self.gate is not None:
            operation = f"weight_only_dual_gemm_{symbol(self.gate.activation)}"
            suffix += "_limit" * (self.gate.limit is not None)
            suffix += f"_{self.gate.weight_layout}" * (self.gate.weight_layout != "separate")
        dtypes = f"{dtype_name(self.dtype)}_{dtype_name(self.out_dtype)}"
        return f"{self.b_format}_{operation}_{self.arch}_{groups}_{self.config.to_name()}_{dtypes}{suffix}"

    def make_kernel(self) -> Any:
        """Returns the CuTe DSL object of the weight-only kernel."""
        gate: dict[str, Any] = {}
        if self.gate is not None:
            gate = {"activation": self.gate.activation, "weight_layout": self.gate.weight_layout}
            gate["has_limit"] = self.gate.limit is not None
        return kernel_class(self.arch, weight_only_family_of(self.arch, self.config).KERNEL)(
            config=self.config,
            form=self.form,
            num_groups=self.num_groups,
            out_dtype=cutlass_dtype(self.out_dtype),
            has_alpha=self.has_alpha,
            name=self.to_name(),
            b_format=self.b_format,
            is_bf16=self.dtype == torch.bfloat16,
            bias_dtype=cutlass_dtype(self.bias_dtype),
            **gate,
        )


def weights_of(gate: Gate | None) -> int:
    """Returns the number of operands ``b``, see ``problem.num_weights``."""
    return 1 if gate is None else num_weights(True, gate.weight_layout)
