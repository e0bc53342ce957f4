"""State dicts of layers: their self-description, and the checks and conversions when they are loaded."""

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from nvfp4_cute.formats.block_format import BlockFormat

VERSION = 1
# Torch's key for state that is not a tensor of a module.
EXTRA = "_extra_state"
# Dtypes that ``.to(dtype)`` converts; tensors of other dtypes hold codes, their factors, or numbers of rows.
CONVERTED_DTYPES = (torch.float16, torch.bfloat16, torch.float64)
# Dtypes of codes: bits without a numeric meaning.
BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
DESCRIPTION = {"format": "nvfp4", "global_scale": "multiplies", "version": VERSION}


def description(said: Mapping[str, Any] = DESCRIPTION) -> torch.Tensor:
    """Encodes the description (format, convention, version) as bytes of JSON, which files of tensors can hold."""
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def formats_said(*formats: BlockFormat) -> dict[str, Any]:
    """Returns the description of weights in formats without global scales."""
    return {"formats": [format.name for format in formats], "version": VERSION}


def description_fault(
    state: dict[str, Any], prefix: str, read: Mapping[str, Any] = DESCRIPTION
) -> str | None:
    """Returns a message if the stored description differs from ``read``; None if it agrees or is missing."""
    stored = state.get(prefix + EXTRA)
    given = read if stored is None or stored.is_meta else json.loads(bytes(stored.cpu().tolist()))
    return None if given == read else f"{prefix}{EXTRA} says {given}; this layer reads {read}"


class Picklable(torch.nn.Module):
    """A module that plain pickle can store: 8-bit floats become bytes, since torch cannot pickle them itself."""

    def __getstate__(self) -> dict[str, Any]:
        buffers, dtypes = dict(self._buffers), {}
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype.itemsize == 1 and buffer.dtype.is_floating_point:
                buffers[name], dtypes[name] = buffer.view(torch.uint8), buffer.dtype
        return {**self.__dict__, "_buffers": buffers, "_stored_dtypes": dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fields, buffers = dict(state), dict(state["_buffers"])
        for name, dtype in fields.pop("_stored_dtypes", {}).items():
            buffers[name] = buffers[name].view(dtype)
        super().__setstate__({**fields, "_buffers": buffers})

    def __deepcopy__(self, memo: dict[int, Any]) -> "Picklable":
        """Copies tensors directly, so that tensors shared by modules stay shared."""
        made = memo[id(self)] = type(self).__new__(type(self))
        torch.nn.Module.__setstate__(made, copy.deepcopy(self.__dict__, memo))
        return made


class KeepsBits(Picklable):
    """A module with buffers of codes and their float32 factors, which moves without a change of dtype and loads bit by bit.

    Loading raises, by name, for codes that ``read_codes`` refuses and for factors that are not finite and positive.
    """

    FACTORS: ClassVar[tuple[str, ...]] = ()
    """Names of float32 buffers with positive numbers."""
    BLOCK_FACTORS: ClassVar[tuple[str, ...]] = ()
    """Names of float32 buffers with one number per block, which may be 0 for a block of zeros."""

    @property
    def _block_factors(self) -> tuple[str, ...]:
        return self.BLOCK_FACTORS

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ) -> None:
        found = [
            read_codes(state_dict, prefix + name, buffer.dtype)
            for name, buffer in self.named_buffers(recurse=False)
            if buffer.dtype.itemsize == 1 or not buffer.dtype.is_floating_point
        ]
        found += [factor_fault(state_dict, prefix + name) for name in self.FACTORS]
        names = self._block_factors
        found += [factor_fault(state_dict, prefix + name, allows_zero=True) for name in names]
        faults = [fault for fault in found if fault is not None]
        if faults:
            errors.extend(faults)
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _apply(self, fn, recurse=True):
        return super()._apply(moving(fn), recurse)


