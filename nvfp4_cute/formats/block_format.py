"""Block-scaled number formats as records, which say what the bytes of elements and block scales mean.

The caller of an operation names the format of an operand; no code guesses it from a dtype or a shape. Code that converts bytes
to elements, or sizes to bytes, asks the record, so a new format is a new record.

| record | elements | scales | block (rows,K) | global scale | source |
|---|---|---|---|---|---|
| NVFP4 | e2m1 | ue4m3 | 1 x 16 | yes | PTX ISA 9.7.16.10, kind mxf4nvf4 |
| MXFP4 | e2m1 | ue8m0 | 1 x 32 | no | OCP Microscaling Formats v1.0, section 5.2 |
| MXFP8_E4M3 | e4m3 | ue8m0 | 1 x 32 | no | OCP Microscaling Formats v1.0, section 5.2 |
| MXFP8_E5M2 | e5m2 | ue8m0 | 1 x 32 | no | OCP Microscaling Formats v1.0, section 5.2 |
| FP8_1x128 | e4m3 | fp32 | 1 x 128 | no | DeepSeek-V3 report, section 3.3: activations |
| FP8_128x128 | e4m3 | fp32 | 128 x 128 | no | DeepSeek-V3 report, section 3.3: weights |
| FP8_1xK | e4m3 | fp32 | 1 x K | no | per-token FP8 of vLLM and compressed-tensors: activations |
| MXFP4_FP8 | e2m1 | relative | 1 x 32 | no | MXFP4 weights prepared for FP8_1xK rows: :mod:`nvfp4_cute.formats.fp8_order` |
| INT8 | s8 | fp32 | 1 x K | no | SmoothQuant (arXiv 2211.10438), section 3: one scale per token and per output channel |
| int4_format() | int4 | 16 or 32 b | 1 x 32 to 128 | no | weights; see :func:`int4_format` |
| BFLOAT16, FLOAT16 | bf16, fp16 | none | none | no | 16-bit rows of weight-only products |

FOUR_OVER_SIX is NVFP4 with block scales that are chosen by their error (``formats.four_over_six``). No tensor has it: quantizing
to it makes NVFP4 tensors.

Rows are K-major. Consecutive k lie in consecutive bytes, or share a byte with the even k in the low nibble.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

TMA_ALIGN_BYTES = 16  # base address and row pitch of a tensor map (PTX ISA, cp.async.bulk.tensor)
# TMA unpacks 4-bit elements to bytes with 16U4_ALIGN16B, whose rows are whole boxes of 128 elements.
PADDED_ALIGN_BYTES = 32
PADDED_K_MULTIPLE = 128
# One atom of blocked scales: 128 rows of 4 blocks along K, a byte each, stored [row % 32, row // 32, block].
ATOM_ROWS = 128
ATOM_COLS = 4
ATOM_BYTES = ATOM_ROWS * ATOM_COLS
ATOM_SHAPE = (32, 4, 4)
# Bits per row of an atom: four 8-bit scales, or fewer wider ones.
ATOM_WORD_BITS = 32

# "ragged": blocked, with the rows of every group padded to whole atoms. The tensor does not know where groups end.
ScaleLayout = Literal["blocked", "rowmajor", "ragged"]
# Layouts that a caller can choose.
SCALE_LAYOUTS: tuple[ScaleLayout, ...] = ("blocked", "rowmajor")


# Rows of formats with one scale per row are whole 16-byte units, so K is a multiple of 16 8-bit elements.
ROW_K_MULTIPLE = 16
# Largest K for which a sum of products of bytes, at most -128 * -128 each, fits in int32.
MAX_INTEGER_K = (2**31 - 1) // 2**14


@dataclass(frozen=True)
class NumberType:
    """Storage of one number.

    Attributes:
        name: PTX's name, such as "e2m1".
        bits: bits per number in memory; a divisor or a multiple of 8.
        max: largest finite magnitude. For integers, the largest magnitude that rounding and clamping change by at most half a
            step.
        max_exponent: exponent of the largest power of two that the type can hold.
        dtypes: names of the torch dtypes that may hold the numbers.
        quantized_dtype: the dtype among them that quantization returns.
    """

    name: str
    bits: int
    max: float
    max_exponent: int
    dtypes: tuple[str, ...]
    quantized_dtype: str


E2M1 = NumberType("e2m1", 4, 6.0, 2, ("uint8", "float4_e2m1fn_x2"), "uint8")
E4M3 = NumberType("e4m3", 8, 448.0, 8, ("uint8", "float8_e4m3fn"), "float8_e4m3fn")
E5M2 = NumberType("e5m2", 8, 57344.0, 15, ("uint8", "float8_e5m2"), "float8_e5m2")
UE4M3 = NumberType("ue4m3", 8, 448.0, 8, ("uint8", "float8_e4m3fn"), "float8_e4m3fn")
UE8M0 = NumberType("ue8m0", 8, 2.0**127, 127, ("uint8", "float8_e8m0fnu"), "float8_e8m0fnu")
# Symmetric: quantization never produces -128, but operands may contain it.
S8 = NumberType("s8", 8, 127.0, 6, ("uint8", "int8"), "int8")
# Exponent of a block relative to the largest one of its row; see ``formats.fp8_order``.
RELATIVE = NumberType("relative", 8, 2.0**127, 127, ("uint8",), "uint8")
FP32 = NumberType("fp32", 32, (2 - 2.0**-23) * 2.0**127, 127, ("float32",), "float32")
BF16 = NumberType("bf16", 16, (2 - 2.0**-7) * 2.0**127, 127, ("bfloat16",), "bfloat16")
FP16 = NumberType("fp16", 16, 65504.0, 15, ("float16",), "float16")
# S4: codes 0 to 15 for -8 to 7. U4: codes from which a zero point is subtracted.
S4 = NumberType("int4", 4, 7.5, 2, ("uint8",), "uint8")
U4 = NumberType("uint4", 4, 15.0, 3, ("uint8",), "uint8")
INT4_ZERO_POINT = 8  # the code of an int4 zero
NO_SCALE = NumberType("none", 0, 1.0, 0, (), "")
# 32-bit words: the low half holds a block's scale, the high half its integer zero point.
BF16_ZERO = NumberType("bf16_zero", 32, BF16.max, 127, ("int32",), "int32")
FP16_ZERO = NumberType("fp16_zero", 32, FP16.max, 15, ("int32",), "int32")
SCALES_OF_WORDS = {BF16_ZERO.name: BF16, FP16_ZERO.name: FP16}


@dataclass(frozen=True, repr=False)
class BlockFormat:
    """A block-scaled format: ``value * scale``, times ``global_scale`` where the format has one.

    Records: NVFP4 and MXFP4 (e2m1 values), MXFP8_E4M3 and MXFP8_E5M2, FP8_1x128, FP8_128x128 and FP8_1xK (e4m3 values, named
    after the values that share a scale), INT8, MXFP4_FP8 (see ``mxfp4_for_fp8``), and those of ``int4_format``.

        >>> NVFP4.name, NVFP4.element.name, NVFP4.scale.name, NVFP4.block_k
        ('nvfp4', 'e2m1', 'ue4m3', 16)

    Attributes:
        name: appears in messages, cache keys and kernel names.
        element: type of the data.
        scale: type of the block scales.
        block_k: values along K that share a scale; 0 if a whole row does.
        block_rows: rows that share a scale.
        has_global_scale: whether a tensor also has one float32 factor.
        scale_layout: layout in which kernels read the scales: "blocked", in atoms of 128 rows by 4 blocks, or "rowmajor".
        order: order of the data in memory: "rows"; for weights only also "fp8" within blocks
            (:mod:`nvfp4_cute.formats.fp8_order`).
        scaling: how quantization finds block scales: from the block's "amax", or by "four_over_six".
    """

    name: str
    element: NumberType
    scale: NumberType
    block_k: int
    block_rows: int = 1
    has_global_scale: bool = False
    scale_layout: ScaleLayout = "blocked"
    order: Literal["rows", "fp8"] = "rows"
    scaling: Literal["amax", "four_over_six"] = "amax"

    def __str__(self) -> str:
        """Returns the name."""
        return self.name

    def __repr__(self) -> str:
        """Returns a form that is short enough for signatures."""
        return f"BlockFormat({self.name})"

    def __hash__(self) -> int:
        """Hashes the name alone, because every repeated call looks up its formats."""
        return hash(self.name)

    @property
    def title(self) -> str:
        """Name as sentences write it, such as NVFP4."""
        return self.name.upper()

    @property
    def record(self) -> str:
        """Expression for the format in code, such as FP8_128x128 or ``int4_format(...)``."""
        if self.is_int4:
            return "int4_format(...)"
        # Upper case must not touch the x in the extents of a block.
        return self.title.replace("1X128", "1x128").replace("128X128", "128x128").replace("1XK", "1xK")

    @property
    def stored(self) -> "BlockFormat":
        """Returns the format of tensors that quantizing to this format makes."""
        return NVFP4 if self == FOUR_OVER_SIX else self

    @property
    def largest_scale(self) -> float:
        """Returns the block scale that an automatic global scale gives to the block with the largest magnitude.

        4over6 also tries 1.5 times this scale. 384 is the largest e4m3 number whose two thirds, 256, is an e4m3 number.
        """
        return 256.0 if self.scaling == "four_over_six" else self.scale.max

    @property
    def global_scale_divisor(self) -> float:
        """Returns the largest magnitude divided by its automatic global scale: largest element times largest block scale."""
        return self.element.max * self.largest_scale

    @property
    def has_zero_points(self) -> bool:
        """Whether blocks have a zero point, which is subtracted from elements before scaling."""
        return self.element == U4

    @property
    def scale_float(self) -> NumberType:
        """Type of the scales alone, also where zero points are stored in the same words."""
        return SCALES_OF_WORDS.get(self.scale.name, self.scale)

    @property
    def family(self) -> str:
        """Name of the format, or of its family of formats, in lists of formats."""
        return "int4_format(...)" if self.is_int4 else self.name

    @property
    def has_scales(self) -> bool:
        """Whether values have block scales. Formats without them are those of 16-bit rows."""
        return self.scale.bits > 0

    @property
    def is_int4(self) -> bool:
        """Whether elements are 4-bit integers, whose products with scales are rounded to 16-bit floats."""
        return self.element in (S4, U4)

    # ---- data ------------------------------------------------------------------------------------------------

    def row_bytes(self, k: int) -> int:
        """Returns the bytes of ``k`` elements, which fill whole bytes."""
        return k * self.element.bits // 8

    def elements(self, nbytes: int) -> int:
        """Returns the number of elements in ``nbytes`` bytes of a row, a pitch or a stride."""
        return nbytes * 8 // self.element.bits

    @property
    def length(self) -> str:
        """Bytes per row as messages write it: K/2 for 4-bit elements, K for 8-bit elements."""
        return "K" if self.element.bits == 8 else f"K/{8 // self.element.bits}"

    def pitch_bytes(self, k: int) -> int:
        """Returns the smallest distance in bytes between rows of ``k`` elements that a tensor map can describe."""
        return -(-self.row_bytes(k) // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES

    def nbytes(self, rows: int, k: int) -> int:
        """Returns the bytes of ``rows`` rows of ``k`` elements and their scales, each counted once, without padding."""
        row_blocks = -(-rows // self.block_rows)
        return rows * self.row_bytes(k) + row_blocks * self.scale_row_bytes(k)

    @property
    def data_dtypes(self) -> tuple["torch.dtype", ...]:
        """Dtypes in which data may be stored."""
        return torch_dtypes(self.element.dtypes)

    @property
    def has_integer_sums(self) -> bool:
        """Whether elements are integers, whose products tensor cores sum exactly."""
        return self.element == S8

    # ---- scales ----------------------------------------------------------------------------------------------

    @property
    def k_multiple(self) -> int:
        """Divisor of K, such that all blocks are whole."""
        return self.block_k or ROW_K_MULTIPLE

    @property
    def is_1xk(self) -> bool:
        """Whether one scale covers a whole row (FP8_1xK, INT8), so that it multiplies sums over all of K."""
        return self.block_k == 0 and self.has_scales

    def block_of(self, k: int) -> int:
        """Returns how many values of a row of ``k`` share a scale."""
        return self.block_k or k

    @property
    def blocks(self) -> str:
        """Rows and values of a block, as messages write them."""
        return f"{self.block_rows} x {self.block_k or 'K'}"

    def padded_k(self, k: int) -> int:
        """Rounds ``k`` up to a valid K."""
        return max(1, -(-k // self.k_multiple)) * self.k_multiple

    def num_k_blocks(self, k: int) -> int:
        """Returns the scales per row of ``k`` elements. Raises ValueError unless ``k`` is a positive multiple of the block."""
        if k <= 0 or k % self.k_multiple:
            what = "block size" if self.block_k else "rows of whole 16-byte units"
            raise ValueError(
                f"K={k} is not a positive multiple of {self.k_multiple} ({self.title} {what}); pad K to {self.padded_k(k)}"
            )
        return k // self.block_of(k)

    def check_stored_k(self, k: int) -> None:
        """Raises ValueError for a K that no tensor of the format has.

        Rows with row-major scales may end within a block: checkpoints store such weights. Only blocked scales need whole blocks.
        """
        if self.scale_layout == "blocked" or k <= 0:
            self.num_k_blocks(k)

    def scale_row_bytes(self, k: int) -> int:
        """Returns the bytes of the scales along ``k`` elements, counting a partial last block, without padding."""
        return -(-k // self.block_of(k)) * self.scale.bits // 8

    @property
    def scale_atom(self) -> tuple[int, int]:
        """Rows and blocks along K that are stored together. Sizes of stored scales are multiples of these."""
        return (ATOM_ROWS, ATOM_WORD_BITS // self.scale.bits) if self.scale_layout == "blocked" else (1, 1)

    @property
    def atom_shape(self) -> tuple[int, int, int]:
        """Shape of one atom of blocked scales."""
        return (*ATOM_SHAPE[:2], ATOM_WORD_BITS // self.scale.bits)

    @property
    def atom_rows(self) -> int:
        """Rows of data per row of scale atoms."""
        return self.scale_atom[0] * self.block_rows

    @property
    def atom_k(self) -> int:
        """Elements along K per scale atom; 0 if an atom covers all of K."""
        return self.scale_atom[1] * self.block_k

    def scale_atoms(self, rows: int, k: int) -> tuple[int, int]:
        """Returns the number of scale atoms along ``rows`` rows and along ``k`` elements, counting partial ones."""
        return -(-rows // self.atom_rows), -(-k // (self.atom_k or k))

    def scale_shape(self, rows: int, k: int, layout: ScaleLayout | None = None) -> tuple[int, ...]:
        """Returns the shape of stored scales.

        Blocked: ``(rm, rk, 32, 4, 4)``, with a last extent of 2 for 16-bit and 1 for 32-bit scales. Row-major: ``(row blocks, k
        blocks)``.

        Args:
            rows, k: extents of the data.
            layout: None for the format's own.
        """
        if (layout or self.scale_layout) == "blocked":
            k_blocks = -(-k // self.block_of(k))
            return (-(-rows // ATOM_ROWS), -(-k_blocks // self.atom_shape[-1]), *self.atom_shape)
        return -(-rows // self.block_rows), -(-k // self.block_of(k))

    def ragged_scale_shape(self, rows: int, k: int, groups: int) -> tuple[int, ...]:
        """Returns the shape of blocked scales for groups of any sizes that follow each other in ``rows`` rows.

        Every group begins a row of atoms, so ``groups`` additional rows of atoms suffice.
        """
        return (rows // ATOM_ROWS + groups, *self.scale_shape(rows, k, "blocked")[1:])

    def padded_scale_shape(self, rows: int, k: int) -> tuple[int, int]:
        """Returns rows and columns of the padded scales, before they are stored in the format's own layout."""
        (row_atoms, k_atoms), (atom_rows, atom_cols) = self.scale_atoms(rows, k), self.scale_atom
        return row_atoms * atom_rows, k_atoms * atom_cols

    def scale_bytes(self, rows: int, k: int) -> int:
        """Returns the bytes of stored scales in the format's own layout, padding included."""
        padded_rows, padded_blocks = self.padded_scale_shape(rows, k)
        return padded_rows * padded_blocks * self.scale.bits // 8

    def atom_row_bytes(self, k: int) -> int:
        """Returns the bytes between rows of scale atoms, for rows of ``k`` elements."""
        return self.scale_bytes(1, k)

    @property
    def scale_dtypes(self) -> tuple["torch.dtype", ...]:
        """Dtypes in which scales may be stored."""
        return torch_dtypes(self.scale.dtypes)


