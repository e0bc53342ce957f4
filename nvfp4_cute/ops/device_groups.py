"""Checked operands of a grouped GEMM whose group sizes live on the device: the ragged and the masked form.

Nothing here reads the sizes, so nothing waits for the GPU and a captured graph follows sizes that change.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np
import torch

from nvfp4_cute import backends, formats, tuned
from nvfp4_cute.arch import ctas_per_sm
from nvfp4_cute.compile import KernelKey
from nvfp4_cute.config import KernelConfig, check_config
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header, float32_bits
from nvfp4_cute.ops import vector_checks as checks
from nvfp4_cute.problem import NVFP4, Form, Gate, GroupedProblem, OutDtype, new_quantized_data
from nvfp4_cute.reference import grouped_dual_gemm_reference, grouped_gemm_reference
from nvfp4_cute.scale_layout import ATOM_BYTES, ATOM_SHAPE, SF_VEC_SIZE, atom_counts, num_k_blocks
from nvfp4_cute.select import config_for_mean
from nvfp4_cute.tensor_checks import check_out_dtype, check_quantized_columns

SF_ATOM_ROWS = 128


@dataclass(frozen=True)
class DeviceGroupsTask:
    """One launch of the ragged or masked form (``task.Task``).

    Attributes:
        form: "ragged": ``sizes`` are the groups' inclusive ends in the rows of ``a``; "masked": their row counts.
        a: uint8 [batches, rows, K/2]: one batch where ragged, one a group where masked.
        b: uint8 [G, N, K/2].
        a_scale: uint8, flat, blocked; where ragged, every group's rows begin a 128-row block.
        b_scale: uint8 [G, bytes], blocked.
        sizes: int32 [G].
        alpha: float32 [G], or None.
        out: [batches, rows, N], unit stride in N or in M; of NVFP4 results, data: uint8 [batches, rows, N/2].
        config: how.
        max_cta: CTAs that the GPU runs at once.
        out_scale: uint8, flat, blocked, of NVFP4 results, as ``a_scale``; None otherwise.
        out_global_scale: float32 [G] of NVFP4 results, or None.
        gate: of a dual GEMM; None where there is one product.
        b2, b2_scale: of a dual GEMM with separate weights: like ``b`` and ``b_scale``.
        alpha2: of a dual GEMM: float32 [G], or None where ``alpha`` is.
    """

    form: Literal["ragged", "masked"]
    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    sizes: torch.Tensor
    alpha: torch.Tensor | None
    out: torch.Tensor
    config: KernelConfig
    max_cta: int
    out_scale: torch.Tensor | None = None
    out_global_scale: torch.Tensor | None = None
    gate: Gate | None = None
    b2: torch.Tensor | None = None
    b2_scale: torch.Tensor | None = None
    alpha2: torch.Tensor | None = None

    @property
    def out_dtype(self) -> OutDtype:
        """Of the results."""
        return self.out.dtype if self.out_scale is None else NVFP4

    @property
    def device(self) -> torch.device:
        """The device of the operands."""
        return self.a.device

    @property
    def is_empty(self) -> bool:
        """Whether there can be no work, whatever the sizes are."""
        return self.out.numel() == 0

    @property
    def out_m_major(self) -> bool:
        """Whether columns of the output are contiguous, not rows."""
        return self.out_scale is None and _is_m_major(self.out)

    def key(self, arch: str) -> KernelKey:
        """What to compile. Raises UnsupportedTarget, UnsupportedProblem or ConfigError."""
        has_alpha = self.alpha is not None
        variant = (arch, self.config, 1, self.out_dtype, has_alpha, self.form, self.out_m_major)
        if self.gate is None:
            return KernelKey.make(*variant)
        gate = self.gate
        return KernelKey.make(*variant, gate.activation, gate.weight_layout, gate.limit is not None)

    def table(self) -> np.ndarray:
        """``launch_table``: a header and one row."""
        batches, rows, row_bytes = self.a.shape
        num_groups, n, _ = self.b.shape
        k = 2 * row_bytes
        table = np.zeros((2, NUM_COLUMNS), np.int64)
        header, row = table
        header[Header.NUM_CTA] = self._num_cta()
        header[Header.GROUP_SIZES] = self.sizes.data_ptr()
        header[Header.NUM_GROUPS] = num_groups
        if self.alpha is not None:
            header[Header.ALPHA] = self.alpha.data_ptr()
        if self.alpha2 is not None:
            header[Header.ALPHA2] = self.alpha2.data_ptr()
        if self.gate is not None and self.gate.limit is not None:
            header[Header.LIMIT] = float32_bits(self.gate.limit)
        row[Group.A : Group.OUT + 1] = [
            tensor.data_ptr() for tensor in (self.a, self.b, self.a_scale, self.b_scale, self.out)
        ]
        row[Group.A_PITCH], row[Group.A_BATCH_PITCH] = 2 * self.a.stride(1), 2 * self.a.stride(0)
        row[Group.B_PITCH], row[Group.B_BATCH_PITCH] = 2 * self.b.stride(1), 2 * self.b.stride(0)
        if self.b2 is not None and self.b2_scale is not None:
            row[Group.B2], row[Group.SFB2] = self.b2.data_ptr(), self.b2_scale.data_ptr()
            row[Group.B2_PITCH], row[Group.B2_BATCH_PITCH] = 2 * self.b2.stride(1), 2 * self.b2.stride(0)
        row[Group.OUT_PITCH] = self.out.stride(2 if self.out_m_major else 1)
        row[Group.OUT_BATCH_PITCH] = self.out.stride(0)
        if self.out_scale is not None:
            row[Group.OUT_SCALE] = self.out_scale.data_ptr()
        if self.out_global_scale is not None:
            header[Header.OUT_GLOBAL_SCALE] = self.out_global_scale.data_ptr()
        row[[Group.M, Group.N, Group.K]] = rows, n, k
        row[Group.A_BATCH], row[Group.B_BATCH] = batches, num_groups
        _, k_blocks = atom_counts(1, num_k_blocks(k))
        block_bytes = k_blocks * ATOM_BYTES
        row[Group.SFA_ROW_BLOCKS] = self.a_scale.numel() // (block_bytes * batches)
        row[Group.SFB_ROW_BLOCKS] = self.b_scale.shape[1] // block_bytes
        row[Group.SFB_BATCH_BLOCKS] = self.b_scale.stride(0) // block_bytes
        return table

    def address_places(self) -> list[int]:
        """Where in the flat launch table addresses go: of what :meth:`tensors` names, in its order."""
        header = {
            "sizes": Header.GROUP_SIZES,
            "alpha": Header.ALPHA,
            "alpha2": Header.ALPHA2,
            "out_global_scale": Header.OUT_GLOBAL_SCALE,
        }
        row = {
            "a": Group.A,
            "b": Group.B,
            "a_scale": Group.SFA,
            "b_scale": Group.SFB,
            "b2": Group.B2,
            "b2_scale": Group.SFB2,
            "out": Group.OUT,
            "out_scale": Group.OUT_SCALE,
        }
        return [
            int(header[name]) if name in header else NUM_COLUMNS + row[name] for name, _, _ in self.tensors()
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it is written: inputs in the order of the operation's arguments, then outputs."""
        weights = ("b2", "b2_scale", "alpha2")
        inputs = ("a", "b", "a_scale", "b_scale", "sizes", "alpha", *weights, "out_global_scale")
        for name in (*inputs, "out", "out_scale"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor, name not in inputs

    def reference(self) -> None:
        """Float64 sums, rounded as ``reference.grouped_gemm_reference`` says. Reads the sizes."""
        _, k_blocks = atom_counts(1, num_k_blocks(2 * self.a.shape[2]))
        dtype = torch.float32 if self.out_scale is not None else self.out.dtype
        for group, (batch, start, end, block) in enumerate(self.groups()):
            num_blocks = -(-(end - start) // SF_ATOM_ROWS)
            scales = self.a_scale.view(-1, k_blocks * ATOM_BYTES)
            if block + num_blocks > len(scales):
                raise ValueError(
                    f"a_scale has {len(scales)} blocks of {SF_ATOM_ROWS} rows, and group {group} ends in block "
                    f"{block + num_blocks}; pad every group's rows to {SF_ATOM_ROWS}"
                )
            scale = scales[block : block + num_blocks].reshape(-1)
            results = self._group_reference(group, self.a[batch, start:end], scale, dtype)
            if self.out_scale is None:
                self.out[batch, start:end] = results[0]
            elif end > start:
                factor = None if self.out_global_scale is None else self.out_global_scale[group]
                quantized = formats.quantize(results[0], global_scale=factor)
                self.out[batch, start:end] = quantized.data
                row_bytes = quantized.scale[0].numel()
                self.out_scale.view(-1, row_bytes)[block : block + num_blocks] = quantized.scale.view(
                    torch.uint8
                ).view(num_blocks, row_bytes)

    def _group_reference(
        self, group: int, a: torch.Tensor, a_scale: torch.Tensor, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """The results of one group, in a list of one."""
        b, b_scale = [self.b[group]], [self.b_scale[group]]
        alpha, alpha2 = (x if x is None else x[group : group + 1] for x in (self.alpha, self.alpha2))
        if self.gate is None:
            return grouped_gemm_reference([a], b, [a_scale], b_scale, alpha, out_dtype=dtype)
        b2, b2_scale = (x if x is None else [x[group]] for x in (self.b2, self.b2_scale))
        return grouped_dual_gemm_reference(
            [a], b, b2, [a_scale], b_scale, b2_scale, alpha, alpha2, dtype, **vars(self.gate)
        )

    def groups(self) -> Iterator[tuple[int, int, int, int]]:
        """Batch, first row, end, and first scale block of every group, clipped to the rows that there are."""
        batches, rows, _ = self.a.shape
        row_blocks = self.table()[1, Group.SFA_ROW_BLOCKS]
        start = block = 0
        for group, size in enumerate(self.sizes.tolist()):
            if self.form == "masked":
                yield group, 0, max(min(size, rows), 0), group * int(row_blocks)
                continue
            end = max(min(size, rows), start)
            yield 0, start, end, block
            start, block = max(size, 0), block + -(-(end - start) // SF_ATOM_ROWS)

    def _num_cta(self) -> int:
        """Persistent CTAs: one an SM, and no more than there can be tiles."""
        config = self.config
        batches, rows, _ = self.a.shape
        num_groups, n, _ = self.b.shape
        tile_m, tile_n, _ = config.work_tile_mnk
        # Where ragged, every group but one may end a tile early.
        tiles_m = batches * -(-rows // tile_m) + (num_groups - 1 if self.form == "ragged" else 0)
        clusters = min((config.num_cta or self.max_cta) // config.cluster_size, tiles_m * -(-n // tile_n))
        return clusters * config.cluster_size


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
    if offs is not None and masked_m is not None:
        raise ValueError(
            "offs and masked_m are both given; offs is of the ragged form, masked_m of the masked one"
        )
    if scale_layout != "blocked":
        raise UnsupportedProblem(
            f"scale_layout={scale_layout!r} with offs or masked_m: only the device knows where padding goes; quantize "
            "to blocked scales, every group's rows padded to 128"
        )
    ragged = offs is not None
    form: Literal["ragged", "masked"] = "ragged" if ragged else "masked"
    sizes_name, sizes = ("offs", offs) if ragged else ("masked_m", masked_m)
    suffix = "" if gate is None else "1"
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
    matrix_shape = "[sum of M, K/2]" if ragged else "[G, M_max, K/2]"
    if isinstance(a, list | tuple):
        raise TypeError(f"a is a {type(a).__name__}; with {sizes_name} it is one tensor, {matrix_shape}")
    device = checks.check_tensors(named, optional | outputs)
    named |= optional | outputs
    if sizes.dtype != torch.int32 or sizes.ndim != 1 or not sizes.is_contiguous():
        raise TypeError(
            f"{sizes_name} is {sizes.dtype} of shape {list(sizes.shape)}; expected contiguous int32 [G]: "
            f"{sizes_name}.to(torch.int32)"
        )
    num_groups = sizes.shape[0]
    matrix = checks.fp4_bytes("a", a)
    if matrix.ndim != (2 if ragged else 3):
        raise ValueError(f"a has shape {list(a.shape)}; with {sizes_name} it is {matrix_shape}")
    matrix = matrix.unsqueeze(0) if ragged else matrix
    batches, rows, row_bytes = matrix.shape
    k = checks.check_k(2 * row_bytes)
    if num_groups == 0:
        raise ValueError(f"{sizes_name} is empty; pass at least one group (a group may have no rows)")
    if not ragged and batches != num_groups:
        raise ValueError(f"a has {batches} groups and {sizes_name} {num_groups}; pass an entry a group")
    _check_rows("a", matrix)
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
    config = config or config_for_mean(gpu.arch, gpu.num_sms, num_groups, mean, gate, out_dtype == NVFP4)
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
        gpu.num_sms * ctas_per_sm(gpu.arch, config),
        results[1].view(torch.uint8).view(-1) if out_dtype == NVFP4 else None,
        out_global_scale,
        gate,
        None if weights2 is None else _pitched(weights2),
        sfb2,
        factors2,
    )
    return task, results


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
    return GroupedProblem((mean,) * num_groups, form, out_dtype, out_m_major=_is_m_major(out), **kind)


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


def _is_m_major(out: torch.Tensor) -> bool:
    """Whether columns of [batches, rows, N] are contiguous, not rows."""
    _, rows, n = out.shape
    return out.stride(2) != 1 and n > 1 and rows > 1


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
    checks.check_extent(f"rows of {name}", tensor.shape[1], checks.INT32_MAX)


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
    return (rows // SF_ATOM_ROWS + num_groups, n_blocks) if ragged else (num_groups, row_blocks, n_blocks)


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
        return torch.tensor(alpha, dtype=torch.float32, device=device)
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
