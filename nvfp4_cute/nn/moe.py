"""``MoE``: a layer of experts with quantized weights as a module of torch.nn, for inference."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import is_not, itemgetter
from typing import Any, Literal, TypeVar

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.activation import SILU, Activation, activation_of
from nvfp4_cute.backends.last_chains import LastChains
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.experts.checks import (
    check_expert_weights,
    check_row_scales,
    kernel_ids,
    kind_of_rows,
)
from nvfp4_cute.experts.moe import FP8_ROWS, compute
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.products import ROWS, check_activations
from nvfp4_cute.experts.records import (
    LAYOUTS,
    ActivationFormat,
    Activations,
    ExpertLayout,
    Experts,
    LayerOfExperts,
    Parallel,
)
from nvfp4_cute.experts.weights import ExpertWeights, in_whole_lines, per_expert, product_factors
from nvfp4_cute.formats.block_format import (
    MXFP4,
    NVFP4,
    BlockFormat,
    as_format,
)
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, check_is_tensor
from nvfp4_cute.nn import options as options_of
from nvfp4_cute.nn import prepare
from nvfp4_cute.nn.seen import Seen
from nvfp4_cute.nn.state import NamesFormats
from nvfp4_cute.nn.weights import as_words, kept_bias, scales_of, zeros
from nvfp4_cute.operands.rules import check_choice, global_scales

# Rows of operands start at multiples of 16 bytes.
K_STEP = 32
# Options that ``from_experts`` and ``from_quantized`` decide.
DECIDED = ("num_experts", "hidden_size", "intermediate_size", "bias", "device")

# A layer's tensors, in the order of the fields of ``LayerOfExperts``.
HELD = dict.fromkeys((
    "w13", "w13_scale", "bias13", "alpha13", "w2", "w2_scale", "bias2", "alpha2", "input_scale", "hidden_scale"
))  # fmt: skip
ALPHA13 = 3 + [*HELD].index("alpha13")  # after ids, weights and shared
_in_order = itemgetter(*HELD)
_is_given = partial(is_not, None)
Module = TypeVar("Module", bound="MoE")


class MoE(NamesFormats):
    """The experts of a mixture-of-experts layer with quantized weights: ``moe`` as a module. There is no backward pass.

        >>> gate_up, down = torch.randn(4, 512, 128).bfloat16() / 16, torch.randn(4, 128, 256).bfloat16() / 16
        >>> layer = MoE.from_experts(gate_up, down)
        >>> layer(torch.randn(3, 128).bfloat16(), *route(torch.randn(3, 4), 2)).shape
        torch.Size([3, 128])

    Make one with :meth:`from_experts` or :meth:`from_quantized`; the constructor makes an empty layer for ``load_state_dict``.
    The caller routes tokens; :func:`nvfp4_cute.route` does so for the usual models.

    State dict:
        w13: uint8 [E, 2 I, H/2] (without a gate [E, I, H/2]), two e2m1 values per byte; 8-bit formats: float8 or int8 [E, 2 I,
            H].
        w2: uint8 [E, H, I/2]; 8-bit formats: [E, H, I].
        w13_scale, w2_scale: NVFP4: float8_e4m3fn, MX formats: float8_e8m0fnu, both blocked [E, rn, rk, 32, 4, 4]. FP8, INT8:
            float32 [E, rows, columns]. int4: int32 words [E, rn, rk, 32, 4], see QuantizedLinear.
        alpha13: float32 [2, E], factors of the products of gate and up: global scale of the weights times that of x. NVFP4
            only.
        alpha2: float32 [E], factors of the second product. NVFP4 only.
        input_scale: float32 [1] or [E], where there is one.
        hidden_scale: float32 [E], where there is one.
        bias13, bias2: [E, 2 I] and [E, H], where there are biases.
        _extra_state: names of the formats, a ``weight_layout`` other than "concatenated", and a version, as uint8 bytes of JSON.
            A state dict without it can also be loaded.

    Rows of w13 and w2 begin at lines of 128 bytes if this padding takes at most an eighth more memory. A state dict has no
    padding.

    Moving the module to a device moves all of it; ``.to(dtype)`` converts only biases. ``torch.compile`` and CUDA graphs can
    capture the whole layer.

    Args:
        num_experts: E, the number of experts of this process.
        hidden_size: H, a multiple of 32.
        intermediate_size: I, a multiple of 32.
        format: format of the weights: NVFP4, MXFP4, MXFP8, an ``int4_format``, FP8_128x128 or INT8. For int4, a pair gives w13
            and w2 different block sizes.
        activations: see ``moe``. NVFP4 weights: "nvfp4", "nvfp4_four_over_six" or "16bit". MX weights: "mxfp8_e4m3",
            "mxfp8_e5m2", "mxfp4" or "16bit". FP8_128x128: "16bit" or "fp8_1x128". INT8: "16bit" or "int8". int4: "16bit". None
            selects the first of these. ``from_experts`` and ``from_quantized`` also take "fp8_1xk" for MXFP4 weights, and convert
            them to MXFP4_FP8 (sm_90a).
            "fp8" is "fp8_1x128" or "fp8_1xk", by the weights, as in :class:`nvfp4_cute.QuantizedLinear`.
        activation: an :class:`nvfp4_cute.Activation` or its name.
        weight_layout: see ``moe``.
        weight_on_input: whether router weights multiply tokens before the first product (Llama-4); see
            :class:`nvfp4_cute.ActivationFormat`.
        input_scale, hidden_scale: calibrated global scales of x and of the hidden activations: a number, or one per expert;
            None for 1. Only NVFP4 activations have them. ``input_scale="per_row"``: every row of both products has its own, found
            by the launches that quantize, and nothing is calibrated.
        bias: whether there are biases.
        parallel: ranks that divide the layer; see :class:`nvfp4_cute.Parallel`. If they divide experts, ``bias2`` has one row
            per expert of all ranks, also in the state dict. If they divide the width, ``intermediate_size`` is that of one rank.
        dtype: dtype of the biases.
        device: device of all tensors.
        backend: see ``moe``.

    To replace the block of transformers' Qwen3-MoE, whose experts hold ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H,
    I]::

        class Block(torch.nn.Module):
            def __init__(self, block, top_k):
                super().__init__()
                self.gate, self.top_k = block.gate, top_k
                self.experts = MoE.from_experts(block.experts.gate_up_proj, block.experts.down_proj)

            def forward(self, hidden_states):
                x = hidden_states.reshape(-1, hidden_states.shape[-1])
                logits = torch.nn.functional.linear(x, self.gate.weight)
                return self.experts(x, *route(logits, self.top_k)).view_as(hidden_states)

        for layer in model.model.layers:
            layer.mlp = Block(layer.mlp, model.config.num_experts_per_tok)

    To use the released weights of gpt-oss, whose MXFP4 ``blocks`` [E, 2 I, H/32, 16] and ``scales`` [E, 2 I, H/32] alternate
    rows of gate and up (``ExpertWeights.in_turns`` changes their order, for one launch fewer)::

        def weights(blocks, scales):
            shape = (*blocks.shape[:2], 32 * blocks.shape[2])
            return BlockScaledTensor(blocks.flatten(2), scales, None, shape, "rowmajor", format=MXFP4)

        experts = MoE.from_quantized(
            weights(gate_up_blocks, gate_up_scales), weights(down_blocks, down_scales), bias13=gate_up_bias, bias2=down_bias,
            weight_layout="interleaved", activation=Activation("swiglu_oai", limit=7.0), activations="16bit",
        )

    Raises:
        UnsupportedProblem: kernels do not support the sizes.
        ValueError: weights of this format cannot be multiplied by these activations, or activations that have no global scale
            are given one.
    """

    FACTORS = ("alpha13", "alpha2", "input_scale", "hidden_scale")

    @property
    def _block_factors(self) -> tuple[str, ...]:
        has_numbers = self.formats[1].scale_dtypes[0] == torch.float32
        return ("w13_scale", "w2_scale") if has_numbers else ()

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    alpha13: torch.Tensor | None
    alpha2: torch.Tensor | None
    input_scale: torch.Tensor | None
    hidden_scale: torch.Tensor | None
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        format: BlockFormat | str | tuple[BlockFormat | str, BlockFormat | str] = NVFP4,
        activations: Activations | Literal["fp8"] | None = None,
        activation: Activation | str = SILU,
        weight_layout: ExpertLayout = "concatenated",
        weight_on_input: bool = False,
        input_scale: Any = None,
        hidden_scale: Any = None,
        bias: bool = False,
        parallel: Parallel | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        formats = _pair(format)
        format = formats[1]
        asked: Any = FP8_ROWS.get(format, "fp8") if activations == "fp8" else activations
        rows, input_scale = kind_of_rows(asked or ROWS[format][0], input_scale)
        check_activations(rows, format)
        if parallel is not None and not isinstance(parallel, Parallel):
            raise TypeError(f"parallel={parallel!r} is not a Parallel; pass nvfp4_cute.Parallel(group)")
        check_choice("weight_layout", weight_layout, LAYOUTS)
        check_row_scales(rows, input_scale=input_scale, hidden_scale=hidden_scale)
        if num_experts < 1:
            raise ValueError(f"num_experts={num_experts} is not positive")
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size < K_STEP or size % K_STEP:
                raise UnsupportedProblem(
                    f"{name}={size} is not a positive multiple of {K_STEP} (rows start 16 bytes apart); pad the weights to "
                    f"{max(-(-size // K_STEP), 1) * K_STEP}"
                )
        self.num_experts, self.hidden_size, self.intermediate_size = (
            num_experts,
            hidden_size,
            intermediate_size,
        )
        self.activations = rows
        self.activation, self.weight_layout = activation_of(activation), weight_layout
        self.weight_on_input = weight_on_input
        self.formats = formats
        self.backend = backend
        if parallel is not None and parallel.group is not None and parallel.divide == "experts":
            ranks = parallel.group.size()
            placed = parallel.placement or Placement.even(num_experts * ranks, ranks)
            parallel = replace(parallel, placement=placed)
        self.parallel = parallel
        rows = intermediate_size * (1 if weight_layout == "none" else 2)
        sizes = ("w13", rows, hidden_size), ("w2", hidden_size, intermediate_size)
        for (name, n, k), own in zip(sizes, formats, strict=True):
            data, scale = zeros(own, (num_experts,), n, k, device)
            self.register_buffer(name, data)
            self.register_buffer(f"{name}_scale", scale)
        for name, shape in (("alpha13", (2, num_experts)), ("alpha2", (num_experts,))):
            ones = torch.ones(shape, dtype=torch.float32, device=device) if format.has_global_scale else None
            self.register_buffer(name, ones)
        self._seen, self._last = Seen(), LastChains()
        where = torch.empty(0, device=device).device
        backends.resolve(backend, where)
        given = None
        if input_scale is not None:
            given = torch.as_tensor(input_scale, dtype=torch.float32, device=where).reshape(-1)
            given = given if len(given) == 1 else per_expert(given, num_experts, where)
        self.register_buffer("input_scale", given)
        self.register_buffer("hidden_scale", per_expert(hidden_scale, num_experts, where))
        for name in ("input_scale", "hidden_scale"):
            global_scales(name, getattr(self, name), num_experts, where, of="expert", allows_one=True)
        placement = None if parallel is None else parallel.placement
        all_experts = num_experts if placement is None else placement.num_experts
        for name, count, columns in (("bias13", num_experts, rows), ("bias2", all_experts, hidden_size)):
            empty = torch.zeros((count, columns), dtype=dtype, device=device) if bias else None
            self.register_buffer(name, empty)

    @classmethod
    def from_experts(
        cls: type[Module],
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        format: BlockFormat | str = NVFP4,
        bias13: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
        **options: Any,
    ) -> Module:
        """Makes a layer with quantized weights on the device of ``gate_up``.

        NVFP4: each expert's global scale is its amax / 2688.

        Args:
            gate_up: [E, 2 I, H] of any float dtype (without a gate [E, I, H]), not changed.
            down: [E, H, I], not changed.
            format: format of the weights.
            bias13, bias2: see ``moe``.
            options: arguments of the constructor except sizes, bias and device.
        """
        options_of.refuse(options, DECIDED, "gate_up")
        format = as_format("format", format)
        _check_format("format", format)
        check_is_tensor("gate_up", gate_up)
        check_is_tensor("down", down)
        if gate_up.ndim != 3 or down.ndim != 3:
            raise ValueError(
                f"gate_up has shape {list(gate_up.shape)} and down {list(down.shape)}; expected [E, 2 I, H] and [E, H, I]"
            )
        w13, w2 = (ExpertWeights.quantize(weights, format) for weights in (gate_up, down))
        return cls.from_quantized(w13, w2, bias13=bias13, bias2=bias2, **options)

    @classmethod
    def from_quantized(
        cls: type[Module],
        w13: Any,
        w2: Any,
        *,
        bias13: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
        **options: Any,
    ) -> Module:
        """Makes a layer from quantized weights, which are copied only if their rows have to be further apart.

        Args:
            w13, w2: ExpertWeights, or a BlockScaledTensor as in ``moe``. Row-major scales are copied into blocks.
            bias13, bias2: see ``moe``.
            options: arguments of the constructor except sizes, format, bias and device.
        """
        options_of.refuse(options, (*DECIDED, "format"), "w13")
        check_expert_weights("w13", w13)
        check_expert_weights("w2", w2)
        _pair((w13.format, w2.format))
        w13, w2 = (as_kernels_read(w) for w in (w13, w2))
        if w13.format == MXFP4 and options.get("activations") in ("fp8", "fp8_1xk"):
            w13, w2 = w13.for_fp8(), w2.for_fp8()
        formats = w13.format, w2.format
        experts, hidden_size, row_bytes = w2.data.shape
        has_bias = bias13 is not None or bias2 is not None
        for name, bias in (("bias13", bias13), ("bias2", bias2)):
            if bias is not None:
                check_is_tensor(name, bias)
        if has_bias:
            options.setdefault("dtype", next(b.dtype for b in (bias13, bias2) if b is not None))
        width = w2.format.elements(row_bytes)
        module = cls(
            experts, hidden_size, width, format=formats, bias=has_bias, device=w2.data.device, **options
        )
        given, fitting = list(w13.shape), [experts, module.w13.shape[1], hidden_size]
        if given != fitting:
            raise ValueError(
                f"gate_up (w13) is {given} and down (w2) [E, H, I] = {list(w2.shape)}, which asks for gate_up {fitting}; "
                "is one of them transposed?"
            )
        for name, weights in (("w13", w13), ("w2", w2)):
            scale = as_words(weights.scale) if weights.format.is_int4 else weights.scale
            for part, tensor in ((name, weights.data), (f"{name}_scale", scale)):
                buffer = getattr(module, part)
                if tensor.numel() != buffer.numel():
                    raise ValueError(f"{part} has shape {list(tensor.shape)}; expected {list(buffer.shape)}")
                setattr(module, part, tensor.view(buffer.dtype).view(buffer.shape))
        module._align_rows()
        if module.alpha13 is not None and module.alpha2 is not None:
            factors = product_factors(w13, module.input_scale, experts)
            for row, factor in zip(module.alpha13, factors, strict=True):
                row.copy_(torch.ones_like(row) if factor is None else factor)
            factor, _ = product_factors(w2, module.hidden_scale, experts)
            module.alpha2.copy_(torch.ones_like(module.alpha2) if factor is None else factor)
        for name, bias in (("bias13", bias13), ("bias2", bias2)):
            if bias is not None:
                own = getattr(module, name)
                own.copy_(kept_bias(name, bias, tuple(own.shape), own.device, own.dtype))
        module._compare_alphas()
        return module

    has_one_alpha = True
    """Whether gate and up have the same factors, as last seen. False is always correct."""
    has_two_alphas = False
    """Whether to assume two factors without comparing, for writers that torch does not count."""

    def _compare_alphas(self) -> None:
        """Sets ``has_one_alpha`` from ``alpha13``. While a graph is captured, which forbids reading, assumes two factors."""
        if self.alpha13 is None or self.alpha13.is_meta:
            return
        if self.alpha13.is_cuda and torch.cuda.is_current_stream_capturing():
            self.has_one_alpha = False
            return
        seen = Seen([(self._buffers, "alpha13")])
        self.has_one_alpha = bool((self.alpha13[0] == self.alpha13[1]).all())
        self._seen = seen  # last, because it tells other threads that the result is current

    def _is_one_alpha(self, is_traced: bool) -> bool:
        """Returns whether gate and up have the same factors. A traced graph uses the last comparison."""
        if not (is_traced or self.has_two_alphas or self._seen.is_current()):
            self._compare_alphas()
        return self.has_one_alpha and not self.has_two_alphas

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the layer's result.

        Args:
            x: float16 or bfloat16 [..., H].
            ids: integers [T, k], the experts of each row of x, as ``route`` returns them; any integer dtype.
            weights: [T, k], the factors of these experts.
            shared: added to the result; dtype and shape of x.

        Returns:
            [..., H] in the dtype of x.

        Raises what ``moe`` raises.
        """
        for name, tensor in (("x", x), ("ids", ids), ("weights", weights)):
            if type(tensor) is not torch.Tensor:
                check_is_tensor(name, tensor)
        hidden_size = self.hidden_size
        if x.shape[-1:] != (hidden_size,):
            raise ValueError(
                f"x has shape {list(x.shape)}; expected [..., {hidden_size}], the layer's hidden_size"
            )
        if shared is not None:
            check_is_tensor("shared", shared)
            shared = shared.reshape(-1, hidden_size)
        if x.ndim != 2:
            return self.forward(x.reshape(-1, hidden_size), ids, weights, shared).view(x.shape)
        held, parallel, is_traced = self._held(), self.parallel, private_api.is_traced()
        is_one_alpha = held["alpha13"] is None or self._is_one_alpha(is_traced)
        call = (x, ids, weights, shared, held, is_one_alpha)
        is_over_ranks = parallel is not None and parallel.group is not None
        if is_over_ranks or self.weight_on_input or is_traced:
            return self._compute(*call)
        given = [ids, weights, shared, *_in_order(held)]
        if not is_one_alpha:
            given[ALPHA13 : ALPHA13 + 1] = held["alpha13"].unbind()
        modes = (self.activations, self.activation, self.weight_layout, self.formats, parallel, self.backend)
        tensors, settings = [x, *filter(_is_given, given)], (*modes, *map(_is_given, given))
        with_rows = 3 + (shared is not None)
        return self._last.call(settings, tensors, self._compute, *call, with_rows=with_rows)

    def _compute(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        held: Mapping[str, Any],
        is_one_alpha: bool,
    ) -> torch.Tensor:
        alpha: Any = held["alpha13"]
        if alpha is not None:
            alpha = alpha[0] if is_one_alpha else (alpha[0], alpha[1])
        w13, w2 = (
            ExpertWeights(held[name], scales_of(held[f"{name}_scale"], format), None, format)
            for name, format in zip(("w13", "w2"), self.formats, strict=True)
        )
        parallel = self.parallel
        layer = LayerOfExperts(
            Experts(w13, self.weight_layout, held["bias13"], alpha),
            Experts(w2, "none", held["bias2"], held["alpha2"]),
            self.activation,
            ActivationFormat(
                self.activations, held["input_scale"], held["hidden_scale"], self.weight_on_input
            ),
            0 if parallel is None else parallel.first_expert,
            self.backend,
        )
        return compute(layer, x, kernel_ids(ids, "ids"), weights, shared, parallel)

    def prepare(
        self,
        max_tokens: int = prepare.MAX_ROWS,
        top_k: int = 8,
        dtype: torch.dtype = torch.bfloat16,
        jobs: int | None = None,
    ) -> int:
        """Compiles and loads all kernels for 1 to ``max_tokens`` tokens, so that no later call waits for the compiler.

        Args:
            max_tokens: largest number of tokens per call.
            top_k: experts per token.
            dtype: dtype of the tokens.
            jobs: number of compiling processes; None for one per core, at most 8.

        Returns:
            The number of kernels that this process did not have; 0 on the CPU, where the reference computes.

        Raises:
            UnsupportedProblem: the layer is spread over the ranks of a group, which would have to call it together.
        """
        if self._group is not None:
            raise UnsupportedProblem(
                "prepare does not support a layer that ranks divide; call the layer once on all ranks"
            )
        where = dtype, self.w13.device
        keys = prepare.expert_kernels(self, self.hidden_size, self.num_experts, top_k, max_tokens, *where)
        return prepare.load(keys, self.w13.device, jobs)

    @property
    def _group(self) -> Any:
        return None if self.parallel is None else self.parallel.group

    def _held(self) -> Mapping[str, Any]:
        """Returns tensors by name. Module attributes are slow to look up, so buffers come from their dict."""
        buffers: dict[str, Any] = self._buffers
        if buffers.keys() >= HELD.keys():
            return buffers
        return {name: getattr(self, name) for name in HELD}  # parameters, or computed in every call

    def extra_repr(self) -> str:
        """Shows sizes and the activation."""
        limit = "" if self.activation.limit is None else f"limit={self.activation.limit}, "
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"format={' and '.join(dict.fromkeys(map(str, self.formats)))}, activations={self.activations!r}, "
            f"activation={self.activation.function!r}, {limit}weight_layout={self.weight_layout!r}"
        )

    def _align_rows(self) -> None:
        for name in ("w13", "w2"):
            held = self._buffers.get(name)  # parameters are moved by torch, with their strides
            if held is not None:
                self._buffers[name] = in_whole_lines(held)

    @property
    def _said(self) -> dict[str, Any]:
        said = super()._said
        # Rows of w13 in another order have the same shape.
        is_plain = self.weight_layout == "concatenated"
        return said if is_plain else said | {"weight_layout": self.weight_layout}

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._align_rows()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("w13", "w2"):
            destination[prefix + name] = destination[prefix + name].contiguous()

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._align_rows()
        self._compare_alphas()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle. Raises TypeError for a layer that is spread over ranks."""
        if self._group is not None:
            raise TypeError(
                "a layer that ranks divide cannot be pickled, since its group belongs to these processes; store "
                "layer.state_dict(), and load it into a layer that is made with the group there"
            )
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the layer; the copy uses the same process group."""
        if self._group is not None:
            memo[id(self._group)] = self._group
        return super().__deepcopy__(memo)


def _pair(format: Any) -> tuple[BlockFormat, BlockFormat]:
    """Returns the formats of w13 and w2. Raises ValueError for two formats that one layer cannot combine."""
    first, second = format if isinstance(format, tuple) else (format, format)
    formats = as_format("format", first), as_format("format", second)
    for one in formats:
        _check_format("format", one)
    if formats[0] != formats[1] and not all(one.is_int4 for one in formats):
        raise ValueError(f"w13 is {formats[0].title} and w2 {formats[1].title}; quantize both to one format")
    return formats


def _check_format(name: str, format: BlockFormat) -> None:
    """Raises ValueError unless ``format`` is one of weights of a layer."""
    if format not in ROWS:
        known = dict.fromkeys(one.family for one in ROWS)
        raise ValueError(f"{name} is {format.title}; use {' or '.join(known)}")


def as_kernels_read(weights: Any) -> ExpertWeights:
    """Converts weights to the layout of kernels, with blocked scales where the format has these."""
    _check_format("the format of weights", weights.format)
    if isinstance(weights, BlockScaledTensor):
        weights = weights.with_scale_layout(weights.format.scale_layout)
    return ExpertWeights(weights.data, weights.scale, weights.global_scale, weights.format)
