"""Quantized tensors, and their quantization and dequantization on any device without a kernel."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from nvfp4_cute.formats import four_over_six
from nvfp4_cute.formats.block_format import (
    ATOM_ROWS,
    FORMATS,
    INT4_FORMATS,
    INT8,
    NVFP4,
    SCALE_LAYOUTS,
    BlockFormat,
    as_format,
)
from nvfp4_cute.formats.block_format import ScaleLayout as ScaleLayout
from nvfp4_cute.formats.block_scales import (
    Method,
    ScaleRounding,
    check_scale_rounding,
    scale_codes,
    scale_quotient,
    with_method,
)
from nvfp4_cute.formats.codecs import (
    INPUT_DTYPES,
    at_least_float32,
    check_is_float,
    decode,
    decode_blocks,
    encode,
    pack_e2m1,
)
from nvfp4_cute.formats.fp8_order import in_rows
from nvfp4_cute.formats.global_scale import (
    PER_ROW,
    check_factor,
    check_has_global_scale,
    is_per_row,
    resolve_global_scale,
)
from nvfp4_cute.formats.pickling import restored
from nvfp4_cute.formats.scale_layout import from_blocked, to_blocked
from nvfp4_cute.formats.zero_points import quantize_with_zero_points

Self = TypeVar("Self", bound="BlockScaledTensor")


@dataclass(frozen=True, eq=False, repr=False)
class BlockScaledTensor:
    """A quantized tensor of logical ``shape`` ``(..., K)``: ``value * scale``, times ``global_scale`` where there is one.

    ``...`` is any number of dimensions. The last of them are the rows (one row if there are none), the others are batches.
    ``t[i]`` and ``t[i:j]`` select batches and rows without a copy; a slice of rows begins at a multiple of the rows that share
    an atom or block of scales.

    Rows of FP8 and INT8 with float32 scales may end within a block, as in some checkpoints. Such a tensor can be dequantized;
    products refuse its K.

    Attributes:
        data: ``[..., bytes of K]``, of a dtype of the format: K/2 bytes for 4-bit elements, K for 8-bit elements.
        scale: of a dtype of the format. "rowmajor": ``[..., K / block_k]`` (INT8: ``[..., 1]``; FP8_128x128: one row per 128
            rows), rounded up. "blocked": ``[batches..., rm, rk, 32, 4, 4]`` (see :mod:`nvfp4_cute.formats.scale_layout`).
        global_scale: float32 factor by which dequantizing multiplies, without dimensions, [batches...] with one per batch, or
            [...] with one per row of at least two dimensions ("ragged": [rows, 1]). None means 1. Only formats with a global
            scale may have one.
        shape: shape of the unpacked values.
        scale_layout: "blocked", "rowmajor", or "ragged": blocked, with every group's rows padded to 128 (``grouped_quantize``).
        format: a record or, when constructed, its name.

    Raises:
        TypeError, ValueError: on construction, if the parts do not fit each other.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    shape: tuple[int, ...]
    scale_layout: ScaleLayout = "blocked"
    format: BlockFormat = field(kw_only=True)

    def __post_init__(self):
        """Checks dtypes, shapes and devices against ``shape``. Reads no values, so it never synchronizes."""
        if isinstance(self.format, str):
            object.__setattr__(self, "format", as_format("format", self.format))
        object.__setattr__(self, "format", self.format.stored)
        if self.scale_layout != "ragged":
            check_scale_layout(self.scale_layout, self.format)
        for name, tensor, dtypes in (
            ("data", self.data, self.format.data_dtypes),
            ("scale", self.scale, self.format.scale_dtypes),
        ):
            check_is_tensor(name, tensor)
            if tensor.dtype not in dtypes:
                raise TypeError(f"{name} is {' or '.join(map(str, dtypes))}; got {tensor.dtype}; view it")
        if not isinstance(self.shape, tuple | list):
            raise TypeError(f"shape={self.shape!r} is not a tuple; pass the extents of the unpacked values")
        if not self.shape:
            raise ValueError(f"shape=() has no K; an {self.format.title} tensor has at least one dimension")
        *lead, k = self.shape
        self.format.check_stored_k(k)
        _check_shape("data", self.data, (*lead, self.format.row_bytes(k)))
        self._check_scale_shape()
        tensors = {"data": self.data, "scale": self.scale}
        if self.global_scale is not None:
            if not self.format.has_global_scale:
                raise ValueError(
                    f"global_scale is given; {self.format.title} has none: pass None, or use alpha"
                )
            if not isinstance(self.global_scale, torch.Tensor):
                raise TypeError(
                    f"global_scale={self.global_scale!r} is not a tensor; pass torch.tensor(number, device=...), float32"
                )
            is_of_groups = self.scale_layout == "ragged" and self.global_scale.ndim == 1
            if self.has_row_scales:
                rows = (*lead, 1) if self.scale_layout == "ragged" else tuple(lead)
                _check_shape("global_scale", self.global_scale, rows)
            elif tuple(self.global_scale.shape) != tuple(lead[:-1]) and not is_of_groups:
                _check_shape("global_scale", self.global_scale, ())
            if self.global_scale.dtype != torch.float32:
                raise TypeError(
                    f"global_scale is torch.float32; got {self.global_scale.dtype}; call .float()"
                )
            tensors["global_scale"] = self.global_scale
        if len({tensor.device for tensor in tensors.values()}) > 1:
            devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
            raise ValueError(f"parts of one tensor lie on different devices: {devices}; move them to one")

    def _check_scale_shape(self) -> None:
        """Checks that ``scale`` has the shape of its layout. The error names another layout that the shape fits."""
        found = tuple(self.scale.shape)
        if self.scale_layout == "ragged":
            return self._check_ragged(found)
        if found == stored_scale_shape(self.format, self.shape, self.scale_layout):
            return  # torch.export would keep a guard for the other layout
        of_layout = {
            layout: stored_scale_shape(self.format, self.shape, layout)
            for layout in SCALE_LAYOUTS
            if layout == self.scale_layout or self.format.scale_layout == "blocked"
        }
        expected = of_layout.pop(self.scale_layout)
        for layout, shape in of_layout.items():
            if found == shape != expected:
                raise ValueError(
                    f'scale has shape {found}, which is {layout}; expected {expected}; pass scale_layout="{layout}"'
                )
        _check_shape(
            "scale", self.scale, expected, fix="scales in this order have to be given, not others reshaped"
        )

    def _check_ragged(self, found: tuple[int, ...]) -> None:
        """Checks the scales of groups of rows, each padded to whole atoms. Only the device knows the number of groups."""
        if self.format.scale_layout != "blocked" or len(self.shape) != 2:
            raise ValueError(
                f'scale_layout="ragged" is for rows [rows, K] of a format with blocked scales; got {list(self.shape)} of '
                f"{self.format.title}"
            )
        expected = stored_scale_shape(self.format, self.shape, "blocked")
        if len(found) != len(expected) or found[1:] != expected[1:]:
            raise ValueError(
                f"scale has shape {found}; expected (row atoms of all groups, {', '.join(map(str, expected[1:]))})"
            )

    def __repr__(self) -> str:
        """Shows format, sizes, layout and the global scale, but no other values. Reading the global scale waits for a GPU."""
        name, factor = type(self).__name__, ""
        format_name = "" if isinstance(self, NVFP4Tensor) else f", format={self.format.name}"
        if self.format.has_global_scale:
            g = self.global_scale
            numbers = None if g is None else list(g.shape) if g.ndim or g.is_meta else f"{g.item():.6g}"
            factor = f", global_scale={numbers}"
        size = self.data.nbytes + self.scale.nbytes
        return (
            f"{name}(shape={tuple(self.shape)}{format_name}, scale_layout={self.scale_layout!r}{factor}, "
            f"scale={list(self.scale.shape)}, {size} bytes on {self.data.device})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Stores data and scales as bytes with their dtypes, and the format by name, which plain ``torch.load`` reads."""
        state = dict(self.__dict__)
        for name in ("data", "scale"):
            tensor = state[name]
            if tensor.dtype.itemsize == 1:
                state[name], state[f"{name}_dtype"] = tensor.view(torch.uint8), tensor.dtype
        is_known = self.format.name in (FORMATS, INT4_FORMATS)[self.format.is_int4]
        state["format"] = self.format.name if is_known else self.format
        state["shape"] = tuple(self.shape)
        return restored, (state,)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores tensors that were pickled as instances of this class, before :func:`pickling.restored` existed."""
        fields = dict(state)
        for name in ("data", "scale"):
            dtype = fields.pop(f"{name}_dtype", None)
            if dtype is not None:
                fields[name] = fields[name].view(dtype)
        self.__dict__.update(fields)

    @staticmethod
    def from_parts(
        data: torch.Tensor,
        scale: torch.Tensor | None,
        global_scale: "float | Sequence[float] | torch.Tensor | None" = None,
        *,
        format: BlockFormat | str = NVFP4,
        scale_layout: ScaleLayout = "blocked",
    ) -> "BlockScaledTensor":
        """Make a tensor from existing parts, which are checked and not copied. Its shape follows from ``data``.

            >>> w = quantize(torch.randn(256, 512))
            >>> BlockScaledTensor.from_parts(w.data, w.scale, format="nvfp4").shape
            (256, 512)

        Args:
            data: [..., bytes of K], K-major. 4-bit elements are uint8 or float4_e2m1fn_x2, two per byte, the low nibble first.
            scale: "blocked": [batches..., rm, rk, 32, 4, 4] (see :mod:`nvfp4_cute.formats.scale_layout`), the same bytes flat,
                or the permuted view (32, 4, rm, 4, rk, L). "rowmajor": [..., K / block]. "ragged": [row atoms, rk, 32, 4, 4],
                every group's rows padded to 128, as ``grouped_quantize`` returns it. None, for INT8 only, means 1.
            global_scale: factor by which dequantizing multiplies, as in ``quantize`` (NVFP4 only): a number, float32 with one
                element, one per batch ("ragged": per group), or one per row ([..., M]; "ragged": [rows, 1]).
            format: a record or a name.
            scale_layout: layout of ``scale``. Formats with float32 scales always have "rowmajor".

        Returns:
            An NVFP4Tensor for NVFP4, otherwise a BlockScaledTensor.

        Raises:
            TypeError, ValueError: the parts do not fit each other, or a global scale on the CPU is not a positive, normal
                float32 number; the message names rule, value and fix.
        """
        format = as_format("format", format)
        check_is_tensor("data", data)
        if scale is None and format == INT8:
            scale = torch.ones((*data.shape[:-1], 1), dtype=torch.float32, device=data.device)
        check_is_tensor("scale", scale)
        assert scale is not None
        if format.scale_layout == "rowmajor":
            scale_layout = "rowmajor"
        shape = (*data.shape[:-1], format.elements(data.shape[-1] if data.ndim else 0))
        if scale_layout == "blocked" and len(shape) > 1:
            scale = _straight_scales(scale, stored_scale_shape(format, shape, scale_layout), shape[-2])
        factor = global_scale
        if factor is not None and not isinstance(factor, torch.Tensor):
            try:
                factor = torch.tensor(factor, dtype=torch.float32)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"global_scale={global_scale!r} is not a number, a list of one per batch, or a float32 tensor"
                ) from error
            factor = check_factor(factor, "global_scale").to(data.device)
        elif factor is not None:
            check_factor(factor, "global_scale")
        is_row = factor is not None and tuple(factor.shape) == shape[:-1]
        if (
            factor is not None
            and factor.numel() == 1
            and len(shape) < 3
            and scale_layout != "ragged"
            and not is_row
        ):
            factor = factor.reshape(())
        return quantized_tensor(data, scale, factor, shape, format, scale_layout)

    @property
    def has_row_scales(self) -> bool:
        """Whether there is a global scale per row, as ``quantize(x, global_scale="per_row")`` computes it."""
        g, lead = self.global_scale, len(self.shape) - 1
        return g is not None and lead > 0 and g.ndim == (2 if self.scale_layout == "ragged" else lead)

    @property
    def has_whole_blocks(self) -> bool:
        """Whether K is a multiple of the block, as products need."""
        return self.shape[-1] % self.format.k_multiple == 0

    @property
    def device(self) -> torch.device:
        """Device of all parts."""
        return self.data.device

    def to(
        self: Self,
        device: torch.device | str | int | None = None,
        *,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> Self:
        """Moves to a device; without ``copy`` returns the tensor itself if it is there already. For dtypes use dequantize."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"to({device}): a quantized tensor keeps its format; call .dequantize({device})")
        target = self.device if device is None else device
        return self._with_parts(lambda part: part.to(target, non_blocking=non_blocking, copy=copy))

    def cuda(self: Self, device: torch.device | int | None = None) -> Self:
        """Moves to ``device``, or to the current GPU."""
        return self._with_parts(lambda part: part.cuda(device))

    def cpu(self: Self) -> Self:
        """Moves to host memory."""
        return self.to("cpu")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Converts to floats; see :func:`dequantize`."""
        return dequantize(self, dtype)

    def with_scale_layout(self: Self, scale_layout: ScaleLayout) -> Self:
        """Returns the tensor with its scales copied to another layout, or itself if they already have it.

        Raises:
            ValueError: the format does not have this layout.
        """
        check_scale_layout(scale_layout, self.format)
        if scale_layout == self.scale_layout:
            return self
        check_not_ragged(self)
        plain = rowmajor_scale(self)
        scale = plain if scale_layout == "rowmajor" else to_blocked(plain if plain.ndim > 1 else plain[None])
        return replace(self, scale=scale, scale_layout=scale_layout)

    if not TYPE_CHECKING:  # a type checker that saw it would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError; for names of torch.Tensor, such as ``T``, it says what to call instead."""
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(torch.Tensor, name):
                what += ": it is not a torch.Tensor; multiply with gemm(x, w), convert with .dequantize()"
            raise AttributeError(what)

    def __len__(self) -> int:
        """Returns the extent of the first dimension."""
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Unpacks a ragged tensor, ``data, scale = grouped_quantize(...)``. Raises TypeError for other layouts."""
        if self.scale_layout != "ragged":
            raise TypeError(
                f"'{type(self).__name__}' object is not iterable; take batches as t[i], rows as t[i:j]"
            )
        return iter((self.data, self.scale))

    def __getitem__(self: Self, index: int | slice | tuple[int | slice, ...]) -> Self:
        """Selects batches and rows as views: ``t[2]`` is a batch, ``t[128:300]`` and ``t[2, 128:300]`` are rows.

        Args:
            index: a number or slice per batch dimension, then a slice of step 1 for the rows. K cannot be sliced.

        Raises:
            IndexError: there are too many dimensions, or the batch does not exist.
            ValueError: the slice of rows does not begin at a block of scales, or its step is not 1.
        """
        check_not_ragged(self)
        *batches, rows = self.shape[:-1] or (1,)
        index = index if isinstance(index, tuple) else (index,)
        if len(self.shape) < 2 or len(index) > len(batches) + 1:
            raise IndexError(
                f"index {index} of a tensor of shape {tuple(self.shape)}: index batches and rows only; K stays whole"
            )
        chosen = (*index, *(slice(None) for _ in range(len(batches) + 1 - len(index))))
        if not isinstance(chosen[-1], slice):
            raise ValueError(
                f"index {chosen[-1]} of the rows is not a slice; use [{chosen[-1]}:{chosen[-1] + 1}]"
            )
        start, stop, step = chosen[-1].indices(rows)
        stop = max(start, stop)
        unit = ATOM_ROWS if self.scale_layout == "blocked" else self.format.block_rows
        if step != 1 or (start % unit and stop > start):
            fix = (
                'or call .with_scale_layout("rowmajor") first'
                if self.format.block_rows == 1
                else "and step 1"
            )
            raise ValueError(
                f"rows {start}:{stop}:{step} with {self.scale_layout} scales: a slice begins at a multiple of {unit} and has "
                f"step 1; use [{start // unit * unit}:{stop}] {fix}"
            )
        first = start // unit
        blocks = slice(first, first if stop == start else -(-stop // unit))
        data = self.data[(*chosen[:-1], slice(start, stop))]
        scale = self.scale[(*chosen[:-1], blocks)]
        factor = self.global_scale
        if factor is not None and factor.ndim:
            factor = factor[(*chosen[:-1], slice(start, stop)) if self.has_row_scales else chosen[:-1]]
        shape = (*data.shape[:-1], self.shape[-1])
        return replace(self, data=data, scale=scale, global_scale=factor, shape=shape)

    def _with_parts(self: Self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Applies ``change`` to every part. Returns the tensor itself if no part changes."""
        data, scale = change(self.data), change(self.scale)
        factor = None if self.global_scale is None else change(self.global_scale)
        if data is self.data and scale is self.scale and factor is self.global_scale:
            return self
        return replace(self, data=data, scale=scale, global_scale=factor)


@dataclass(frozen=True, eq=False, repr=False)
class NVFP4Tensor(BlockScaledTensor):
    """A :class:`BlockScaledTensor` in NVFP4: ``value * scale * global_scale``.

    Attributes:
        data: uint8 or float4_e2m1fn_x2, ``[..., K/2]``.
        scale: float8_e4m3fn or uint8. "rowmajor": ``[..., K/16]``. "blocked": ``[batches..., rm, rk, 32, 4, 4]`` (see
            :mod:`nvfp4_cute.formats.scale_layout`).
        global_scale: float32 factor by which dequantizing multiplies, without dimensions, [batches...], or [...] with one per
            row; None means 1.
        shape: shape of the unpacked values.
        scale_layout: "blocked", "rowmajor" or "ragged".
    """

    # A class attribute that no constructor takes, so that tensors pickled before there were formats also have it.
    format: BlockFormat = field(default=NVFP4, init=False)


# Comparing a list's types with this set is cheaper than an isinstance per entry.
BLOCK_SCALED = frozenset((BlockScaledTensor, NVFP4Tensor))


def quantized_tensor(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    shape: tuple[int, ...],
    format: BlockFormat,
    scale_layout: ScaleLayout = "blocked",
) -> BlockScaledTensor:
    """Constructs the class that belongs to ``format``. Raises what its constructor raises."""
    if format.stored == NVFP4:
        return NVFP4Tensor(data, scale, global_scale, shape, scale_layout)
    return BlockScaledTensor(data, scale, global_scale, shape, scale_layout, format=format)


def check_not_ragged(t: BlockScaledTensor) -> None:
    """Raises ValueError for a tensor whose scales are padded per group, since it does not know where groups end."""
    if t.scale_layout == "ragged":
        raise ValueError(
            'scale_layout="ragged": scales are padded group by group, and only offs says where groups end; call quantize on the '
            "rows instead of grouped_quantize, or pass the tensor to an operation with offs"
        )


def is_tensor_of(value: object, format: BlockFormat) -> bool:
    """Returns whether ``value`` is a quantized tensor of this format."""
    return isinstance(value, BlockScaledTensor) and value.format == format.stored


def tensors_of(format: BlockFormat) -> str:
    """Returns the name that messages use for a tensor of a format."""
    return "NVFP4Tensor" if format.stored == NVFP4 else f"BlockScaledTensor of {format.title}"


def check_is_tensor(name: str, value: object) -> None:
    """Raises TypeError, with the type found and the fix, unless ``value`` is a BlockScaledTensor."""
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, BlockScaledTensor) and name.endswith("out"):
        what = "an NVFP4Tensor" if isinstance(value, NVFP4Tensor) else f"a {tensors_of(value.format)}"
        raise TypeError(
            f'{name} is {what}; it goes with out_dtype="{value.format.name}": pass that, or a torch.Tensor'
        )
    if isinstance(value, BlockScaledTensor) and name == "x":
        raise TypeError(
            f"x is quantized already, to {value.format.title}; pass values: x.dequantize(torch.bfloat16)"
        )
    if isinstance(value, NVFP4Tensor):
        raise TypeError(f"{name} is an NVFP4Tensor; pass its .data, and its .scale with the scales")
    if isinstance(value, BlockScaledTensor):
        raise TypeError(
            f"{name} is a BlockScaledTensor of {value.format.title}; pass its .data, its .scale with the scales, and its format"
        )
    raise TypeError(
        f"{name} is {'None' if value is None else f'a {type(value).__name__}'}; pass a torch.Tensor"
    )


