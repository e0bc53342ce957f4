"""A function that takes torch tensors through TVM-FFI; run by `nvfp4-cute emulate`."""

import checks
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def increment(a: cute.Tensor, b: cute.Tensor):
    i = cute.arch.thread_idx()[0]
    b[i] = a[i] + 1


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor):
    increment(a, b).launch(grid=(1, 1, 1), block=(32, 1, 1))


def check_torch_tensors_are_arguments() -> None:
    a = torch.arange(32, dtype=torch.float32, device="cuda")
    b = torch.zeros_like(a)
    wrapped = [from_dlpack(x, enable_tvm_ffi=True).mark_layout_dynamic() for x in (a, b)]
    compiled = cute.compile(launch, *wrapped, options="--enable-tvm-ffi")
    compiled(a, b)
    assert torch.equal(b.cpu(), torch.arange(1.0, 33.0))
    compiled(b, b)
    assert torch.equal(b.cpu(), torch.arange(2.0, 34.0))
    try:
        compiled(a.cpu(), b)
    except Exception as error:
        assert "evice" in str(error), error
    else:
        raise AssertionError("a CPU tensor was taken for one on the GPU")


if __name__ == "__main__":
    checks.run(globals())
