"""Rules of the ragged and the masked form, whose group sizes live on the device.

Nothing here reads the sizes, so nothing waits for the GPU and a captured graph follows sizes that change.
"""

from dataclasses import replace
from math import prod
from typing import Literal

import torch

from nvfp4_cute import backends
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.scale_layout import (
    ATOM_BYTES,
    ATOM_ROWS,
    ATOM_SHAPE,
    SF_VEC_SIZE,
    atom_counts,
    num_k_blocks,
)
from nvfp4_cute.launch import tuned
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.operands.tensor_checks import check_out_dtype, check_quantized_columns
from nvfp4_cute.ops import vector_checks as checks
from nvfp4_cute.ops.device_groups import DeviceGroupsTask, is_m_major
from nvfp4_cute.planning.arch import clusters_at_once
from nvfp4_cute.planning.choose import config_for_mean
from nvfp4_cute.planning.config import check_config
from nvfp4_cute.problem import INT32_MAX, NVFP4, Form, Gate, GroupedProblem, OutDtype, new_quantized_data

DeviceForm = Literal["ragged", "masked"]
# Of ``a``, by form.
A_SHAPES: dict[DeviceForm, str] = {"ragged": "[sum of M, K/2]", "masked": "[G, M_max, K/2]"}


def check_device_groups(
    a,
    b,
    a_scale,
    b_scale,
    offs,
    masked_m,
    alpha,
    out,
    out_dtype,
    scale_layout,
    backend,
    config,
    *,
    out_global_scale=None,
    second: tuple | None = None,
    gate: Gate | None = None,
) -> tuple[DeviceGroupsTask, list[torch.Tensor]]:
    """The task, and what to return (``results``): ``out``, or a new one; of NVFP4 results, data and scale.

    Args:
        second: of a dual GEMM: b, b_scale and alpha of the second product; b and scale None where ``b`` has both.
        gate: of a dual GEMM.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
    """
    form, sizes_name, sizes = _form(offs, masked_m, scale_layout)
    ragged, suffix = form == "ragged", "" if gate is None else "1"
    b2, b2_scale, alpha2 = second or (None, None, None)
    if alpha is None and alpha2 is not None:
        alpha = 1.0
    if alpha2 is None and alpha is not None and gate is not None:
        alpha2 = 1.0
    named = {
        "a": a,
        f"b{suffix}": b,
        "a_scale": a_scale,
        f"b{suffix}_scale": b_scale,
        sizes_name: sizes,
    }
    optional = {
        "b2": b2,
        "b2_scale": b2_scale,
        f"alpha{suffix}": alpha if isinstance(alpha, torch.Tensor) else None,
        "alpha2": alpha2 if isinstance(alpha2, torch.Tensor) else None,
        "out_global_scale": out_global_scale,
    }
    check_config(config)
    check_out_dtype(out_dtype, out_global_scale)
    outputs = _named_outputs(out, out_dtype)
    if isinstance(a, list | tuple):
        raise TypeError(f"a is a {type(a).__name__}; with {sizes_name} it is one tensor, {A_SHAPES[form]}")
    device = checks.check_tensors(named, optional | outputs)
    named |= optional | outputs
    _check_sizes(sizes_name, sizes)
    num_groups = sizes.shape[0]
    matrix = _tokens(a, form, sizes_name, num_groups)
    batches, rows, row_bytes = matrix.shape
    k = checks.check_k(2 * row_bytes)
    weights = _weights(f"b{suffix}", b, num_groups, row_bytes, sizes_name)
    n = weights.shape[1]
    sfa = _scales("a_scale", a_scale, rows, k, None if ragged else batches)
    sfb = _scales(f"b{suffix}_scale", b_scale, n, k, num_groups).view(num_groups, -1)
    weights2 = sfb2 = None
    if gate is not None:
        gate.check_rows(f"b{suffix}", n)
        if gate.weight_layout != "separate":
            n //= 2
    if b2 is not None:
        weights2 = _weights("b2", b2, num_groups, row_bytes, sizes_name)
        if weights2.shape != weights.shape:
            raise ValueError(
                f"b2 has shape {list(b2.shape)} and b1 {list(b.shape)}; a dual GEMM takes two of one shape"
            )
        sfb2 = _scales("b2_scale", b2_scale, n, k, num_groups).view(num_groups, -1)
    shape = (rows, n) if ragged else (batches, rows, n)
    for name, tensor in outputs.items():
        checks.check_overlap(tensor, {other: t for other, t in named.items() if other != name}, name)
    if out_dtype == NVFP4:
        _check_global_scale(out_global_scale, num_groups)
    factors, factors2 = _factors(alpha, num_groups, device), _factors(alpha2, num_groups, device)
    if out_dtype == NVFP4:
        results = _quantized_outputs(outputs, shape, num_groups, ragged, device)
    else:
        results = [_plain_output(out, shape, out_dtype, device)]
    view = results[0].unsqueeze(0) if ragged else results[0]
    gpu = backends.gpu_of(backend, device)
    mean = (-(-rows // num_groups) if ragged else rows, n, k)
    if config is None and backends.resolve(backend, device) != "reference":
        config = tuned.find(_problem_of_mean(form, mean, num_groups, out_dtype, view, gate), gpu)
    if config is None:
        config = config_for_mean(gpu.arch, gpu.num_sms, num_groups, mean, gate, out_dtype == NVFP4, ragged)
    task = DeviceGroupsTask(
        form,
        _pitched(matrix),
        _pitched(weights),
        sfa,
        sfb,
        sizes,
        factors,
        _pitched(view) if out_dtype == NVFP4 else view,
        config,
        clusters_at_once(gpu.arch, config, gpu.num_sms),
        results[1].view(torch.uint8).view(-1) if out_dtype == NVFP4 else None,
        out_global_scale,
        gate,
        None if weights2 is None else _pitched(weights2),
        sfb2,
        factors2,
    )
    return task, results


def _form(offs, masked_m, scale_layout) -> tuple[DeviceForm, str, torch.Tensor]:
    """The form, and the groups' sizes and what the caller calls them."""
    if offs is not None and masked_m is not None:
        raise ValueError(
            "offs and masked_m are both given; offs is of the ragged form, masked_m of the masked one"
        )
    if scale_layout != "blocked":
        raise UnsupportedProblem(
            f"scale_layout={scale_layout!r} with offs or masked_m: only the device knows where padding goes; quantize "
            "to blocked scales, every group's rows padded to 128"
        )
    return ("masked", "masked_m", masked_m) if offs is None else ("ragged", "offs", offs)


def _check_sizes(name: str, sizes: torch.Tensor) -> None:
    if sizes.dtype != torch.int32 or sizes.ndim != 1 or not sizes.is_contiguous():
        raise TypeError(
            f"{name} is {sizes.dtype} of shape {list(sizes.shape)}; expected contiguous int32 [G]: "
            f"{name}.to(torch.int32)"
        )
    if len(sizes) == 0:
        raise ValueError(f"{name} is empty; pass at least one group (a group may have no rows)")


def _tokens(a: torch.Tensor, form: DeviceForm, sizes_name: str, num_groups: int) -> torch.Tensor:
    """The uint8 [batches, rows, K/2] view of checked ``a``."""
    matrix = checks.fp4_bytes("a", a)
    if matrix.ndim != (2 if form == "ragged" else 3):
        raise ValueError(f"a has shape {list(a.shape)}; with {sizes_name} it is {A_SHAPES[form]}")
    matrix = matrix.unsqueeze(0) if form == "ragged" else matrix
    if form == "masked" and len(matrix) != num_groups:
        raise ValueError(f"a has {len(matrix)} groups and {sizes_name} {num_groups}; pass an entry a group")
    _check_rows("a", matrix)
    return matrix


def _problem_of_mean(
    form: Form,
    mean: tuple[int, int, int],
    num_groups: int,
    out_dtype: OutDtype,
    out: torch.Tensor,
    gate: Gate | None,
) -> GroupedProblem:
    """What is known of a problem without its sizes: every group has the mean ones. ``out`` is [batches, rows, N]."""
    kind = {} if gate is None else {"activation": gate.activation, "weight_layout": gate.weight_layout}
    if kind.get("weight_layout") == "concatenated":  # halves of one tensor are two for a kernel
        kind["weight_layout"] = "separate"
    return GroupedProblem((mean,) * num_groups, form, out_dtype, out_m_major=is_m_major(out), **kind)


def check_dual_device_groups(
    a, b1, b2, a_scale, b1_scale, b2_scale, offs, masked_m, alpha1, alpha2, out, out_dtype, scale_layout,
    backend, config, *, activation, limit, weight_layout, out_global_scale,
) -> tuple[DeviceGroupsTask, list[torch.Tensor]]:  # fmt: skip
    """The same of a dual GEMM, whose ``weight_layout`` is as of ``grouped_dual_gemm``."""
    gate = Gate.checked(activation, limit, weight_layout, (b2, b2_scale))
    task, results = check_device_groups(
        a,
        b1,
        a_scale,
        b1_scale,
        offs,
        masked_m,
        alpha1,
        out,
        out_dtype,
        scale_layout,
        backend,
        config,
        out_global_scale=out_global_scale,
        second=(b2, b2_scale, alpha2),
        gate=gate,
    )
    if weight_layout != "concatenated":
        return task, results
    n, half = task.b.shape[1] // 2, task.b_scale.shape[1] // 2
    return replace(
        task,
        b=task.b[:, :n],
        b_scale=task.b_scale[:, :half],
        b2=task.b[:, n:],
        b2_scale=task.b_scale[:, half:],
        gate=replace(gate, weight_layout="separate"),
    ), results


def _weights(name: str, b: torch.Tensor, num_groups: int, row_bytes: int, sizes_name: str) -> torch.Tensor:
    """The uint8 view of checked weights."""
    weights = checks.fp4_bytes(name, b)
    if weights.ndim != 3 or weights.shape[0] != num_groups or weights.shape[2] != row_bytes:
        raise ValueError(
            f"{name} has shape {list(b.shape)}; expected [G, N, K/2] = [{num_groups}, N, {row_bytes}] "
            f"({num_groups} entries in {sizes_name}, K={2 * row_bytes} in a)"
        )
    _check_rows(name, weights)
    return weights


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    """Rows that TMA reads."""
    if tensor.numel() and tensor.stride(2) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(2)} in K, not 1 (K-major); copy with .contiguous()"
        )
    pitches = [tensor.stride(i) for i in (0, 1) if tensor.shape[i] > 1]
    checks.check_aligned(name, tensor, pitches=pitches)
    checks.check_extent(f"rows of {name}", tensor.shape[1], INT32_MAX)


