"""LightMoE's layer of experts on the virtual GPU.

``InferenceMoE`` runs as its user calls it, with its static scheduler. The emulator executes a few clusters of every launch,
except for the launches that put rows in order. With many columns and few tokens LightMoE launches two CTAs per SM, all of
which compute the same tiles; its grid of one CTA per SM is modelled instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any

import torch

from nvfp4_cute.bench.foreign.cells import Model
from nvfp4_cute.bench.foreign.lightmoe import KERNEL, TILE_K
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.bench.foreign.schedule import static_work
from nvfp4_cute.emulator.fronts.script import emulation
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu, aligned_bytes
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.emulator.record.placement import Placement
from nvfp4_cute.emulator.record.representatives import LaunchWork
from nvfp4_cute.emulator.state import Launch
from nvfp4_cute.formats.block_format import ATOM_ROWS, NVFP4
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.roofline.modelled import modelled_launches, replayed_tiles
from nvfp4_cute.roofline.row_work import launch_of_rows, part_of_row, row_place, scale_place
from nvfp4_cute.timing.result import ChainTiming

ALIGN = 128
"""LightMoE pads its weights so that widths are multiples of this number."""
PART = 256
"""Columns of tokens that a CTA of LightMoE quantizes, for many tokens."""


class Recording:
    """Collects the recordings of the launches of a call, which share their memory."""

    with_data = True

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets all launches, and the places of memory that may have been freed since."""
        self.traces: list[LaunchTrace] = []
        self.memory = Placement()

    def model(self, trace: LaunchTrace) -> None:
        """Stores the trace of a launch."""
        self.traces.append(trace)

    def placement(self) -> Placement:
        """Returns the placement that all launches share."""
        return self.memory


class RecordingGpu(VirtualGpu):
    """A virtual GPU that records all launches, and executes a few of their clusters if their work is known.

    Attributes:
        work_of: returns the work of a launch, or None if all of its clusters must be executed.
        compiles: launches do nothing.
    """

    def __init__(self, target: Target):
        """Starts by compiling."""
        self.recording = Recording()
        super().__init__(target.arch, target.num_sms, timing=self.recording)
        self.machine.jobs = 1  # processes would copy the memory of all experts
        self.work_of: Callable[[Launch], LaunchWork | None] = lambda launch: None
        self.compiles = True

    def run(self, launch: Launch) -> None:
        """Runs a launch."""
        if self.compiles:
            return
        assert self._timed.recorder is not None
        self._timed.recorder.with_data = KERNEL not in launch.code.entry.name  # nothing depends on products
        self.expect(self.work_of(launch))
        super().run(launch)


