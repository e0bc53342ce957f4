"""Layers with FP8 weights in blocks of 128 x 128 (DeepSeek-V3, Qwen3-FP8): activations become FP8 in blocks of 128 values."""

from typing import Literal, get_args

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_format import FP8_1x128, FP8_128x128
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, check_is_tensor
from nvfp4_cute.nn.experts import Activation, SortedExperts
from nvfp4_cute.nn.linear import result_dtype
from nvfp4_cute.nn.products import KERNEL_DTYPE, aligned
from nvfp4_cute.nn.state import moving
from nvfp4_cute.nn.weight_only import weight_only_linear
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES, check_choice, check_tensors
from nvfp4_cute.ops.gemm import gemm
from nvfp4_cute.ops.grouped_gemm import grouped_gemm
from nvfp4_cute.ops.quantize import quantize
from nvfp4_cute.planning.arch import ARCHS, mmas_of
from nvfp4_cute.problem import OUT_DTYPES

Activations = Literal["fp8", "16bit"]


class LinearFP8(torch.nn.Module):
    """``x @ W^T + bias`` with W in FP8: ``torch.nn.Linear`` at 8 bits a weight. There is no backward pass.

    - ``activations="fp8"`` (W8A8): rows of x are quantized to FP8_1x128, then ``gemm`` multiplies.
    - ``activations="16bit"`` (W8A16): ``gemm`` with 16-bit rows, of float32 ones rounded to bfloat16. It is made for few rows:
      from 512 on a GPU decodes W into memory that is given back, each weight rounded once, and torch multiplies.

    The result has the dtype of ``x``, under autocast that of autocast; it is rounded to it, and again after the bias was added.

    State dict, as DeepSeek-V3 names it:
        weight: float8_e4m3fn [N, K].
        weight_scale_inv: float32 [ceil(N/128), K/128], which multiplies, its name notwithstanding.
        bias: [N], where there is one.

    Moving the module to a device moves all of it; ``.to(dtype)`` converts a 16-bit bias.

    Args:
        weight: FP8_128x128 [N, K].
        bias: [N], or None.
        dtype: of the bias.
        activations: "fp8" or "16bit".
        backend: as of ``gemm``.

    Example:
        >>> layer = LinearFP8(quantize(torch.randn(256, 512), format=FP8_128x128))
        >>> layer(torch.randn(40, 512).bfloat16()).shape
        torch.Size([40, 256])

    Raises:
        TypeError, ValueError: ``weight`` is no matrix of FP8_128x128, ``bias`` no tensor [N], or a choice is unknown.
    """

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        weight: BlockScaledTensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        activations: Activations = "fp8",
        backend: str = "auto",
    ):
        super().__init__()
        _check_weight("weight", weight, "[N, K]")
        check_choice("activations", activations, get_args(Activations))
        backends.resolve(backend, weight.device)
        self.out_features, self.in_features = weight.shape
        _check_bias("bias", bias, (self.out_features,))
        self.activations, self.backend = activations, backend
        self.register_buffer("weight", weight.data.view(torch.float8_e4m3fn))
        self.register_buffer("weight_scale_inv", weight.scale)
        self.register_buffer("bias", None if bias is None else bias.detach().to(weight.device, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W^T + bias``.

        Args:
            x: [..., K], float16, bfloat16 or float32.

        Returns:
            [..., N] of ``result_dtype(x)``.

        Raises:
            TypeError: ``x`` has another dtype. ValueError: it has another K. UnsupportedProblem: ``x`` has a gradient to follow.
            And what ``quantize`` and ``gemm`` refuse.
        """
        check_tensors({"x": x})
        dtype = result_dtype(x)
        if dtype not in OUT_DTYPES:
            raise TypeError(
                f"x is {x.dtype}; the layer multiplies float16, bfloat16 and float32: pass x.float()"
            )
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"x has shape {list(x.shape)}; expected [..., {self.in_features}], the layer's in_features"
            )
        rows = x.reshape(-1, self.in_features)
        y = (self._by_fp8 if self.activations == "fp8" else self._by_16_bits)(rows, dtype)
        if self.bias is not None:
            y += self.bias.to(y.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _by_fp8(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        q = quantize(x, format=FP8_1x128, backend=self.backend)
        return gemm(
            q.data, self.weight, q.scale, self.weight_scale_inv,
            a_format=FP8_1x128, b_format=FP8_128x128, out_dtype=dtype, backend=self.backend,
        )  # fmt: skip

    def _by_16_bits(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = x if x.dtype in ACTIVATION_DTYPES else x.to(KERNEL_DTYPE)
        sides = self.weight, self.weight_scale_inv
        if torch.compiler.is_compiling():
            return gemm(
                x.contiguous(), sides[0], None, sides[1], b_format=FP8_128x128, out_dtype=dtype, backend=self.backend
            )  # fmt: skip
        return weight_only_linear(aligned(x), *sides, None, dtype, self.backend, FP8_128x128)

    def extra_repr(self) -> str:
        """Sizes, and how rows are multiplied."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, activations={self.activations!r}"

    def _apply(self, fn, recurse=True):
        return super()._apply(moving(fn), recurse)


class ExpertsFP8(SortedExperts):
    """Experts with FP8 weights: two products of all experts, whose rows are quantized in blocks of 128.

    A CUDA graph can hold the call.

    Args:
        w13: FP8_128x128 [E, 2 I, H], [gate; up] of every expert, or [E, I, H] where there is no gate. w2: [E, H, I].
        bias13, bias2: [E, 2 I] and [E, H], or None.
        activation: as of SortedExperts. has_gate: whether there is a gate.
        backend: as of ``gemm``.

    Raises:
        TypeError, ValueError: weights are not FP8_128x128 of three dimensions, or sizes do not fit.
    """

    w13: torch.Tensor
    w13_scale_inv: torch.Tensor
    w2: torch.Tensor
    w2_scale_inv: torch.Tensor
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None

    def __init__(
        self,
        w13: BlockScaledTensor,
        w2: BlockScaledTensor,
        bias13: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
        activation: str | Activation = "silu",
        *,
        has_gate: bool = True,
        backend: str = "auto",
    ):
        _check_weight("w13", w13, "[E, 2 I, H]")
        _check_weight("w2", w2, "[E, H, I]")
        backends.resolve(backend, w13.device)
        experts, hidden, width = w2.shape
        rows = 2 * width if has_gate else width
        if tuple(w13.shape) != (experts, rows, hidden):
            raise ValueError(
                f"w13 has shape {list(w13.shape)}; expected {[experts, rows, hidden]}, beside w2 {list(w2.shape)} with "
                f"has_gate={has_gate}"
            )
        _check_bias("bias13", bias13, (experts, rows))
        _check_bias("bias2", bias2, (experts, hidden))
        super().__init__(experts, activation)
        self.has_gate, self.backend = has_gate, backend
        for name, weight in (("w13", w13), ("w2", w2)):
            self.register_buffer(name, weight.data.view(torch.float8_e4m3fn))
            self.register_buffer(f"{name}_scale_inv", weight.scale)
        self.register_buffer("bias13", bias13)
        self.register_buffer("bias2", bias2)

    def products(self, rows: torch.Tensor, offs: torch.Tensor, expert_of_row: torch.Tensor) -> torch.Tensor:
        """As of SortedExperts."""
        own = expert_of_row.clamp(max=self.num_experts - 1)
        first = self._product(rows, self.w13, self.w13_scale_inv, self.bias13, offs, own)
        hidden = self.hidden([*first.chunk(2, dim=-1)] if self.has_gate else [first])
        return self._product(hidden, self.w2, self.w2_scale_inv, self.bias2, offs, own)

    def _product(self, x, weight, scale, bias, offs, own) -> torch.Tensor:
        q = quantize(x, format=FP8_1x128, backend=self.backend)
        y = grouped_gemm(
            q.data, weight, q.scale, scale, offs,
            a_format=FP8_1x128, b_format=FP8_128x128, out_dtype=x.dtype, backend=self.backend,
        )  # fmt: skip
        return y if bias is None else y + bias[own].to(y.dtype)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.num_experts} of {self.w2.shape[1]} x {self.w2.shape[2]}"


def _check_weight(name: str, weight: object, axes: str) -> None:
    """Raise where it is no FP8_128x128 tensor with as many dimensions as ``axes`` names."""
    if not isinstance(weight, BlockScaledTensor):
        raise TypeError(
            f"{name} is {'None' if weight is None else f'a {type(weight).__name__}'}; pass a BlockScaledTensor: "
            "quantize(weight, format=FP8_128x128)"
        )
    if weight.format != FP8_128x128 or len(weight.shape) != axes.count(",") + 1:
        raise ValueError(
            f"{name} is {weight.format.title} of shape {list(weight.shape)}; expected {axes} of {FP8_128x128.title}: "
            "quantize(weight, format=FP8_128x128)"
        )


def _check_bias(name: str, bias: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if bias is None:
        return
    check_is_tensor(name, bias)
    if tuple(bias.shape) != shape:
        raise ValueError(f"{name} has shape {list(bias.shape)}; expected {list(shape)}")


def has_fp8_products(backend: str, device: torch.device) -> bool:
    """Whether a kernel multiplies FP8 rows by FP8 weights on a device, or the reference does."""
    if backends.resolve(backend, device) == "reference":
        return True
    arch = backends.gpu_of(backend, device).arch
    return arch in ARCHS and (FP8_1x128, FP8_128x128) in mmas_of(arch)