def _named_outputs(out, out_dtype: OutDtype) -> dict[str, torch.Tensor]:
    """The caller's outputs by name."""
    if out is None:
        return {}
    if out_dtype != NVFP4:
        return {"out": out}
    if not isinstance(out, list | tuple) or len(out) != 2:
        raise TypeError(
            'out_dtype="nvfp4" with offs or masked_m takes out as (data, scale), as the call returns them'
        )
    return {"data of out": out[0], "scale of out": out[1]}


def _plain_output(out, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``out``, checked, or a new one."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype} and out_dtype is {dtype}; make them agree")
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {list(out.shape)}; expected {list(shape)}")
    if out.numel() and 1 not in out.stride()[-2:]:
        raise ValueError(
            f"out has strides {out.stride()}; expected unit stride in N or in M: torch.empty{shape}"
        )
    return out


def new_device_results(
    shape: tuple[int, ...], num_groups: int, ragged: bool, device: torch.device
) -> list[torch.Tensor]:
    """Uninitialised data and scales, uint8, of NVFP4 results of groups on the device."""
    atoms = _scale_atoms(shape, num_groups, ragged)
    scale = torch.empty((*atoms, *ATOM_SHAPE), dtype=torch.uint8, device=device)
    return [new_quantized_data(shape, device), scale]


