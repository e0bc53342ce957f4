"""Tasks of the kernels in ``kernels/simt``: products of few rows, quantization, global scales, dequantization."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import ClassVar

import torch

from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.compile.simt_keys import (
    DequantizeKey,
    FewRowsKey,
    GemvKey,
    GlobalScaleKey,
    QuantizeKey,
    QuantizeScaledRowsKey,
    W4A16Key,
)
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.global_scale import PER_ROW, resolve_global_scale
from nvfp4_cute.formats.silu import silu_mul
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import Addresses, TableTask
from nvfp4_cute.launch_table import W4A16, Dequantize, FewRows, Gemv, GemvBias, GlobalScale, Quantize
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.operands.products import Product
from nvfp4_cute.operands.quantization import Quantization
from nvfp4_cute.operands.rules import MAX_BATCHES, MAX_PITCH
from nvfp4_cute.planning.arch.base import check_pair
from nvfp4_cute.planning.arch.simt import (
    AMAX_VALUES,
    GEMV_PAIRS,
    QUANTIZE_FEW_WORDS,
    QUANTIZE_WORDS,
    W4A16_PAIRS,
    amax_ctas,
    is_for_few_rows,
    is_gemv_for_one_row,
    quantize_words,
    scaled_rows_split,
    w4a16_tokens,
    w4a16_warps,
)
from nvfp4_cute.reference import gemv_reference, grouped_gemm_reference, weight_only_reference

# Values of K that a lane of the few-rows kernel reads at a time.
FEW_ROWS_K_STEP = 32


@dataclass(frozen=True, eq=False)
class ProductTask(TableTask):
    """A product of two tensors, batch by batch."""

    product: Product
    bias_column: ClassVar[IntEnum]
    natural = ("bias",)

    def addresses(self) -> Addresses:
        """Addresses of ``a``, ``b``, their scales, ``alpha`` and ``out``."""
        p, columns = self.product, self.columns
        a, b = p.a, p.b
        operands = {
            "a": (columns["A"], a.data),
            "b": (columns["B"], b.data),
            "a_scale": (columns["SFA"], a.scale),
            "b_scale": (columns["SFB"], b.scale),
        }
        return operands | self._others()

    def _others(self) -> dict[str, tuple[IntEnum, torch.Tensor]]:
        """Returns the addresses of ``alpha``, ``bias`` and ``out``."""
        p, columns = self.product, self.columns
        named = {
            "alpha": (columns["ALPHA"], p.alpha),
            "bias": (self.bias_column, p.bias),
            "out": (columns["OUT"], p.out),
        }
        return {name: (column, x) for name, (column, x) in named.items() if x is not None}

    def reference(self) -> None:
        """Computes float64 sums, rounds once to fp32, applies alpha and bias, and rounds to the output type."""
        p = self.product
        for batch, out in enumerate(p.out):
            out.copy_(
                self._batch_reference(
                    batch, None if p.alpha is None else p.alpha[batch if p.alpha_step else 0]
                )
            )

    def _batch_reference(self, batch: int, alpha: torch.Tensor | None) -> torch.Tensor:
        """Returns [M, N] of one batch."""
        a, b, dtype = self.product.a, self.product.b, self.product.out.dtype
        sides = [a.data[batch]], [b.data[batch]], [a.scale[batch]], [b.scale[batch]]
        alphas = None if alpha is None else alpha.reshape(1)
        return grouped_gemm_reference(
            *sides, alphas, dtype, bias=self.product.bias, a_format=a.format, b_format=b.format
        )[0]


class GemvTask(ProductTask):
    """A matrix a times a vector b, with one column in out. Only ``OneRowTask`` has a bias."""

    columns = Gemv
    bias_column = GemvBias.BIAS

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Returns a and b as matrix and vector."""
        return self.product.a, self.product.b

    @property
    def out(self) -> torch.Tensor:
        """The result as [L, M]."""
        return self.product.out[:, :, 0]

    def key(self, gpu: Gpu) -> GemvKey:
        """Returns the gemv kernel's key. Raises UnsupportedProblem for formats that it does not multiply."""
        matrix, vector = self.operands
        check_pair(f"{gpu.arch}: gemv", (matrix.format, vector.format), GEMV_PAIRS)
        p = self.product
        return GemvKey(gpu.arch, p.out.dtype, p.alpha is not None, p.bias_dtype)

    def numbers(self, gpu: Gpu) -> Mapping[IntEnum, int]:
        """Returns numbers for ``launch_table.Gemv``."""
        matrix, vector = self.operands
        return {
            Gemv.A_PITCH: matrix.data.stride(1) if matrix.rows > 1 else 0,
            Gemv.A_BATCH: matrix.data.stride(0),
            Gemv.B_BATCH: vector.data.stride(0),
            Gemv.SFA_BATCH: matrix.scale.stride(0),
            Gemv.SFB_BATCH: vector.scale.stride(0),
            Gemv.OUT_PITCH: self.out.stride(1),
            Gemv.OUT_BATCH: self.out.stride(0),
            Gemv.ALPHA_BATCH: self.product.alpha_step,
            Gemv.M: matrix.rows,
            Gemv.K: matrix.k,
            Gemv.L: matrix.batches,
            Gemv.NUM_SMS: gpu.num_sms,
        }

    def _batch_reference(self, batch: int, alpha: torch.Tensor | None) -> torch.Tensor:
        matrix, vector = self.operands
        scales = matrix.scale[batch], vector.scale[batch]
        dtype = self.product.out.dtype
        sums = gemv_reference(
            matrix.data[batch], vector.data[batch, 0], *scales, alpha, dtype,
            a_format=matrix.format, b_format=vector.format,
        )  # fmt: skip
        return sums.view(self.product.out.shape[1:])


