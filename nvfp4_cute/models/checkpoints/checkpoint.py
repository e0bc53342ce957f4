"""``Checkpoint``: reads a folder of any supported tool, layer by layer."""

import os
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, quantized_tensor
from nvfp4_cute.models.checkpoints import awq, checks, compressed_tensors, fp8, gptq, modelopt, mxfp4
from nvfp4_cute.models.checkpoints.convention import (
    BIAS,
    DATA,
    GLOBAL,
    INPUT,
    KV,
    ORDER,
    PRE,
    SCALE,
    ZERO,
    Config,
    Convention,
    object_of,
)
from nvfp4_cute.models.checkpoints.experts_config import ExpertsConfig
from nvfp4_cute.models.checkpoints.folders import way_out
from nvfp4_cute.models.checkpoints.json_files import read_object
from nvfp4_cute.models.checkpoints.names import (
    FUSED_PART,
    INTERLEAVED_MODELS,
    K_FIRST_MODELS,
    expert_of,
    spellings,
)
from nvfp4_cute.models.checkpoints.stored import (
    FP8,
    INT4,
    INT8,
    Scheme,
    StoredExperts,
    StoredLinear,
    stored_weight,
)
from nvfp4_cute.models.checkpoints.tensors import TensorFiles

READERS = {
    "modelopt": modelopt.convention,
    "compressed-tensors": compressed_tensors.convention,
    "mxfp4": mxfp4.convention,
    "fp8": fp8.convention,
    "gptq": gptq.convention,
    "awq": awq.convention,
}
# Dtypes of quantized weights, as files name them.
QUANTIZED_DTYPES = ("U8", "F8_E4M3")
# Dtypes, and last parts of names, that only quantizing tools write, whether or not a config mentions them.
PACKED_DTYPES = (*QUANTIZED_DTYPES, "U32", "F4", "F8_E5M2", "F8_E8M0")
PACKED_NAMES = ("qweight", "weight_packed")
# Last parts of names that a tool writes only if its convention has them.
OWN_NAMES = (
    *PACKED_NAMES,
    "qzeros",
    "weight_global_scale",
    "input_global_scale",
    "weight_scale_2",
    "weight_scale_inv",
)
MissingInputScale = Literal["refuse", "fill"]
Roles = dict[str, str]  # role -> name of the tensor


