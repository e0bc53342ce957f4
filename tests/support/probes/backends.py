"""Probes, which are kernels that run both on the emulator and on a real device, and the two ways to run them.

A probe is a function of a backend: it launches kernels through it and returns their results by label. Both backends
must return the same bits, except where the probe states a bound.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.tensormap import encode

Results = dict[str, np.ndarray]
HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"


@dataclass(frozen=True, eq=False)
class Map:
    """A kernel argument: the 128-byte tensor map of an array, passed by value, with the arguments of `encode`."""

    array: np.ndarray
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def encoded(self, address: int) -> bytes:
        return encode(address, self.element, self.dims, self.strides, self.box, **self.options)


def aligned(shape: int | tuple[int, ...], dtype: Any, fill: Any = 0) -> np.ndarray:
    """An array whose data start at a multiple of 128 bytes, as device allocations do."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = np.empty(count * dtype.itemsize + 128, np.uint8)
    start = -raw.ctypes.data % 128
    result = raw[start : start + count * dtype.itemsize].view(dtype).reshape(shape)
    result[...] = fill
    return result


class Backend:
    """Runs kernels. Arrays are passed by address and hold the results afterwards; ints are .u32 or .u64 parameters."""

    spins = 300
    """Polls after which a probe says that a barrier does not complete."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def launch(
        self,
        ptx: str,
        args: Sequence[Any],
        *,
        grid: int = 1,
        block: int = 32,
        cluster: int = 1,
        smem_bytes: int = 0,
    ) -> None:
        """Runs the only kernel of a PTX text."""
        self.digest.update(f"{ptx} {grid} {block} {cluster}".encode())
        for arg in args:
            if isinstance(arg, np.ndarray):
                self.digest.update(arg.tobytes())
            elif isinstance(arg, Map):
                self.digest.update(arg.encoded(0))
        self.run(ptx, args, grid, block, cluster, smem_bytes)

    def run(self, ptx: str, args: Sequence[Any], grid: int, block: int, cluster: int, smem: int) -> None:
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Changes when a kernel or its inputs do."""
        return self.digest.hexdigest()[:16]


class Emulated(Backend):
    """The emulator."""

    def run(self, ptx: str, args: Sequence[Any], grid: int, block: int, cluster: int, smem: int) -> None:
        values = [a.encoded(a.array.ctypes.data) if isinstance(a, Map) else a for a in args]
        run_ptx(ptx, grid=grid, block=block, args=values, cluster=cluster, smem_bytes=smem, checked=False)


class Device(Backend):
    """The first CUDA device, through the driver API."""

    spins = 100_000

    def __init__(self) -> None:
        super().__init__()
        from cuda.bindings import driver

        self.driver = driver
        self.call(driver.cuInit(0))
        self.call(driver.cuCtxSetCurrent(self.call(driver.cuDevicePrimaryCtxRetain(0))))
        self.kernels: dict[str, Any] = {}

    def call(self, result: tuple[Any, ...]) -> Any:
        """Returns the values of a driver call.

        Raises:
            RuntimeError: the call failed.
        """
        if result[0] != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA driver: {self.driver.cuGetErrorName(result[0])[1].decode()}")
        return result[1] if len(result) == 2 else result[1:]

    def kernel(self, ptx: str) -> Any:
        if ptx not in self.kernels:
            module = self.call(self.driver.cuModuleLoadData(ptx.encode() + b"\0"))
            self.kernels[ptx] = kernel = self.call(self.driver.cuModuleGetFunction(module, b"k"))
            attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call(self.driver.cuFuncSetAttribute(kernel, attribute, 100_000))
        return self.kernels[ptx]

    def run(self, ptx: str, args: Sequence[Any], grid: int, block: int, cluster: int, smem: int) -> None:
        driver = self.driver
        arrays = {id(x): x for a in args if isinstance(x := getattr(a, "array", a), np.ndarray)}
        copies = {key: int(self.call(driver.cuMemAlloc(x.nbytes))) for key, x in arrays.items()}
        for key, x in arrays.items():
            self.call(driver.cuMemcpyHtoD(copies[key], x.ctypes.data, x.nbytes))
        values = [_argument(a, copies) for a in args]
        pointers = np.array([v.ctypes.data for v in values], np.uint64)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = smem, 0
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value = attribute.value
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        self.call(driver.cuLaunchKernelEx(config, self.kernel(ptx), pointers.ctypes.data, 0))
        self.call(driver.cuCtxSynchronize())
        for key, x in arrays.items():
            self.call(driver.cuMemcpyDtoH(x.ctypes.data, copies[key], x.nbytes))
            self.call(driver.cuMemFree(copies[key]))


