"""Layers of experts next to LightMoE's: every launch of a call after the router, replayed as a CUDA graph on a cold L2.

LightMoE's ``InferenceMoE`` runs as its user calls it, with its static scheduler. The emulator executes a few clusters of its
products, and all of its other launches. With many columns and few tokens LightMoE launches two CTAs per SM, all of which
compute the same tiles; its grid of one CTA per SM is modelled instead. Our layer is modelled without ``route``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import Any

import torch

from nvfp4_cute.activation import Activation
from nvfp4_cute.bench.cases import routed_ids
from nvfp4_cute.bench.foreign.cells import MODELS, Model
from nvfp4_cute.bench.foreign.lightmoe import KERNEL, TILE_K
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.bench.foreign.schedule import static_work
from nvfp4_cute.bench.layers import empty_experts, experts_work
from nvfp4_cute.bench.moe import Model as Sizes
from nvfp4_cute.emulator.fronts.script import emulation
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu, aligned_bytes
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.emulator.record.placement import Placement
from nvfp4_cute.emulator.record.representatives import LaunchWork
from nvfp4_cute.emulator.state import Launch
from nvfp4_cute.formats.block_format import ATOM_ROWS, NVFP4
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.roofline.modelled import modelled_chain, modelled_launches, replayed_tiles
from nvfp4_cute.timing.result import ChainTiming

LIGHTMOE = "LightMoE"
TOKENS = (1, 16, 128, 1024)
ACTIVATIONS = {
    # model: (our activation, LightMoE's name and options)
    "DeepSeek-V4-Flash": (Activation("silu", limit=10.0), "swiglu", {"activation_clamp": 10.0}),
    "MiniMax-M3": (Activation("swiglu_oai", limit=7.0), "swiglu_oai", {}),
    "Nemotron-3.5-Lightning": (Activation("relu2"), "relu2", {}),
}
"""Activations of the models that do not use SwiGLU without a clamp."""
ALIGN = 128
"""LightMoE pads its weights so that widths are multiples of this number."""


@dataclass(frozen=True)
class Layer:
    """A layer of experts on a number of tokens. If experts are divided over GPUs, every token has equally many on each."""

    model: Model
    tokens: int

    def __str__(self) -> str:
        return f"{self.model.name} layer, {self.tokens} token{'s' * (self.tokens > 1)}"

    @property
    def experts(self) -> int:
        """Experts of the GPU."""
        return self.model.experts // self.model.gpus

    @property
    def top_k(self) -> int:
        """Experts of the GPU per token."""
        return self.model.top_k // self.model.gpus

    @property
    def ids(self) -> torch.Tensor:
        """Experts of every token, int32 [tokens, top_k]."""
        return torch.tensor(routed_ids(self.tokens, self.experts, self.top_k), dtype=torch.int32)

    @property
    def work(self) -> light.Work:
        """Least traffic of the layer."""
        rows = [count for count in torch.bincount(self.ids.flatten().long()).tolist() if count]
        return experts_work(rows, self.tokens, self.model.hidden, self.model.intermediate, self.model.gated)


def layers() -> list[Layer]:
    """Returns all layers, few tokens first. Kimi-K3 is left out, because LightMoE does not have its activation."""
    return [Layer(model, tokens) for tokens, model in product(TOKENS, MODELS) if model.name != "Kimi-K3"]


def record(kernel: str, layer: Layer, target: Target) -> dict[str, Any]:
    """Returns the record of a layer: our own, or LightMoE's in a process that has not run another one."""
    began = time.monotonic()
    timing = lightmoe(layer, target) if kernel == LIGHTMOE else ours(layer, target)
    return {
        "us": timing.us,
        "launches": [{"kernel": one.kernel, "us": one.us} for one in timing.launches],
        "seconds": round(time.monotonic() - began, 1),
    }


