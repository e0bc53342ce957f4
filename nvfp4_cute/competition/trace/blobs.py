"""One safetensors file with the inputs of a workload."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from nvfp4_cute.models.checkpoints.tensors import DTYPE_NAMES, DTYPES

PACKED = torch.float4_e2m1fn_x2
PACKED_NAME = "F4"  # its shape counts values, two per byte


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a file, and creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        shape = list(tensor.shape)
        kind = DTYPE_NAMES.get(tensor.dtype, PACKED_NAME)
        if tensor.dtype == PACKED:
            shape[-1] *= 2
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """Reads one tensor of a file.

    Raises:
        ValueError: there is no such file or tensor, or its dtype is unknown.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}; a workload reads {name} from it")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        if name not in header:
            raise ValueError(f"{path} has no tensor {name!r}; it has {', '.join(header)}")
        entry = header[name]
        dtype = PACKED if entry["dtype"] == PACKED_NAME else DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(
                f"{path}: tensor {name!r} has dtype {entry['dtype']}; known are {', '.join(DTYPES)}"
            )
        begin, end = entry["data_offsets"]
        file.seek(8 + length + begin)
        data = bytearray(file.read(end - begin))
    shape = list(entry["shape"])
    if dtype == PACKED:
        shape[-1] //= 2
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)
