"""Memory footprint of weights: a linear layer, a mixture-of-experts layer, and models, in NVFP4, fp8, and fp16.

NVFP4 is counted as stored: two values per byte, one e4m3 scale per 16 values in the 128x4 blocked layout, including its
padding, and a float32 global scale per matrix. Fp8 has one float32 scale per matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.roofline.speed_of_light import tensor_bytes

FORMATS = ("fp16", "fp8", "nvfp4")
GLOBAL_SCALE_BYTES = {"fp16": 0, "fp8": 4, "nvfp4": 4}


@dataclass(frozen=True)
class Weights:
    """Weight matrices that belong together.

    Attributes:
        name: name of the group.
        matrices: (count, n, k): ``count`` matrices of n output and k input features.
    """

    name: str
    matrices: tuple[tuple[int, int, int], ...]

    @property
    def parameters(self) -> int:
        """Number of values in all matrices."""
        return sum(count * n * k for count, n, k in self.matrices)

    def stored_bytes(self, storage: str) -> int:
        """Returns the bytes of all matrices with their scales in one of ``FORMATS``."""
        return sum(count * matrix_bytes(storage, n, k) for count, n, k in self.matrices)


def matrix_bytes(storage: str, n: int, k: int) -> int:
    """Returns the stored bytes of an (n, k) weight matrix in one of ``FORMATS``.

    Raises:
        ValueError: an unknown format, or a K that NVFP4 blocks do not divide.
    """
    if storage not in GLOBAL_SCALE_BYTES:
        raise ValueError(f"format {storage!r} is unknown; use one of {', '.join(FORMATS)}")
    values, scales = tensor_bytes(storage, n, k)
    if storage == "nvfp4":
        NVFP4.num_k_blocks(k)
        scales = NVFP4.scale_bytes(n, k)
    return values + scales + GLOBAL_SCALE_BYTES[storage]


def linear(n: int, k: int) -> Weights:
    """Returns a linear layer of k input and n output features."""
    return Weights(f"linear {n} x {k}", ((1, n, k),))


def moe_layer(name: str, num_experts: int, hidden: int, intermediate: int, num_layers: int = 1) -> Weights:
    """Returns the experts of SwiGLU layers: gate and up (2 * intermediate, hidden), down (hidden, intermediate)."""
    count = num_experts * num_layers
    return Weights(name, ((count, 2 * intermediate, hidden), (count, hidden, intermediate)))


@dataclass(frozen=True)
class MoeModel:
    """Mixture-of-experts layers of a model, by its published configuration."""

    name: str
    num_experts: int
    hidden: int
    intermediate: int
    num_layers: int

    def layer(self) -> Weights:
        """Returns all experts of one layer."""
        return moe_layer(f"{self.name} layer", self.num_experts, self.hidden, self.intermediate)

    def model(self) -> Weights:
        """Returns all experts of all layers."""
        name = f"{self.name}, {self.num_layers} layers"
        return moe_layer(name, self.num_experts, self.hidden, self.intermediate, self.num_layers)


# (n, k) of attention and feed-forward layers of common dense models; a transpose has equal bytes.
LINEAR_SHAPES = ((4096, 4096), (11008, 4096), (14336, 4096), (28672, 8192))
# Routed and shared experts; DeepSeek-V3 has 3 dense layers before its 58.
MOE_MODELS = (
    MoeModel("DeepSeek-V3 experts", 257, 7168, 2048, 58),
    MoeModel("Qwen3-30B-A3B experts", 128, 2048, 768, 48),
    MoeModel("Mixtral-8x7B experts", 8, 4096, 14336, 32),
)


def catalogue() -> list[Weights]:
    """Returns linear layers, one layer of each model, and all layers of each model."""
    layers = [linear(n, k) for n, k in LINEAR_SHAPES]
    return layers + [m.layer() for m in MOE_MODELS] + [m.model() for m in MOE_MODELS]


def read_us(num_bytes: int, target: Target) -> float:
    """Returns the least microseconds in which ``num_bytes`` can be read once."""
    return 1e6 * num_bytes / target.floor_bandwidth_bytes_per_s


def records(weights: Sequence[Weights], target: Target) -> list[dict]:
    """Returns one plain dict per row: name, parameters, bytes and read time by format, fp16 over NVFP4, whether it fits."""
    rows = []
    for entry in weights:
        sizes = {storage: entry.stored_bytes(storage) for storage in FORMATS}
        rows.append(
            {
                "name": entry.name,
                "parameters": entry.parameters,
                "bytes": sizes,
                "read_us": {storage: read_us(size, target) for storage, size in sizes.items()},
                "fp16_over_nvfp4": sizes["fp16"] / sizes["nvfp4"],
                "fits": {storage: size <= target.memory_bytes for storage, size in sizes.items()},
            }
        )
    return rows
