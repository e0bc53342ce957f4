"""Makes modules from the layers that a checkpoint stores."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from nvfp4_cute.activation import Activation, activation_of
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.errors import CheckpointError, UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.experts import weights as moe_weights
from nvfp4_cute.experts.checks import PER_ROW_ACTIVATIONS, has_row_scales, per_row_name
from nvfp4_cute.experts.products import FUSED_ROWS
from nvfp4_cute.experts.records import ExpertLayout, Weights
from nvfp4_cute.formats.block_format import (
    FOUR_OVER_SIX,
    INT8,
    MXFP4,
    MXFP4_FP8,
    NVFP4,
    TMA_ALIGN_BYTES,
    BlockFormat,
    FP8_1xK,
    FP8_128x128,
)
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.global_scale import PER_ROW
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.models.checkpoints.stored import (
    Scheme,
    StoredExperts,
    StoredLinear,
    as_nvfp4,
)
from nvfp4_cute.nn.activations import Activations, mode_of, multiplies_fp4, must_keep_16_bits, rows_format
from nvfp4_cute.nn.by_rows import by_rows, experts_by_rows
from nvfp4_cute.nn.embedding import QuantizedEmbedding
from nvfp4_cute.nn.experts import (
    HiddenFunction,
    ModelExperts,
    Projection,
    SortedExperts,
)
from nvfp4_cute.nn.linear import K_STEP, QuantizedLinear
from nvfp4_cute.nn.moe import MoE, as_kernels_read
from nvfp4_cute.nn.products import KERNEL_DTYPE
from nvfp4_cute.nn.rounded import PreparedInput, PreparedRows, RoundedInput
from nvfp4_cute.nn.weights import has_products
from nvfp4_cute.operands.products import W4A16_K_STEP
from nvfp4_cute.planning.arch import ARCHS, mmas_of

FOUR_BITS = ("nvfp4", "mxfp4")  # formats of activations to which ``activations`` applies
LayerActivations = Literal[Activations, "by_rows", "fp8"]
# Values of NVFP4_CUTE_ACTIVATIONS and of config.json -> activations of 4-bit layers. "fp8" applies to MXFP4 layers.
ACTIVATION_CHOICES: dict[str, LayerActivations] = {
    "auto": "by_rows", "4bit": "nvfp4", "4over6": "nvfp4_four_over_six", "per_row": "nvfp4_per_row", "fp8": "fp8",
    "16bit": "16bit",
}  # fmt: skip
# Kinds of NVFP4 rows with one scale, and those that callers may choose instead of a checkpoint's.
WITH_ONE_SCALE = (NVFP4.name, FOUR_OVER_SIX.name)
OWN_ROWS = (FOUR_OVER_SIX.name, *PER_ROW_ACTIVATIONS)


def linear_module(
    stored: StoredLinear,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    activations: LayerActivations = "nvfp4",
    backend: str = "auto",
    decode: bool = False,
) -> torch.nn.Module:
    """Makes a module that computes a layer according to its scheme.

    - NVFP4 weights with 4-bit or 16-bit activations: QuantizedLinear. MXFP4 weights that NVFP4 can represent also become that,
      weight-only, because more modules can merge NVFP4 layers. Others stay MXFP4.
    - ``activations="fp8"``: MXFP4 weights multiply FP8 rows with one scale each (sm_90a), whatever the checkpoint says. A layer
      whose weights ``mxfp4_for_fp8`` does not convert exactly keeps 16-bit rows, with a warning.
    - FP8 weights in blocks (K a multiple of 128) and INT8 weights (K a multiple of 16, or of 32 with 16-bit activations):
      QuantizedLinear. Activations have the same format on a GPU with a kernel for it, otherwise 16 bits.
    - Int4 weights: QuantizedLinear with 16-bit activations.
    - Other weights are dequantized to ``dtype`` for torch.nn.Linear.
    - Activations in formats other than NVFP4 that no kernel multiplies are rounded to that format first.
    - ``activations="nvfp4_four_over_six"`` applies 4over6 to layers with NVFP4 activations, and "nvfp4_per_row" finds a global
      scale per row instead of the checkpoint's. Batch-invariant layers do so where the checkpoint has none.
    - Where no kernel multiplies quantized activations (sm_80 to sm_89), all of these are weight-only, with a warning.
    - Activations with factors or another order of K get these first: PreparedInput.

    Args:
        stored: the layer.
        bias: [N], or None.
        dtype: dtype of the bias, of dequantized weights, and of activations.
        device: device on which the layer will run.
        activations: for layers with 4-bit activations in their scheme, also dequantized ones; see QuantizedLinear. "by_rows"
            uses the faster mode in each call (``nn.by_rows``).
        backend: see ``gemm``.
        decode: dequantize weights of every format to ``dtype``, for torch to multiply.

    Raises:
        UnsupportedProblem: ``activations="fp8"`` for weights in another format.
        UnsupportedTarget: ``activations="fp8"`` on a GPU without a kernel for it.
    """
    if activations == "fp8":
        make = lambda stored, mode: linear_module(
            stored, bias, dtype=dtype, device=device, activations=mode, backend=backend, decode=decode
        )
        return _with_fp8_rows(make, stored, stored.weight, backend, device)
    if stored.scheme.activations is not None and must_keep_16_bits(backend, torch.device(device)):
        stored = replace(stored, scheme=replace(stored.scheme, activations=None), input_scale=None)
    layer = _product(stored, bias, dtype, device, activations, backend, decode)
    if stored.order is None and stored.pre_scale is None:
        return layer
    own = [None if one is None else one.to(device) for one in (stored.order, stored.pre_scale)]
    return PreparedInput(layer, *own)


def _product(
    stored: StoredLinear,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device | str,
    activations: LayerActivations,
    backend: str,
    decode: bool,
) -> torch.nn.Module:
    """Makes the module that multiplies activations that are already in the weights' order and scaled."""
    scheme = stored.scheme
    weight = _moved(stored.weight, device)
    given = None if stored.input_scale is None else stored.input_scale.to(device)
    own: Any = "nvfp4" if activations == "by_rows" else activations
    is_rounded = not (
        scheme.activations in FOUR_BITS and mode_of(own, backend, torch.device(device)) == "16bit"
    )
    if not is_rounded:
        scheme = replace(scheme, activations=None)
    rounding = _rows_of(scheme.activations, own)
    is_fp8 = scheme.activations == FP8_1xK.name
    exact = None if decode or is_fp8 or weight.shape[-1] % K_STEP else as_nvfp4(weight)
    direct = None if decode or exact is not None else _direct(weight, scheme, backend)
    if direct is not None:
        mode = "16bit" if scheme.activations is None or direct.format.is_int4 else "fp8" if is_fp8 else None
        product = QuantizedLinear.from_quantized(direct, bias, activations=mode, dtype=dtype, backend=backend)
        if direct.format.is_int4 and scheme.activations is not None:
            return RoundedInput(product, scheme.activations)
        return product
    if exact is None:
        layer: torch.nn.Module = _decoded(weight, bias, dtype)
        return layer if rounding is None else RoundedInput(layer, rounding, given)
    if scheme.activations == "nvfp4" and weight.format == NVFP4:
        layer = QuantizedLinear.from_quantized(
            exact, bias, activations=own, input_scale=own_scale(given, own), dtype=dtype, backend=backend
        )
        return by_rows(layer) if activations == "by_rows" else layer
    layer = QuantizedLinear.from_quantized(exact, bias, activations="16bit", dtype=dtype, backend=backend)
    return layer if rounding is None else RoundedInput(layer, rounding, given)


