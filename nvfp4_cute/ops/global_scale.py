"""Finds the global scale of 16-bit rows in one launch and multiplies it into given factors."""

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.formats.block_format import NVFP4, TMA_ALIGN_BYTES, BlockFormat
from nvfp4_cute.formats.global_scale import resolve_global_scale
from nvfp4_cute.launch.simt import GlobalScaleTask
from nvfp4_cute.operands import rules
from nvfp4_cute.operands.quantization import KERNEL_DTYPES
from nvfp4_cute.planning.arch.simt import AMAX_VALUES, amax_ctas

# ``launch_table.GlobalScale`` has room for two factors.
MAX_TIMES = 2
# The kernel's extents are 32-bit numbers.
MAX_VALUES = 2**31


def find_global_scale(
    x: torch.Tensor, *times: torch.Tensor, format: BlockFormat = NVFP4, backend: str = "auto"
) -> list[torch.Tensor]:
    """Computes the global scale "auto" of ``x``, its finite amax / 2688, and the product of each of ``times`` with it.

    float16 and bfloat16 on a GPU (or on the emulator) take one launch for up to 65,536 values and two for more.
    ``formats.global_scale`` computes everything else with torch operations: other dtypes, and rows with unaligned addresses or
    with gaps that are not a multiple of 16 bytes. Both give the same bits.

    Args:
        x: [..., K].
        times: up to two float32 tensors with one element, on the device of ``x``.
        format: NVFP4, or FOUR_OVER_SIX for amax / 1536.
        backend: "auto", "cuda", "emulator", "emulator:ARCH", or "reference".

    Returns:
        float32 tensors without dimensions: the scale, then the products.

    Raises:
        ValueError: there are more than two ``times``.
        UnsupportedTarget: the GPU has no kernel.
    """
    check_times(times)
    rows = x.detach() if x.requires_grad else x
    rows = rows if x.ndim == 2 else _as_rows(rows)
    is_traced = private_api.is_traced()
    if is_traced or not is_for_kernel(rows, backend):
        if not is_traced:
            rules.check_memory(x=x)
        scale = resolve_global_scale(x.detach(), "auto", None, format)
        assert scale is not None
        return [scale, *((factor * scale).view(()) for factor in times)]
    settings = ("global_scale", len(times), format)
    found = call(backend, settings, [rows, *times], [], _check, format, rows, *times)
    return found[: 1 + len(times)]


def check_times(times: tuple[torch.Tensor, ...]) -> None:
    """Raises ValueError for more factors than a launch has room for."""
    if len(times) > MAX_TIMES:
        raise ValueError(
            f"times are {len(times)} factors; a launch has up to {MAX_TIMES}: multiply the others by the result"
        )


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """Reshapes to [M, K], as a view where possible."""
    return x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)


def is_for_kernel(x: torch.Tensor, backend: str) -> bool:
    """Returns whether a kernel can read these rows in place."""
    return (
        x.dtype in KERNEL_DTYPES
        and 0 < x.numel() < MAX_VALUES
        and backends.resolve(backend, x.device) != "reference"
        and not x.shape[1] % AMAX_VALUES
        and x.stride(1) == 1
        and not x.stride(0) % AMAX_VALUES
        and not x.data_ptr() % TMA_ALIGN_BYTES
    )


def new_scalars(count: int, device: torch.device) -> list[torch.Tensor]:
    """Allocates ``count`` float32 tensors without dimensions."""
    return [torch.empty((), dtype=torch.float32, device=device) for _ in range(count)]


def _check(
    format: BlockFormat, x: torch.Tensor, *times: torch.Tensor
) -> tuple[GlobalScaleTask, list[torch.Tensor]]:
    """Returns the checked task and its results, including partial maxima."""
    rules.check_memory(x=x, **{f"times[{i}]": factor for i, factor in enumerate(times)})
    made = new_scalars(1 + len(times), x.device)
    ctas = amax_ctas(x.numel())
    partials = None if ctas == 1 else torch.empty(ctas, dtype=torch.float32, device=x.device)
    times_0, times_1 = (*times, None, None)[:MAX_TIMES]
    product_0, product_1 = (*made[1:], None, None)[:MAX_TIMES]
    task = GlobalScaleTask(x, times_0, times_1, made[0], product_0, product_1, partials, format)
    return task, made if partials is None else [*made, partials]
