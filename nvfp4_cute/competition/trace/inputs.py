"""Inputs of a workload by their descriptors: random values, a number, a tensor from a file, or made by the reference."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.competition.trace.blobs import read_tensor
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.codecs import encode_e2m1, pack_e2m1
from nvfp4_cute.problems.trace_schema import DTYPES, Definition, TensorSpec, Workload

# Random integers lie in [-LIMITS, LIMITS), random 8-bit floats in [-2, 2], as in both projects.
INTEGER_LIMITS = {torch.int8: 128, torch.int16: 1024, torch.int32: 1024, torch.int64: 1024}
FLOAT8_LIMIT = 2.0


def make_inputs(
    definition: Definition,
    workload: Workload,
    folder: Path,
    device: torch.device,
    generate: Callable[[dict[str, int], torch.device], Mapping[str, Any]] | None,
) -> list[Any]:
    """Returns the arguments of ``run``, tensors on ``device``.

    Names do not matter here, although SOL-ExecBench draws some inputs by their names.

    Args:
        folder: folder that paths of safetensors files are relative to, or whose ancestor is.
        generate: the function of the reference that makes inputs of the kind "custom".

    Raises:
        ValueError: a descriptor cannot be followed, or its value has another shape or dtype.
    """
    sizes = definition.sizes(workload.axes)
    scalars = {n: source["value"] for n, source in workload.inputs.items() if source["type"] == "scalar"}
    custom: Mapping[str, Any] = {}
    if any(source["type"] == "custom" for source in workload.inputs.values()):
        if generate is None:
            raise ValueError(
                f"{definition.name}: inputs are custom and the definition names no function for them"
            )
        custom = generate({**sizes, **scalars}, device)
    found = []
    for name, spec in definition.inputs.items():
        source = workload.inputs.get(name, {"type": "random"})
        kind = source["type"]
        if kind == "scalar":
            value: Any = source["value"]
        elif kind == "custom":
            if name not in custom:
                raise ValueError(f"{definition.name}: {definition.generator} makes no {name}")
            value = custom[name]
        elif kind == "safetensors":
            value = read_tensor(_find(folder, source["path"]), source["tensor_key"]).to(device)
        elif kind == "random":
            value = random_input(spec, definition.shape(spec, sizes), device)
        else:
            raise ValueError(
                f"{name}: inputs of type {kind!r} are unknown; use random, scalar, safetensors or custom"
            )
        _check(name, value, spec, definition.shape(spec, sizes))
        found.append(value)
    return found


def random_input(spec: TensorSpec, shape: tuple[int, ...], device: torch.device) -> Any:
    """Returns a random tensor, or a number for a scalar input.

    Values are normal floats, integers in a range of their type, or packed fp4 of normal values.
    """
    dtype = DTYPES[spec.dtype]
    if dtype is torch.bool:
        value = torch.randint(0, 2, shape, dtype=torch.bool, device=device)
    elif dtype in INTEGER_LIMITS:
        limit = INTEGER_LIMITS[dtype]
        value = torch.randint(-limit, limit, shape, dtype=dtype, device=device)
    elif dtype is torch.float4_e2m1fn_x2:
        values = torch.randn((*shape[:-1], NVFP4.elements(shape[-1])), device=device)
        return pack_e2m1(encode_e2m1(values)).view(dtype)
    elif dtype.itemsize == 1:
        value = torch.randn(shape, device=device).clamp(-FLOAT8_LIMIT, FLOAT8_LIMIT).to(dtype)
    else:
        value = torch.randn(shape, dtype=dtype, device=device)
    return value.item() if spec.shape is None else value


def _find(folder: Path, path: str) -> Path:
    """Returns a path below the folder or one of its ancestors, because problem folders lie inside of a data set."""
    for root in (folder, *folder.resolve().parents):
        if (root / path).is_file():
            return root / path
    return folder / path


def _check(name: str, value: Any, spec: TensorSpec, shape: tuple[int, ...]) -> None:
    if spec.shape is None or not isinstance(value, torch.Tensor):
        return
    if tuple(value.shape) != shape or value.dtype != DTYPES[spec.dtype]:
        raise ValueError(
            f"{name} is {value.dtype} {tuple(value.shape)}; the definition says {spec.dtype} {shape}"
        )
