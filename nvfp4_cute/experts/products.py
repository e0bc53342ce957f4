"""The two products of a layer of experts: from sorted rows, quantized or 16-bit, to one result per row."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.activation import IDENTITY, Activation
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.experts.checks import (
    PER_ROW_SUFFIX,
    check_expert_weights,
    check_first_expert,
    check_row_scales,
    format_of_rows,
    has_row_scales,
    kind_of_rows,
)
from nvfp4_cute.experts.gather import gather, quantize_rows
from nvfp4_cute.experts.middle import activate
from nvfp4_cute.experts.new_rows import ExpertRows
from nvfp4_cute.experts.permutation import Permutation
from nvfp4_cute.experts.records import (
    LAYOUTS,
    Activations,
    ExpertLayout,
    Experts,
    LayerOfExperts,
    Weights,
)
from nvfp4_cute.experts.weights import per_expert, product_factors
from nvfp4_cute.formats.block_format import (
    BFLOAT16,
    INT4_FORMATS,
    INT8,
    MXFP4,
    MXFP4_FP8,
    MXFP8,
    BlockFormat,
    FP8_1xK,
    FP8_128x128,
)
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.global_scale import PER_ROW
from nvfp4_cute.launch import tuned
from nvfp4_cute.launch.plan import config_of
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.operands.whole import Parts
from nvfp4_cute.ops.options import Options
from nvfp4_cute.ops.parts import composed_dual, dequantized
from nvfp4_cute.ops.parts.dual_gemm import gate_up, grouped_dual_gemm
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Gate, GroupedProblem, OutDtype

# Formats of rows that kernels multiply by weights of each format. Weights in other formats take 16-bit rows.
MX_ROWS: tuple[Activations, ...] = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "16bit")
ROWS: dict[BlockFormat, tuple[Activations, ...]] = {
    NVFP4_FORMAT: ("nvfp4", "nvfp4_four_over_six", "16bit"),
    **dict.fromkeys((MXFP4, *MXFP8), MX_ROWS),
    FP8_128x128: ("16bit", "fp8_1x128"),
    INT8: ("16bit", "int8"),
    **dict.fromkeys(INT4_FORMATS.values(), ("16bit",)),
    MXFP4_FP8: ("fp8_1xk",),
}
# Both halves of concatenated weights have scales in separate blocks if they have a multiple of this many rows.
FUSED_ROWS = 256
# Signatures of operands that passed all checks.
_checked: set[tuple[Any, ...]] = set()


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """Checked experts of this process. Fields are those of the layer's records; factors are float32 [E] or None."""

    w13: Any
    w2: Any
    activations: Activations
    activation: Activation
    weight_layout: ExpertLayout
    gate_alpha: torch.Tensor | None
    up_alpha: torch.Tensor | None
    alpha2: torch.Tensor | None
    bias13: torch.Tensor | None
    input_scale: torch.Tensor | None
    hidden_scale: torch.Tensor | None

    @classmethod
    def of(cls, x: torch.Tensor, layer: LayerOfExperts) -> "LocalExperts":
        """Checks the layer. Raises TypeError or ValueError if shapes do not fit ``x``."""
        first, second, rows = layer.w13, layer.w2, layer.activations
        activations, input_scale = kind_of_rows(rows.format, rows.input_scale)
        hidden_scale = rows.hidden_scale
        checks.check_choice("activations", activations, get_args(Activations))
        check_row_scales(activations, input_scale=input_scale, hidden_scale=hidden_scale)
        checks.check_choice("weight_layout", first.layout, LAYOUTS)
        check_first_expert(layer.first_expert)
        experts = _check_weights(x, first.weight, second.weight, first.layout)
        for name, one in (("w13", first), ("w2", second)):
            check_activations(activations, one.weight.format, name)
        _check_bias(first.bias, x, (experts, first.weight.data.shape[1]))
        for name, scale in (("input_scale", input_scale), ("hidden_scale", hidden_scale)):
            checks.global_scales(name, scale, experts, x.device, of="expert", allows_one=True)
        checks.check_tensors({"x": x}, {"input_scale": input_scale})
        gate_alpha, up_alpha = _factors("w13.alpha", first, input_scale, experts, x.device)
        if isinstance(second.alpha, tuple):
            raise TypeError("w2.alpha is a tuple; the second product has one factor per expert")
        alpha2, _ = _factors("w2.alpha", second, hidden_scale, experts, x.device)
        local = cls(
            first.weight, second.weight, activations, layer.activation, first.layout,
            gate_alpha, up_alpha, alpha2, first.bias, input_scale, per_expert(hidden_scale, experts, x.device),
        )  # fmt: skip
        if not local.is_fused:
            local._check_two_launches()
        return local

    @property
    def is_fused(self) -> bool:
        """Whether ``grouped_dual_gemm`` computes gate, up and activation."""
        if self.weight_layout in ("interleaved", "none"):
            return False
        if self.bias13 is not None and self.w13.format.scale_layout == "rowmajor":
            return False
        return self.weight_layout != "concatenated" or self.w13.data.shape[1] % FUSED_ROWS == 0

    def _check_two_launches(self) -> None:
        if self.weight_layout not in ("concatenated", "interleaved", "none"):
            raise UnsupportedProblem(
                f'weight_layout={self.weight_layout!r} with bias13: pass rows that are "concatenated" or "interleaved"'
            )
        if self.gate_alpha is not self.up_alpha:
            raise UnsupportedProblem(
                "gate and up have factors of their own, and the layer is not one for grouped_dual_gemm (a bias, rows in turn, "
                "or halves that are not a multiple of 128 rows): give both halves of every expert one global scale"
            )

    def check(self, x: torch.Tensor, backend: str) -> None:
        """Raises whatever ``rows`` would refuse, before other ranks depend on this one. Skips operands like earlier ones."""
        signature = (backend, x.dtype, x.device, x.shape[1], *self._signature())
        if signature in _checked:
            return
        ids = torch.empty((0, 1), dtype=torch.int32, device=x.device)
        if self.has_row_scales:
            raise UnsupportedProblem(
                'input_scale="per_row" with a group that divides experts: ranks send rows that are quantized with one scale, or '
                'in 16 bits; divide="tensor" divides every expert, or pass calibrated scales'
            )
        rows, order = gather(x[:0], ids, self.count, format=self.row_format, backend=backend)
        self.rows(rows, ids, order, dtype=x.dtype, first_expert=0, backend=backend)
        _checked.add(signature)

    def _signature(self) -> tuple[Any, ...]:
        """Returns everything on which refusals depend."""
        tensors = (
            self.w13.data, self.w13.scale, self.w2.data, self.w2.scale, self.gate_alpha, self.up_alpha, self.alpha2, self.bias13,
            self.hidden_scale,
        )  # fmt: skip
        kinds = (
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 128)
            for t in tensors
        )
        formats = self.w13.format.name, self.w2.format.name
        return (self.activations, self.activation, self.weight_layout, *formats, *kinds)

    @property
    def count(self) -> int:
        """Number of experts, E."""
        return len(self.w13.data)

    @property
    def row_format(self) -> BlockFormat | None:
        """Format of quantized rows; None for 16-bit rows."""
        return format_of_rows(self.activations)

    @property
    def has_row_scales(self) -> bool:
        """Whether rows of both products have a global scale each."""
        return has_row_scales(self.activations)

    @property
    def _has_rowmajor_scales(self) -> bool:
        """Whether scales of quantized rows are row-major (FP8_1x128, FP8_1xK, INT8): ``quantize`` makes them."""
        return self.row_format is not None and self.row_format.scale_layout == "rowmajor"

    @property
    def _a_format(self) -> BlockFormat:
        """Format argument of the products, which ignore it for 16-bit rows."""
        return (self.row_format or NVFP4_FORMAT).stored

    def _hidden_dtype(self, dtype: torch.dtype, backend: str, device: torch.device) -> Any:
        """Returns dtype or format of hidden activations from a fused launch, for results in ``dtype``.

        Hidden activations that a later launch quantizes are in float32, so that all backends round them once. FP8_1xK and rows
        with a global scale each are exceptions: the launch that quantizes to them reads 16-bit rows, so they are rounded twice.
        """
        if self.row_format in (None, FP8_1xK) or self.has_row_scales:
            return dtype
        formats = self._a_format, self.w13.format
        if self._has_rowmajor_scales and not composed_dual.is_fused(
            formats, backend, device, self.row_format
        ):
            return torch.float32
        return self.activations

    def rows(
        self,
        rows: ExpertRows,
        ids: torch.Tensor,
        order: Permutation,
        *,
        dtype: torch.dtype,
        first_expert: int,
        backend: str,
        mean_rows: int | None = None,
    ) -> torch.Tensor:
        """Computes one result per row, [R, H] in ``dtype``, in at most three launches (four with 8-bit rows).

        Args:
            rows, order: from ``gather``.
            ids: the ids from which ``order`` was computed.
            dtype: dtype of the results.
            first_expert, backend: see ``moe``.
            mean_rows: mean number of rows per expert, for which kernels are chosen; None for R / E. Needed where ``rows`` has
                spare room.
        """
        hidden: Any
        data, scale, row_scale = rows
        configs = self._configs(mean_rows, dtype, backend, data.device)
        if self.is_fused and not self._dequantizes_first(data, configs[0], backend):
            alphas = self.gate_alpha, self.up_alpha
            w13 = gate_up(_parts_of(self.w13), None, self.weight_layout, *alphas)
            out_dtype = self._hidden_dtype(dtype, backend, data.device)
            hidden = grouped_dual_gemm(
                Parts(data, scale, self._a_format, row_scale), w13, order.offs, bias=self.bias13,
                activation=self.activation.function, limit=self.activation.limit,
                out_dtype=out_dtype, out_global_scale=self.hidden_scale, backend=backend,
                options=Options(configs[0], order.is_older),
            )  # fmt: skip
            if isinstance(hidden, torch.Tensor) and self.has_row_scales:
                hidden = activate(
                    hidden, ids, order, activation=IDENTITY, gate_layout="none", format=self.row_format,
                    global_scale=PER_ROW, first_expert=first_expert, follows_product=True, backend=backend,
                )  # fmt: skip
            elif isinstance(hidden, torch.Tensor):
                hidden = quantize_rows(hidden, self.row_format, backend)
        else:
            hidden = self._two_launches(rows, ids, order, dtype, first_expert, backend, configs[0])
        hidden, hidden_sf, hidden_factor = ExpertRows(*hidden)
        return grouped_gemm(
            Parts(hidden, hidden_sf, self._a_format, hidden_factor), _parts_of(self.w2), order.offs, self.alpha2,
            out_dtype=dtype, backend=backend, options=Options(configs[1], prefetch_weights=True),
        )  # fmt: skip

    def _dequantizes_first(self, rows: torch.Tensor, config: KernelConfig | None, backend: str) -> bool:
        """Returns whether a product of 16-bit rows dequantizes ``w13`` first, which no fused launch does."""
        if self.row_format is not None or config is not None or self.weight_layout != "concatenated":
            return False
        if self.gate_alpha is not self.up_alpha:
            return False
        w13 = self.w13
        return dequantized.is_for_groups(rows, w13.data, w13.format, self.gate_alpha, rows.dtype, backend)

    def _configs(
        self, mean_rows: int | None, dtype: torch.dtype, backend: str, device: torch.device
    ) -> tuple[KernelConfig | None, KernelConfig | None]:
        """Returns the configs of both products; None where the call chooses itself."""
        name = backends.resolve(backend, device)
        if mean_rows is None or name == "reference" or self._has_rowmajor_scales:
            return None, None
        (_, rows, _), (_, hidden, _) = self.w13.data.shape, self.w2.data.shape
        width = self.w2.format.elements(self.w2.data.shape[2])
        gate = (
            Gate(self.activation.function, self.activation.limit, self.weight_layout)
            if self.is_fused
            else None
        )
        first = (
            (mean_rows, width if gate else rows, hidden),
            (self.activations if self.row_format and not self.has_row_scales else dtype) if gate else dtype,
            gate,
        )
        second = (mean_rows, hidden, width), dtype, None
        a_format = BFLOAT16 if self.row_format is None else self._a_format
        return (
            config_of_mean(name, device, self.count, *first, a_format, self.w13.format, is_batch_invariant()),
            config_of_mean(name, device, self.count, *second, a_format, self.w2.format, is_batch_invariant()),
        )

    def _two_launches(self, rows: ExpertRows, ids, order, dtype, first_expert, backend, config) -> ExpertRows:
        """Computes the first product, then its activation, quantized unless rows have 16 bits."""
        gate_layout: Any = self.weight_layout
        h = grouped_gemm(
            Parts(rows.data, rows.scale, self._a_format, rows.row_scale), _parts_of(self.w13), order.offs, self.gate_alpha,
            out_dtype=dtype, backend=backend, options=Options(config, order.is_older),
        )  # fmt: skip
        quantizes = self.row_format is not None and not self._has_rowmajor_scales
        factor = PER_ROW if self.has_row_scales else self.hidden_scale
        made = activate(
            h, ids, order, activation=self.activation, gate_layout=gate_layout, bias=self.bias13,
            format=self.row_format if quantizes else None, global_scale=factor if quantizes else None,
            first_expert=first_expert, follows_product=True, backend=backend,
        )  # fmt: skip
        return made if quantizes else quantize_rows(made.data, self.row_format, backend)


