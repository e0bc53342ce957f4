"""A linear layer with weights of 8 bits and float32 scales: what FP8 and INT8 have in common."""

from typing import Any, ClassVar

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.formats.block_format import BlockFormat, Formats
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, check_is_tensor
from nvfp4_cute.nn.linear import result_dtype
from nvfp4_cute.nn.products import KERNEL_DTYPE, aligned
from nvfp4_cute.nn.state import KeepsBits
from nvfp4_cute.nn.weight_only import weight_only_linear
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES, addable_bias, check_choice, check_tensors
from nvfp4_cute.ops.gemm import gemm
from nvfp4_cute.ops.quantize import quantize
from nvfp4_cute.planning.arch import ARCHS, mmas_of
from nvfp4_cute.problem import OUT_DTYPES


class Linear8Bit(KeepsBits):
    """``x @ W^T + bias`` with W in 8 bits; rows of x are quantized, or stay in 16 bits. There is no backward pass.

    A subclass states:
        ROWS, WEIGHTS: formats that are multiplied. BLOCK_FACTORS: the name of the scales' buffer. ACTIVATIONS: choices; the first
        is of ROWS, "16bit" is of 16-bit rows.
    """

    ROWS: ClassVar[BlockFormat]
    WEIGHTS: ClassVar[BlockFormat]
    ACTIVATIONS: ClassVar[tuple[str, ...]]

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        weight: BlockScaledTensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        activations: str | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        check_weight("weight", weight, "[N, K]", self.WEIGHTS)
        activations = self.ACTIVATIONS[0] if activations is None else activations
        check_choice("activations", activations, self.ACTIVATIONS)
        backends.resolve(backend, weight.device)
        self.out_features, self.in_features = weight.shape
        kept = kept_bias("bias", bias, (self.out_features,), weight.device, dtype)
        self.activations, self.backend = activations, backend
        self.register_buffer("weight", weight.data.view(self.WEIGHTS.data_dtypes[-1]))
        self.register_buffer(self.BLOCK_FACTORS[0], weight.scale)
        self.register_buffer("bias", kept)

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
        rows, dtype = checked_rows(x, self.in_features)
        if self.activations == "16bit":
            how = (dtype, self.backend, self.WEIGHTS)
            y = product_of_16_bits(rows, self.weight, self.scale, self.bias, *how)
        else:
            y = self._by_8_bits(rows, dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    @property
    def scale(self) -> torch.Tensor:
        """Of the weights."""
        return getattr(self, self.BLOCK_FACTORS[0])

    def _by_8_bits(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        q = quantize(x, format=self.ROWS, backend=self.backend)
        return gemm(
            q.data, self.weight, q.scale, self.scale, bias=addable_bias(self.bias),
            a_format=self.ROWS, b_format=self.WEIGHTS, out_dtype=dtype, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Sizes, and how rows are multiplied."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, activations={self.activations!r}"


def checked_rows(x: torch.Tensor, in_features: int) -> tuple[torch.Tensor, torch.dtype]:
    """The rows [M, K] of a layer's input, and the dtype of its result. Raises what ``Linear8Bit.forward`` does."""
    check_tensors({"x": x})
    dtype = result_dtype(x)
    if dtype not in OUT_DTYPES:
        raise TypeError(f"x is {x.dtype}; the layer multiplies float16, bfloat16 and float32: pass x.float()")
    if x.shape[-1:] != (in_features,):
        raise ValueError(
            f"x has shape {list(x.shape)}; expected [..., {in_features}], the layer's in_features"
        )
    return x.reshape(-1, in_features), dtype


def product_of_16_bits(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    backend: str,
    format: BlockFormat,
) -> torch.Tensor:
    """``rows @ W^T + bias``, float32 rows rounded to bfloat16. A traced graph has the product alone, whatever M is."""
    rows, bias = rows if rows.dtype in ACTIVATION_DTYPES else rows.to(KERNEL_DTYPE), addable_bias(bias)
    if private_api.is_traced():
        options: dict[str, Any] = {"b_format": format, "out_dtype": dtype, "backend": backend}
        return gemm(rows.contiguous(), weight, None, scale, bias=bias, **options)
    return weight_only_linear(aligned(rows), weight, scale, None, dtype, backend, format, bias)


def check_weight(name: str, weight: object, axes: str, format: BlockFormat | None) -> None:
    """Raise where it is no tensor of the format, None for any of int4, with as many dimensions as ``axes`` names."""
    made = "int4_format(128)" if format is None else format.record
    fix = f"quantize(weight, format={made})"
    if not isinstance(weight, BlockScaledTensor):
        raise TypeError(
            f"{name} is {'None' if weight is None else f'a {type(weight).__name__}'}; pass a BlockScaledTensor: {fix}"
        )
    fits = weight.format.is_int4 if format is None else weight.format == format
    if not fits or len(weight.shape) != axes.count(",") + 1:
        wanted = "an int4_format" if format is None else format.title
        raise ValueError(
            f"{name} is {weight.format.title} of shape {list(weight.shape)}; expected {axes} of {wanted}: {fix}"
        )


def kept_bias(
    name: str,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """A bias as a layer on ``device`` keeps it: contiguous, without a gradient, of ``dtype`` (None: its own). None is None.

    Raises:
        TypeError: no tensor, or not of floats. ValueError: another shape, or no memory where the layer has some.
    """
    if bias is None:
        return None
    check_is_tensor(name, bias)
    if not bias.is_floating_point():
        raise TypeError(f"{name} is {bias.dtype}; expected floats: pass {name}.float()")
    if tuple(bias.shape) != shape:
        raise ValueError(f"{name} has shape {list(bias.shape)}; expected {list(shape)}")
    if bias.is_meta and device.type != "meta":
        raise ValueError(f"{name} is on meta and the weights on {device}; pass one that has data")
    return bias.detach().to(device, dtype or bias.dtype).contiguous()


def has_products(backend: str, device: torch.device, formats: Formats) -> bool:
    """Whether a kernel multiplies rows and weights of these formats on a device, or the reference does."""
    if backends.resolve(backend, device) == "reference":
        return True
    arch = backends.gpu_of(backend, device).arch
    return arch in ARCHS and formats in mmas_of(arch)
