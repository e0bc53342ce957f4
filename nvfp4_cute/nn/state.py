"""State dicts of layers: what they say about themselves, and what is refused or taken as bits when they are loaded."""

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from nvfp4_cute.formats.block_format import BlockFormat

VERSION = 1
# Torch's key for what is no tensor of a module by itself.
EXTRA = "_extra_state"
# What ``.to(dtype)`` converts: all else is codes, factors of them, or numbers of rows.
CONVERTED_DTYPES = (torch.float16, torch.bfloat16, torch.float64)
# Dtypes of codes: bits, whatever numbers these stand for.
BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
DESCRIPTION = {"format": "nvfp4", "global_scale": "multiplies", "version": VERSION}


def description(said: Mapping[str, Any] = DESCRIPTION) -> torch.Tensor:
    """What a state dict says, such as format, convention and version, as bytes of JSON: files of tensors can hold it."""
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def formats_said(*formats: BlockFormat) -> dict[str, Any]:
    """What a state dict says of weights in formats without global scales."""
    return {"formats": [format.name for format in formats], "version": VERSION}


def description_fault(
    state: dict[str, Any], prefix: str, read: Mapping[str, Any] = DESCRIPTION
) -> str | None:
    """What is wrong with a stored description, as a message; None where it says ``read``, or where there is none to read."""
    stored = state.get(prefix + EXTRA)
    given = read if stored is None or stored.is_meta else json.loads(bytes(stored.cpu().tolist()))
    return None if given == read else f"{prefix}{EXTRA} says {given}; this layer reads {read}"


class Picklable(torch.nn.Module):
    """A module that plain pickle stores, too: 8-bit floats as bytes, since torch does not pickle them by itself."""

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
        """Not by way of bytes: tensors that modules share stay one."""
        made = memo[id(self)] = type(self).__new__(type(self))
        torch.nn.Module.__setstate__(made, copy.deepcopy(self.__dict__, memo))
        return made


class KeepsBits(Picklable):
    """A module with buffers of codes and float32 factors of them: moved without a change of dtype, and loaded bit by bit.

    Loading refuses, by name, what ``read_codes`` refuses, and factors that are not finite, or negative, or 0.
    """

    FACTORS: ClassVar[tuple[str, ...]] = ()
    """Names of float32 buffers of positive numbers."""
    BLOCK_FACTORS: ClassVar[tuple[str, ...]] = ()
    """The same of blocks: that of a block of zeros may be 0."""

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
    """A module whose state dict names the formats of its weights: in another one the bits of scales are other numbers."""

    formats: tuple[BlockFormat, ...]

    @property
    def _said(self) -> dict[str, Any]:
        return formats_said(*self.formats)

    def get_extra_state(self) -> torch.Tensor:
        """What the state dict says of itself."""
        return description(self._said)

    def set_extra_state(self, extra: torch.Tensor) -> None:
        """Nothing to set: it was checked before tensors were loaded."""

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
    """Have a stored tensor loaded into a buffer of codes of ``dtype`` without a change of what it says.

    Bytes are codes: their bits are taken. Wider numbers are taken where ``dtype`` has each of them.

    Returns:
        What is wrong, as a message: another format, or numbers that would be rounded. None where nothing is.
    """
    tensor = state.get(name)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype == dtype:
        return None
    if tensor.dtype in BYTES and (tensor.dtype != torch.float4_e2m1fn_x2 or dtype in BYTES):
        state[name] = tensor.view(dtype)
        return None
    is_wide = tensor.dtype.itemsize > 1 and dtype != torch.uint8  # whose bytes are no numbers
    if is_wide and (tensor.is_meta or torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)):
        return None
    also = "" if dtype == torch.uint8 else ", its codes as torch.uint8, or numbers that it has exactly"
    return f"{name} is {tensor.dtype}; expected {dtype}{also}. Quantize weights of another format first"


def factor_fault(state: dict[str, Any], name: str, allows_zero: bool = False) -> str | None:
    """What is wrong with stored factors, as a message; None where nothing is, or where there are none."""
    factors = state.get(name)
    if not isinstance(factors, torch.Tensor) or factors.is_meta:
        return None
    values = factors.detach().float()
    if bool((((values >= 0) if allows_zero else (values > 0)) & torch.isfinite(values)).all()):
        return None
    return f"{name} is {values.min().item():g} to {values.max().item():g}; a scale is finite and positive"


def faults(state: dict[str, Any], prefix: str, said: Mapping[str, Any] = DESCRIPTION) -> list[str]:
    """What makes a state dict another one than a layer writes that says ``said``, as messages.

    A state dict with the description is of this convention. One without is of an earlier version, or of something else: a
    global scale over 1 is then a reciprocal one, for weights stay below 2688.
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
    """What ``.to``, ``.cuda``, ``to_empty`` and the like do with a tensor whose dtype is fixed: the device changes alone."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = fn(tensor)
        if moved.dtype == tensor.dtype:
            return moved
        if tensor.is_meta:
            return torch.empty_like(tensor, device=moved.device)
        return tensor.to(moved.device)

    return move


def moving(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """``fn`` for tensors of ``CONVERTED_DTYPES``; for others the same without a change of dtype."""
    keep = keeping_dtype(fn)
    return lambda tensor: fn(tensor) if tensor.dtype in CONVERTED_DTYPES else keep(tensor)