def _parts_of(weights: Weights) -> Parts:
    return Parts(weights.data, weights.scale, weights.format)


@lru_cache(maxsize=1024)
def config_of_mean(
    backend: str,
    device: torch.device,
    experts: int,
    mean: tuple[int, int, int],
    dtype: OutDtype,
    gate: Gate | None,
    a_format: BlockFormat = NVFP4_FORMAT,
    b_format: BlockFormat = NVFP4_FORMAT,
    batch_invariant: bool = False,
) -> KernelConfig:
    """Returns the tuned or chosen config for experts with a mean number of rows.

    Args:
        backend: backend that computes.
        device: device of the operands.
        experts: number of experts.
        mean: (m, n, k) per expert; n counts columns of the result.
        dtype: dtype of the results.
        gate: gate of a dual GEMM, or None.
        a_format, b_format: formats of the rows and of the weights.
        batch_invariant: see ``GroupedProblem``.

    Raises UnsupportedTarget or UnsupportedProblem if no kernel multiplies the formats.
    """
    gpu = backends.gpu_of(backend, device)
    dual: dict[str, Any] = {} if gate is None else vars(gate)
    if gate is not None and gate.weight_layout == "concatenated":  # to a kernel, the halves are two operands
        dual = dual | {"weight_layout": "separate"}
    sizes = (mean,) * experts
    problem = GroupedProblem(
        sizes,
        "ragged",
        dtype,
        a_format=a_format,
        b_format=b_format,
        batch_invariant=batch_invariant,
        **dual,
    )
    if not a_format.has_scales:
        return config_of(problem, gpu.arch, gpu.num_sms)
    return tuned.find(problem, gpu) or config_of(problem, gpu.arch, gpu.num_sms)