def _scale_atoms(shape: tuple[int, ...], num_groups: int, ragged: bool) -> tuple[int, ...]:
    """Scale blocks of results [rows, N] or [G, M_max, N]."""
    *_, rows, n = shape
    row_blocks, n_blocks = atom_counts(rows, n // SF_VEC_SIZE)
    return (rows // ATOM_ROWS + num_groups, n_blocks) if ragged else (num_groups, row_blocks, n_blocks)


def _quantized_outputs(
    outputs: dict[str, torch.Tensor],
    shape: tuple[int, ...],
    num_groups: int,
    ragged: bool,
    device: torch.device,
) -> list[torch.Tensor]:
    """Data and scale of NVFP4 results: the caller's, checked, or new ones."""
    *lead, n = shape
    check_quantized_columns("N", n)
    if not outputs:
        return new_device_results(shape, num_groups, ragged, device)
    data, scale = outputs.values()
    view = checks.fp4_bytes("data of out", data)
    if tuple(view.shape) != (*lead, n // 2) or (view.numel() and view.stride(-1) != 1):
        raise ValueError(
            f"data of out has shape {list(data.shape)} and strides {data.stride()}; expected uint8 {[*lead, n // 2]}, "
            "unit stride in N"
        )
    pitches = [
        stride for stride, extent in zip(view.stride()[:-1], view.shape[:-1], strict=True) if extent > 1
    ]
    checks.check_aligned("data of out", view, pitches=pitches)
    atoms = _scale_atoms(shape, num_groups, ragged)
    flat = _scales("scale of out", scale, lead[-1], n, None if ragged else num_groups)
    if ragged and flat.numel() < prod(atoms) * ATOM_BYTES:
        raise ValueError(
            f"scale of out has {flat.numel()} bytes; expected {prod(atoms) * ATOM_BYTES}, whatever the sizes of the "
            f"{num_groups} groups are: {list(atoms)} blocks of {ATOM_BYTES}"
        )
    return [view, scale]


def _check_global_scale(factors: torch.Tensor | None, num_groups: int) -> None:
    if factors is not None and (
        factors.dtype != torch.float32 or tuple(factors.shape) != (num_groups,) or not factors.is_contiguous()
    ):
        raise ValueError(
            f"out_global_scale has dtype {factors.dtype}, shape {list(factors.shape)}; expected contiguous float32 "
            f"[{num_groups}], one factor a group"
        )


def _factors(alpha, num_groups: int, device: torch.device) -> torch.Tensor | None:
    """float32 [G] on the device, or None."""
    if isinstance(alpha, list | tuple):
        if len(alpha) != num_groups:
            raise ValueError(
                f"alpha has {len(alpha)} entries for {num_groups} groups; pass one number a group"
            )
        return numbers_on(device, alpha)
    factors, step = checks.as_alpha(alpha, num_groups, device, "group")
    return factors if factors is None or step else factors.expand(num_groups).contiguous()


def _pitched(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with 16-byte pitches in the modes of extent 1, whose strides are never used."""
    batches, rows, row_bytes = tensor.shape
    aligned = -(-row_bytes // 16) * 16
    pitch = tensor.stride(1) if rows > 1 else aligned
    return tensor.as_strided(tensor.shape, (tensor.stride(0) if batches > 1 else aligned, pitch, 1))


def _scales(name: str, scale: torch.Tensor, rows: int, k: int, batches: int | None) -> torch.Tensor:
    """Blocked scales as flat bytes: of ``batches`` matrices, or, where None, of groups one after the other."""
    row_blocks, k_blocks = atom_counts(rows, num_k_blocks(k))
    row_bytes = k_blocks * ATOM_BYTES
    if scale.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise TypeError(f"{name} has dtype {scale.dtype}; expected float8_e4m3fn or uint8 (e4m3 codes)")
    if not scale.is_contiguous():
        raise ValueError(
            f"{name} has strides {scale.stride()}; blocked scales are contiguous: call .contiguous()"
        )
    flat = scale.view(torch.uint8).view(-1)
    size = flat.numel()
    if batches is None:
        if size % row_bytes or size < row_blocks * row_bytes:
            raise ValueError(
                f"{name} has {size} bytes; expected a multiple of {row_bytes} (128 rows of K={k}), and every group's "
                f"rows padded to 128: at least {row_blocks * row_bytes}"
            )
    elif size != batches * row_blocks * row_bytes:
        raise ValueError(
            f"{name} has {size} bytes; expected {batches * row_blocks * row_bytes}: {batches} groups of "
            f"{row_blocks} x {k_blocks} blocks of {ATOM_BYTES} bytes (128 rows x 4 scales)"
        )
    checks.check_aligned(name, flat)
    return flat
