"""``gemm_chain``: multiplies activations by several N x N layers in one launch, quantized to NVFP4 between layers."""

from dataclasses import dataclass, replace

import torch

from nvfp4_cute import backends
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.operands import rules
from nvfp4_cute.operands.grouped import GroupedOperands, Result, Weights, check_lists
from nvfp4_cute.operands.whole import Parts
from nvfp4_cute.ops.parts.gemm import gemm
from nvfp4_cute.planning.config import KernelConfig, check_config
from nvfp4_cute.problem import (
    NVFP4,
    GroupedProblem,
    new_quantized_data,
    new_quantized_scale,
)

# Part of the error's name when not all CTAs of a cooperative launch fit on the GPU at the same time.
REFUSED = "CooperativeLaunchTooLarge"


@dataclass(frozen=True)
class ChainWorkspace:
    """Device memory that a chain of layers keeps between launches. Launches that share a workspace must not overlap.

    Attributes:
        counters: int32 [G], zero between launches.
        results: two NVFP4Tensors [M, N], written by even and odd layers and read back from L2.
    """

    counters: torch.Tensor
    results: tuple[NVFP4Tensor, NVFP4Tensor]

    @classmethod
    def make(cls, num_layers: int, m: int, n: int, device: torch.device) -> "ChainWorkspace":
        """Allocates a workspace for ``num_layers`` layers of N x N and M rows."""
        counters = torch.zeros(num_layers, dtype=torch.int32, device=device)
        return cls(counters, (_new_result(m, n, device), _new_result(m, n, device)))


def gemm_chain(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    out_global_scale: torch.Tensor,
    workspace: ChainWorkspace,
    *,
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> NVFP4Tensor:
    """Computes ``A <- quantize(alpha[g] * A @ B_g^T, out_global_scale[g])`` for every layer g in one launch.

    The result has the bits of G ``gemm`` calls. Persistent CTAs process the tiles of all layers. Before the first load of a
    tile they wait, on a counter in L2, until the previous layer is stored. The GPU therefore has to run all CTAs of the launch
    at the same time, one per SM; a launch on another stream that never ends would block it.

    Args:
        a: uint8 [M, N/2].
        a_scale: scales of ``a``, blocked, as in ``gemm``.
        b: uint8 [G, N, N/2], contiguous.
        b_scale: [G, rn, rn', 32, 4, 4], contiguous.
        alpha, out_global_scale: float32 [G] on the operands' device.
        workspace: made for these sizes; launches that share it must not overlap.
        backend, config: see ``grouped_gemm``. The reference calls ``gemm`` G times.

    Returns:
        The last layer's result, [M, N].

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule, the GPU's kernel cannot run chains, or not all CTAs
            fit on the GPU at once.
    """
    device = rules.check_tensors({"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "alpha": alpha})
    if b.ndim != 3 or b.shape[1] != 2 * b.shape[2]:
        raise ValueError(f"b has shape {list(b.shape)}; a chain of equal layers is [G, N, N/2]")
    (num_layers, n, _), m = b.shape, a.shape[0]
    if backends.resolve(backend, device) == "reference":
        result = None
        for g in range(num_layers):
            result = gemm(
                Parts(a, a_scale), Parts(b[g], b_scale[g]), alpha[g : g + 1],
                out_dtype=NVFP4, out_global_scale=out_global_scale[g : g + 1], backend=backend,
            )  # fmt: skip
            a, a_scale = result.data, result.scale
        assert result is not None
        return result
    results = [workspace.results[g % 2] for g in range(num_layers - 1)] + [_new_result(m, n, device)]
    # All weights lie at equal distances and the workspace holds the results, so the checks of one layer hold for all.
    layer = [Weights("b", [b[0]], [b_scale[0]], "alpha", alpha[:1])]
    wanted = Result(results[:1], NVFP4, out_global_scale[:1])
    problem, first = check_lists([a], [a_scale], layer, wanted, "blocked")
    for name, tensor in (("alpha", alpha), ("out_global_scale", out_global_scale), ("b_scale", b_scale)):
        if len(tensor) != num_layers or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}; expected contiguous, an entry for "
                f"each of {num_layers} layers"
            )
    outs = tuple(result.data for result in results)
    out_scales = tuple(result.scale.view(torch.uint8).view(-1) for result in results)
    (rows,), (weights,) = first.a, first.b
    scales = b_scale.view(torch.uint8).view(num_layers, -1)
    layers = [replace(weights, data=x, scale=y) for x, y in zip(b.view(torch.uint8), scales, strict=True)]
    between = [replace(rows, data=x, scale=s) for x, s in zip(outs[:-1], out_scales[:-1], strict=True)]
    operands = GroupedOperands(
        (rows, *between),
        tuple(layers),
        outs,
        alpha,
        out_scale=out_scales,
        out_global_scale=out_global_scale,
        chain=workspace.counters,
    )
    chain = GroupedProblem(problem.sizes * num_layers, "list", NVFP4, has_alpha=True, is_chain=True)
    check_config(config)
    try:
        backends.run_task(backend, GroupedTask(chain, operands, config))
    except Exception as error:  # CuTe DSL's own errors are not RuntimeErrors
        if REFUSED not in str(error):
            raise
        raise UnsupportedProblem(
            "the launch was refused: CTAs of a chain wait for each other, so all have to run at once, and fewer SMs are to be "
            "had here (MPS, a green context); pass a config with a smaller num_cta, or call gemm once a layer"
        ) from error
    last = results[-1]
    return NVFP4Tensor(last.data, last.scale, out_global_scale[-1], (m, n))


def _new_result(m: int, n: int, device: torch.device) -> NVFP4Tensor:
    scale = new_quantized_scale((m,), n, device).view(torch.float8_e4m3fn)
    return NVFP4Tensor(new_quantized_data((m, n), device), scale, None, (m, n))