# ---- ours ------------------------------------------------------------------------------------------------------------
def ours(layer: Layer, target: Target) -> ChainTiming:
    """Returns the modelled time of our layer."""
    model = layer.model
    activation = ACTIVATIONS[model.name][0] if model.name in ACTIVATIONS else Activation()
    sizes = Sizes(layer.experts, layer.top_k, model.hidden, model.intermediate)
    module = empty_experts(sizes, activation=activation, gated=model.gated)
    x = torch.zeros((layer.tokens, model.hidden), dtype=torch.bfloat16)
    weights = torch.ones(layer.ids.shape) / layer.top_k

    def call(backend: str) -> object:
        module.backend = backend
        return module(x, layer.ids, weights)

    return modelled_chain(call, target)


# ---- LightMoE's ------------------------------------------------------------------------------------------------------
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
    """A virtual GPU that records all launches, and executes a few of the clusters of those that multiply.

    Attributes:
        products: for the next launches that multiply, a function from the number of clusters to their work.
    """

    def __init__(self, target: Target):
        """Starts without expected launches."""
        self.recording = Recording()
        super().__init__(target.arch, target.num_sms, timing=self.recording)
        self.machine.jobs = 1  # processes would copy the memory of all experts
        self.products: list[Callable[[int], LaunchWork]] = []

    def run(self, launch: Launch) -> None:
        """Runs a launch."""
        if KERNEL in launch.code.entry.name and self.products:
            work = self.products.pop(0)(prod(launch.grid) // prod(launch.cluster))
            self.expect(replace(work, most_tiles=replayed_tiles(work)))
        super().run(launch)


def lightmoe(layer: Layer, target: Target, *, by_representatives: bool = True) -> ChainTiming:
    """Returns the modelled time of LightMoE's layer. Its weights hold no data, so its results are meaningless."""
    gpu = RecordingGpu(target)
    with emulation(gpu):
        from lightmoe import InferenceMoE
        from lightmoe.kernels.grouped import runtime

        # With LightMoE's grid of two CTAs per SM, its scheduler reads blockIdx.z, 0 in every CTA, and computes few of the tiles.
        runtime._decode_grid_mode = lambda *_: runtime.DECODE_GRID_PERSISTENT
        model = layer.model
        _, name, options = ACTIVATIONS.get(model.name, (None, "swiglu", {}))
        hidden, width = model.hidden, -(-model.intermediate // ALIGN) * ALIGN
        moe = InferenceMoE(
            hidden,
            width,
            layer.experts,
            layer.top_k,
            layer.tokens,
            activation=name,
            use_dynamic_sched=False,
            **options,
        )
        one = torch.ones(1, device="cuda")
        moe.load_packed_weights(*_weights(gpu, layer.experts, width * (1 + model.gated), hidden), one,
                                *_weights(gpu, layer.experts, hidden, width), one)  # fmt: skip
        moe.set_activation_scales(1.0, 1.0)
        x = torch.zeros((layer.tokens, hidden), dtype=torch.bfloat16, device="cuda")
        ids = layer.ids.cuda()
        probabilities = torch.ones(ids.shape, device="cuda") / layer.top_k
        rows = torch.bincount(layer.ids.flatten().long(), minlength=layer.experts).tolist()
        for _ in range(2):  # the first call also compiles, with launches that convert tensors
            gpu.recording.restart()
            if by_representatives:
                gpu.products = [partial(_work, moe, rows, second) for second in (False, True)]
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


def _work(moe: Any, rows: list[int], second: bool, clusters: int) -> LaunchWork:
    """Returns the work of a launch of one of both products of an ``InferenceMoE``, from the tiles of its GEMM."""
    (execution,) = moe._full_executions.values()
    gemm = execution.fc2 if second else execution.fc1
    data, scale = (execution.qh, execution.sfh) if second else (execution.qx, execution.sfx)
    weights, weight_scale = (moe.qb2, moe.sfb2) if second else (moe.qb1, moe.sfb1)
    listed, out_atom = gemm.fast_decode_sched, NVFP4.atom_k * gemm.n // gemm.output_n
    starts = tuple(accumulate(rows, initial=0))[:-1]
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