def _factors(
    name: str, projection: Experts, scale: torch.Tensor | None, experts: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns factors for gate and up, equal ones for other products: given ones after checks, else from global scales."""
    given = projection.alpha
    if given is None:
        return product_factors(projection.weight, scale, experts)
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2:
        raise ValueError(f"{name} has {len(pair)} entries; pass one tensor, or two: of gate and of up")
    for factor in pair:
        if isinstance(factor, torch.Tensor):
            checks.factors(name, factor, experts, device, of="expert")
    return pair


def _check_bias(bias13: torch.Tensor | None, x: torch.Tensor, shape: tuple[int, int]) -> None:
    """Raises TypeError or ValueError unless the bias is None or contiguous [E, rows of w13] in the dtype of ``x``."""
    if bias13 is None or private_api.is_traced():  # the custom op of a traced graph checks it
        return
    checks.check_tensors({"x": x, "bias13": bias13})
    if bias13.dtype != x.dtype or tuple(bias13.shape) != shape or not bias13.is_contiguous():
        raise ValueError(
            f"bias13 is {bias13.dtype} {list(bias13.shape)}, strides {list(bias13.stride())}; expected contiguous {x.dtype} "
            f"{list(shape)}, as x and the rows of w13"
        )
    checks.check_aligned("bias13", bias13)


def check_activations(activations: str, format: BlockFormat, name: str = "") -> None:
    """Raises UnsupportedProblem unless a GPU has a kernel for rows in ``activations`` (see ``moe``) and these weights.

    name: name of the weights, for messages.
    """
    served = ROWS.get(format.stored, ("16bit",))
    if activations.removesuffix(PER_ROW_SUFFIX) in served:
        return
    fix = f"use {' or '.join(map(repr, served))}"
    if format == MXFP4 and activations == "fp8_1xk":
        fix += ", or prepare the weights with mxfp4_for_fp8"
    weights = f"{format.title} weights {name}".rstrip()
    raise UnsupportedProblem(f"activations={activations!r} with {weights}; {fix}")


def _check_weights(x: torch.Tensor, w13: Any, w2: Any, layout: str) -> int:
    """Returns the number of experts. Raises TypeError or ValueError if shapes or devices do not fit each other."""
    named = {"x": x}
    for name, tensor in (("w13", w13), ("w2", w2)):
        check_expert_weights(name, tensor)
        named |= {f"data of {name}": tensor.data, f"scale of {name}": tensor.scale}
    checks.check_tensors(named)
    (experts, rows, row_bytes), down = w13.data.shape, tuple(w2.data.shape)
    width = rows if layout == "none" else rows // 2
    features = x.shape[-1] if x.ndim == 2 else None
    wanted = (experts, features, w2.format.row_bytes(width))
    if features != w13.format.elements(row_bytes) or down != wanted:
        raise ValueError(
            f"x has shape {list(x.shape)}, w13 {list(w13.data.shape)} and w2 {list(down)} in bytes; expected [T, H], "
            f"[E, {'I' if layout == 'none' else '2 I'}, H/2] and [E, H, I/2]"
        )
    return experts