def _with_fp8_rows(
    make: Callable[[Any, Any], Any],
    stored: Any,
    weight: BlockScaledTensor,
    backend: str,
    device: torch.device | str,
) -> Any:
    """Makes a layer, or experts, with FP8 rows, or with 16-bit rows where weights do not convert exactly.

    Raises what ``linear_module`` raises.

    Args:
        make: makes the module of a stored layer, or of experts, in a mode.
        stored: the layer, or the experts.
        weight: some of its weights.
        backend, device: see ``linear_module``.
    """
    if weight.format != MXFP4:
        raise UnsupportedProblem(
            f"activations='fp8' for {stored.name}, whose weights are {weight.format}; FP8 rows need MXFP4 weights: leave it "
            "out"
        )
    if not has_products(backend, torch.device(device), (FP8_1xK, MXFP4_FP8)):
        archs = ", ".join(arch for arch in ARCHS if (FP8_1xK, MXFP4_FP8) in mmas_of(arch))
        raise UnsupportedTarget(
            f"activations='fp8' for {stored.name}: FP8 rows times MXFP4 weights have a kernel on {archs}, and not on this GPU; "
            "leave it out"
        )
    try:
        return make(replace(stored, scheme=replace(stored.scheme, activations=FP8_1xK.name)), NVFP4.name)
    except ValueError as error:
        warnings.warn(f"{stored.name} keeps 16-bit rows instead of FP8 ones: {error}", stacklevel=3)
        return make(stored, "16bit")


