"""A linear layer with block-scaled weights of any format, for inference."""

from numbers import Real
from typing import Any, Literal

import torch
from torch.nn import functional

from nvfp4_cute import backends, private_api
from nvfp4_cute.backends.last_chains import LastChains
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import INT8, NVFP4, BlockFormat, FP8_128x128, as_format
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, NVFP4Tensor
from nvfp4_cute.nn import options as options_of
from nvfp4_cute.nn import prepare, state
from nvfp4_cute.nn.activations import Activations, LayerMode, check_activations, layer_mode, rows_format
from nvfp4_cute.nn.decoded import Decoded, is_for_kept
from nvfp4_cute.nn.products import KERNEL_DTYPE, aligned, product, result_dtype
from nvfp4_cute.nn.weight_only import decoded_by_casts, decoded_linear, weight_only_linear
from nvfp4_cute.nn.weights import check_weight, kept_bias, scales_of, words_of, zeros
from nvfp4_cute.operands import rules
from nvfp4_cute.ops.dequantize import dequantize
from nvfp4_cute.ops.parts.gemm import gemm
from nvfp4_cute.ops.quantize import quantize
from nvfp4_cute.problem import OUT_DTYPES

# Of the bias and of decoded weights.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Rows of 4-bit weights lie 16 bytes apart, or a multiple.
K_STEP = 32
# What ``.to(dtype)`` of a model must not change: codes, block scales, global scales.
FIXED = ("weight", "weight_scale", "weight_global_scale", "input_global_scale")
# Names of the buffer of block scales: as DeepSeek-V3 names those of FP8, which multiply, the name notwithstanding.
SCALE_NAMES = {FP8_128x128.name: "weight_scale_inv"}
# What a layer that is quantized decides.
DECIDED = ("in_features", "out_features", "bias", "device")