def modelled(
    model: Model,
    ids: torch.Tensor,
    target: Target,
    *,
    by_representatives: bool = True,
    activation: str = "swiglu",
    **options: float,
) -> ChainTiming:
    """Returns the modelled time of LightMoE's layer. Its weights hold no data, so its results are meaningless.

    Args:
        model: the model. If several GPUs share the experts, those of the first one are modelled.
        ids: experts of every token, int32 [tokens, top_k].
        target: the GPU.
        by_representatives: execute only a few clusters of a launch whose work is known.
        activation, options: LightMoE's name of the activation, and its other arguments.
    """
    experts, (tokens, top_k) = model.experts // model.gpus, ids.shape
    gpu = RecordingGpu(target)
    with emulation(gpu):
        from lightmoe import InferenceMoE
        from lightmoe.kernels.grouped import runtime

        # With LightMoE's grid of two CTAs per SM, its scheduler reads blockIdx.z, 0 in every CTA, and computes few of the tiles.
        runtime._decode_grid_mode = lambda *_: runtime.DECODE_GRID_PERSISTENT
        hidden, width = model.hidden, -(-model.intermediate // ALIGN) * ALIGN
        moe = InferenceMoE(
            hidden, width, experts, top_k, tokens, activation=activation, use_dynamic_sched=False, **options
        )
        one = torch.ones(1, device="cuda")
        moe.load_packed_weights(*_weights(gpu, experts, width * (1 + model.gated), hidden), one,
                                *_weights(gpu, experts, hidden, width), one)  # fmt: skip
        moe.set_activation_scales(1.0, 1.0)
        x = torch.zeros((tokens, hidden), dtype=torch.bfloat16, device="cuda")
        ids = ids.cuda()
        probabilities = torch.ones(ids.shape, device="cuda") / top_k
        moe.run(x, ids, probabilities)
        gpu.compiles = False
        gpu.recording.restart()
        if by_representatives:
            gpu.work_of = Works(moe, x, ids)
        moe.run(x, ids, probabilities)
        if gpu.failed is not None:
            raise gpu.failed
    return modelled_launches(gpu.recording.traces, target, explained=False)


def _weights(gpu: VirtualGpu, experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns unwritten weights and their scales."""

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.from_numpy(aligned_bytes(prod(shape))).reshape(shape)
        return gpu.torch_memory.adopt(made).view(dtype)

    data = tensor((experts, n, NVFP4.row_bytes(k)), torch.float4_e2m1fn_x2)
    return data, tensor((experts, *NVFP4.scale_shape(n, k)), torch.float8_e4m3fn)


class Works:
    """Work of the launches of a call of an ``InferenceMoE``: products, quantization, and the sum over experts."""

    def __init__(self, moe: Any, x: torch.Tensor, ids: torch.Tensor):
        """Takes the arguments of the call."""
        self.moe, self.x, self.ids = moe, x, ids
        chosen = torch.tensor(ids.tolist()).flatten()
        order = chosen.argsort(stable=True)
        self.tokens = (order // ids.shape[1]).tolist()
        self.slots = order.argsort().reshape(ids.shape).tolist()
        self.rows = torch.bincount(chosen, minlength=moe.experts).tolist()
        self.starts = tuple(accumulate(self.rows, initial=0))[:-1]
        self.products = 0

    def __call__(self, launch: Launch) -> LaunchWork | None:
        """Returns the work of the next launch, or None if it puts rows in order."""
        name = launch.code.entry.name
        if KERNEL in name:
            self.products += 1
            work = self._product(self.products == 2, prod(launch.grid) // prod(launch.cluster))
            return replace(work, most_tiles=replayed_tiles(work))
        if "MoEFinalizeKernel" in name:
            return self._sum(launch.grid[1])
        if "NVFP4DecodeQuantKernel" in name:
            return self._quantize_tokens(launch.grid[0])
        return self._quantize_rows(*launch.grid[:2]) if "NVFP4QuantKernel" in name else None

    @property
    def execution(self) -> Any:
        """Both products and their operands."""
        (execution,) = self.moe._full_executions.values()
        return execution

    def _sum(self, parts: int) -> LaunchWork:
        """Returns the work of CTAs (token, part of its columns)."""
        tensors = self.moe._slots, self.moe._probs, self.moe._out, self.execution.routed_out
        return launch_of_rows(
            tuple(
                tuple(
                    part_of_row(1 + part, _rows(tensors, (token * len(slots), slot, token, slot)))
                    for slot in slots
                )
                for part in range(parts)
                for token, slots in enumerate(self.slots)
            ),
            tensors,
        )

    def _quantize_tokens(self, parts: int) -> LaunchWork:
        """Returns the work of CTAs (part of the columns, token), which write a token to all of its experts."""
        data, scale = self.execution.qx.view(torch.uint8), self.execution.sfx.view(torch.uint8)[0]
        tensors = self.x, self.ids, self.moe._slots, data, scale
        atoms = tuple(accumulate((-(-m // ATOM_ROWS) for m in self.rows), initial=0))

        def places(token: int, expert: int, slot: int) -> tuple[int, ...]:
            row = atoms[expert] * ATOM_ROWS + slot - self.starts[expert]
            first = token * len(self.slots[token])
            return *_rows(tensors[:4], (token, token, first, slot)), scale_place(scale, self.x.shape[1], row)

        return launch_of_rows(
            tuple(
                tuple(
                    part_of_row(1 + part, places(token, *pair))
                    for pair in zip(experts, self.slots[token], strict=True)
                )
                for token, experts in enumerate(self.ids.tolist())
                for part in range(parts)
            ),
            tensors,
        )

    def _quantize_rows(self, parts: int, tiles: int) -> LaunchWork:
        """Returns the work of CTAs (part of the columns, 128 rows of an expert or fewer); the last ones have no rows.

        In the place of missing rows stands the last one, with 0 results, so that all CTAs have equally many tiles.
        """
        data, scale = self.execution.qx.view(torch.uint8), self.execution.sfx.view(torch.uint8)[0]
        tensors = self.x, self.moe._gather, data, scale
        columns = self.x.shape[1]
        steps = (PART * self.x.element_size(), 0, NVFP4.row_bytes(PART), NVFP4.atom_row_bytes(PART))

        def rows_of(expert: int, first: int) -> list[tuple[int, tuple[int, ...]]]:
            found = []
            for row in range(first, first + ATOM_ROWS):
                there = min(row, self.rows[expert] - 1)
                at = self.starts[expert] + there
                blocked = (self.starts[expert] // ATOM_ROWS + expert) * ATOM_ROWS + there
                rows = _rows(tensors[:3], (self.tokens[at], at, at))
                found.append((int(row == there), (*rows, scale_place(scale, columns, blocked))))
            return found

        clusters = []
        for expert, count in enumerate(self.rows):
            for first in range(0, count, ATOM_ROWS):
                rows = rows_of(expert, first)
                for part in range(parts):
                    kind = 1 + (columns < (part + 1) * PART)
                    clusters.append(
                        tuple(
                            part_of_row(
                                kind, [p + part * s for p, s in zip(places, steps, strict=True)], there
                            )
                            for there, places in rows
                        )
                    )
        clusters += [()] * (parts * tiles - len(clusters))
        return launch_of_rows(tuple(clusters), tensors)

    def _product(self, second: bool, clusters: int) -> LaunchWork:
        """Returns the work of a launch of one of both products of an ``InferenceMoE``, from the tiles of its GEMM."""
        moe, execution, rows, starts = self.moe, self.execution, self.rows, self.starts
        gemm = execution.fc2 if second else execution.fc1
        data, scale = (execution.qh, execution.sfh) if second else (execution.qx, execution.sfx)
        weights, weight_scale = (moe.qb2, moe.sfb2) if second else (moe.qb1, moe.sfb1)
        listed, out_atom = gemm.fast_decode_sched, NVFP4.atom_k * gemm.n // gemm.output_n
        if listed:
            places = tuple(accumulate((-(-m // gemm.tile_n) for m in rows), initial=0))[:-1]
        else:
            places = tuple(start // ATOM_ROWS + expert for expert, start in enumerate(starts))
        as_bytes = lambda tensor: tensor.view(torch.uint8)
        operands = GroupedOperands(
            sizes=tuple((m, gemm.n, gemm.k) for m in rows),
            starts=starts,
            atoms=places,
            a=as_bytes(data),
            b=as_bytes(weights),
            a_scale=as_bytes(scale)[0],
            b_scale=as_bytes(weight_scale),
            out=execution.routed_out if second else as_bytes(execution.qh),
            device="cuda",
        )
        tile = (gemm.tile_n, gemm.tile_m, TILE_K) if gemm.swap_ab else (gemm.tile_m, gemm.tile_n, TILE_K)
        return static_work(
            operands, tile, clusters, "n" if listed else "shorter",
            out_scale=None if second else (as_bytes(execution.sfh)[0], places, out_atom),
        )  # fmt: skip


def _rows(tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> list[int]:
    """Returns the address of a row of every tensor."""
    return [row_place(tensor, row) for tensor, row in zip(tensors, rows, strict=True)]