class Checkpoint:
    """The quantized layers and experts of a checkpoint folder, each read on demand.

    Weights are views of mapped files, with two exceptions: experts in separate tensors are stacked, and weights in another
    order than that of kernels are copied. Memory use is therefore that of the layers that the caller holds.

    Args:
        folder: folder of config.json and safetensors files.
        missing_input_scale: what to do for a layer with 4-bit activations whose scale of activations is missing, zero, not
            finite, or out of the range of kernels, for example of experts that no token reached during calibration. "refuse"
            raises. "fill" gives experts the largest scale of their layer, and computes that of other layers from each input.
        files: the safetensors files to read, or None; see ``TensorFiles``.

    Attributes:
        config: contents of config.json.
        tool: the tool whose convention the checkpoint follows; "none" without quantization.
        files: all tensors.
        linears: prefix -> scheme of every quantized layer outside experts, in the order of the files.
        experts: prefix -> scheme of every layer of quantized experts.
        plain: names of all tensors that belong to no quantized layer.

    Raises:
        FileNotFoundError: there is no config.json, or there are no tensors.
        CheckpointError: a scheme or a tensor is unknown, or no file describes the quantization of weights that are quantized.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        missing_input_scale: MissingInputScale = "refuse",
        files: Sequence[str | os.PathLike] | None = None,
    ):
        if missing_input_scale not in ("refuse", "fill"):
            raise ValueError(f'missing_input_scale={missing_input_scale!r} is neither "refuse" nor "fill"')
        self.folder = Path(folder)
        self.missing_input_scale = missing_input_scale
        self.config = read_config(self.folder)
        self.convention = _convention(self.config, self.folder)
        self.tool = "none" if self.convention is None else self.convention.tool
        self.files = TensorFiles(self.folder, files)
        self._modules: dict[str, Roles] = {}
        self._foreign: dict[str, list[str]] = {}
        self.linears: dict[str, Scheme] = {}
        self.experts: dict[str, Scheme] = {}
        self._parts: dict[str, dict[tuple[str, int | None], str]] = {}
        self.plain: list[str] = list(self.files)
        if self.convention is None:
            _check_plain(self.files)
        else:
            self._sort(self.convention)

    # ---- contents --------------------------------------------------------------------------------------------

    @property
    def experts_config(self) -> ExpertsConfig:
        """What config.json says about layers of experts. Raises CheckpointError for an activation that no kernel computes."""
        return ExpertsConfig.of(self.config)

    def linear_named(self, name: str) -> str | None:
        """Returns the prefix of the layer that a module with this name computes, in any spelling; None if it is not quantized."""
        return next((one for one in spellings(name) if one in self.linears), None)

    def experts_named(self, name: str) -> str | None:
        """Returns the prefix of the experts that a module with this name computes; None if they are not quantized."""
        return next((one for one in spellings(name) if one in self.experts), None)

    def tensors_of(self, prefix: str) -> list[str]:
        """Returns the names of the tensors of a quantized layer, or of all experts of a layer."""
        prefixes = self._parts[prefix].values() if prefix in self.experts else [prefix]
        return [name for one in prefixes for name in self._modules[one].values()]

    def kv_scales(self) -> dict[str, float]:
        """Returns the scales of an FP8 KV cache, which multiply, by tensor name.

        Raises CheckpointError for more than one number.
        """
        names = [
            name for roles in self._modules.values() for role, name in roles.items() if role.startswith(KV)
        ]
        found = {name: self.files[name] for name in names if not name.endswith("_bias")}
        for name, scale in found.items():
            if scale.numel() != 1:
                raise CheckpointError(
                    f"{name} has shape {list(scale.shape)}; a KV cache has one scale: export it again"
                )
        return {name: float(scale) for name, scale in found.items()}

    # ---- layers ----------------------------------------------------------------------------------------------

    def linear(self, prefix: str) -> StoredLinear:
        """Reads and checks a layer of ``linears``. Raises CheckpointError with the name of the tensor."""
        return self._read(prefix, self.linears[prefix])

    def each_linear(self) -> Iterator[StoredLinear]:
        """Reads all of ``linears``, one after the other."""
        return (self.linear(prefix) for prefix in self.linears)

    def read_experts(self, prefix: str) -> StoredExperts:
        """Reads, checks and stacks the experts of a layer. Raises CheckpointError with the name of the tensor."""
        scheme, parts = self.experts[prefix], self._parts[prefix]
        count = self._count(prefix, parts)
        interleaved = str(self.config.get("model_type")) in INTERLEAVED_MODELS
        sides = {
            kind: self._side(prefix, scheme, kind, count, interleaved)
            for kind in ("gate_up", "gate", "up", "down")
            if any(key[0] == kind for key in parts)
        }
        down = sides.get("down")
        if down is None or ("gate_up" not in sides and "up" not in sides):
            raise CheckpointError(
                f"{prefix} has {', '.join(sorted(sides))}; experts have up_proj (w3) and down_proj (w2), or gate_up_proj "
                "and down_proj: a file of the checkpoint is missing"
            )
        first = sides.get("gate_up")
        if first is None:
            has_gate = "gate" in sides
            first = _joined(sides["gate"], sides["up"]) if has_gate else sides["up"]
        else:
            has_gate = True
            if first.factors is not None and first.factors.shape[1] == 1:
                first.factors = first.factors.expand(-1, 2).contiguous()
        return StoredExperts(
            prefix, scheme, first.weight, first.factors, down.weight,
            None if down.factors is None else down.factors[:, 0], first.inputs, down.inputs,
            first.bias, down.bias, has_gate, first.order, down.order, first.pre_scale, down.pre_scale,
        )  # fmt: skip

    # ---- reading ---------------------------------------------------------------------------------------------

    def _read(self, prefix: str, scheme: Scheme) -> StoredLinear:
        """Reads a layer, or one projection of all experts, whose weights are [E, N, K] and whose factors are [E]."""
        assert self.convention is not None
        roles = self._modules[prefix]
        if prefix in self._foreign:
            raise checks.foreign(prefix, scheme, self._foreign[prefix][0])
        optional = (INPUT,) if self.missing_input_scale == "fill" else ()
        checks.check_present(prefix, scheme, set(roles), self.convention, optional)
        if scheme.weights == INT4:
            assert self.convention.unpack is not None
            tensors = {role: self.files[name] for role, name in roles.items() if not role.startswith(KV)}
            weight, order = self.convention.unpack(prefix, tensors)
            return StoredLinear(prefix, scheme, weight, None, order, self._pre_scale(roles, weight))
        unknown = next((roles[role] for role in (ZERO, ORDER) if role in roles), None)
        if unknown is not None:
            raise checks.foreign(prefix, scheme, unknown)
        data, scale = self.files[roles[DATA]], self.files[roles[SCALE]]
        is_k_first = str(self.config.get("model_type")) in K_FIRST_MODELS
        data, scale = _k_major(roles[DATA], data, scale, scheme, is_k_first)
        scale = _shaped(data, scale, scheme)
        checks.check_data(roles[DATA], scheme, data, scale, roles[SCALE])
        if scheme.weights in (FP8, INT8):
            scale = scale.float().expand(*data.shape[:-1], 1).contiguous()
        if scheme.weights == "fp8_128x128":
            scale = scale.float()  # some are stored in bfloat16
        weight = stored_weight(scheme.weights, data, scale, self._factor(roles, GLOBAL))
        given = self._factor(roles, INPUT) if scheme.activations == "nvfp4" else None
        return StoredLinear(prefix, scheme, weight, given, None, self._pre_scale(roles, weight))

    def _pre_scale(self, roles: Roles, weight: BlockScaledTensor) -> torch.Tensor | None:
        """Returns the factors of activations, [K]."""
        if PRE not in roles:
            return None
        stored = self.files[roles[PRE]]
        checks.check_pre_scale(roles[PRE], stored, weight.shape[-1])
        return stored.reshape(-1)

    def _factor(self, roles: Roles, role: str) -> torch.Tensor | None:
        """Returns a global scale that multiplies, float32 [] or [E]."""
        assert self.convention is not None
        if role not in roles:
            return None
        stored = self.files[roles[role]]
        if role == INPUT and self.missing_input_scale == "fill" and not bool(checks.is_factor(stored).all()):
            return None
        checks.check_count(roles[role], stored, self.files.entries[roles[DATA]].shape)
        checks.check_factor(roles[role], stored)
        factor = 1 / stored if self.convention.is_reciprocal else stored.clone()
        return factor.reshape(()) if factor.numel() == 1 else factor.reshape(-1)

    def _count(self, prefix: str, parts: dict[tuple[str, int | None], str]) -> int:
        """Returns the number of experts. Raises unless every projection has all of them."""
        numbers = {expert for _, expert in parts}
        if None in numbers:
            roles = self._modules[next(iter(parts.values()))]
            return self.files.entries[roles[DATA]].shape[0]
        count = 1 + max(n for n in numbers if n is not None)
        for kind in dict.fromkeys(kind for kind, _ in parts):
            own = {n for one, n in parts if one == kind}
            if len(own) < count:
                absent = next(n for n in range(count) if n not in own)
                raise CheckpointError(
                    f"{prefix} has no {kind} projection of expert {absent}, and {count} experts; a file of the checkpoint "
                    "is missing: fetch it again"
                )
        return count

    def _side(self, prefix: str, scheme: Scheme, kind: str, count: int, interleaved: bool) -> "_Side":
        """Reads one projection of all experts."""
        parts = self._parts[prefix]
        bias = order = pre_scale = None
        if (kind, None) in parts:
            name = parts[kind, None]
            stored = self._read(name, scheme)
            if stored.order is not None or stored.pre_scale is not None:
                raise CheckpointError(
                    f"{name} holds all experts, and one order of K or factors of activations; export one tensor an expert"
                )
            weight, factor, given = stored.weight, stored.weight.global_scale, stored.input_scale
            weight = replace(weight, global_scale=None)
            factors = None if factor is None else factor.reshape(-1, 1).expand(count, 1).contiguous()
            inputs = [None if given is None else given.reshape(-1).expand(count)[e] for e in range(count)]
            if BIAS in self._modules[name]:
                bias = self.files[self._modules[name][BIAS]]
        else:
            read = [self._read(parts[kind, e], scheme) for e in range(count)]
            weight, factors = stacked(prefix, kind, [one.weight for one in read])
            inputs = [one.input_scale for one in read]
            order, pre_scale = _stacked_rows(read)
            bias = self._bias([one.name for one in read])
        checks.check_bias(f"{kind} projections of {prefix}", bias, weight.shape)
        side = _Side(weight, factors, self._inputs(scheme, prefix, inputs), bias, order, pre_scale)
        return side.deinterleaved() if kind == "gate_up" and interleaved else side

    def _bias(self, names: list[str]) -> torch.Tensor | None:
        """Returns the biases of one projection of all experts, [E, N]; None if no expert has one."""
        names = [f"{name}.bias" for name in names]
        absent = [name for name in names if name not in self.files]
        if len(absent) == len(names):
            return None
        if absent:
            raise CheckpointError(
                f"{absent[0]} is in no file, and other experts of the layer have a bias; a file of the checkpoint is missing: "
                "fetch it again"
            )
        biases = [self.files[name] for name in names]
        checks.check_alike(names, biases)
        return torch.stack(biases)

    def _inputs(self, scheme: Scheme, prefix: str, inputs: list[torch.Tensor | None]) -> torch.Tensor | None:
        """Returns the scales of activations, [E], with unknown ones replaced by the largest known one."""
        if scheme.activations != "nvfp4":
            return None
        known = [one for one in inputs if one is not None]
        if not known:
            raise CheckpointError(
                f"{prefix} has 4-bit activations and not one scale of them; calibrate the model again, or export it weight-only"
            )
        largest = torch.stack(known).amax()
        return torch.stack([largest if one is None else one for one in inputs])

    # ---- sorting tensors -------------------------------------------------------------------------------------

    def _sort(self, convention: Convention) -> None:
        """Fills ``linears``, ``experts`` and ``plain``."""
        others: dict[str, list[str]] = {}
        for name in self.files:
            placed = _place(name, convention)
            if placed is None:
                fused = FUSED_PART.match(name)
                others.setdefault(fused[1] if fused else name.rpartition(".")[0], []).append(name)
                continue
            prefix, role = placed
            role = f"{KV}.{name}" if role == KV else role
            roles = self._modules.setdefault(prefix, {})
            if role in roles:
                raise CheckpointError(
                    f"{roles[role]} and {name} are the {role} of one layer, in the spellings of two tools: remove one of them"
                )
            roles[role] = name
        for prefix in list(self._modules):
            if not self._is_quantized(prefix):
                roles = self._modules[prefix]
                if not any(role.startswith(KV) for role in roles):
                    del self._modules[prefix]
                continue
            scheme = convention.scheme(prefix)
            if scheme is None:
                raise CheckpointError(
                    f"{next(iter(self._modules[prefix].values()))} is quantized, and {prefix} is one that the checkpoint's "
                    "config leaves out; one of the two is of another export"
                )
            self._add(prefix, scheme)
            unknown = [name for name in others.get(prefix, ()) if not name.endswith(".bias")]
            if unknown:
                self._foreign[prefix] = unknown
        owned = {name for roles in self._modules.values() for name in roles.values()}
        self.plain = [name for name in self.files if name not in owned]
        self._check_method(convention)

    def _check_method(self, convention: Convention) -> None:
        """Raises for tensors of another method's tool, which would be misread or ignored."""
        foreign = next((name for name in self.plain if _is_of_another_tool(name, convention)), None)
        of_a_layer = {name for names in self._foreign.values() for name in names}
        if foreign is not None and foreign not in of_a_layer:
            raise CheckpointError(
                f"{foreign} is not a tensor of {convention.tool}, which quant_method names; config.json and the tensors are of "
                "different exports: fetch both again"
            )

    def _is_quantized(self, prefix: str) -> bool:
        roles = self._modules[prefix]
        data = roles.get(DATA)
        return SCALE in roles or (data is not None and self.files.entries[data].dtype in QUANTIZED_DTYPES)

    def _add(self, prefix: str, scheme: Scheme) -> None:
        found = expert_of(prefix)
        if found is None:
            self.linears[prefix] = scheme
            return
        experts, kind, number = found
        known = self.experts.setdefault(experts, scheme)
        if known != scheme:
            raise CheckpointError(
                f"{prefix} is {scheme.name}, and other experts of its layer are {known.name}; one layer's experts are "
                "quantized alike: export them so"
            )
        parts = self._parts.setdefault(experts, {})
        if (kind, number) in parts:
            raise CheckpointError(
                f"{parts[kind, number]} and {prefix} are both the {kind} projection of an expert: remove one of them"
            )
        parts[kind, number] = prefix


