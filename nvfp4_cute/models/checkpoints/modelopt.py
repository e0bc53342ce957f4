"""Checkpoints of NVIDIA ModelOpt: global scales multiply; config.json or hf_quant_config.json describes the quantization."""

from nvfp4_cute.models.checkpoints.convention import (
    DATA,
    GLOBAL,
    INPUT,
    KV,
    PRE,
    SCALE,
    Config,
    Convention,
    Modules,
    around,
    objects_of,
    unknown,
)
from nvfp4_cute.models.checkpoints.int4 import of_modelopt
from nvfp4_cute.models.checkpoints.names import spellings
from nvfp4_cute.models.checkpoints.stored import FP8, INT4, INT8, Scheme

SUFFIXES = {
    "weight": DATA,
    "weight_scale": SCALE,
    "weight_scale_2": GLOBAL,
    "input_scale": INPUT,
    "pre_quant_scale": PRE,
    "k_scale": KV,
    "v_scale": KV,
    "k_bias": KV,
    "v_bias": KV,
}
FUSED = {"": DATA, "_weight_scale": SCALE, "_weight_scale_2": GLOBAL, "_input_scale": INPUT, "_bias": "bias"}
# Formats of weights and activations by quant_algo in upper case.
ALGORITHMS = {
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4_AWQ": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", None),
    "MXFP4": ("mxfp4", "mxfp4"),
    "W4A16_MXFP4": ("mxfp4", None),
    "MXFP8": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "FP8": (FP8, FP8),
    "FP8_PER_CHANNEL_PER_TOKEN": (FP8, FP8),
    "FP8_PB_WO": ("fp8_128x128", "fp8_1x128"),
    "W4A8_NVFP4_FP8": ("nvfp4", FP8),
    "W4A8_MXFP4_FP8": ("mxfp4", FP8),
    "W4A16_AWQ": (INT4, None),
    "W4A8_AWQ": (INT4, FP8),
    "W8A16": (INT8, None),
    "W8A8_SQ_PER_CHANNEL": (INT8, INT8),
}
MIXED = "MIXED_PRECISION"


def convention(quantization: Config) -> Convention:
    """Returns the convention for a ``quantization_config``, or for the ``quantization`` of hf_quant_config.json.

    Raises:
        CheckpointError: quant_algo is unknown, or the config is malformed.
    """
    algorithm = str(quantization.get("quant_algo")).upper()
    groups = objects_of(quantization, "config_groups").values()
    if algorithm == "NVFP4" and groups and not any(group.get("input_activations") for group in groups):
        algorithm = "W4A16_NVFP4"  # the meaning of exports with only weights, whatever the config says
    excluded = [Modules(quantization.get(key) or ()) for key in ("exclude_modules", "ignore")]
    layers = objects_of(quantization, "quantized_layers")
    wild = [(Modules([pattern]), entry) for pattern, entry in layers.items() if "*" in pattern]
    # Refuses unknown algorithms when the checkpoint is opened, not at their first layer.
    algorithms = {str(e.get("quant_algo")) for e in layers.values()} if algorithm == MIXED else {algorithm}
    schemes = tuple(_scheme(each) for each in sorted(algorithms))

    def scheme(prefix: str) -> Scheme | None:
        if any(prefix in modules for modules in excluded):
            return None
        return _layer_scheme(prefix, layers, wild) if algorithm == MIXED else schemes[0]

    return Convention("modelopt", SUFFIXES, FUSED, False, schemes, scheme, of_modelopt)


def _layer_scheme(prefix: str, layers: Config, wild: list[tuple[Modules, Config]]) -> Scheme | None:
    """Finds a layer's scheme in MIXED_PRECISION: the exact name first, then the nearest module around it, then wildcards."""
    for name in spellings(prefix):
        entry = next((layers[one] for one in around(name) if one in layers), None)
        if entry is not None:
            return _scheme(entry.get("quant_algo"))
    entry = next((entry for modules, entry in wild if prefix in modules), None)
    return None if entry is None else _scheme(entry.get("quant_algo"))


def _scheme(algorithm: str | None) -> Scheme:
    found = ALGORITHMS.get(str(algorithm).upper())
    if found is None:
        raise unknown("quant_algo", algorithm, ALGORITHMS)
    return Scheme(str(algorithm).upper(), *found)