@overload
def quantize(
    x: torch.Tensor,
    *,
    global_scale: float | torch.Tensor | Literal["auto", "per_batch", "per_row"] | None = None,
    global_scale_inv: float | torch.Tensor | None = None,
    scale_layout: ScaleLayout | None = None,
    method: Method = "amax",
) -> NVFP4Tensor: ...


@overload
def quantize(
    x: torch.Tensor,
    *,
    format: BlockFormat | str,
    global_scale: float | torch.Tensor | Literal["auto", "per_batch", "per_row"] | None = None,
    global_scale_inv: float | torch.Tensor | None = None,
    scale_layout: ScaleLayout | None = None,
    scale_rounding: ScaleRounding = "up",
    method: Method = "amax",
) -> BlockScaledTensor: ...


def quantize(
    x: torch.Tensor,
    *,
    format: BlockFormat | str = NVFP4,
    global_scale: float | torch.Tensor | Literal["auto", "per_batch", "per_row"] | None = None,
    global_scale_inv: float | torch.Tensor | None = None,
    scale_layout: ScaleLayout | None = None,
    scale_rounding: ScaleRounding = "up",
    method: Method = "amax",
) -> BlockScaledTensor:
    """Quantize to NVFP4 in blocks of 16 along the last dimension, or to another format in its blocks.

    For a block with the largest magnitude ``amax``, every line below is one IEEE 754 float32 operation, rounded to nearest
    even, with subnormals (``g`` is the global scale; without one, lines 2 and 4 are skipped)::

        1  q = amax / 6
        2  q = q / g
        3  scale = e4m3(q)                 nearest even, at most 448
        4  d = scale * g
        5  data = e2m1(x / d)              the quotient is rounded to float32, then to e2m1; at most 6

    In other formats, the largest element replaces 6, line 5 rounds to the format's elements, and line 3 follows
    :func:`block_scales.scale_codes`: a power of two (MXFP4, MXFP8), q itself (FP8), or q in 16 bits (int4, with 7.5 instead of
    6). For integers with zero points see :func:`zero_points.quantize_with_zero_points`.

    float64 input is first rounded to float32; float16 and bfloat16 are widened exactly. The result has the same bits on every
    device (CPU and H200 were compared). Small tables are copied to the device, so a CUDA graph cannot capture this function.

    - Zeros keep their sign. A block whose scale rounds to zero (``q <= 2^-10``, including all-zero blocks) has scale 0 and zero
      values. Without a global scale this happens to every block with ``amax <= 0.0058``.
    - Scales under 2^-6 are rounded to multiples of 2^-9 and may be off by up to a factor of two. A global scale keeps scales
      out of this range.
    - Where nothing saturates, dequantized values differ from ``x`` by at most amax / 6 * (1 + 2^-4) + 6 * 2^-10 * g: half the
      distance between 4 and 6, plus the rounding of the scale, plus its rounding where it is small.
    - Magnitudes over 2688 * g saturate. Infinity also saturates: its block has scale 448, infinities become 6, and the other
      values are divided by 448 * g.
    - A NaN makes its whole block NaN: scale 0x7F, values 0x7. e2m1 has no NaN and would turn it into +6, a plausible number.
      The NaN survives only in the scale, and dequantize and GEMM then show it.

    Args:
        x: float32, float16, bfloat16 or float64, ``[..., K]``, any strides, K a multiple of the format's block (NVFP4: 16).
        format: a record, such as MXFP4, or its name, "mxfp4".
        global_scale: the factor by which dequantizing multiplies; only NVFP4 has one. 2688 * global_scale should be the largest
            magnitude of ``x``. A positive, normal float32 number, a tensor with one element, or, for ``x`` [batches..., M, K],
            [batches...] with one per batch. "auto" computes the finite amax of ``x`` / 2688 on the device (1 if that amax is 0;
            at least 2^-126), "per_batch" that of each batch, and "per_row" that of each row.
        global_scale_inv: the inverse (2688 / amax), for callers with that convention; the global scale is 1 / it, rounded to
            float32.
        scale_layout: "blocked" or "rowmajor", the layout of the result's scales; None for the one that kernels read.
        scale_rounding: rounds scales that are powers of two "up" or "down" (:func:`block_scales.scale_codes`).
        method: "amax", or, for NVFP4, "four_over_six" (:mod:`four_over_six`).

    Returns:
        An NVFP4Tensor with uint8 data and float8_e4m3fn scales, contiguous, on the device of ``x``; for another format, a
        BlockScaledTensor.

    Raises:
        TypeError: ``x`` is not a float tensor.
        ValueError: K is not a multiple of the block; the global scale is given twice, is not positive and normal (tensors on a
            GPU are not read, so not checked), or is given for a format without one; or ``scale_rounding`` is "down" for scales
            that are not powers of two, or ``method`` is "four_over_six" for a format other than NVFP4.
    """
    check_is_tensor("x", x)
    format = with_method(as_format("format", format), method)
    check_scale_rounding(scale_rounding, format)
    scale_layout = scale_layout or format.scale_layout
    check_scale_layout(scale_layout, format)
    if x.ndim == 0:
        raise ValueError(
            f"x has no dimensions, hence no K; reshape it to [..., K], K a multiple of {format.k_multiple}"
        )
    format.num_k_blocks(x.shape[-1])
    check_has_global_scale(format, global_scale, global_scale_inv)
    check_is_float(x)
    g = factor = resolve_global_scale(x.detach(), global_scale, global_scale_inv, format)
    if g is not None and g.ndim:
        if not is_per_row(global_scale):
            return _quantize_each(x, g, scale_layout, format)
        g = g[..., None]  # for every block of the row
    values = at_least_float32(x.detach()).float()
    blocks = values.unflatten(-1, (-1, format.block_of(x.shape[-1])))
    if format.has_zero_points:
        data, words = quantize_with_zero_points(blocks, format)
        scale = to_blocked(words if words.ndim > 1 else words[None]) if scale_layout == "blocked" else words
        return BlockScaledTensor(data, scale, None, tuple(x.shape), scale_layout, format=format)
    amax = _over_rows_of_blocks(blocks.abs().amax(dim=-1), format)
    if format.scaling == "four_over_six":
        elements, codes = four_over_six.choose(blocks, scale_quotient(amax, format, g), g)
        data = pack_e2m1(elements.flatten(-2))
    else:
        codes = scale_codes(amax, format, g, scale_rounding)
        divisor = decode(codes, format.scale)
        if g is not None:
            divisor = divisor * g
        # Dividing by infinity gives zeros with the signs of the values; 0 / 0 would give NaN.
        divisor = _to_rows(divisor.masked_fill(divisor == 0, math.inf), format, values.shape)
        data = encode((blocks / divisor.unsqueeze(-1)).flatten(-2), format.element)
    format = format.stored
    scale = codes.view(getattr(torch, format.scale.quantized_dtype))
    if scale_layout == "blocked":
        scale = to_blocked(scale if scale.ndim > 1 else scale.unsqueeze(0))
    data = data.view(getattr(torch, format.element.quantized_dtype))
    if format == NVFP4:
        return NVFP4Tensor(data, scale, factor, tuple(x.shape), scale_layout)
    return BlockScaledTensor(data, scale, factor, tuple(x.shape), scale_layout, format=format)