def _argument(arg: Any, copies: dict[int, int]) -> np.ndarray:
    """The bytes of a kernel parameter. An int is padded to the size of .u64."""
    if isinstance(arg, np.ndarray):
        return np.array([copies[id(arg)]], np.uint64)
    if isinstance(arg, Map):
        return np.frombuffer(arg.encoded(copies[id(arg.array)]), np.uint8).copy()
    return np.array([arg], np.uint64)


# ---- results ------------------------------------------------------------------------------------------------------
Probe = Callable[[Backend], Results]


@dataclass(frozen=True)
class Bound:
    """Allowed error of an approximation, in units in the last place or as an absolute value.

    Attributes:
        dtype: of the codes; a word of a packed format contains several.
    """

    ulps: int
    absolute: float = 0.0
    dtype: str = "u4"

    def broken(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Where codes differ by more than the bound (bool, flat)."""
        a, b = (x.reshape(-1).view(self.dtype) for x in (a, b))
        far = distance(a, b) > self.ulps
        if self.absolute:
            with np.errstate(invalid="ignore"):
                far &= ~(np.abs(a.view(np.float32) - b.view(np.float32)) <= self.absolute)
        return far


def mismatches(got: Results, expected: Results, bounds: dict[str, Bound] | None = None) -> list[str]:
    """One line for each label whose bits differ by more than its bound, or at all if it has none."""
    lines = []
    for label, want in expected.items():
        have = got[label]
        bound = (bounds or {}).get(label)
        wrong = np.flatnonzero(bound.broken(have, want) if bound else have != want)
        if wrong.size:
            i = int(wrong[0])
            one, two = (x.reshape(-1).view(bound.dtype if bound else x.dtype)[i] for x in (have, want))
            lines.append(f"{label}: {wrong.size} of {want.size} differ, first [{i}] {one:#x}, not {two:#x}")
    return lines


_SIGN = {2: 0x8000, 4: 0x80000000, 8: 1 << 63}
_INFINITY = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF << 52}


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Units in the last place between float codes (unsigned words). NaN is close only to NaN."""
    sign, infinity = _SIGN[a.itemsize], _INFINITY[a.itemsize]
    steps, nans = [], []
    for codes in (a, b):
        magnitude = (codes & (sign - 1)).astype(np.int64)
        steps.append(np.where(codes & sign != 0, -magnitude, magnitude))
        nans.append(magnitude > infinity)
    apart = np.abs(steps[0] - steps[1])
    return np.where(nans[0] | nans[1], np.where(nans[0] & nans[1], 0, 1 << 40), apart)


def pack(results: Results) -> np.ndarray:
    """All results as one uint8 array, in the order of their labels."""
    return np.concatenate([np.ascontiguousarray(x).view(np.uint8).reshape(-1) for x in results.values()])


def unpack(data: np.ndarray, like: Results) -> Results:
    """Inverse of pack, for results of the same labels, shapes and types."""
    results, at = {}, 0
    for label, x in like.items():
        results[label] = data[at : at + x.nbytes].view(x.dtype).reshape(x.shape)
        at += x.nbytes
    if at != data.size:
        raise ValueError(f"{data.size} recorded bytes for results of {at} bytes: record them again")
    return results
