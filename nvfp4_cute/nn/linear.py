"""``QuantizedLinear``: a linear layer with block-scaled weights of any format, for inference."""

from numbers import Real
from typing import Any, Literal

import torch
from torch.nn import functional

from nvfp4_cute import backends, private_api
from nvfp4_cute.backends.last_chains import LastChains
from nvfp4_cute.batch_invariance import refuse_product_of_torch
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.experts.checks import has_row_scales
from nvfp4_cute.formats.block_format import (
    INT8,
    MXFP4,
    MXFP4_FP8,
    NVFP4,
    BlockFormat,
    FP8_1xK,
    FP8_128x128,
    as_format,
)
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, NVFP4Tensor
from nvfp4_cute.formats.exact_fp8 import mxfp4_as_fp8, mxfp4_for_fp8
from nvfp4_cute.formats.global_scale import PER_ROW, is_per_row
from nvfp4_cute.nn import options as options_of
from nvfp4_cute.nn import prepare, state
from nvfp4_cute.nn.activations import Activations, LayerMode, check_activations, layer_mode
from nvfp4_cute.nn.decoded import Decoded, decoded_linear, is_for_kept
from nvfp4_cute.nn.products import KERNEL_DTYPE, product, product_of_format, result_dtype
from nvfp4_cute.nn.weights import check_weight, has_products, kept_bias, scales_of, words_of, zeros
from nvfp4_cute.operands import rules
from nvfp4_cute.ops.dequantize import dequantize
from nvfp4_cute.ops.parts.dequantized import by_casts
from nvfp4_cute.ops.quantize import quantize
from nvfp4_cute.problem import OUT_DTYPES

# Dtypes of the bias and of dequantized weights.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Rows of 4-bit weights start at multiples of 16 bytes.
K_STEP = 32
# Tensors whose dtype ``.to(dtype)`` of a model must not change: codes, block scales, global scales.
FIXED = ("weight", "weight_scale", "weight_global_scale", "input_global_scale")
# Name of the buffer of block scales. FP8 uses DeepSeek-V3's name; despite it, the scales multiply.
SCALE_NAMES = {FP8_128x128.name: "weight_scale_inv"}
# Options that ``from_linear`` and ``from_quantized`` decide.
DECIDED = ("in_features", "out_features", "bias", "device")


