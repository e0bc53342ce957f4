"""Objects that one process exports and another loads. `nvfp4-cute emulate` runs this twice: `export`, then `load`."""

import ctypes
import os
import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import find_runtime_libraries, from_dlpack

for library in find_runtime_libraries(enable_tvm_ffi=False):
    ctypes.CDLL(
        library, mode=ctypes.RTLD_GLOBAL
    )  # projects also load the library before their exported objects

folder, with_ffi = sys.argv[2], sys.argv[3] == "ffi"


@cute.kernel
def add(x: cute.Tensor, value: cutlass.Constexpr):
    i = cute.arch.thread_idx()[0]
    x[i] = i + value


@cute.jit
def launch(x: cute.Tensor, value: cutlass.Constexpr):
    add(x, value).launch(grid=(1, 1, 1), block=(32, 1, 1))


x = torch.zeros(32, device="cuda", dtype=torch.int32)
options = {"options": "--enable-tvm-ffi"} if with_ffi else {}
for value in (5, 7):  # two kernels with the same name
    path = os.path.join(folder, f"add{value}.o")
    if sys.argv[1] == "export":
        compiled = cute.compile(launch, from_dlpack(x, enable_tvm_ffi=with_ffi), value, **options)
        if with_ffi:
            compiled.export_to_c(object_file_path=path, function_name="fn")
        else:
            compiled.export_to_c(folder, f"add{value}", function_prefix="fn")
    else:
        cute.runtime.load_module(path, enable_tvm_ffi=with_ffi).fn(x if with_ffi else from_dlpack(x))
        assert x.tolist() == list(range(value, 32 + value)), x
print("PASS")