class _Side:
    """One projection of all experts: weights [E, N, K], factors [E, 1 or 2], inputs [E], bias [E, N]; order, pre_scale [E, K]."""

    def __init__(self, weight, factors, inputs, bias, order=None, pre_scale=None):
        self.weight, self.factors, self.inputs, self.bias = weight, factors, inputs, bias
        self.order, self.pre_scale = order, pre_scale

    def deinterleaved(self) -> "_Side":
        """Rearranges alternating rows, the gate's first, to all rows of gate, then all of up."""
        turn = lambda t: torch.cat([t[:, 0::2], t[:, 1::2]], 1)
        weight = replace(self.weight, data=turn(self.weight.data), scale=turn(self.weight.scale))
        return _Side(weight, self.factors, self.inputs, None if self.bias is None else turn(self.bias))


def stacked(
    prefix: str, kind: str, weights: list[BlockScaledTensor]
) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """Stacks the weights of all experts to [E, N, K] without global scales, and the global scales to [E, 1]."""
    one = weights[0]
    other = next((e for e, w in enumerate(weights) if (w.shape, w.format) != (one.shape, one.format)), None)
    if other is not None:
        raise CheckpointError(
            f"{prefix} has {kind} projections of {list(one.shape)} in {one.format} and, of expert {other}, of "
            f"{list(weights[other].shape)} in {weights[other].format}; one layer's experts are alike: files of different "
            "models, or gate, up and down in each other's place"
        )
    data, scale = torch.stack([w.data for w in weights]), torch.stack([w.scale for w in weights])
    stacked = quantized_tensor(data, scale, None, (len(weights), *one.shape), one.format, "rowmajor")
    factors = [w.global_scale for w in weights if w.global_scale is not None]
    return stacked, torch.stack(factors).reshape(-1, 1) if factors else None