def as_format(name: str, value: object) -> BlockFormat:
    """Returns the record for ``value``, a record or a format's name. ``name`` is the argument's name, for messages.

    Raises:
        TypeError: ``value`` is neither a record nor a string.
        ValueError: there is no format of this name.
    """
    if isinstance(value, BlockFormat):
        return value
    if isinstance(value, str):
        return format_named(value, name)
    raise TypeError(f'{name}={value!r} is not a format; pass nvfp4_cute.MXFP4, or its name "mxfp4"')


def format_of_values(dtype: "torch.dtype") -> BlockFormat:
    """Returns the format of float16 or bfloat16 values."""
    return SIXTEEN_BITS[str(dtype).removeprefix("torch.")]


def torch_dtypes(names: tuple[str, ...]) -> tuple["torch.dtype", ...]:
    """Looks up dtypes by name. Imports torch only when called."""
    import torch

    return tuple(getattr(torch, name) for name in names)


NVFP4 = BlockFormat("nvfp4", E2M1, UE4M3, block_k=16, has_global_scale=True)
FOUR_OVER_SIX = replace(NVFP4, name="nvfp4_four_over_six", scaling="four_over_six")
MXFP4 = BlockFormat("mxfp4", E2M1, UE8M0, block_k=32)
MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3, UE8M0, block_k=32)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2, UE8M0, block_k=32)
FP8_1x128 = BlockFormat("fp8_1x128", E4M3, FP32, block_k=128, scale_layout="rowmajor")
FP8_128x128 = BlockFormat("fp8_128x128", E4M3, FP32, block_k=128, block_rows=128, scale_layout="rowmajor")
FP8_1xK = BlockFormat("fp8_1xk", E4M3, FP32, block_k=0, scale_layout="rowmajor")
INT8 = BlockFormat("int8", S8, FP32, block_k=0, scale_layout="rowmajor")
MXFP4_FP8 = BlockFormat("mxfp4_fp8", E2M1, RELATIVE, block_k=32, order="fp8")
# Formats of 16-bit operands, which are plain tensors: no tensor class has these formats.
BFLOAT16 = BlockFormat("bfloat16", BF16, NO_SCALE, block_k=0, scale_layout="rowmajor")
FLOAT16 = BlockFormat("float16", FP16, NO_SCALE, block_k=0, scale_layout="rowmajor")
SIXTEEN_BITS = {f.name: f for f in (BFLOAT16, FLOAT16)}
# Number of powers of two in MXFP4_FP8, because e4m3 holds e2m1 times 2^-8 to 2^6. The row's largest scale becomes 2^ROW_EXPONENT.
E4M3_POWERS, ROW_EXPONENT = 15, 6
# Formats of ``a`` and ``b``, or of the M side and the N side of an MMA.
Formats = tuple[BlockFormat, BlockFormat]
NVFP4_PAIR: Formats = (NVFP4, NVFP4)
INT8_PAIR: Formats = (INT8, INT8)
MXFP8 = (MXFP8_E4M3, MXFP8_E5M2)
MXFP8_PAIRS: tuple[Formats, ...] = tuple((a, b) for a in MXFP8 for b in MXFP8)
# MXFP8 with MXFP4, in either order.
MIXED_PAIRS: tuple[Formats, ...] = (*((a, MXFP4) for a in MXFP8), *((MXFP4, b) for b in MXFP8))
FORMATS = {f.name: f for f in (NVFP4, MXFP4, MXFP8_E4M3, MXFP8_E5M2, FP8_1x128, FP8_128x128, FP8_1xK, INT8)}