class NamesFormats(KeepsBits):
    """A module whose state dict names the formats of its weights, because scale bits mean other numbers in another format."""

    formats: tuple[BlockFormat, ...]

    @property
    def _said(self) -> dict[str, Any]:
        return formats_said(*self.formats)

    def get_extra_state(self) -> torch.Tensor:
        """Returns the module's description for the state dict."""
        return description(self._said)

    def set_extra_state(self, extra: torch.Tensor) -> None:
        """Ignores the description, which was checked before tensors were loaded."""

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ) -> None:
        fault = description_fault(state_dict, prefix, self._said)
        if fault is not None:
            errors.append(fault)
            return
        state_dict.setdefault(prefix + EXTRA, self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)


def read_codes(state: dict[str, Any], name: str, dtype: torch.dtype) -> str | None:
    """Prepares a stored tensor so that it loads into a buffer of codes of ``dtype`` without a change of meaning.

    Bytes are codes, whose bits are kept. Wider numbers are converted if ``dtype`` can represent each of them.

    Returns:
        A message if the tensor has another format or its numbers would be rounded; otherwise None.
    """
    tensor = state.get(name)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype == dtype:
        return None
    if tensor.dtype in BYTES and (tensor.dtype != torch.float4_e2m1fn_x2 or dtype in BYTES):
        state[name] = tensor.view(dtype)
        return None
    is_wide = tensor.dtype.itemsize > 1 and dtype != torch.uint8  # bytes of uint8 are not numbers
    if is_wide and (tensor.is_meta or torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)):
        return None
    also = "" if dtype == torch.uint8 else ", its codes as torch.uint8, or numbers that it has exactly"
    fix = "Load 16-bit weights before layers are replaced, or quantize them first"
    return f"{name} is {tensor.dtype}; expected {dtype}{also}. {fix}"


def factor_fault(state: dict[str, Any], name: str, allows_zero: bool = False) -> str | None:
    """Returns a message if stored factors are invalid; None if they are valid or missing."""
    factors = state.get(name)
    if not isinstance(factors, torch.Tensor) or factors.is_meta:
        return None
    values = factors.detach().float()
    if bool((((values >= 0) if allows_zero else (values > 0)) & torch.isfinite(values)).all()):
        return None
    return f"{name} is {values.min().item():g} to {values.max().item():g}; a scale is finite and positive"


def faults(state: dict[str, Any], prefix: str, said: Mapping[str, Any] = DESCRIPTION) -> list[str]:
    """Returns messages for everything in a state dict that a layer with the description ``said`` would not have written.

    A state dict with the description follows this convention. One without comes from an earlier version or another program.
    There a global scale over 1 is taken as reciprocal, because weights stay below 2688.
    """
    stored, of_description = state.get(prefix + EXTRA), description_fault(state, prefix, said)
    found = [] if of_description is None else [of_description]
    for name in ("weight_global_scale", "input_global_scale"):
        scale = state.get(prefix + name)
        if not isinstance(scale, torch.Tensor) or scale.is_meta:
            continue
        fault, values = factor_fault(state, prefix + name), scale.detach().float()
        if fault is not None:
            found.append(fault)
        elif stored is None and bool((values > 1).any()):
            found.append(
                f"{prefix}{name} is {values.max().item():g}, and here it multiplies, amax / 2688: this one is a reciprocal, as "
                "compressed-tensors stores it. Load the folder with nvfp4_cute.models.checkpoints.Checkpoint, or store 1 / it"
            )
    return found


def keeping_dtype(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Wraps the function of ``.to``, ``.cuda``, ``to_empty`` and the like so that it changes only the device."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = fn(tensor)
        if moved.dtype == tensor.dtype:
            return moved
        if tensor.is_meta:
            return torch.empty_like(tensor, device=moved.device)
        return tensor.to(moved.device)

    return move


def moving(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Wraps ``fn`` so that it keeps the dtype of tensors outside ``CONVERTED_DTYPES``."""
    keep = keeping_dtype(fn)
    return lambda tensor: fn(tensor) if tensor.dtype in CONVERTED_DTYPES else keep(tensor)
