"""What differs between tools: the names of a layer's tensors, and how the config describes the quantization."""

import fnmatch
import re
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.models.checkpoints.names import spellings
from nvfp4_cute.models.checkpoints.patterns import matcher
from nvfp4_cute.models.checkpoints.stored import Scheme

# Roles of a layer's tensors: packed values, block scales, global scales of weights and of activations, bias.
DATA, SCALE, GLOBAL, INPUT, BIAS = "data", "scale", "global", "input", "bias"
# Further roles for int4: zero points, the sizes before packing, and the block of each value along K.
ZERO, SHAPE, ORDER = "zero", "shape", "order"
PRE = "pre_scale"  # factors of activations before quantization, [K]
KV = "kv"  # a scale of the KV cache, not used by the layer's product
# Roles that the layers of a format require; INPUT is required if activations have a global scale.
NEEDED = {"nvfp4": (DATA, SCALE, GLOBAL)}
NEEDED_OF_OTHERS = (DATA, SCALE)

MAX_SECONDS = 20  # limit for all lookups in one list of modules

Config = Mapping[str, Any]
Unpack = Callable[[str, Mapping[str, torch.Tensor]], tuple[BlockScaledTensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Convention:
    """The conventions of a tool.

    Attributes:
        tool: name of the tool.
        suffixes: last part of a tensor's name -> its role in the layer.
        fused: end of the name of a tensor that holds all experts -> its role.
        is_reciprocal: whether dequantizing divides by the stored global scales.
        schemes: all schemes that the config names.
        scheme: function of a prefix that returns its scheme, or None if the layer is not quantized. Raises CheckpointError for
            an unknown scheme.
        unpack: for int4: function of a prefix and of tensors by role that returns the weights and their order of K; None if the
            tool has no int4.
        names_layers: whether the config says which layers are quantized. Otherwise, layers with packed tensors are.
    """

    tool: str
    suffixes: Mapping[str, str]
    fused: Mapping[str, str]
    is_reciprocal: bool
    schemes: tuple[Scheme, ...]
    scheme: Callable[[str], Scheme | None] = field(repr=False)
    unpack: Unpack | None = field(default=None, repr=False)
    names_layers: bool = True

    def name_of(self, role: str) -> str:
        """Returns the suffix of a role, for messages."""
        return next((suffix for suffix, known in self.suffixes.items() if known == role), role)


def needed_roles(scheme: Scheme) -> tuple[str, ...]:
    """Returns the roles that a layer of a scheme must have."""
    roles = NEEDED.get(scheme.weights, NEEDED_OF_OTHERS)
    more = {INPUT: scheme.activations == "nvfp4", ZERO: scheme.has_zero_points, ORDER: scheme.has_order}
    return (*roles, *(role for role, is_needed in more.items() if is_needed))


class Modules:
    """The modules that a list of names and patterns selects: ``prefix in Modules(patterns)``, with the prefix in any spelling.

    A pattern is one of: a module's exact name, which also selects the modules inside it; a name with wildcards of fnmatch, such
    as a star at its end; or ``re:`` followed by a regular expression for the beginning of a name. Text after a NUL is dropped,
    because one tool's files have remnants of another string there. A model has tens of thousands of experts' projections, so
    patterns are sorted by kind once.

    Raises:
        CheckpointError: patterns are not a list of strings, one is not a regular expression, or all lookups together take more
            than ``MAX_SECONDS``.
    """

    def __init__(self, patterns: Iterable[str]):
        cut = [pattern.split("\0")[0] for pattern in names_of(patterns)]
        expressions = [p[3:] for p in cut if p.startswith("re:")]
        plain = [p for p in cut if p and not p.startswith("re:")]
        wild = [p for p in plain if any(c in p for c in "*?[")]
        begins = [p for p in wild if p.endswith("*") and not any(c in p[:-1] for c in "*?[")]
        # Stored in all spellings, so that a prefix is looked up only in its own.
        self.exact = {name for p in set(plain) - set(wild) for name in spellings(p)}
        self.begins = tuple({name for p in begins for name in spellings(p[:-1])})
        # fnmatch translates stars to groups that never backtrack.
        others = [re.compile(fnmatch.translate(p)).match for p in wild if p not in begins]
        self.matchers: list[Callable[[str], object]] = [*others, *map(matcher, expressions)]
        self._seconds = 0.0

    def __contains__(self, prefix: str) -> bool:
        begun = time.perf_counter()
        found = self.names(prefix) or self._is_matched(prefix)
        self._seconds += time.perf_counter() - begun
        if self._seconds > MAX_SECONDS:
            raise CheckpointError(
                f"patterns of modules take more than {MAX_SECONDS} s to match, last with {prefix}; list the names instead"
            )
        return found

    def names(self, prefix: str) -> bool:
        """Returns whether the list names the module or one around it, or has a pattern for the beginning of its name."""
        if self.begins and prefix.startswith(self.begins):
            return True
        return bool(self.exact) and any(name in self.exact for name in around(prefix))

    def _is_matched(self, prefix: str) -> bool:
        names = tuple(spellings(prefix)) if self.matchers else ()
        for match in self.matchers:
            for name in names:
                if match(name):
                    return True
        return False


def around(prefix: str) -> Iterator[str]:
    """Iterates over the module's name and the names of the modules around it, the nearest first."""
    yield prefix
    while "." in prefix:
        prefix = prefix.rpartition(".")[0]
        yield prefix


def names_of(given: Any) -> list[str]:
    """Returns a config's list of module names or patterns. Raises CheckpointError for anything else."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    names = list(given) if is_list else [given]
    if not is_list or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{reprlib.repr(given)} is not a list of module names; correct config.json")
    return names


def flag_of(config: Config, key: str, default: bool) -> bool:
    """Returns the flag under ``key``, or ``default``. Raises CheckpointError for anything but true or false."""
    found = config.get(key)
    if found is not None and not isinstance(found, bool):
        raise CheckpointError(f"{key} is {reprlib.repr(found)}; it is true or false: correct config.json")
    return default if found is None else found


def object_of(config: Config, key: str, place: str = "") -> Config:
    """Returns the object under ``key``, or an empty one. ``place`` locates ``config`` in messages.

    Raises:
        CheckpointError: the value is not an object.
    """
    found = config.get(key)
    return {} if found is None else _object(f"{place}{key}", found)


def objects_of(config: Config, key: str) -> dict[str, Config]:
    """Returns the objects by name inside the object under ``key``. Raises CheckpointError for other values."""
    return {name: _object(f"{key}.{name}", one) for name, one in object_of(config, key).items()}


def _object(place: str, found: Any) -> Config:
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{place} is {reprlib.repr(found)}; it is an object: correct config.json, or fetch it again"
        )
    return found


def unknown(what: str, value: object, known: Mapping[str, Any]) -> CheckpointError:
    """Returns the error for a scheme of a config that no reader supports."""
    return CheckpointError(
        f"{what} is {reprlib.repr(value)}; known are {', '.join(map(str, known))}: export it as one of these"
    )