def _quantize_each(
    x: torch.Tensor, factors: torch.Tensor, scale_layout: ScaleLayout, format: BlockFormat
) -> NVFP4Tensor:
    """Quantizes [batches..., M, K] with one global scale per batch."""
    # One batch at a time, because weights of many experts are large.
    *batches, rows, k = x.shape
    data = torch.empty((*batches, rows, NVFP4.row_bytes(k)), dtype=torch.uint8, device=x.device)
    shape = stored_scale_shape(NVFP4, tuple(x.shape), scale_layout)
    scale = torch.empty(shape, dtype=torch.uint8, device=x.device)
    for index in product(*map(range, batches)):
        one = quantize(x[index], format=format, global_scale=factors[index], scale_layout=scale_layout)
        data[index], scale[index] = one.data, one.scale.view(torch.uint8)
    return NVFP4Tensor(data, scale.view(torch.float8_e4m3fn), factors, tuple(x.shape), scale_layout)


def quantize_groups(
    ends: Sequence[int],
    rows_of: Callable[[int, int, int], torch.Tensor],
    factors: torch.Tensor | None,
    data: torch.Tensor,
    scale: torch.Tensor,
    format: BlockFormat = NVFP4,
    scale_rounding: ScaleRounding = "up",
    found: torch.Tensor | None = None,
) -> None:
    """Quantizes groups of rows into a ragged operand, in which every group's scales begin a row of atoms.

    Args:
        ends: inclusive ends of the groups, ascending.
        rows_of: called with (group, start, stop), returns the float values [stop - start, K] to quantize; not called for an
            empty group.
        factors: global scales, float32, one element or one per group; None for 1.
        data: uint8 [rows, bytes of K], written.
        scale: uint8 [rows of atoms, atoms of K, 32, 4, 4], written, padding included.
        format, scale_rounding: see :func:`quantize`.
        found: float32 [rows], written: the global scale per row. Without ``factors``.
    """
    start = atom = 0
    for group, stop in enumerate(ends):
        if stop > start:
            factor: Any = None if factors is None else factors[group if len(factors) > 1 else 0]
            factor = PER_ROW if found is not None else factor
            rows = rows_of(group, start, stop)
            result = quantize(rows, format=format, global_scale=factor, scale_rounding=scale_rounding)
            data[start:stop] = result.data.view(torch.uint8)
            scale[atom : atom + len(result.scale)] = result.scale.view(torch.uint8)
            if found is not None and result.global_scale is not None:
                found[start:stop] = result.global_scale
            atom += len(result.scale)
        start = stop