def _rows_of(stored: str | None, activations: LayerActivations) -> str | None:
    """Returns the format of quantized rows: that of the checkpoint, or the caller's 4over6 or per-row NVFP4."""
    return activations if stored == "nvfp4" and activations in OWN_ROWS else stored


def product_sizes(sizes: Sequence[int], numbers: Iterable[torch.Tensor]) -> list[int]:
    """Returns the rows of the products that compute a layer of merged parts: one product if all parts have equal numbers.

    Args:
        sizes: rows of the parts.
        numbers: such as global scales, with one entry per part.
    """
    return [sum(sizes)] if all(bool((one == one[0]).all()) for one in numbers) else [*sizes]


def own_scale(given: torch.Tensor | float | None, activations: str) -> Any:
    """Returns the input scale of a linear layer: ``given`` by the checkpoint, one per row, or "auto" if none is given."""
    if has_row_scales(activations) or (given is None and is_batch_invariant()):
        return PER_ROW
    return "auto" if given is None else given


def embedding_module(
    stored: StoredLinear,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tied: torch.nn.Module | None = None,
    backend: str = "auto",
    decode: bool = False,
) -> torch.nn.Module:
    """Makes an embedding of the layer's rows: QuantizedEmbedding, which dequantizes the rows it reads, or torch.nn.Embedding.

    Args:
        stored: the table.
        dtype: dtype of the rows.
        device: device on which it will run.
        tied: an output layer with the same weights. If it is a QuantizedLinear or torch.nn.Linear, both share their tensors.
        backend: see ``dequantize``.
        decode: see ``linear_module``.

    Raises:
        CheckpointError: the weights expect reordered or scaled activations, which an embedding does not have.
    """
    if stored.order is not None or stored.pre_scale is not None:
        raise CheckpointError(
            f"{stored.name} is an embedding with an order of K or factors of activations, and an embedding has no activations: "
            "export it without"
        )
    if isinstance(tied, QuantizedLinear) and tied.format == NVFP4:
        return QuantizedEmbedding(tied.quantized_weight, dtype=dtype, backend=backend)
    table = _moved(stored.weight, device)
    if decode or table.format.scale.bits != 8:
        n, k = table.shape
        layer = torch.nn.Embedding(n, k, device="meta", dtype=dtype)
        values = tied.weight if isinstance(tied, torch.nn.Linear) else table.dequantize(dtype)
        layer.weight = torch.nn.Parameter(values.detach(), requires_grad=False)
        return layer
    return QuantizedEmbedding(table, dtype=dtype, backend=backend)


