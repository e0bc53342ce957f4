"""Converts int4 weights of every tool to one form: K-major codes, the even k in the low nibble, and row-major scales.

Tools pack codes 0 to 15 into int32 words, eight per word, the first in the lowest bits. They differ in which eight codes share
a word, and in their order. ModelOpt packs bytes.

Adjacent values along K may belong to different blocks of scales (desc_act, actorder). Such codes are sorted by block, and the
order of K accompanies the weights.

| tool | codes | zero points | source |
|---|---|---|---|
| compressed-tensors | [N, K/8], along K | [N/8, blocks], along N | 0.20.0: compressors/pack_quantized, base.py and helpers.py |
| AutoGPTQ | [K/8, N], along K | [blocks, N/8], along N | auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py |
| AutoAWQ (gemm) | [K, N/8], along N | [blocks, N/8], along N | 0.2.9: awq/modules/linear/gemm.py, awq/utils/packing_utils.py |
| ModelOpt | [N/2, K], along N | none | 0.47.0: modelopt/torch/export/quant_utils.py |

AutoGPTQ's layout "gptq" stores zero points minus 1; "gptq_v2" stores them unchanged. AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5,
7 of eight. ModelOpt packs two rows into bytes, with values -8 to 7 in two's complement.
"""

from collections.abc import Mapping

import torch

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.formats.block_format import INT4_BLOCKS, INT4_ZERO_POINT, int4_format
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.codecs import pack_e2m1, unpack_e2m1
from nvfp4_cute.formats.zero_points import scale_words
from nvfp4_cute.models.checkpoints.convention import DATA, ORDER, SCALE, SHAPE, ZERO
from nvfp4_cute.models.checkpoints.stored import stored_weight

# Position in the word of columns 0 to 7: column 1, for example, comes after 0, 2, 4 and 6.
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Tensors = Mapping[str, torch.Tensor]  # by role
Ordered = tuple[BlockScaledTensor, torch.Tensor | None]  # weights for x[..., order], and the order


def of_compressed_tensors(prefix: str, tensors: Tensors) -> Ordered:
    """Reads weights in format "pack-quantized", without a copy of the data, or in "int-quantized", one per byte.

    Args:
        prefix: name of the layer, for messages.
        tensors: data int32 [N, K/8], or int8 [N, K] with values -8 to 7; scale [N, blocks], or [N, 1] for whole rows; optional
            zero points int32 [N/8, blocks], in old versions int8 [N, blocks] with values -8 to 7; shape int64 [2]; optional
            order int32 [K].

    Raises:
        CheckpointError: a tensor has another dtype or shape, or blocks have different sizes.
    """
    scale = tensors[SCALE]
    if tensors[DATA].dtype == torch.int8 and tensors[DATA].ndim == 2:
        data = pack_e2m1((tensors[DATA].int() + INT4_ZERO_POINT).to(torch.uint8))
    else:
        data = _words(prefix, tensors[DATA]).view(torch.uint8)
    n, k = len(data), 2 * data.shape[1]
    if SHAPE in tensors and tensors[SHAPE].tolist() != [n, k]:
        raise CheckpointError(
            f"{prefix} is said to be {tensors[SHAPE].tolist()}, and its packed values are {[n, k]}: K is not a multiple of 8, or "
            "the two are of different exports"
        )
    zero_points = tensors.get(ZERO)
    if zero_points is not None and zero_points.dtype == torch.int8:
        zero_points = zero_points.int() + INT4_ZERO_POINT
    elif zero_points is not None:
        zero_points = _nibbles(_words(prefix, zero_points).T)[:, :n].T
    sorted_data, order = _sorted(prefix, tensors, data, scale.shape[-1])
    return _stored(prefix, sorted_data, scale, zero_points), order


def of_gptq(prefix: str, tensors: Tensors, *, is_symmetric: bool, is_v2: bool) -> Ordered:
    """Reads weights of AutoGPTQ and GPTQModel.

    Args:
        prefix: name of the layer, for messages.
        tensors: data int32 [K/8, N]; scale [blocks, N]; zero points int32 [blocks, N/8]; optional order int32 [K].
        is_symmetric: whether all zero points are 8 according to the config.
        is_v2: whether zero points are stored unchanged.

    Raises:
        CheckpointError: a tensor has another dtype or shape, blocks have different sizes, or zero points of symmetric weights
            are not all 8.
    """
    data, scale = _words(prefix, tensors[DATA]).T.contiguous(), tensors[SCALE]
    sorted_data, order = _sorted(prefix, tensors, data.view(torch.uint8), len(scale))
    zero_points = None
    if ZERO in tensors:
        stored = _nibbles(_words(prefix, tensors[ZERO]))
        # As in AutoGPTQ: a stored 15, which is 0 minus 1, means 0.
        zero_points = (stored if is_v2 else stored + 1 & 15).T
    if zero_points is not None and is_symmetric:
        if bool((zero_points != INT4_ZERO_POINT).any()):
            raise CheckpointError(
                f"{prefix} has zero points {int(zero_points.min())} to {int(zero_points.max())}, and the config says sym: "
                "all of them are 8; correct sym, or checkpoint_format (gptq, gptq_v2)"
            )
        zero_points = None
    return _stored(prefix, sorted_data, scale.T.contiguous(), zero_points), order