def dequantize(t: BlockScaledTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Converts to floats of ``dtype`` in ``t.shape``.

    ``value * scale`` is exact, with two exceptions: fp32 scales round to float32 unless ``dtype`` is float64, and products
    beyond float32's range overflow. In float64 the product with the global scale is also exact. Otherwise that product is
    rounded to float32, and the result to ``dtype`` (nearest even; infinity beyond the range of float16). A block with a NaN
    scale is all NaN, and the sign bit of a ue4m3 scale is ignored, as in a GEMM.

    Raises:
        TypeError: ``t`` is not a BlockScaledTensor, or ``dtype`` is not float32, float16, bfloat16 or float64.
    """
    if not isinstance(t, BlockScaledTensor):
        raise TypeError(f"t is a {type(t).__name__}; pass a BlockScaledTensor, which quantize returns")
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"dtype={dtype}: dequantize to float32, float16, bfloat16 or float64")
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    scale = _to_rows(rowmajor_scale(t), t.format, t.shape)
    data, format = in_rows(t.data, t.format)
    expanded = decode_blocks(data, scale, format, compute)
    if t.global_scale is not None:
        factor = t.global_scale.to(compute)
        dims = 0 if not factor.ndim else 1 if t.has_row_scales else 2
        expanded = expanded * factor[(..., *(None,) * dims)]
    return expanded.to(dtype)


def rowmajor_scale(t: BlockScaledTensor) -> torch.Tensor:
    """Returns the scales of ``t`` in row-major order without padding, copied only if they are blocked."""
    check_not_ragged(t)
    if t.scale_layout == "rowmajor":
        return t.scale
    k_blocks = t.format.num_k_blocks(t.shape[-1])
    return from_blocked(t.scale, _rows(t.shape)[1], k_blocks).reshape(*t.shape[:-1], k_blocks)


def stored_scale_shape(format: BlockFormat, shape: tuple[int, ...], layout: ScaleLayout) -> tuple[int, ...]:
    """Returns the shape of the scales of a tensor of logical ``shape``; a single row-major row has ``(K / block_k,)``."""
    batches, rows = _rows(shape)
    stored = format.scale_shape(rows, shape[-1], layout)
    return (*batches, *stored) if layout == "blocked" or len(shape) > 1 else stored[1:]


def _straight_scales(scale: torch.Tensor, expected: tuple[int, ...], rows: int) -> torch.Tensor:
    """Converts flat blocked scales, or the permuted view, to the shape that a tensor stores; returns others unchanged.

    Raises for flat scales of batches whose rows need padding, because they may be the scales of one matrix, which are laid out
    differently.
    """
    found = tuple(scale.shape)
    if found == expected:
        return scale
    is_clear = len(expected) == 5 or rows % ATOM_ROWS == 0
    if scale.ndim == 1 and is_clear and scale.numel() == math.prod(expected) and scale.is_contiguous():
        return scale.view(expected)
    one = expected if len(expected) == 6 else (1, *expected)
    if len(one) == 6 and found == tuple(one[i] for i in (3, 4, 1, 5, 2, 0)):
        straight = scale.permute(5, 2, 4, 0, 1, 3)
        return straight if len(expected) == 6 else straight[0]
    return scale


def check_scale_layout(scale_layout: str, format: BlockFormat = NVFP4) -> None:
    """Raises ValueError if the layout does not exist or the format does not have it."""
    if scale_layout not in SCALE_LAYOUTS:
        raise ValueError(f'scale_layout={scale_layout!r} is neither "blocked" nor "rowmajor"')
    if "rowmajor" == format.scale_layout != scale_layout:
        raise ValueError(f'scale_layout="blocked": scales of {format.title} are row-major; pass "rowmajor"')


def _over_rows_of_blocks(amax: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Reduces the largest magnitudes ``[..., rows, k blocks]`` over the rows that share a block."""
    if format.block_rows == 1 or amax.ndim == 1:
        return amax
    missing = -amax.shape[-2] % format.block_rows
    padded = torch.nn.functional.pad(amax, (0, 0, 0, missing))
    return padded.unflatten(-2, (-1, format.block_rows)).amax(dim=-2)


def _to_rows(scale: torch.Tensor, format: BlockFormat, shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
    """Repeats row-major scales ``[..., row blocks, k blocks]`` to one per row of a tensor of ``shape``."""
    if format.block_rows == 1 or len(shape) == 1:
        return scale
    return scale.repeat_interleave(format.block_rows, dim=-2)[..., : shape[-2], :]


def _rows(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Splits a logical shape into batches and rows. One dimension alone is one row."""
    return (tuple(shape[:-2]), shape[-2]) if len(shape) > 1 else ((), 1)


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], fix: str = "reshape it") -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(expected)}; {fix}")