class QuantizedLinear(state.Picklable):
    """``x @ W^T + bias`` with block-scaled W: ``torch.nn.Linear`` at 4.1 to 8.3 bits per weight. There is no backward pass.

    Make one with :meth:`from_linear` or :meth:`from_quantized`; the constructor makes an empty one, for
    ``load_state_dict``. Weights are of NVFP4, MXFP4, MXFP8_E4M3, FP8_128x128, INT8 or an ``int4_format``. What multiplies:

    - ``activations="nvfp4"`` (W4A4): rows of x are quantized (one launch, and of over 65,536 values a pass for their largest
      magnitude with ``input_scale="auto"``), then ``gemm``.
    - ``activations="fp8"``, ``"int8"``, ``"mxfp4"`` or ``"mxfp8_e4m3"``, for such weights: rows of x are quantized to that
      format (FP8: to FP8_1x128), then ``gemm``. Integer sums of INT8 are exact, so all backends give the same bits.
    - ``activations="16bit"``: ``gemm`` with 16-bit rows, for weights of any format; of very many rows W is decoded into memory
      that is given back afterwards, each weight rounded once, and torch multiplies (``nn.weight_only``).
    - ``activations="auto"``, for NVFP4: 16 bits on a GPU without FP4 tensor cores (Hopper), else W4A4; ``mode`` says which.
    - ``pre_decode=True``: W is decoded to ``dtype`` once, then ``torch.nn.functional.linear``: for GPUs without FP4
      arithmetic, and many rows. State dict and file still hold 4 bits a weight.
    - ``keep_decoded=True``: decoded weights are kept beside the 4-bit ones, and multiplied by torch where 16-bit rows are many
      (``nn.decoded``). They are made anew once the weights have changed; graphs that are traced or captured do without.

    Dtypes are those of ``torch.nn.Linear``: the result has the dtype of ``x``, under autocast that of autocast. float32
    activations are rounded to bfloat16 before they are quantized to NVFP4 or multiplied in 16 bits. The bias is added in float32,
    before the rounding to the result's dtype.

    ``layer.weight`` is the decoded weights, [N, K] of ``layer.dtype``, made when it is read: modules around the layer that
    multiply by it themselves, such as torch.nn.MultiheadAttention, compute with 16-bit activations. The codes are
    ``layer.packed_weight``, codes and scales together ``layer.quantized_weight``.

    State dict, for every choice of activations:
        weight: the codes, uint8 [N, K/2] with the even k in the low nibble, float8_e4m3fn [N, K], or int8 [N, K].
        weight_scale: NVFP4: float8_e4m3fn [rm, rk, 32, 4, 4], blocked. MXFP4, MXFP8: float8_e8m0fnu, blocked. INT8: float32
            [N, 1]. int4: int32 [rm, rk, 32, 4], blocked, the bits of scales and zero points. FP8 has ``weight_scale_inv``,
            float32 [ceil(N/128), K/128], in its place.
        weight_global_scale: NVFP4: float32, the factor one multiplies by to dequantize.
        input_global_scale: float32, where ``input_scale`` is a number.
        bias: [N], where there is one.
        _extra_state: format, convention and version, uint8 bytes of JSON. A state dict without it is read as well, but not one
            whose global scales are reciprocal. Block scales that are uint8 are taken as bits.

    Moving the module to a device moves all of it; ``.to(dtype)`` converts the bias, and decodes the weights anew.

    Args:
        in_features: K, a whole number of blocks; a multiple of 32 for 4-bit formats. out_features: N.
        bias: whether there is one.
        format: of the weights, a record or its name.
        activations: see above; None: quantized to the format that goes with the weights, 16 bits for int4.
        input_scale: global scale of x where it is quantized to NVFP4: "auto" (from x, in every call), None, or a number
            (calibrated: amax / 2688). A layer that does not quantize x holds a number for its state dict alone.
        pre_decode: whether to multiply by decoded weights. keep_decoded: whether to where rows are many; for NVFP4.
        dtype: of the bias and of decoded weights.
        device: of everything.
        backend: as of ``gemm``.

    Example:
        >>> layer = QuantizedLinear.from_linear(torch.nn.Linear(512, 256))
        >>> layer(torch.randn(40, 512).bfloat16()).shape
        torch.Size([40, 256])

    Raises:
        UnsupportedProblem: K is not a multiple of 32, for 4-bit formats. ValueError: an unknown choice, a format or a K that no
        layer has, a negative size, an ``input_scale`` that is not positive. TypeError: a size that is not an int, another dtype.
    """

    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor
    input_global_scale: torch.Tensor | None
    decoded: torch.Tensor | None
    mode: LayerMode
    """What it does with activations where it is: "16bit", or the format that they are quantized to."""
    # The layers that read the same input, and this one's number among them (``nn.shared_input``).
    shared: tuple[Any, int] | None = None
    # The product of the global scales, and what it was made of (``alpha``).
    _kept_alpha: tuple[Any, ...] = (None, None, None, None)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: BlockFormat | str = NVFP4,
        activations: Activations | LayerMode | None = None,
        input_scale: float | Literal["auto"] | None = "auto",
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
                f"keep_decoded=True with weights of {format.title}; decoded weights are kept beside NVFP4 alone: leave it out"
            )
        if pre_decode and keep_decoded:
            raise ValueError(
                "pre_decode=True multiplies all rows by decoded weights, keep_decoded=True many rows: pass one of the two"
            )
        if isinstance(input_scale, str) and input_scale != "auto":
            raise ValueError(f'input_scale={input_scale!r} is not "auto", None or a number')
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
        self.finds_input_scale = isinstance(input_scale, str) and self._is_nvfp4
        self.dtype = dtype
        # Not by register_buffer, which would read the property of this name.
        self._buffers["weight"], scale = zeros(format, (), out_features, in_features, device)
        self.register_buffer(self._scale_name, scale)
        one = torch.ones((), dtype=torch.float32, device=device) if self._is_nvfp4 else None
        self.register_buffer("weight_global_scale", one)
        given = None
        if input_scale is not None and not isinstance(input_scale, str):
            given = torch.as_tensor(input_scale, dtype=torch.float32, device=device).reshape(())
        self.register_buffer("input_global_scale", given)
        backends.resolve(backend, scale.device)
        self.mode = layer_mode(activations, backend, scale.device)
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
        """The layer with the weights of ``linear`` quantized (NVFP4: global scale amax / 2688), on its device.

        Args:
            linear: of any float dtype; not changed. format: of the weights. options: of the constructor, but what ``linear``
                says: sizes, bias, device; ``dtype`` is the layer's where it is not given.

        Raises:
            TypeError: ``linear`` is another module, or an option says what it says.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear is a {type(linear).__name__}; pass a torch.nn.Linear")
        options_of.refuse(options, DECIDED, "linear")
        weight = linear.weight.detach()
        options.setdefault("dtype", weight.dtype)
        backend = options.get("backend", "auto")
        if str(backend).startswith("emulator"):
            backend = "reference"  # the same bits
        format = as_format("format", format)
        found: Any = "auto" if format.has_global_scale else None
        quantized = quantize(weight, format=format, global_scale=found, backend=backend)
        return cls.from_quantized(quantized, linear.bias, **options)

    @classmethod
    def from_quantized(
        cls, weight: BlockScaledTensor, bias: torch.Tensor | None = None, **options: Any
    ) -> "QuantizedLinear":
        """The layer with quantized weights: no copy where scales lie as kernels read them.

        Args:
            weight: [N, K]. bias: [N], or None. options: of the constructor, but sizes, format and device.

        Raises:
            ValueError: ``weight`` is not a matrix of a format that layers have, or ``bias`` has another shape. TypeError: another
            type, or an option says what ``weight`` says.
        """
        options_of.refuse(options, (*DECIDED, "format"), "weight")
        check_weight("weight", weight, "[N, K]")
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
        """``x @ W^T + bias``.

        Args:
            x: [..., K], float16, bfloat16 or float32; with ``pre_decode`` of ``dtype``, unless autocast is on.

        Returns:
            [..., N] of ``result_dtype(x)``. The bias is added in float32, before the product is rounded to that; torch adds it
            where it multiplies decoded weights.

        Raises:
            ValueError: ``x`` has another K. UnsupportedProblem: ``x`` or the bias has a gradient to follow.
            And what ``quantize`` and ``gemm`` refuse.
        """
        if self.shared is None:
            return self.product(x)
        layers, number = self.shared
        self.bias_now()  # the layer of all rows has a copy of it
        return layers.result(number, x)

    def prepare(
        self, max_rows: int = prepare.MAX_ROWS, dtype: torch.dtype = KERNEL_DTYPE, jobs: int | None = None
    ) -> int:
        """Compile and load all kernels that 1 to ``max_rows`` rows take, so that no later call waits for a compiler.

        Args:
            max_rows: most rows of a call. dtype: of the rows. jobs: processes that compile; None for one per core, 8 at most.

        Returns:
            How many kernels this process did not have: 0 on the CPU, where the reference computes.
        """
        device = self.packed_weight.device
        keys = [] if self.pre_decode else self.kernels(max_rows, dtype)
        return prepare.load(keys, device, jobs)

    def kernels(self, max_rows: int, dtype: torch.dtype = KERNEL_DTYPE) -> list[Any]:
        """Keys of the kernels of ``prepare``."""
        device = self.packed_weight.device
        found = prepare.linear_kernels(self.product, self.in_features, max_rows, dtype, device)
        self.forget_kept()  # decoded weights that no launch wrote
        return found

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """``forward`` of this layer alone, whatever others read the same input."""
        if self.pre_decode:
            self.bias_now()
            return functional.linear(x, self._fresh(), self.bias)
        if not self._is_nvfp4:
            return self._of_format(x)
        given, bias = self.given_input_scale(), self._parameters.get("bias")  # not slowly, as attributes
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
            finds = self.finds_input_scale and self.mode == "nvfp4"
            y = multiply(rows, *parts, given, finds, self.mode, dtype, self.backend, bias)
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _of_format(self, x: torch.Tensor) -> torch.Tensor:
        """The product with weights of another format than NVFP4, which has no global scales."""
        (rows, dtype), bias, format = self.rows(x), self.bias_now(), self.format
        weight, scale, backend = self.packed_weight, self.scale, self.backend
        options: dict[str, Any] = {"bias": bias, "b_format": format, "out_dtype": dtype, "backend": backend}
        if self.mode != "16bit":
            own = rows_format(format)
            q = quantize(rows, format=own, backend=backend)
            y = gemm(q.data, weight, q.scale, scale, a_format=own, **options)
        elif private_api.is_traced():  # the product alone, whatever M is
            y = gemm(rows.contiguous(), weight, None, scale, **options)
        else:
            y = weight_only_linear(aligned(rows), weight, scale, None, dtype, backend, format, bias)
        return y.reshape(*x.shape[:-1], self.out_features)

    def bias_now(self) -> torch.Tensor | None:
        """The bias as ``gemm`` takes it; that of torch.nn.utils.parametrize and prune is no parameter any more.

        Raises:
            UnsupportedProblem: it has a gradient to follow, which torch would, where it multiplies decoded weights.
        """
        parameters = self._parameters  # a module looks its attributes up slowly
        bias = parameters["bias"] if "bias" in parameters else self.bias
        if bias is not None and bias.requires_grad:
            rules.check_tensors({"bias": bias})
        return rules.addable_bias(bias)

    def uses_kept(self, rows: int) -> bool:
        """Whether so many rows are multiplied by kept weights."""
        return self.keep_decoded and self.mode == "16bit" and is_for_kept(rows, self.packed_weight.is_cuda)

    def kept(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The kept weights, [N, K] of ``dtype``, None for that of most rows; None where writes to them are not counted."""
        buffers: dict[str, Any] = self._buffers
        parts = (buffers["weight"], buffers["weight_scale"], buffers["weight_global_scale"])
        return self._kept.of(*parts, (self.out_features, self.in_features), dtype or self.kept_dtype)

    @property
    def kept_nbytes(self) -> int:
        """Bytes that kept weights take now."""
        return self._kept.nbytes

    def forget_kept(self) -> None:
        """Give the memory of kept weights back; a product that wants them makes them anew."""
        self._kept = Decoded()

    @property
    def kept_dtype(self) -> torch.dtype:
        """Of the rows that a layer of ``dtype`` multiplies."""
        return KERNEL_DTYPE if self.dtype == torch.float32 else self.dtype

    def rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """``x`` as kernels take it, [M, K] of 16 bits, and the dtype of the result. Raises what ``forward`` raises."""
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
            return rows, dtype  # quantized as they are
        kernel_dtype = KERNEL_DTYPE if dtype == torch.float32 else dtype
        return rows if rows.dtype == kernel_dtype else rows.to(kernel_dtype), dtype

    def given_input_scale(self) -> torch.Tensor | None:
        """The global scale by which rows are quantized; None for 1, where it is found, and where rows are not quantized."""
        is_given = self.mode == "nvfp4" and not self.finds_input_scale
        return self._buffers["input_global_scale"] if is_given else None

    def parts(self, given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The 4-bit weights, their block scales, and ``alpha(given)``."""
        buffers: dict[str, Any] = self._buffers  # a module looks its attributes up slowly
        return buffers["weight"], buffers["weight_scale"], self.alpha(given)

    def alpha(self, given: torch.Tensor | None) -> torch.Tensor:
        """The product of the weights' global scale and of what is given, which is kept, for eager calls on one stream of a GPU.

        A graph that is captured reads what was kept, and no launch of it multiplies scalars. Once scales were written, the next
        eager call writes the product anew, for such a graph, too. A graph that is traced computes it.
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
        """The block scales as kernels read them."""
        stored = self._buffers[self._scale_name]
        assert stored is not None
        return scales_of(stored, self.format)

    @property
    def _scale_name(self) -> str:
        return SCALE_NAMES.get(self.format.name, "weight_scale")

    @property
    def packed_weight(self) -> torch.Tensor:
        """The codes of the weights: uint8 [N, K/2], two values per byte, or [N, K] of 8 bits."""
        packed = self._buffers["weight"]
        assert packed is not None
        return packed

    @property
    def weight(self) -> torch.Tensor:
        """The decoded weights, [N, K] of ``dtype``: what ``torch.nn.Linear`` has under this name. Made anew when read."""
        return self._fresh() if self.pre_decode else self._decode()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute as torch.nn.Module does; a ``weight`` is codes, as ``load_state_dict(assign=True)`` sets it."""
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
        """The weights as a tensor [N, K], without a copy."""
        shape, format = (self.out_features, self.in_features), self.format
        if self._is_nvfp4:
            return NVFP4Tensor(self.packed_weight, self.weight_scale, self.weight_global_scale, shape)
        return BlockScaledTensor(
            self.packed_weight, self.scale, None, shape, format.scale_layout, format=format
        )

    def extra_repr(self) -> str:
        """Sizes and how it multiplies."""
        is_auto = self.activations == "auto"
        how = f"activations={self.activations!r}" + (f" ({self.mode!r} here)" if is_auto else "")
        how = f"pre_decode={self.dtype}" if self.pre_decode else how
        how += ", keep_decoded=True" if self.keep_decoded else ""
        how += "" if self._is_nvfp4 else f", format={self.format}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {how}"

    def get_extra_state(self) -> torch.Tensor:
        """What the state dict says of itself (``nn.state``)."""
        return state.description(self._said)

    @property
    def _said(self) -> dict[str, Any]:
        return state.DESCRIPTION if self._is_nvfp4 else state.formats_said(self.format)

    def set_extra_state(self, extra: torch.Tensor) -> None:
        """Nothing to set: it was checked before tensors were loaded."""

    def _decode(self) -> torch.Tensor:
        if self.format in (FP8_128x128, INT8):
            return decoded_by_casts(self.quantized_weight, self.dtype)
        return dequantize(self.quantized_weight, self.dtype)

    def _fresh(self) -> torch.Tensor:
        """Decoded weights of what is in the buffers now."""
        if private_api.is_traced() and self.decoded is not None:
            return self.decoded
        now = self._versions()
        if self.decoded is None or self._decoded_of != now:
            self.decoded, self._decoded_of = self._decode(), now
        return self.decoded

    def _versions(self) -> tuple[int, ...]:
        """Addresses of the weights' tensors, and how often each was written."""
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
        self.mode = layer_mode(self.activations, self.backend, self.packed_weight.device)
        self._decode_ahead()
        if self.shared is not None:
            self.shared[0].changed()
        return self


class LinearNVFP4(QuantizedLinear):
    """:class:`QuantizedLinear` by another name: weights are NVFP4 where no format is given."""