def of_awq(prefix: str, tensors: Tensors) -> Ordered:
    """Reads weights of AutoAWQ, version gemm.

    Args:
        prefix: name of the layer, for messages.
        tensors: data int32 [K, N/8]; scale [blocks, N]; optional zero points int32 [blocks, N/8].

    Raises:
        CheckpointError: a tensor has another dtype or shape.
    """

    def columns(words: torch.Tensor) -> torch.Tensor:
        nibbles = _nibbles(_words(prefix, words))
        return nibbles.unflatten(1, (-1, 8))[..., AWQ_PLACES].flatten(1).T

    zero_points = columns(tensors[ZERO]) if ZERO in tensors else None
    data = pack_e2m1(columns(tensors[DATA]).contiguous())
    return _stored(prefix, data, tensors[SCALE].T.contiguous(), zero_points), None


def of_modelopt(prefix: str, tensors: Tensors) -> Ordered:
    """Reads weights of ModelOpt's W4A16_AWQ.

    Args:
        prefix: name of the layer, for messages.
        tensors: data uint8 [N/2, K], row 2 i in the low nibble, values -8 to 7; scale [N, blocks].

    Raises:
        CheckpointError: a tensor has another dtype or shape.
    """
    packed = tensors[DATA]
    if packed.dtype != torch.uint8 or packed.ndim != 2:
        raise CheckpointError(
            f"{prefix} has packed integers of {packed.dtype} {list(packed.shape)}; they are uint8, [N/2, K]: export it again"
        )
    signed = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1)
    return _stored(prefix, pack_e2m1(signed ^ INT4_ZERO_POINT), tensors[SCALE], None), None


def _stored(
    prefix: str, data: torch.Tensor, scale: torch.Tensor, zero_points: torch.Tensor | None
) -> BlockScaledTensor:
    """Makes weights from uint8 [N, K/2], and from scales and zero points, [N, blocks] or [N, 1]."""
    n, k = len(data), 2 * data.shape[1]
    if scale.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{prefix} has scales of {scale.dtype}; int4 weights have {', '.join(map(str, SCALE_DTYPES))}: export it again"
        )
    blocks = scale.shape[-1] if scale.ndim == 2 else 0
    if blocks == 1 and k not in INT4_BLOCKS:
        blocks = next((k // block for block in reversed(INT4_BLOCKS) if k % block == 0), 0)
        scale = scale.expand(-1, blocks)
        zero_points = None if zero_points is None else zero_points.expand(-1, blocks)
    if not blocks or tuple(scale.shape) != (n, blocks) or k % blocks or k // blocks not in INT4_BLOCKS:
        raise CheckpointError(
            f"{prefix} has {n} x {k} values and scales {list(scale.shape)}; a scale is for {', '.join(map(str, INT4_BLOCKS))} "
            "values of K, or for all of them: export it so"
        )
    if not bool(torch.isfinite(scale).all()):
        raise CheckpointError(
            f"{prefix} has scales that are NaN or infinite; the weights were not finite when they were quantized: export it again"
        )
    if zero_points is not None:
        if zero_points.shape != scale.shape:
            raise CheckpointError(
                f"{prefix} has zero points {list(zero_points.shape)}, and scales {list(scale.shape)}: of different exports"
            )
        if scale.dtype == torch.float32:
            raise CheckpointError(
                f"{prefix} has float32 scales and zero points; export it with 16-bit scales"
            )
    format = int4_format(k // blocks, scale.dtype, zero_points=zero_points is not None)
    stored = scale.contiguous() if zero_points is None else scale_words(scale, zero_points)
    return stored_weight(format.name, data, stored)


def _words(prefix: str, packed: torch.Tensor) -> torch.Tensor:
    if packed.dtype != torch.int32 or packed.ndim != 2:
        raise CheckpointError(
            f"{prefix} has packed integers of {packed.dtype} {list(packed.shape)}; they are int32, of two dimensions: export it "
            "again"
        )
    return packed


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 [rows, columns] to uint8 [rows, 8 columns], the lowest bits first."""
    return unpack_e2m1(words.contiguous().view(torch.uint8))


def _sorted(
    prefix: str, tensors: Tensors, data: torch.Tensor, blocks: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sorts data [N, K/2] so that the values of each block are adjacent; returns it with its order of K."""
    given, k = tensors.get(ORDER), 2 * data.shape[1]
    # compressed-tensors stores -1 everywhere if K was never ordered.
    if given is None or bool((given == -1).all()):
        return data, None
    plain = torch.arange(k, device=given.device) // max(k // max(blocks, 1), 1)
    if given.shape == plain.shape and torch.equal(given.long(), plain):
        return data, None
    if given.shape != plain.shape or not torch.equal(given.long().sort().values, plain):
        raise CheckpointError(
            f"{prefix} has its K ordered by activations in {blocks} blocks that do not have {k} / {blocks} values each; "
            'export it with desc_act=False, or actorder "static"'
        )
    order = given.long().argsort(stable=True)
    return pack_e2m1(unpack_e2m1(data)[:, order]), order