class OneRowTask(GemvTask):
    """A ``gemm`` with one row in ``a``, computed as a gemv: ``a`` is the vector, ``b`` the matrix."""

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Returns b and a as matrix and vector."""
        return self.product.b, self.product.a

    @property
    def out(self) -> torch.Tensor:
        """The result as [L, N]."""
        return self.product.out[:, 0]

    def addresses(self) -> Addresses:
        """Addresses by the names of the gemm."""
        matrix, vector = self.operands
        operands: dict[str, tuple[IntEnum, torch.Tensor]] = {
            "a": (Gemv.B, vector.data),
            "b": (Gemv.A, matrix.data),
            "a_scale": (Gemv.SFB, vector.scale),
            "b_scale": (Gemv.SFA, matrix.scale),
        }
        return operands | self._others()

    def _batch_reference(self, batch: int, alpha: torch.Tensor | None) -> torch.Tensor:
        return ProductTask._batch_reference(self, batch, alpha)


class FewRowsTask(ProductTask):
    """At most eight rows in a, times weights b."""

    columns = FewRows
    bias_column = FewRows.BIAS

    def key(self, gpu: Gpu) -> FewRowsKey:
        """Returns the few-rows kernel's key."""
        p = self.product
        return FewRowsKey(gpu.arch, p.out.dtype, p.alpha is not None, p.bias_dtype)

    def numbers(self, gpu: Gpu) -> Mapping[IntEnum, int]:
        """Returns numbers for ``launch_table.FewRows``."""
        p = self.product
        a, b = p.a, p.b
        out_batch, out_row, out_column = p.out.stride()
        return {
            FewRows.A_PITCH: a.data.stride(1),
            FewRows.B_PITCH: b.data.stride(1),
            FewRows.A_BATCH: a.data.stride(0),
            FewRows.B_BATCH: b.data.stride(0),
            FewRows.SFA_BATCH: a.scale.stride(0),
            FewRows.SFB_BATCH: b.scale.stride(0),
            FewRows.OUT_ROW: out_row,
            FewRows.OUT_COLUMN: out_column,
            FewRows.OUT_BATCH: out_batch,
            FewRows.ALPHA_BATCH: p.alpha_step,
            FewRows.M: a.rows,
            FewRows.N: b.rows,
            FewRows.K: b.k,
            FewRows.L: b.batches,
        }


