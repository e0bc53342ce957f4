"""Checkpoints of compressed-tensors (llm-compressor, vLLM), which store global scales as reciprocals, 2688 / amax."""

from reprlib import repr

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.convention import (
    DATA,
    GLOBAL,
    INPUT,
    KV,
    ORDER,
    SCALE,
    SHAPE,
    ZERO,
    Config,
    Convention,
    Modules,
    around,
    names_of,
    object_of,
    objects_of,
    unknown,
)
from nvfp4_cute.models.checkpoints.int4 import of_compressed_tensors
from nvfp4_cute.models.checkpoints.names import is_embedding, spellings
from nvfp4_cute.models.checkpoints.stored import FP8, INT4, INT8, Scheme

SUFFIXES = {
    "weight_packed": DATA,
    "weight": DATA,
    "weight_scale": SCALE,
    "weight_global_scale": GLOBAL,
    "input_global_scale": INPUT,
    "input_scale": INPUT,
    "weight_zero_point": ZERO,
    "weight_shape": SHAPE,
    "weight_g_idx": ORDER,
    "k_scale": KV,
    "v_scale": KV,
}
# Format of the weights by the format of a group.
FORMATS = {
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "mxfp8-quantized": "mxfp8_e4m3",
    "float-quantized": FP8,
    "int-quantized": INT8,
    "pack-quantized": INT4,
}
# Values of actorder with an order of K: "dynamic" is another name for "group" (quant_args.py, ActivationOrdering).
ORDERING = (True, "group", "dynamic")
GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8_e4m3": 32}
BITS = {"nvfp4": 4, "mxfp4": 4, "mxfp8_e4m3": 8, FP8: 8, "fp8_128x128": 8, INT8: 8, INT4: 4}


def convention(quantization: Config) -> Convention:
    """Returns the convention for a ``quantization_config``.

    Raises:
        CheckpointError: a group's format is unknown or contradicts its bits or group size, or weights are sparse or
            transformed.
    """
    _check_nothing_else(quantization)
    ignored = Modules(quantization.get("ignore") or ())
    groups = {
        name: (_scheme(name, group, quantization.get("format")), names_of(group.get("targets") or ["Linear"]))
        for name, group in objects_of(quantization, "config_groups").items()
    }
    if not groups:
        raise CheckpointError(
            "quantization_config has no config_groups, so nothing says how layers are quantized"
        )
    targets = {target: found for found, own in groups.values() for target in own}
    patterns = [t for t in targets if t.startswith("re:") or any(c in t for c in "*?[")]
    named = {name: found for t, found in targets.items() if t not in patterns for name in spellings(t)}
    # In the library's order (utils/match.py, match_targets): names, then expressions alphabetically, then classes.
    matched = [(Modules([t]), targets[t]) for t in sorted(patterns, key=lambda t: ("re:" in t, t))]

    def scheme(prefix: str) -> Scheme | None:
        if prefix in ignored:
            return None
        own = next((named[name] for name in around(prefix) if name in named), None)
        own = own or next((found for modules, found in matched if prefix in modules), None)
        own = own or (targets.get("Embedding") if is_embedding(prefix) else None)
        return own or targets.get("Linear")

    schemes = tuple(found for found, _ in groups.values())
    return Convention("compressed-tensors", SUFFIXES, {}, True, schemes, scheme, of_compressed_tensors)


def _check_nothing_else(quantization: Config) -> None:
    """Raises if the config does more to weights than quantize them."""
    given = object_of(quantization, "sparsity_config")
    sparsity = given.get("format") or "dense"
    if sparsity != "dense":
        structure = given.get("sparsity_structure")
        raise CheckpointError(
            f"sparsity_config.format is {repr(sparsity)}, structure {repr(structure)}; this reader takes dense weights: export "
            "the model without sparse compression"
        )
    if object_of(quantization, "transform_config").get("config_groups"):
        raise CheckpointError(
            "transform_config rotates weights and activations, which this reader does not; export the model without transforms"
        )


def _scheme(name: str, group: Config, default: str | None) -> Scheme:
    place = f"config_groups.{name}."
    weights, given = (object_of(group, side, place) for side in ("weights", "input_activations"))
    tool_format = group.get("format") or default
    found = FORMATS.get(str(tool_format))
    if found is None:
        raise unknown(f"format of config_groups.{name}", tool_format, FORMATS)
    if found == FP8 and weights.get("strategy") == "block":
        found = "fp8_128x128"
    if found == INT8 and weights.get("num_bits") == BITS[INT4]:
        found = INT4  # one per byte, as in W4A8
    _check(f"config_groups.{name}", weights, found)
    if found == INT8:
        _check_integers(f"config_groups.{name}", group)
    is_token = (given.get("num_bits"), given.get("strategy"), given.get("dynamic")) == (8, "token", True)
    if found == INT4 and given and not (is_token and given.get("symmetric", True) is True):
        raise CheckpointError(
            f"config_groups.{name} quantizes activations of int4 weights, and not to 8 bits with one scale per token as it "
            "comes: export the weights alone, or W4A8"
        )
    has_zero_points = found == INT4 and weights.get("symmetric", True) is not True
    activations = _activations(given, found)
    has_order = found == INT4 and weights.get("actorder") in ORDERING
    return Scheme(str(tool_format), found, activations, has_zero_points, has_order=has_order)


def _activations(given: Config, weights: str) -> str | None:
    if not given:
        return None
    if weights == "fp8_128x128":
        return "fp8_1x128"
    if given.get("type") == "int" and given.get("num_bits") == BITS[INT8]:
        return INT8
    if given.get("num_bits") == BITS[weights]:
        return weights
    return "mxfp8_e4m3" if given.get("group_size") == GROUPS["mxfp8_e4m3"] else FP8


def _check_integers(place: str, group: Config) -> None:
    """Raises if integers have zero points, or if weights or activations have other scales than one per row."""
    rows = {"weights": ("channel", "tensor"), "input_activations": ("token",)}
    for side, strategies in rows.items():
        given = group.get(side) or {}
        if given and given.get("symmetric", True) is not True:
            raise CheckpointError(
                f"{place}.{side} has zero points; kernels have none: export it with symmetric=true"
            )
        if given and given.get("strategy") not in strategies:
            raise CheckpointError(
                f"{place}.{side}.strategy is {repr(given.get('strategy'))}; kernels have one scale per row of integers: export "
                f"it with {' or '.join(map(repr, strategies))}"
            )
    activations = group.get("input_activations") or {}
    if activations and activations.get("dynamic") is not True:
        raise CheckpointError(
            f"{place}.input_activations.dynamic is {repr(activations.get('dynamic'))}; rows get their scales as they come: "
            "export it with dynamic=true"
        )


def _check(place: str, weights: Config, found: str) -> None:
    expected = {"num_bits": BITS[found], "type": "int" if found in (INT8, INT4) else "float"}
    if found in GROUPS:
        expected["group_size"] = GROUPS[found]
    for key, value in expected.items():
        if weights.get(key) != value:
            raise CheckpointError(
                f"{place}.weights.{key} is {repr(weights.get(key))}, and its format {found} has {value!r}; export it anew"
            )
    if found == "fp8_128x128" and weights.get("block_structure") not in ([128, 128], (128, 128)):
        raise CheckpointError(
            f"{place}.weights.block_structure is {repr(weights.get('block_structure'))}; kernels have blocks of [128, 128]"
        )
