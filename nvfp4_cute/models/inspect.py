"""Inspects a checkpoint folder: layers by kind, formats and scales, and what computes them on which GPU."""

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.formats.block_format import INT8, INT8_PAIR, MXFP4, NVFP4_PAIR, FP8_1x128, FP8_128x128
from nvfp4_cute.models.checkpoints import Checkpoint, Scheme
from nvfp4_cute.models.checkpoints.names import is_embedding
from nvfp4_cute.models.checkpoints.stored import INT4
from nvfp4_cute.nn.kept import LEAVE
from nvfp4_cute.nn.linear import K_STEP
from nvfp4_cute.planning.arch import ARCHS, FAMILIES, is_weight_only, mmas_of, simt
from nvfp4_cute.terminal import Progress

MXFP4_PAIR = (MXFP4, MXFP4)
DECODED_BYTES = 2  # bytes per dequantized weight
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass
class Kind:
    """Layers of one kind, with the same name except for numbers, and the same scheme.

    Attributes:
        name: name with ``*`` for numbers.
        scheme: how they are quantized; None for plain floats.
        shape: shape of one layer, [N, K]; for experts "E x [N, K]" of the first product.
        dtype: dtype of plain tensors.
        count: number of layers.
        nbytes: bytes of all layers.
        scale_range: smallest and largest global scale of weights, which multiplies; None without one.
        unequal: layers whose gate and up have different global scales.
        values: number of weights in all layers, except experts.
        finds_scale: whether a layer with NVFP4 activations stores no global scale for them, so that each call computes it.
        k_sizes: sizes of K, of both products of experts.
        has_bias: whether experts have biases.
    """

    name: str
    scheme: Scheme | None
    shape: str
    dtype: str = ""
    count: int = 0
    nbytes: int = 0
    scale_range: tuple[float, float] | None = None
    unequal: int = 0
    values: int = 0
    k_sizes: set[int] = field(default_factory=set)
    finds_scale: bool = False
    has_bias: bool = False

    @property
    def weights(self) -> str | None:
        """The format of the weights; None for plain floats."""
        return None if self.scheme is None else self.scheme.weights

    @property
    def is_experts(self) -> bool:
        """Whether the layers are experts, with the shape of the first product."""
        return " x " in self.shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers in ``shape``."""
        return tuple(map(int, re.findall(r"\d+", self.shape)))

    def add(self, nbytes: int, factors: Iterable[float] = ()) -> None:
        """Counts one more layer."""
        self.count += 1
        self.nbytes += nbytes
        known = [*factors, *(self.scale_range or ())]
        self.scale_range = (min(known), max(known)) if known else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the kind for JSON."""
        record = asdict(self)
        for own in ("k_sizes", "has_bias"):
            record.pop(own)
        return record | {"scheme": None if self.scheme is None else str(self.scheme)}


@dataclass(frozen=True)
class Inspection:
    """Contents of a checkpoint.

    Attributes:
        tool: tool whose convention it follows.
        model_type: entry of config.json.
        kinds: quantized layers, then plain tensors.
        refusals: errors of the readers, by name.
        kv_scales: number of scales of an FP8 KV cache.
        nbytes: bytes of all tensors.
    """

    tool: str
    model_type: str
    kinds: list[Kind]
    refusals: list[str]
    kv_scales: int
    nbytes: int


def inspect(checkpoint: Checkpoint) -> Inspection:
    """Reads all layers of a checkpoint, one after the other, and counts them. Collects refusals instead of raising."""
    kinds: dict[tuple, Kind] = {}
    refusals: list[str] = []
    entries = checkpoint.files.entries
    names = [(name, False) for name in checkpoint.linears] + [(name, True) for name in checkpoint.experts]
    for name, is_experts in Progress(names, desc="layers", unit="layer"):
        nbytes = sum(entries[tensor].nbytes for tensor in checkpoint.tensors_of(name))
        try:
            if is_experts:
                _add_experts(kinds, checkpoint, name, nbytes)
            else:
                _add_linear(kinds, checkpoint, name, nbytes)
        except CheckpointError as error:
            refusals.append(str(error))
    for name in checkpoint.plain:
        entry = entries[name]
        pattern, shape = NUMBER.sub("*", name), str(list(entry.shape))
        key = (pattern, None, shape, entry.dtype)
        kinds.setdefault(key, Kind(pattern, None, shape, entry.dtype)).add(entry.nbytes)
    return Inspection(
        checkpoint.tool, str(checkpoint.config.get("model_type")), list(kinds.values()), refusals,
        len(checkpoint.kv_scales()), checkpoint.files.nbytes,
    )  # fmt: skip


def _add_linear(kinds: dict[tuple, Kind], checkpoint: Checkpoint, name: str, nbytes: int) -> None:
    layer = checkpoint.linear(name)
    n, k = layer.weight.shape
    pattern, shape = NUMBER.sub("*", name), f"[{n}, {k}]"
    kind = kinds.setdefault((pattern, layer.scheme, shape), Kind(pattern, layer.scheme, shape))
    factor = layer.weight.global_scale
    kind.add(nbytes, () if factor is None else (float(factor),))
    kind.values += n * k
    kind.k_sizes.add(k)
    kind.finds_scale |= layer.scheme.activations == "nvfp4" and layer.input_scale is None