def few_rows_task(product: Product, gpu: Gpu) -> OneRowTask | FewRowsTask | None:
    """Returns the task that computes a ``gemm`` faster than a GEMM kernel; None if there is none for its operands."""
    a, b = product.a, product.b
    if (a.format, b.format) not in GEMV_PAIRS or a.row_scale is not None or is_batch_invariant():
        return None
    if a.rows == 1 and is_gemv_for_one_row(gpu.arch):
        # Products beyond the gemv's 32-bit offsets and grid stay with the GEMM.
        fits = (b.rows <= 1 or b.data.stride(1) <= MAX_PITCH) and b.batches <= MAX_BATCHES
        return OneRowTask(product) if fits else None
    if is_for_few_rows(gpu.arch, gpu.num_sms, a.rows, b.rows, b.batches) and b.k % FEW_ROWS_K_STEP == 0:
        return FewRowsTask(product)
    return None


class W4A16Task(ProductTask):
    """16-bit activations a [L, M, K] times quantized weights b."""

    columns = W4A16
    bias_column = W4A16.BIAS

    def key(self, gpu: Gpu) -> W4A16Key:
        """Returns the weight-only kernel's key. Raises UnsupportedProblem for weights that it does not dequantize."""
        p = self.product
        check_pair(gpu.arch, (p.a.format, p.b.format), W4A16_PAIRS)
        m, has_alpha = p.a.rows, p.alpha is not None
        tokens, dtype = w4a16_tokens(m), p.a.data.dtype
        key = W4A16Key(gpu.arch, dtype, p.out.dtype, has_alpha, tokens, p.b.format, p.bias_dtype)
        if key.blocks_per_sm == 1:
            return key
        return replace(key, warps=w4a16_warps(gpu.num_sms, m, p.b.rows, p.b.k, p.b.batches))

    def addresses(self) -> Addresses:
        """Addresses for ``launch_table.W4A16``."""
        p = self.product
        operands: dict[str, tuple[IntEnum, torch.Tensor]] = {
            "x": (W4A16.X, p.a.data),
            "b": (W4A16.B, p.b.data),
            "b_scale": (W4A16.SFB, p.b.scale),
        }
        return operands | self._others()

    def numbers(self, gpu: Gpu) -> Mapping[IntEnum, int]:
        """Returns numbers for ``launch_table.W4A16``."""
        p = self.product
        x, b = p.a.data, p.b
        out_batch, out_row, out_column = p.out.stride()
        return {
            W4A16.X_PITCH: x.element_size() * x.stride(1),
            W4A16.B_PITCH: b.data.stride(1),
            W4A16.X_BATCH: x.element_size() * x.stride(0),
            W4A16.B_BATCH: b.data.stride(0),
            W4A16.SFB_BATCH: b.scale.stride(0),
            W4A16.OUT_ROW: out_row,
            W4A16.OUT_COLUMN: out_column,
            W4A16.OUT_BATCH: out_batch,
            W4A16.ALPHA_BATCH: p.alpha_step,
            W4A16.M: x.shape[1],
            W4A16.N: b.rows,
            W4A16.K: b.k,
            W4A16.L: b.batches,
        }

    def by_rows(self) -> tuple[int, Mapping[IntEnum, int]] | None:
        """Returns the rows of one batch."""
        a = self.product.a
        return (a.rows, {W4A16.M: 1}) if a.batches == 1 else None

    def _batch_reference(self, batch: int, alpha: torch.Tensor | None) -> torch.Tensor:
        p = self.product
        return weight_only_reference(
            p.a.data[batch],
            p.b.data[batch],
            p.b.scale[batch],
            alpha,
            p.out.dtype,
            bias=p.bias,
            b_format=p.b.format,
        )