INT4_BLOCKS = (32, 64, 128)
# Types of scales: by element type, then by the dtype that a checkpoint stores.
INT4_SCALES: dict[NumberType, dict[str, NumberType]] = {
    S4: {"bfloat16": BF16, "float16": FP16, "float32": FP32},
    U4: {"bfloat16": BF16_ZERO, "float16": FP16_ZERO},
}
INT4_FORMATS = {
    f.name: f
    for element, scales in INT4_SCALES.items()
    for (dtype, scale), block_k in product(scales.items(), INT4_BLOCKS)
    for f in (BlockFormat(f"{element.name}_{block_k}_{dtype}", element, scale, block_k),)
}


def int4_format(
    block_k: int = 128, scale_dtype: "str | torch.dtype" = "bfloat16", *, zero_points: bool = False
) -> BlockFormat:
    """Returns a format of 4-bit integer weights: ``(code - zero point) * scale``.

    Codes are 0 to 15; without zero points, the zero point is 8. Such an integer times a 16-bit scale is exact in float32.
    Products with 16-bit rows round it once, to nearest even, to the type of the rows. If that is the dtype of the scales, the
    result equals the tools' own dequantization: ``dequantize`` of compressed-tensors (quantization/lifecycle/forward.py),
    ``dequantize_gemm`` of AutoAWQ (utils/packing_utils.py), and ``dequantize_weight`` of GPTQModel
    (nn_modules/qlinear/__init__.py).

    Data is packed like e2m1: [..., K/2] bytes, the even k in the low nibble. Scales are [..., K / block_k] in ``scale_dtype``.
    With zero points they are int32 words, with the bits of the scale in the low half and the zero point in the high half. In
    the blocked layout an atom of 128 rows has 32 bits per row: two 16-bit scales, or one word. ``int4_tensor`` makes a tensor
    from parts.

    Args:
        block_k: values along K that share a scale: 32, 64 or 128.
        scale_dtype: bfloat16, float16 or, without zero points, float32; a name or a torch dtype.
        zero_points: whether blocks have zero points (AWQ, asymmetric GPTQ).

    Raises:
        ValueError: there is no such format.
    """
    element, dtype = (U4 if zero_points else S4), str(scale_dtype).removeprefix("torch.")
    found = INT4_FORMATS.get(f"{element.name}_{block_k}_{dtype}")
    if found is None:
        raise ValueError(
            f"block_k={block_k!r}, scale_dtype={dtype}, zero_points={zero_points} is not a format; blocks have "
            f"{', '.join(map(str, INT4_BLOCKS))} values, scales are {', '.join(INT4_SCALES[element])}"
        )
    return found


# Formats that have a name but are not in FORMATS.
_OTHERS = {f.name: f for f in (FOUR_OVER_SIX, MXFP4_FP8)}


def format_named(name: str, argument: str = "format") -> BlockFormat:
    """Returns the record with this name. Raises ValueError, with a list of all names, if there is none."""
    found = FORMATS.get(name) or INT4_FORMATS.get(name) or _OTHERS.get(name)
    if found is None:
        raise ValueError(
            f"{argument}={name!r} is unknown; use one of {', '.join(FORMATS)}, or an int4_format(...), such as "
            f"{int4_format().name}"
        )
    return found