def _add_experts(kinds: dict[tuple, Kind], checkpoint: Checkpoint, name: str, nbytes: int) -> None:
    stored = checkpoint.read_experts(name)
    experts, n, k = stored.w13.shape
    pattern, shape = NUMBER.sub("*", name), f"{experts} x [{n}, {k}]"
    kind = kinds.setdefault((pattern, stored.scheme, shape), Kind(pattern, stored.scheme, shape))
    factors = [t.reshape(-1).tolist() for t in (stored.w13_global, stored.w2_global) if t is not None]
    kind.add(nbytes, [f for side in factors for f in side])
    kind.k_sizes |= {k, stored.w2.shape[2]}
    kind.finds_scale |= stored.scheme.activations == "nvfp4" and stored.w13_input is None
    kind.has_bias = stored.w13_bias is not None
    own = stored.w13_global
    if own is not None and own.shape[1] == 2 and bool((own[:, 0] != own[:, 1]).any()):
        kind.unequal += 1


def what_runs(kind: Kind) -> str:
    """Returns what computes layers of a quantized kind."""
    scheme = kind.scheme
    assert scheme is not None
    if is_embedding(kind.name):
        return "QuantizedEmbedding, which dequantizes the rows that are read"
    is_experts = kind.is_experts
    is_int8 = (scheme.weights, scheme.activations) == (INT8.name, INT8.name)
    if is_int8 and not any(k % INT8.k_multiple for k in kind.k_sizes):
        module = "MoE" if is_experts else "QuantizedLinear"
        archs = [arch for arch in ARCHS if INT8_PAIR in mmas_of(arch)]
        return f"{module} on {', '.join(archs)} and on the CPU; elsewhere dequantized to 16 bits"
    if any(k % K_STEP for k in kind.k_sizes):
        return f"dequantized to 16 bits: K is not a multiple of {K_STEP}"
    if (scheme.weights, scheme.activations) == (FP8_128x128.name, FP8_1x128.name):
        if not any(k % FP8_128x128.block_k for k in kind.k_sizes):
            module = "MoE" if is_experts else "QuantizedLinear"
            archs = [arch for arch in ARCHS if (FP8_1x128, FP8_128x128) in mmas_of(arch)]
            return f"{module} on {', '.join(archs)} and on the CPU; elsewhere dequantized to 16 bits"
    if scheme.activations is None and scheme.weights in (INT8.name, FP8_128x128.name):
        block = 1 if scheme.weights == INT8.name else FP8_128x128.block_k
        if not any(k % block for k in kind.k_sizes):
            return f"{'MoE' if is_experts else 'QuantizedLinear'}, weight-only"
    if scheme.weights == INT4 and is_experts and scheme.activations is None:
        return "MoE, weight-only"
    if scheme.weights == "nvfp4" and scheme.activations == "nvfp4":
        return "MoE" if is_experts else "QuantizedLinear"
    if scheme.weights in ("nvfp4", "mxfp4"):
        way = "MoE, weight-only" if is_experts else "QuantizedLinear, weight-only"
        if scheme.weights == "mxfp4" and is_experts and scheme.activations == "mxfp4":
            archs = [arch for arch in ARCHS if MXFP4_PAIR in mmas_of(arch)]
            return f"MoE on {', '.join(archs)} and on the CPU; elsewhere dequantized to 16 bits"
        if scheme.weights == "mxfp4" and not is_experts:
            way += ", as NVFP4 with the same values"
    elif scheme.weights == INT4 and not is_experts:
        way = "QuantizedLinear, weight-only"
    else:
        way = "dequantized to 16 bits, torch multiplies"
    return way if scheme.activations is None else f"{way}; activations rounded to {scheme.activations} before"


def kept_bytes(inspection: Inspection) -> int:
    """Returns the bytes of dequantized weights that ``nn.kept.keep_decoded`` would keep for all layers."""
    return sum(
        k.values * DECODED_BYTES
        for k in inspection.kinds
        if k.scheme is not None
        and k.scheme.weights in ("nvfp4", "mxfp4")
        and what_runs(k).startswith("QuantizedLinear")
        and not any(fnmatch.fnmatchcase(k.name, pattern) for pattern in LEAVE)
    )


def where_it_runs() -> list[tuple[str, str]]:
    """Returns architectures with their way to multiply two NVFP4 operands, or only NVFP4 weights, one entry per way."""
    archs: dict[str, list[str]] = {}
    for family in FAMILIES:
        if NVFP4_PAIR not in family.MMA:  # kernels of this family multiply other formats
            continue
        kind = family.MMA[NVFP4_PAIR].kind
        how = (
            f"tensor cores multiply 4 bits ({kind})"
            if "4" in kind
            else f"dequantized on the way to tensor cores ({kind})"
        )
        archs.setdefault(how, []).extend(family.ARCHS)
    archs["weight-only: weights dequantized, activations of 16 bits"] = list(
        filter(is_weight_only, simt.ARCHS)
    )
    return [(" ".join(names), how) for how, names in archs.items()]