@dataclass(frozen=True, eq=False)
class QuantizeTask(TableTask):
    """Quantizes one matrix, or groups of rows."""

    columns = Quantize
    written: ClassVar[tuple[str, ...]] = ("data", "scale")

    operands: Quantization

    @property
    def is_empty(self) -> bool:
        """Returns whether there are no scales to write."""
        return self.operands.scale.numel() == 0

    def key(self, gpu: Gpu) -> QuantizeKey:
        """Returns the quantize kernel's key."""
        q = self.operands
        is_blocked, has_up = q.scale_layout == "blocked", q.up is not None
        inputs = (q.x.dtype, q.global_scale is not None, q.offs is not None, is_blocked, has_up)
        batches, _, k = q.x.shape
        words = QUANTIZE_WORDS
        if q.format.scale_layout == "blocked":
            words = quantize_words(gpu.arch, gpu.num_sms, q.atom_rows * batches, q.format, k)
        return QuantizeKey(gpu.arch, *inputs, q.format, q.scale_rounding, words)

    def addresses(self) -> Addresses:
        """Addresses for ``launch_table.Quantize``."""
        names = ("x", "up", "global_scale", "offs", "data", "scale")
        named = ((name, getattr(self.operands, name)) for name in names)
        return {name: (Quantize[name.upper()], tensor) for name, tensor in named if tensor is not None}

    def numbers(self, gpu: Gpu) -> Mapping[IntEnum, int]:
        """Returns numbers for ``launch_table.Quantize``."""
        q = self.operands
        (batches, m, k), size = q.x.shape, q.x.element_size()
        found: dict[IntEnum, int] = {
            Quantize.X_PITCH: size * q.x.stride(1),
            Quantize.X_BATCH: size * q.x.stride(0),
            Quantize.M: m,
            Quantize.K: k,
            Quantize.BATCHES: batches,
            Quantize.GROUPS: 0 if q.offs is None else len(q.offs),
            Quantize.ATOM_ROWS: q.atom_rows,
        }
        if q.up is not None:
            found |= {Quantize.UP_PITCH: size * q.up.stride(1), Quantize.UP_BATCH: size * q.up.stride(0)}
        return found

    def by_rows(self) -> tuple[int, Mapping[IntEnum, int]] | None:
        """Returns the rows of one batch."""
        q = self.operands
        (batches, rows, _), atom = q.x.shape, q.format.atom_rows
        if batches > 1 or q.offs is not None or q.atom_rows != -(-rows // atom):
            return None
        return rows, {Quantize.M: 1, Quantize.ATOM_ROWS: atom}

    def reference(self) -> None:
        """Calls ``formats.quantize``, per group if there are groups (reading ``offs`` waits for a GPU)."""
        self._quantize(self.operands.global_scale)

    def _quantize(self, given: torch.Tensor | None, found: torch.Tensor | None = None) -> None:
        """Quantizes with a ``given`` global scale, or writes that of every row to ``found``."""
        q = self.operands
        data, scale = q.data.view(torch.uint8), q.scale.view(torch.uint8)
        values = q.x if q.up is None else silu_mul(q.x, q.up)
        if q.offs is None:
            result = block_scaled.quantize(
                values,
                format=q.format,
                global_scale=given if found is None else PER_ROW,
                scale_layout=q.scale_layout,
                scale_rounding=q.scale_rounding,
            )
            data.view(-1).copy_(result.data.view(torch.uint8).view(-1))
            scale.view(-1).copy_(result.scale.view(torch.uint8).view(-1))
            if found is not None and result.global_scale is not None:
                found.view(-1).copy_(result.global_scale.view(-1))
            return
        scale.zero_()
        rows_of = lambda _, start, stop: values[0, start:stop]
        ends = [min(max(end, 0), len(values[0])) for end in q.offs.tolist()]  # clipped to the existing rows
        options = (q.format, q.scale_rounding)
        rows = None if found is None else found.view(-1)
        block_scaled.quantize_groups(ends, rows_of, given, data, scale, *options, found=rows)


@dataclass(frozen=True, eq=False)
class FindAndQuantizeTask(QuantizeTask):
    """Quantizes one matrix without gaps to NVFP4 and computes its global scale, like ``GlobalScaleTask``, in one launch.

    Attributes:
        operands: with the global scale that is written.
        times: up to two float32 factors with one element.
        products: float32 without dimensions, one per factor.
    """

    written = ("data", "scale", "global_scale", "product_0", "product_1")

    times: tuple[torch.Tensor, ...]
    products: tuple[torch.Tensor, ...]

    def key(self, gpu: Gpu) -> QuantizeKey:
        """Returns the key of the quantize kernel that also finds the global scale."""
        return replace(super().key(gpu), words=QUANTIZE_FEW_WORDS, found_times=len(self.times))

    def by_rows(self) -> None:
        """Returns None, because more rows take two launches."""

    def addresses(self) -> Addresses:
        """Addresses for ``launch_table.Quantize``, with those of factors and products."""
        q = self.operands
        assert q.global_scale is not None
        return {
            "x": (Quantize.X, q.x),
            **{f"times_{i}": (Quantize[f"TIMES_{i}"], factor) for i, factor in enumerate(self.times)},
            "data": (Quantize.DATA, q.data),
            "scale": (Quantize.SCALE, q.scale),
            "global_scale": (Quantize.GLOBAL_SCALE, q.global_scale),
            **{
                f"product_{i}": (Quantize[f"PRODUCT_{i}"], product) for i, product in enumerate(self.products)
            },
        }

    def reference(self) -> None:
        """Calls ``formats.global_scale`` and ``formats.quantize``."""
        q = self.operands
        store_global_scale(q.x, q.global_scale, self.times, self.products, q.format)
        super().reference()


class QuantizeScaledRowsTask(QuantizeTask):
    """Quantizes one matrix, or groups of rows, to NVFP4, and computes a global scale per row, in one launch.

    ``operands.global_scale`` is float32 [batches * rows], written.
    """

    written = ("data", "scale", "global_scale")

    def key(self, gpu: Gpu) -> QuantizeScaledRowsKey:  # type: ignore[override]
        """Returns the kernel's key."""
        q = self.operands
        inputs = (q.x.dtype, q.offs is not None, q.scale_layout == "blocked", q.up is not None)
        batches, m, k = q.x.shape
        split = scaled_rows_split(gpu.num_sms, batches * m, q.up is not None, q.format.num_k_blocks(k))
        return QuantizeScaledRowsKey(gpu.arch, *inputs, q.format, *split)

    def addresses(self) -> Addresses:
        """Addresses for ``launch_table.Quantize``, the global scales last."""
        named = dict(super().addresses())
        return named | {"global_scale": named.pop("global_scale")}

    def reference(self) -> None:
        """Calls ``formats.quantize``, per group if there are groups."""
        self._quantize(None, self.operands.global_scale)


@dataclass(frozen=True, eq=False)
class GlobalScaleTask(TableTask):
    """Computes the global scale of ``x``, and its products with up to two factors.

    Attributes:
        x: float16 or bfloat16, [M, K], not empty, K a multiple of 8, rows contiguous and a multiple of 16 bytes apart.
        times_0, times_1: float32 with one element, or None.
        out: float32 without dimensions.
        product_0, product_1: float32 without dimensions, one per factor.
        partials: float32 [``amax_ctas``], bits of magnitudes; None if there is one CTA.
        format: format to which ``x`` will be quantized.
    """

    columns = GlobalScale
    written = ("out", "product_0", "product_1", "partials")

    x: torch.Tensor
    times_0: torch.Tensor | None
    times_1: torch.Tensor | None
    out: torch.Tensor
    product_0: torch.Tensor | None
    product_1: torch.Tensor | None
    partials: torch.Tensor | None
    format: BlockFormat = NVFP4

    def key(self, gpu: Gpu) -> GlobalScaleKey:
        """Returns the global-scale kernel's key."""
        num_times = sum(factor is not None for factor in (self.times_0, self.times_1))
        return GlobalScaleKey(gpu.arch, self.x.dtype, self.partials is None, num_times, self.format)

    def numbers(self, gpu: Gpu) -> Mapping[IntEnum, int]:
        """Returns numbers for ``launch_table.GlobalScale``."""
        rows, k = self.x.shape
        return {
            GlobalScale.PITCH: self.x.stride(0) * self.x.element_size(),
            GlobalScale.ROWS: rows,
            GlobalScale.ROW_UNITS: k // AMAX_VALUES,
            GlobalScale.CTAS: amax_ctas(self.x.numel()),
        }

    def reference(self) -> None:
        """Calls ``formats.global_scale`` and multiplies the factors."""
        times, products = (self.times_0, self.times_1), (self.product_0, self.product_1)
        store_global_scale(self.x, self.out, times, products, self.format)


def store_global_scale(
    x: torch.Tensor,
    out: torch.Tensor | None,
    times: Sequence[torch.Tensor | None],
    products: Sequence[torch.Tensor | None],
    format: BlockFormat,
) -> None:
    """Computes the global scale of ``x``, and its product with each factor, without a kernel."""
    scale = resolve_global_scale(x, "auto", None, format)
    assert scale is not None and out is not None
    out.copy_(scale)
    for factor, product in zip(times, products, strict=True):
        if factor is not None and product is not None:
            product.copy_((factor * scale).view(()))


@dataclass(frozen=True, eq=False)
class DequantizeTask(TableTask):
    """Dequantizes ``t``. Its scales are contiguous. Rows of data may have gaps, except with several batch dimensions.

    Attributes:
        out: float16 or bfloat16, contiguous, in the shape of ``t``.
    """

    columns = Dequantize

    t: BlockScaledTensor
    out: torch.Tensor

    def key(self, gpu: Gpu) -> DequantizeKey:
        """Returns the dequantize kernel's key."""
        t = self.t
        has_factor, is_blocked = t.global_scale is not None, t.scale_layout == "blocked"
        return DequantizeKey(gpu.arch, t.format, self.out.dtype, has_factor, is_blocked)

    def addresses(self) -> Addresses:
        """Addresses for ``launch_table.Dequantize``."""
        factor = self.t.global_scale
        named = {"data": self.t.data, "scale": self.t.scale, "global_scale": factor, "out": self.out}
        return {name: (Dequantize[name.upper()], x) for name, x in named.items() if x is not None}

    def numbers(self, gpu: Gpu) -> Mapping[IntEnum, int]:
        """Returns numbers for ``launch_table.Dequantize``."""
        format, (*batches, rows, k) = self.t.format, (1, *self.t.shape)
        num_batches, data, factor = prod(batches), self.t.data, self.t.global_scale
        pitch, batch = format.row_bytes(k), rows * format.row_bytes(k)
        if not data.is_contiguous():
            pitch, batch = (step * data.element_size() for step in (data.stride(-2), data.stride(0)))
        has_factors = factor is not None and factor.numel() > 1
        return {
            Dequantize.PITCH: pitch,
            Dequantize.BATCH: batch,
            Dequantize.SCALE_BATCH: self.t.scale.nbytes // num_batches,
            Dequantize.GLOBAL_SCALE_BATCH: factor.element_size() if has_factors and factor is not None else 0,
            Dequantize.ROWS: rows,
            Dequantize.K: k,
            Dequantize.BATCHES: num_batches,
        }

    def by_rows(self) -> tuple[int, Mapping[IntEnum, int]]:
        """Returns no numbers: as a part of a chain it dequantizes weights, whose rows are not those of the call."""
        return 0, {}

    def reference(self) -> None:
        """Calls ``formats.dequantize``."""
        self.out.copy_(block_scaled.dequantize(self.t, self.out.dtype))