def experts_module(
    stored: StoredExperts,
    activation: str | HiddenFunction,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    activations: LayerActivations = "nvfp4",
    backend: str = "auto",
    keep_two_factors: bool = False,
    decode: bool = False,
) -> SortedExperts | ModelExperts:
    """Makes a module that computes the experts of a layer: MoE where it supports the scheme, else SortedExperts.

    Experts with an order of K or factors of their rows (``pre_quant_scale``) also become SortedExperts.

    Args:
        stored: the experts.
        activation: an ``Activation`` or its name, or a function; see ``nn.experts.SortedExperts``.
        dtype, device, backend: see ``linear_module``.
        activations: for experts with 4-bit activations in their scheme. "auto" keeps 16 bits on a GPU whose tensor cores do not
            multiply FP4, if it has a launch for all experts. "by_rows" uses the faster mode in each call (``nn.by_rows``). "fp8":
            see ``linear_module``.
        keep_two_factors: give gate and up separate factors even where these agree, because experts that are later moved here
            may have different ones.
        decode: see ``linear_module``.

    Raises:
        UnsupportedProblem, UnsupportedTarget: see ``linear_module``.
    """
    if isinstance(activation, str):
        activation = activation_of(activation)
    if activations == "fp8":
        own: Any = {"dtype": dtype, "device": device, "backend": backend, "decode": decode}
        make = lambda stored, mode: experts_module(
            stored, activation, activations=mode, keep_two_factors=keep_two_factors, **own
        )
        return _with_fp8_rows(make, stored, stored.w13, backend, device)
    rounding, place = stored.scheme.activations, torch.device(device)
    keeps_16_bits = rounding in FOUR_BITS and _keeps_16_bits(activations, backend, place, decode)
    if keeps_16_bits or (rounding is not None and must_keep_16_bits(backend, place)):
        stored = replace(
            stored, scheme=replace(stored.scheme, activations=None), w13_input=None, w2_input=None
        )
    rows = _rows_of(stored.scheme.activations, activations)
    if rows in WITH_ONE_SCALE and stored.w13_input is None and is_batch_invariant():
        rows = per_row_name(rows)
    own_rows = [
        None if order is None and scale is None else PreparedRows(order, scale).to(device)
        for order, scale in ((stored.w13_order, stored.w13_pre_scale), (stored.w2_order, stored.w2_pre_scale))
    ]
    if not decode and own_rows == [None, None]:
        whole = _whole_experts(
            stored, activation, rows, keep_two_factors, dtype=dtype, device=device, backend=backend
        )
        if isinstance(whole, ModelExperts) and activations == "by_rows":
            scales = _weight_scales(stored, torch.device(device))
            return ModelExperts(experts_by_rows(whole.experts, scales))
        if whole is not None:
            return whole
    module = _sorted_experts(
        stored, activation, rows, dtype=dtype, device=device, backend=backend, decode=decode
    )
    module.first_rows, module.second_rows = own_rows
    return module