class QuantizedLinear(state.Picklable):
    """Computes ``x @ W^T + bias`` with block-scaled W: ``torch.nn.Linear`` at 4.1 to 8.3 bits per weight.

        >>> layer = QuantizedLinear.from_linear(torch.nn.Linear(512, 256))
        >>> layer(torch.randn(40, 512).bfloat16()).shape
        torch.Size([40, 256])

    Make one with :meth:`from_linear` or :meth:`from_quantized`; the constructor makes an empty layer for ``load_state_dict``.
    Weights are in NVFP4, MXFP4, MXFP8_E4M3, FP8_128x128, INT8 or an ``int4_format``. There is no backward pass. The arguments
    select what multiplies:

    - ``activations="nvfp4"`` (W4A4) quantizes the rows of x in one launch, then calls ``gemm``. With ``input_scale="auto"``,
      inputs of over 65,536 values take another pass for their largest magnitude.
    - ``activations="fp8"``, ``"int8"``, ``"mxfp4"`` or ``"mxfp8_e4m3"``, for such weights, quantizes the rows of x to that
      format (FP8: to FP8_1x128), then calls ``gemm``. Integer sums of INT8 are exact, so all backends give the same bits.
      MXFP4 weights with ``"fp8"`` are converted when the layer is made, with equal values: to MXFP4_FP8, 4.25 bits per weight
      as before, where a kernel multiplies it (sm_90a; its rows are FP8_1xK), else to FP8_128x128.
    - ``activations="16bit"`` calls ``gemm`` with 16-bit rows, for weights of any format. For many rows, where that
      is faster, it dequantizes W to temporary memory and torch multiplies (``ops.parts.dequantized``).
    - ``activations="auto"``, for NVFP4, is "16bit" on a GPU without FP4 tensor cores (Hopper), else "nvfp4"; ``mode`` tells
      which.
    - ``pre_decode=True`` dequantizes W to ``dtype`` once and calls ``torch.nn.functional.linear``, for GPUs without FP4
      arithmetic, and many rows. State dict and file still hold 4 bits per weight.
    - ``keep_decoded=True`` keeps dequantized weights next to the 4-bit ones; torch multiplies by them where there are many
      16-bit rows (``nn.decoded``). They are recomputed after the weights change. Traced or captured graphs do not use them.

    Dtypes follow ``torch.nn.Linear``: the result has the dtype of ``x``, or autocast's under autocast. float32 activations are
    rounded to bfloat16 before they are quantized to NVFP4 or multiplied in 16 bits. The bias is added in float32, before the
    result is rounded to its dtype.

    ``layer.weight`` dequantizes the weights, [N, K] in ``layer.dtype``, whenever it is read. Modules that multiply by it
    themselves, such as torch.nn.MultiheadAttention, therefore compute with 16-bit activations. ``layer.packed_weight`` holds
    the codes, ``layer.quantized_weight`` codes and scales.

    State dict, for every choice of activations:
        weight: the codes, uint8 [N, K/2] with the even k in the low nibble, float8_e4m3fn [N, K], or int8 [N, K].
        weight_scale: NVFP4: float8_e4m3fn [rm, rk, 32, 4, 4], blocked. MXFP4, MXFP8: float8_e8m0fnu, blocked. INT8: float32 [N,
            1]. int4: int32 [rm, rk, 32, 4], blocked, the bits of scales and zero points. FP8 has ``weight_scale_inv``, float32
            [ceil(N/128), K/128], instead.
        weight_global_scale: NVFP4: float32, the factor by which dequantizing multiplies.
        input_global_scale: float32, where ``input_scale`` is a number.
        bias: [N], where there is one.
        _extra_state: format, convention and version, as uint8 bytes of JSON. A state dict without it can be loaded unless its
            global scales are reciprocal. Block scales that are uint8 are read as bits.

    Moving the module to a device moves all of it; ``.to(dtype)`` converts the bias and changes the dtype of dequantized
    weights.

    Args:
        in_features: K, a whole number of blocks; a multiple of 32 for 4-bit formats.
        out_features: N.
        bias: whether there is one.
        format: format of the weights, a record or its name.
        activations: see above. None quantizes to the format that goes with the weights, or keeps 16 bits for int4.
        input_scale: global scale of x where x is quantized to NVFP4: "auto" (computed in every call), "per_row" (one for every
            row, found by the launch that quantizes; rows are then independent of each other), None (1), or a number
            (calibrated: amax / 2688). A layer that does not quantize x keeps a number only for its state dict.
        pre_decode: multiply by dequantized weights.
        keep_decoded: multiply by dequantized weights where there are many rows; for NVFP4.
        dtype: dtype of the bias and of dequantized weights.
        device: device of all tensors.
        backend: see ``gemm``.

    Raises:
        UnsupportedProblem: K is not a multiple of 32, for 4-bit formats.
        ValueError: a choice is unknown, no layer has this format or K, a size is negative, or ``input_scale`` is not positive.
        TypeError: a size is not an int, or ``dtype`` is not a supported dtype.
    """

    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor
    input_global_scale: torch.Tensor | None
    decoded: torch.Tensor | None
    mode: LayerMode
    """What the layer does with its activations on its device: "16bit", or the format to which it quantizes them."""
    # The layers that read the same input, and this layer's index among them (``nn.shared_input``).
    shared: tuple[Any, int] | None = None
    # The product of the global scales and the tensors from which it was computed (``alpha``).
    _kept_alpha: tuple[Any, ...] = (None, None, None, None)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: BlockFormat | str = NVFP4,
        activations: Activations | LayerMode | None = None,
        input_scale: float | Literal["auto", "per_row"] | None = "auto",
        pre_decode: bool = False,
        keep_decoded: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        rules.check_sizes(in_features=in_features, out_features=out_features)
        rules.check_choice("dtype", dtype, DTYPES)
        format = as_format("format", format)
        has_nibbles = format.element.bits == 4 and not format.is_int4
        if has_nibbles and (in_features % K_STEP or in_features < K_STEP):
            raise UnsupportedProblem(
                f"in_features={in_features} is not a positive multiple of {K_STEP} (rows start 16 bytes apart); pad the "
                f"layer's input to {max(-(-in_features // K_STEP), 1) * K_STEP}"
            )
        activations = check_activations(activations, format)
        if keep_decoded and format != NVFP4:
            raise ValueError(
                f"keep_decoded=True with weights of {format.title}; dequantized weights are kept only for NVFP4: leave it out"
            )
        if pre_decode and keep_decoded:
            raise ValueError(
                "pre_decode=True multiplies all rows by decoded weights, keep_decoded=True many rows: pass one of the two"
            )
        if isinstance(input_scale, str) and input_scale not in ("auto", PER_ROW):
            raise ValueError(f'input_scale={input_scale!r} is not "auto", "per_row", None or a number')
        finds_row_scales = is_per_row(input_scale)
        if finds_row_scales and format != NVFP4:
            raise ValueError(
                f"input_scale={PER_ROW!r} with weights of {format.title}; it goes with NVFP4: leave it out"
            )
        if has_row_scales(activations) and not isinstance(input_scale, str) and input_scale is not None:
            raise ValueError(
                f"input_scale={input_scale!r} with activations={activations!r}, whose rows find their own scales; leave it out"
            )
        self.finds_row_scales = finds_row_scales or has_row_scales(activations)
        if isinstance(input_scale, torch.Tensor) and input_scale.numel() != 1:
            raise ValueError(
                f"input_scale has shape {list(input_scale.shape)}; all rows of x have one global scale: pass a number"
            )
        if format != NVFP4 and not isinstance(input_scale, str) and input_scale is not None:
            raise ValueError(
                f"input_scale={input_scale!r} with weights of {format.title}, whose rows have no global scale: leave it out"
            )
        if isinstance(input_scale, Real):  # on the host, wherever the layer is
            rules.global_scales("input_scale", [input_scale], 1, torch.device("cpu"))
        self.in_features, self.out_features = in_features, out_features
        self.format, self._is_nvfp4 = format, format == NVFP4
        self.activations, self.pre_decode, self.backend = activations, pre_decode, backend
        self.keep_decoded, self._kept = keep_decoded, Decoded()
        self._last = LastChains()
        self.finds_input_scale = isinstance(input_scale, str) and self._is_nvfp4 and not self.finds_row_scales
        self.dtype = dtype
        # Bypasses register_buffer, which would read the property of this name.
        self._buffers["weight"], scale = zeros(format, (), out_features, in_features, device)
        self.register_buffer(self._scale_name, scale)
        one = torch.ones((), dtype=torch.float32, device=device) if self._is_nvfp4 else None
        self.register_buffer("weight_global_scale", one)
        given = None
        if input_scale is not None and not isinstance(input_scale, str):
            given = torch.as_tensor(input_scale, dtype=torch.float32, device=device).reshape(())
        self.register_buffer("input_global_scale", given)
        backends.resolve(backend, scale.device)
        self.mode = layer_mode(activations, backend, scale.device, self.finds_row_scales)
        self.register_buffer("decoded", None, persistent=False)
        self._decoded_of: tuple[int, ...] | None = None
        if bias:
            empty = torch.zeros(out_features, dtype=dtype, device=device)
            self.bias = torch.nn.Parameter(empty, requires_grad=False)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, format: BlockFormat | str = NVFP4, **options: Any
    ) -> "QuantizedLinear":
        """Makes a layer with the quantized weights of ``linear`` (NVFP4: global scale amax / 2688), on its device.

        Args:
            linear: a layer of any float dtype, which is not changed.
            format: format of the weights.
            options: arguments of the constructor except sizes, bias and device. ``dtype`` defaults to that of ``linear``.

        Raises:
            TypeError: ``linear`` is another module, or an option repeats what ``linear`` decides.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear is a {type(linear).__name__}; pass a torch.nn.Linear")
        options_of.refuse(options, DECIDED, "linear")
        weight = linear.weight.detach()
        options.setdefault("dtype", weight.dtype)
        backend = options.get("backend", "auto")
        if str(backend).startswith("emulator"):
            backend = "reference"  # same bits on every backend
        format = as_format("format", format)
        found: Any = "auto" if format.has_global_scale else None
        quantized = quantize(weight, format=format, global_scale=found, backend=backend)
        return cls.from_quantized(quantized, linear.bias, **options)

    @classmethod
    def from_quantized(
        cls, weight: BlockScaledTensor, bias: torch.Tensor | None = None, **options: Any
    ) -> "QuantizedLinear":
        """Makes a layer from quantized weights, without a copy if their scales have the layout of kernels.

        Args:
            weight: [N, K].
            bias: [N], or None.
            options: arguments of the constructor except sizes, format and device.

        Raises:
            ValueError: ``weight`` is not a matrix in a format that layers have, or ``bias`` has another shape.
            TypeError: ``weight`` or ``bias`` is of another type, or an option repeats what ``weight`` decides.
        """
        options_of.refuse(options, (*DECIDED, "format"), "weight")
        check_weight(weight)
        if weight.format == MXFP4 and options.get("activations") == "fp8":
            backend = options.get("backend", "auto")
            in_4_bits = has_products(backend, weight.device, (FP8_1xK, MXFP4_FP8))
            weight = mxfp4_for_fp8(weight) if in_4_bits else mxfp4_as_fp8(weight)
        n, k = weight.shape
        format, where = weight.format, weight.data.device
        module = cls(k, n, bias is not None, format=format, device=where, **options)
        own = kept_bias("bias", bias, (n,), where, module.dtype)
        packed, scale = module._buffers["weight"], words_of(weight)
        assert packed is not None
        module._buffers["weight"] = weight.data.view(packed.dtype)
        module._buffers[module._scale_name] = scale
        if weight.global_scale is not None:
            module.weight_global_scale = weight.global_scale
        if own is not None:
            module.bias.copy_(own)
        module._decode_ahead()
        return module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes ``x @ W^T + bias``.

        Args:
            x: [..., K], float16, bfloat16 or float32; with ``pre_decode``, in ``dtype`` unless autocast is on.

        Returns:
            [..., N] in ``result_dtype(x)``. The bias is added in float32, before the product is rounded to that dtype. Where
            torch multiplies dequantized weights, torch adds the bias.

        Raises:
            ValueError: ``x`` has another K.
            UnsupportedProblem: ``x`` or the bias requires a gradient.

        Also raises what ``quantize`` and ``gemm`` raise.
        """
        if self.shared is None:
            return self.product(x)
        layers, number = self.shared
        self.bias_now()  # checks the bias; the merged layer has a copy of it
        return layers.result(number, x)

    def prepare(
        self, max_rows: int = prepare.MAX_ROWS, dtype: torch.dtype = KERNEL_DTYPE, jobs: int | None = None
    ) -> int:
        """Compiles and loads all kernels for 1 to ``max_rows`` rows, so that no later call waits for the compiler.

        Args:
            max_rows: largest number of rows per call.
            dtype: dtype of the rows.
            jobs: number of compiling processes; None for one per core, at most 8.

        Returns:
            The number of kernels that this process did not have; 0 on the CPU, where the reference computes.
        """
        device = self.packed_weight.device
        keys = [] if self.pre_decode else self.kernels(max_rows, dtype)
        return prepare.load(keys, device, jobs)

    def kernels(self, max_rows: int, dtype: torch.dtype = KERNEL_DTYPE) -> list[Any]:
        """Returns the keys of the kernels that ``prepare`` compiles."""
        device = self.packed_weight.device
        found = prepare.linear_kernels(self.product, self.in_features, max_rows, dtype, device)
        self.forget_kept()  # drops dequantized weights that no launch has written
        return found

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Computes ``forward`` of this layer alone, without the layers that read the same input."""
        if self.pre_decode:
            refuse_product_of_torch("pre_decode=True")
            self.bias_now()
            return functional.linear(x, self._fresh(), self.bias)
        if not self._is_nvfp4:
            return self._of_format(x)
        given, bias = (
            self.given_input_scale(),
            self._parameters.get("bias"),
        )  # as attributes they are slow to look up
        parts = self.parts(given)
        if private_api.is_traced():
            return self._product(torch.ops.nvfp4_cute.linear, x, parts, given)
        tensors = [x, *parts]
        if given is not None:
            tensors.append(given)
        if bias is not None:
            tensors.append(bias)
        settings = (self.mode, self.finds_input_scale, self.keep_decoded, self.backend, given is None)
        return self._last.call(settings, tensors, self._product, product, x, parts, given)

    def _product(
        self, multiply: Any, x: torch.Tensor, parts: tuple[torch.Tensor, ...], given: torch.Tensor | None
    ) -> torch.Tensor:
        rows, dtype = self.rows(x)
        bias = self.bias_now()
        kept = self.kept(rows.dtype) if self.keep_decoded and self.uses_kept(rows.shape[0]) else None
        if kept is not None:
            y = decoded_linear(rows, kept, bias, dtype)
        else:
            finds = self.finds_input_scale and self.mode != "16bit"
            y = multiply(rows, *parts, given, finds, self.mode, dtype, self.backend, bias)
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _of_format(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies weights in other formats than NVFP4, which have no global scales."""
        rows, dtype = self.rows(x)
        parts, how = (rows, self.packed_weight, self.scale, self.bias_now()), (self.mode, dtype, self.backend)
        if private_api.is_traced():
            y = torch.ops.nvfp4_cute.linear_of_format(*parts, self.format.name, *how)
        else:
            y = product_of_format(*parts, self.format, *how)
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def bias_now(self) -> torch.Tensor | None:
        """Returns the bias for ``gemm``. Under torch.nn.utils.parametrize or prune it is not a parameter.

        Raises:
            UnsupportedProblem: the bias requires a gradient, which torch would compute where it multiplies dequantized weights.
        """
        parameters = self._parameters  # module attributes are slow to look up
        bias = parameters["bias"] if "bias" in parameters else self.bias
        if bias is not None and bias.requires_grad:
            rules.check_tensors({"bias": bias})
        return rules.addable_bias(bias)

    def uses_kept(self, rows: int) -> bool:
        """Returns whether kept weights multiply this many rows."""
        return self.keep_decoded and self.mode == "16bit" and is_for_kept(rows, self.packed_weight.is_cuda)

    def kept(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Returns the kept weights, [N, K], in ``dtype`` or the usual one; None where torch does not count writes to them."""
        buffers: dict[str, Any] = self._buffers
        parts = (buffers["weight"], buffers["weight_scale"], buffers["weight_global_scale"])
        return self._kept.of(*parts, (self.out_features, self.in_features), dtype or self.kept_dtype)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of kept weights."""
        return self._kept.nbytes

    def forget_kept(self) -> None:
        """Frees the kept weights. A product that needs them computes them again."""
        self._kept = Decoded()

    @property
    def kept_dtype(self) -> torch.dtype:
        """Dtype of kept weights: the layer's ``dtype``, or bfloat16 for float32."""
        return KERNEL_DTYPE if self.dtype == torch.float32 else self.dtype

    def rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Returns ``x`` as kernels read it, 16-bit [M, K], and the dtype of the result. Raises what ``forward`` raises."""
        if type(x) is not torch.Tensor or x.requires_grad or x.layout is not torch.strided or x.is_nested:
            rules.check_tensors({"x": x})
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"x has shape {list(x.shape)}; expected [..., {self.in_features}], the layer's in_features"
            )
        dtype = result_dtype(x)
        if dtype not in OUT_DTYPES:
            raise TypeError(
                f"x is {x.dtype}; the layer multiplies float16, bfloat16 and float32: pass x.float(), or make the layer with "
                "pre_decode=True"
            )
        rows = x if x.ndim == 2 else x.reshape(-1, self.in_features)
        if not self._is_nvfp4 and self.mode != "16bit":
            return rows, dtype  # quantized from their own dtype
        kernel_dtype = KERNEL_DTYPE if dtype == torch.float32 else dtype
        return rows if rows.dtype == kernel_dtype else rows.to(kernel_dtype), dtype

    def given_input_scale(self) -> torch.Tensor | None:
        """Global scale with which rows are quantized; None where it is 1, is computed per call, or rows are not quantized."""
        is_given = self.mode != "16bit" and not self.finds_input_scale
        return self._buffers["input_global_scale"] if is_given else None

    def parts(self, given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the 4-bit weights, their block scales, and ``alpha(given)``."""
        buffers: dict[str, Any] = self._buffers  # module attributes are slow to look up
        return buffers["weight"], buffers["weight_scale"], self.alpha(given)

    def alpha(self, given: torch.Tensor | None) -> torch.Tensor:
        """Returns the weights' global scale times ``given``, cached for eager calls on one stream of a GPU.

        A captured graph reads the cached value, so it needs no launch to multiply scalars. After scales are written, the next
        eager call updates the value in place, also for such a graph. A traced graph computes it.
        """
        factor: Any = self._buffers["weight_global_scale"]
        if given is None:
            return factor
        if private_api.is_traced():
            return factor * given
        made, of_factor, of_given, index, *state = self._kept_alpha
        is_same = of_factor is factor and of_given is given
        if is_same and state == [factor._version, given._version, private_api.current_stream(index)]:
            return made
        if not given.is_cuda or given.is_inference() or factor.is_inference():
            return factor * given
        versions = [factor._version, given._version]
        if torch.cuda.is_current_stream_capturing():
            return made if is_same and state[:2] == versions else factor * given
        index = given.device.index
        made = torch.mul(factor, given, out=made if is_same else None)
        self._kept_alpha = (made, factor, given, index, *versions, private_api.current_stream(index))
        return made

    @property
    def scale(self) -> torch.Tensor:
        """The block scales in the layout of kernels."""
        stored = self._buffers[self._scale_name]
        assert stored is not None
        return scales_of(stored, self.format)

    @property
    def _scale_name(self) -> str:
        return SCALE_NAMES.get(self.format.name, "weight_scale")

    @property
    def packed_weight(self) -> torch.Tensor:
        """The codes of the weights: uint8 [N, K/2], two values per byte, or [N, K] for 8-bit formats."""
        packed = self._buffers["weight"]
        assert packed is not None
        return packed

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weights, [N, K] in ``dtype``, like ``torch.nn.Linear.weight``. Computed whenever it is read."""
        return self._fresh() if self.pre_decode else self._decode()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute like torch.nn.Module. ``weight`` sets the codes, as ``load_state_dict(assign=True)`` needs."""
        if name == "weight" and not (
            getattr(value, "dtype", None) == self.packed_weight.dtype
            and not isinstance(value, torch.nn.Parameter)
        ):
            raise AttributeError(
                f"weight is set to a {type(value).__name__}; it is decoded when it is read: make a layer of other weights by "
                "QuantizedLinear.from_linear(layer), or load a state dict"
            )
        super().__setattr__(name, value)

    @property
    def quantized_weight(self) -> BlockScaledTensor:
        """The weights as a block-scaled tensor [N, K], without a copy."""
        shape, format = (self.out_features, self.in_features), self.format
        if self._is_nvfp4:
            return NVFP4Tensor(self.packed_weight, self.weight_scale, self.weight_global_scale, shape)
        return BlockScaledTensor(
            self.packed_weight, self.scale, None, shape, format.scale_layout, format=format
        )

    def extra_repr(self) -> str:
        """Shows sizes and modes."""
        is_auto = self.activations == "auto"
        how = f"activations={self.activations!r}" + (f" ({self.mode!r} here)" if is_auto else "")
        how += (
            ', input_scale="per_row"'
            if self.finds_row_scales and not has_row_scales(self.activations)
            else ""
        )
        how = f"pre_decode={self.dtype}" if self.pre_decode else how
        how += ", keep_decoded=True" if self.keep_decoded else ""
        how += "" if self._is_nvfp4 else f", format={self.format}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {how}"

    def get_extra_state(self) -> torch.Tensor:
        """Returns the state dict's description of itself (``nn.state``)."""
        return state.description(self._said)

    @property
    def _said(self) -> dict[str, Any]:
        return state.DESCRIPTION if self._is_nvfp4 else state.formats_said(self.format)

    def set_extra_state(self, extra: torch.Tensor) -> None:
        """Does nothing, because the description was checked before tensors were loaded."""

    def _decode(self) -> torch.Tensor:
        if self.format in (FP8_128x128, INT8):
            return by_casts(self.quantized_weight, self.dtype)
        return dequantize(self.quantized_weight, self.dtype)

    def _fresh(self) -> torch.Tensor:
        """Dequantizes the weights that are in the buffers now."""
        if private_api.is_traced() and self.decoded is not None:
            return self.decoded
        now = self._versions()
        if self.decoded is None or self._decoded_of != now:
            self.decoded, self._decoded_of = self._decode(), now
        return self.decoded

    def _versions(self) -> tuple[int, ...]:
        """Returns addresses and version counters of the weights' tensors."""
        tensors = [self._buffers[name] for name in ("weight", self._scale_name, "weight_global_scale")]
        known = [t for t in tensors if t is not None]
        return tuple(n for t in known for n in (t.data_ptr(), 0 if t.is_inference() else t._version))

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        found = state.faults(state_dict, prefix, self._said)
        for name in (self._scale_name, "weight"):
            buffer = self._buffers[name]
            assert buffer is not None
            if buffer.dtype == torch.float32:
                fault = state.factor_fault(state_dict, prefix + name, allows_zero=True)
            else:
                fault = state.read_codes(state_dict, prefix + name, buffer.dtype)
            found += [] if fault is None else [fault]
        if found:
            error_msgs.extend(found)
            return
        state_dict.setdefault(prefix + state.EXTRA, self.get_extra_state())
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.decoded = None
        self._decode_ahead()

    def _decode_ahead(self) -> None:
        if self.pre_decode and not self.packed_weight.is_meta:
            self._fresh()

    def _apply(self, fn, recurse=True):
        names = (self._scale_name, *FIXED)
        fixed = {id(found) for name in names if (found := self._buffers.get(name)) is not None}
        move = state.keeping_dtype(fn)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed_weight.device)).dtype
        self.decoded = None
        self.forget_kept()
        super()._apply(lambda t: move(t) if id(t) in fixed else fn(t), recurse)
        device = self.packed_weight.device
        self.mode = layer_mode(self.activations, self.backend, device, self.finds_row_scales)
        self._decode_ahead()
        if self.shared is not None:
            self.shared[0].changed()
        return self


LinearNVFP4 = QuantizedLinear
"""Another name for :class:`QuantizedLinear`, whose default format is NVFP4."""