def _stacked_rows(read: list[StoredLinear]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Stacks orders of K and factors of activations of all experts, [E, K]; None if no expert has any."""
    k, order, pre_scale = read[0].weight.shape[-1], None, None
    if any(one.order is not None for one in read):
        order = torch.stack([torch.arange(k) if one.order is None else one.order for one in read])
    if any(one.pre_scale is not None for one in read):
        pre_scale = torch.stack(
            [torch.ones(k) if one.pre_scale is None else one.pre_scale.float() for one in read]
        )
    return order, pre_scale


def _is_same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _joined(gate: _Side, up: _Side) -> _Side:
    """Joins [gate; up] of every expert. The larger scale of activations serves both, because they read the same rows."""
    experts, n, k = gate.weight.shape
    if gate.weight.shape != up.weight.shape:
        raise CheckpointError(
            f"gate projections are {list(gate.weight.shape)} and up projections {list(up.weight.shape)}; both are [E, I, H]: "
            "files of different models, or down in the place of one"
        )
    if n % gate.weight.format.block_rows:
        raise CheckpointError(
            f"experts are {n} wide in blocks of 128 x 128; a multiple of 128 is needed to hold gate and up in one tensor"
        )
    if not _is_same(gate.order, up.order) or not _is_same(gate.pre_scale, up.pre_scale):
        raise CheckpointError(
            "gate and up projections of experts have different orders of K, or factors of activations, and both read the same "
            'rows: export the model with desc_act=False, actorder "static", or without AWQ'
        )
    weight = quantized_tensor(
        torch.cat([gate.weight.data, up.weight.data], 1), torch.cat([gate.weight.scale, up.weight.scale], 1),
        None, (experts, n + up.weight.shape[1], k), gate.weight.format, "rowmajor",
    )  # fmt: skip
    factors = None if gate.factors is None else torch.cat([gate.factors, up.factors], 1)
    inputs = None if gate.inputs is None else torch.maximum(gate.inputs, up.inputs)
    if (gate.bias is None) != (up.bias is None):
        raise CheckpointError(
            "of gate and up projections of experts one has biases; both have, or none: a file of the checkpoint is missing"
        )
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias], 1)
    return _Side(weight, factors, inputs, bias, gate.order, gate.pre_scale)


def _k_major(
    name: str, data: torch.Tensor, scale: torch.Tensor, scheme: Scheme, is_k_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves K to the last dimension of values and scales; fused experts may have K first, and gpt-oss has a dimension of blocks.

    Raises:
        CheckpointError: blocks of scales run along N.
    """
    if data.ndim == 4:
        return data.flatten(-2), scale
    if (
        data.ndim == 3
        and scheme.weights == "nvfp4"
        and scale.ndim == 3
        and data.shape[1] == 8 * scale.shape[1]
    ):
        return data.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
    if data.ndim != 3 or not is_k_first:
        return data, scale
    if scheme.weights not in (FP8, INT8) or scale.numel() not in (1, len(data)):
        raise CheckpointError(
            f"{name} of {list(data.shape)} lies K first, and scales {list(scale.shape)} are not for blocks along K, as products "
            "need them: export the model in NVFP4, or with one tensor an expert"
        )
    return data.transpose(1, 2).contiguous(), scale


def _shaped(data: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Reshapes scales of K-major values to the shape of their format if the number of elements fits.

    Some tools write a single scale without dimensions, or blocks of 128 x 128 with extra dimensions of extent 1. ModelOpt's
    W4A8_NVFP4_FP8 has NVFP4 blocks of 32, each of which becomes two of 16.
    """
    *lead, n, width = data.shape
    if scheme.weights in (FP8, INT8):
        shapes = ((*lead, n, 1), (*lead, 1, 1), (1,) * data.ndim)
        fitting = next((s for s in shapes if torch.Size(s).numel() == scale.numel()), scale.shape)
        return scale.reshape(fitting)
    if scheme.weights == "fp8_128x128":
        expected = (*lead, *checks.scale_shape(scheme.weights, n, width))
        is_same = scale.ndim != data.ndim and scale.numel() == torch.Size(expected).numel()
        return scale.reshape(expected) if is_same else scale
    if scheme.weights == "nvfp4" and scheme.activations == FP8 and 16 * scale.shape[-1] == width:
        return scale.view(torch.uint8).repeat_interleave(2, -1).view(scale.dtype)
    return scale


def _place(name: str, convention: Convention) -> tuple[str, str] | None:
    """Returns layer and role of a tensor by its name; None for a name without a role."""
    prefix, _, suffix = name.rpartition(".")
    if suffix in convention.suffixes:
        return prefix, convention.suffixes[suffix]
    for fused, role in sorted(convention.fused.items(), key=lambda item: -len(item[0])):
        bare = name.removesuffix(fused) if fused else name
        if (bare != name or not fused) and expert_of(bare) is not None:
            return bare, role
    return None


def _is_of_another_tool(name: str, convention: Convention) -> bool:
    """Returns whether only tools with another convention write tensors with such a name."""
    suffix = name.rpartition(".")[2]
    return suffix in OWN_NAMES and suffix not in convention.suffixes


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json of a folder. Raises FileNotFoundError without one."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; {way_out(folder)}")
    return read_object(path)


def unwrapped(quantization: Config) -> Config:
    """Returns the config itself, which hf_quant_config.json stores next to the name of its producer."""
    if quantization.get("quantization") is None:
        return quantization
    return {**object_of(quantization, "quantization"), "quant_method": "modelopt"}


def convention_of(quantization: Config) -> Convention:
    """Returns the convention for ``quantization_config`` of config.json, or for all of hf_quant_config.json.

    Raises:
        CheckpointError: a method or a scheme is unknown.
    """
    given = unwrapped(quantization)
    method = str(given.get("quant_method"))
    if "quant_method" not in given and {"bits", "group_size"} <= set(given):
        raise CheckpointError(
            "quantization_config has bits and group_size and no quant_method, as MLX writes it, whose integers and biases no "
            "reader here knows: fetch the 16-bit model, and quantize that"
        )
    if method not in READERS:
        raise CheckpointError(
            f"quant_method is {reprlib.repr(method)}; readers are {', '.join(READERS)}: export the checkpoint as one of these, "
            "or quantize the 16-bit model with `nvfp4-cute quantize`"
        )
    return READERS[method](given)


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """Returns ``quantization_config`` of a folder with its ``quant_method``; None if nothing is quantized.

    Raises:
        CheckpointError: a method or a scheme is unknown, or no file describes the quantization of weights that are quantized.
    """
    config = read_config(folder)
    quantization = _quantization(config, folder)
    if quantization is not None:
        convention_of(quantization)
        return dict(unwrapped(quantization))
    _check_plain(TensorFiles(folder))
    return None


def _check_plain(files: TensorFiles) -> None:
    """Raises for a tensor that only quantizing tools write, where no file describes the quantization."""
    is_packed = lambda name, entry: entry.dtype in PACKED_DTYPES or name.rpartition(".")[2] in PACKED_NAMES
    one = next((name for name, entry in files.entries.items() if is_packed(name, entry)), None)
    if one is not None:
        raise CheckpointError(
            f"{one} is {files.entries[one].dtype}, and neither config.json has a quantization_config nor is there a "
            "hf_quant_config.json, so nothing says what it means: fetch all files of the checkpoint, or, of one of MLX, the "
            "model that it was made of"
        )


def _convention(config: dict[str, Any], folder: Path) -> Convention | None:
    """Returns the convention; None if nothing is quantized."""
    quantization = _quantization(config, folder)
    return None if quantization is None else convention_of(quantization)


def _quantization(config: dict[str, Any], folder: Path) -> Config | None:
    quantization = config.get("quantization_config") or object_of(config, "text_config").get(
        "quantization_config"
    )
    own = folder / "hf_quant_config.json"
    if quantization is None and own.is_file():
        quantization = read_object(own)
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(
            f"quantization_config is {reprlib.repr(quantization)}; it is an object: fetch config.json again"
        )
    return quantization