def _weight_scales(stored: StoredExperts, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the global scales of gate and up, float32 [2, E], and of down, [E]."""
    experts = len(stored.w13.data)
    ones = torch.ones(experts, dtype=torch.float32, device=device)
    first = stored.w13_global if stored.w13_global is not None else ones
    both = first.to(device, torch.float32).reshape(experts, -1).expand(-1, 2).T.contiguous()
    second = ones if stored.w2_global is None else stored.w2_global.to(device, torch.float32)
    return both, second.reshape(experts)


def _whole_experts(
    stored: StoredExperts,
    activation: HiddenFunction,
    rows: str | None,
    keep_two_factors: bool,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
) -> ModelExperts | None:
    """Makes experts that one call of ``moe`` computes; None if it does not support them."""
    if not isinstance(activation, Activation):
        return None
    if _is_moe(stored, keep_two_factors):
        own_weights = [_moved(w, device) for w in (stored.w13, stored.w2)]
        layer = _moe_module(stored, own_weights, rows, activation, dtype=dtype, backend=backend)
        return ModelExperts(layer)
    first, second = (_direct(_moved(w, device), stored.scheme, backend) for w in (stored.w13, stored.w2))
    if first is None or second is None or not _has_whole_blocks(stored, first.format):
        return None
    rounding = stored.scheme.activations
    if rounding is not None and (first.format.is_int4 or any(w.shape[2] % K_STEP for w in (first, second))):
        return None
    own = KERNEL_DTYPE if dtype == torch.float32 else dtype  # dtype of rows, and so of biases
    bias13, bias2 = (None if b is None else b.to(device, own) for b in (stored.w13_bias, stored.w2_bias))
    layout: ExpertLayout = "concatenated" if stored.has_gate else "none"
    w13, bias13, layout = _for_one_launch(first, bias13, layout, rounding, backend)
    whole = MoE.from_quantized(
        w13, second, bias13=bias13, bias2=bias2, activations=rounding or "16bit", activation=activation,
        weight_layout=layout, dtype=own, backend=backend,
    )  # fmt: skip
    return ModelExperts(whole)


def _sorted_experts(
    stored: StoredExperts,
    activation: HiddenFunction,
    rows: str | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
    decode: bool,
) -> SortedExperts:
    """Makes experts whose rows are sorted first, with one product per projection."""
    sides = [*_split(stored), (stored.w2, stored.w2_global, stored.w2_bias)]
    moved = [
        (_moved(w, device), None if f is None else f.to(device), None if b is None else b.to(device, dtype))
        for w, f, b in sides
    ]
    is_nvfp4 = rows in (None, "nvfp4", *OWN_ROWS)
    kept = [None if decode else _kept(w, f, stored.scheme, is_nvfp4, backend) for w, f, _ in moved]
    weights: list[Any] = [one for one in kept if one is not None and _has_whole_blocks(stored, one.format)]
    if len(weights) < len(moved):
        weights = [_scaled(w.dequantize(), f).to(dtype) for w, f, _ in moved]
    inputs = [None if one is None else one.to(device) for one in (stored.w13_input, stored.w2_input)]
    return SortedExperts(
        [Projection(w, bias) for w, (_, _, bias) in zip(weights, moved, strict=True)], activation,
        activations=rows or "16bit", inputs=(inputs[0], inputs[1]), backend=backend,
    )  # fmt: skip


def _kept(
    weight: BlockScaledTensor, factor: torch.Tensor | None, scheme: Scheme, is_nvfp4: bool, backend: str
) -> BlockScaledTensor | None:
    """Returns weights [E, N, K] that a kernel multiplies by activations of the scheme; None if none does.

    ``factor``: global scales [E] of weights in NVFP4, or None. ``is_nvfp4``: whether NVFP4 weights can be multiplied.
    """
    direct = _direct(weight, scheme, backend)
    if direct is not None:
        return None if direct.format.is_int4 and scheme.activations is not None else direct
    if weight.format != NVFP4 or not is_nvfp4 or weight.shape[-1] % K_STEP:
        return None
    return weight if factor is None else replace(weight, global_scale=factor.contiguous())


def _keeps_16_bits(activations: LayerActivations, backend: str, device: torch.device, decode: bool) -> bool:
    """Returns whether experts keep 16-bit rows as requested."""
    if activations == "by_rows" or activations == "fp8":
        return False
    return mode_of(activations, backend, device) == "16bit"


def _direct(weight: BlockScaledTensor, scheme: Scheme, backend: str) -> BlockScaledTensor | None:
    """Returns MXFP4, FP8, INT8 or int4 weights that a kernel multiplies by activations of the scheme; None if none does."""
    format = weight.format
    if format.is_int4:
        return weight
    if format not in (MXFP4, FP8_128x128, INT8) or not weight.has_whole_blocks:
        return None
    if scheme.activations is None:
        return None if weight.shape[-1] % W4A16_K_STEP else weight
    if (format, scheme.activations) == (MXFP4, FP8_1xK.name):
        return weight
    rows = rows_format(format)
    has_kernel = scheme.activations == rows.name and has_products(backend, weight.data.device, (rows, format))
    return weight if has_kernel else None


def _has_whole_blocks(stored: StoredExperts, format: BlockFormat) -> bool:
    """Returns whether gate and up share no block of scales."""
    return not stored.has_gate or stored.w13.shape[1] % (2 * format.block_rows) == 0


def _is_moe(stored: StoredExperts, keep_two_factors: bool) -> bool:
    """Returns whether the experts are NVFP4, and MoE supports them."""
    if stored.w13.format != NVFP4 or stored.scheme.activations not in (NVFP4.name, None):
        return False
    has_two = stored.has_gate and (keep_two_factors or not _is_one_factor(stored.w13_global))
    if has_two and (stored.w13_bias is not None or stored.w13.shape[1] % FUSED_ROWS):
        return False
    return stored.w13.shape[2] % K_STEP == 0 and stored.w2.shape[2] % K_STEP == 0


def _is_one_factor(factors: torch.Tensor | None) -> bool:
    """Returns whether gate and up have the same factors."""
    return factors is None or factors.shape[1] == 1 or torch.equal(factors[:, 0], factors[:, 1])


def _moe_module(
    stored: StoredExperts,
    own_weights: list[BlockScaledTensor],
    rows: Any,
    activation: Activation,
    *,
    dtype: torch.dtype,
    backend: str,
) -> MoE:
    def weights(weight: BlockScaledTensor, factor: torch.Tensor | None) -> moe_weights.ExpertWeights:
        factor = None if factor is None else factor.to(weight.data.device)
        return moe_weights.ExpertWeights(weight.data, to_blocked(weight.scale), factor)

    factors = stored.w13_global
    if factors is not None and _is_one_factor(factors):
        factors = factors[:, 0]
    own = KERNEL_DTYPE if dtype == torch.float32 else dtype  # dtype of rows, which is also that of biases
    bias13, bias2 = (
        None if b is None else b.to(own_weights[0].data.device, own)
        for b in (stored.w13_bias, stored.w2_bias)
    )
    scales: dict[str, Any] = {}
    if stored.scheme.activations:
        given = {"input_scale": stored.w13_input, "hidden_scale": stored.w2_input}
        scales = {} if has_row_scales(rows) else given
    layout: ExpertLayout = "concatenated" if stored.has_gate else "none"
    first, bias13, layout = _for_one_launch(weights(own_weights[0], factors), bias13, layout, rows, backend)
    return MoE.from_quantized(
        first, weights(own_weights[1], stored.w2_global), bias13=bias13, bias2=bias2,
        activations=rows or "16bit", activation=activation, weight_layout=layout,
        dtype=own, backend=backend, **scales,
    )  # fmt: skip


def _for_one_launch(
    w13: Weights, bias13: torch.Tensor | None, layout: ExpertLayout, rows: str | None, backend: str
) -> tuple[Weights, torch.Tensor | None, ExpertLayout]:
    """Returns gate and up, their biases and their layout, reordered for one launch if the weights and rows allow it.

    Kernels for 16-bit rows and for FP8 rows are as fast with either layout. For NVFP4 rows, this holds where tensor
    cores multiply FP4.
    """
    is_one = layout == "none" or w13.shape[1] % FUSED_ROWS == 0 or w13.shape[1] % (2 * moe_weights.TURN_ROWS)
    is_as_fast = rows in (None, "16bit", FP8_1xK.name)
    if rows == NVFP4.name:
        is_as_fast = multiplies_fp4(backend, w13.data.device)
    if is_one or not is_as_fast or w13.format.scale_layout != "blocked":
        return w13, bias13, layout
    bias13 = None if bias13 is None else moe_weights.in_turns(bias13)
    return as_kernels_read(w13).in_turns(), bias13, "interleaved_32_gate_first"


def _split(stored: StoredExperts) -> list[tuple[BlockScaledTensor, torch.Tensor | None, torch.Tensor | None]]:
    """Returns weights, factors and biases of gate and up, or of up."""
    count = 2 if stored.has_gate else 1
    w, factors, bias = stored.w13, stored.w13_global, stored.w13_bias
    width = w.shape[1] // count
    sides = []
    for i in range(count):
        rows = slice(i * width, (i + 1) * width)
        factor = None if factors is None else factors[:, i]
        sides.append((w[:, rows], factor, None if bias is None else bias[:, rows]))
    return sides


def _scaled(values: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return values if factor is None else values * factor.to(values.device)[:, None, None]


def _moved(weight: BlockScaledTensor, device: torch.device | str) -> BlockScaledTensor:
    moved = weight.to(device)
    # Mapped files align tensors to 8 bytes, but kernels read rows 16 bytes at a time.
    is_aligned = moved.data.data_ptr() % TMA_ALIGN_BYTES == 0
    return moved if is_aligned else replace(moved, data=moved.data.clone())


def _decoded(weight: BlockScaledTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.nn.Linear:
    n, k = weight.shape
    layer = torch.nn.Linear(k, n, bias=bias is not None, device="meta", dtype=dtype)
    layer.weight = torch.nn.Parameter(weight.dequantize(dtype), requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.detach().to(weight.data.device, dtype), requires_grad=False)
    return layer
