"""Quantizes a model block by block on a calibration text, so that each layer reads the output of quantized layers.

A stage is a set of layers in a block that read the same rows. Every window of the text runs through a block once per stage.
After each stage its weights are rounded, and the model uses the rounded ones from then on. The output layer is a stage after
the last block.

The device holds one block, the sums of the stage's layers (a float32 [K, K] matrix per linear input or per expert), and one
window. The host holds the 16-bit model, and a hidden state per token. Training a block also needs the sums of all its stages, a
gradient per weight, and a second hidden state per token, that of the 16-bit model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map

from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.models.checkpoints.names import expert_of, spellings
from nvfp4_cute.models.checkpoints.tensors import TensorFiles
from nvfp4_cute.models.quantizing.distill import distill
from nvfp4_cute.models.quantizing.observe import Site, expert_weight, is_experts, observed
from nvfp4_cute.models.quantizing.rules import Layer
from nvfp4_cute.models.quantizing.weights import global_scale
from nvfp4_cute.nn.rounded import rounded
from nvfp4_cute.terminal import Progress


@dataclass
class Inputs:
    """Inputs of the layers of one group.

    Attributes:
        rows: number of rows.
        amax: largest magnitude, before activations are rounded.
        hessian: float32 [K, K], the sum of x x^T over the multiplied rows x; None if there was no row.
    """

    rows: int = 0
    amax: float = 0.0
    hessian: torch.Tensor | None = None

    def add(self, given: torch.Tensor, used: torch.Tensor) -> None:
        """Adds rows [..., K], as the layer receives them and as it multiplies them."""
        used = used.flatten(0, -2).float()
        self.rows += len(used)
        self.amax = max(self.amax, float(given.abs().amax()))
        square = used.T @ used
        self.hessian = square if self.hessian is None else self.hessian.add_(square)


Solve = Callable[[list[Layer], Inputs], list[BlockScaledTensor]]
Key = tuple[int, int | None, bool]


@dataclass(frozen=True)
class _Group:
    """Layers that read the same rows, and their places in the model. Only the first place is observed."""

    layers: list[Layer]
    sites: list[Site]

    @property
    def key(self) -> Key:
        return self.sites[0].key

    @property
    def stage(self) -> tuple[int, bool]:
        """Key of the stage, equal for groups that are quantized after the same pass: an experts module, or a linear input."""
        return id(self.sites[0].module), self.sites[0].second

    def weights(self, of: Callable[[torch.nn.Module], Any] = lambda module: module) -> Iterator[torch.Tensor]:
        """Iterates over views [N, K] of the group's weights, which are attributes of ``of(module)``."""
        for layer, site in zip(self.layers, self.sites, strict=True):
            if site.expert is None:
                yield of(site.module).weight
            else:
                expert = expert_of(layer.name)
                assert expert is not None
                yield expert_weight(of(site.module), expert[1], site.expert)


class _Stop(Exception):
    """Ends a pass after all required rows were seen."""


class _Observer:
    """Rounds the inputs of quantized layers, and collects the rows of observed places."""

    def __init__(self) -> None:
        self.formats: dict[Key, str | None] = {}  # formats of activations, by the same keys as scales
        self.scales: dict[Key, Any] = {}  # scales of layers that are quantized, or about to be
        self._watched: frozenset[Key] = frozenset()
        self._rows: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, site: Site, rows: torch.Tensor) -> torch.Tensor:
        key, used = site.key, rows
        format = self.formats.get(key)
        if format is not None:
            used = rounded(rows.detach(), format, self.scales[key] if format == "nvfp4" else None)
            # Adds zeros through which gradients reach the rows before rounding.
            used = used + (rows - rows.detach()) if rows.requires_grad else used
        if key in self._watched:
            self._rows[key] = rows, used
            if site.expert is None and len(self._rows) == len(self._watched):
                raise _Stop
        return used

    def rows(
        self, watched: Iterable[Key], run: Callable[[], Any]
    ) -> dict[Key, tuple[torch.Tensor, torch.Tensor]]:
        """Returns rows by place, as received and as multiplied, in the order in which the places are reached."""
        self._watched, self._rows = frozenset(watched), {}
        try:
            run()
        except _Stop:
            pass
        finally:
            self._watched = frozenset()
        return self._rows


@torch.no_grad()
def quantize_blocks(
    model: Any,
    batches: Sequence[torch.Tensor],
    groups: Mapping[str, list[Layer]],
    solve: Solve,
    device: torch.device | str = "cpu",
    passes: int = 0,
) -> Iterator[tuple[list[Layer], list[BlockScaledTensor], Inputs]]:
    """Quantizes the layers of a causal model of transformers; its weights become the rounded ones.

    Args:
        model: in 16 bits, in eval mode.
        batches: token ids, [1, n] each.
        groups: name of a group -> its layers of the checkpoint, which read the same rows.
        solve: rounds the weights of a group; its inputs are already rounded according to its recipe.
        device: device on which blocks run.
        passes: passes over the text that train scales and norms of each block (``quantizing.distill``).

    Yields:
        Layers, weights and inputs of each group that the model has, in the order of the model. Inputs of experts that no token
        reached have no rows, and the largest ``amax`` of their stage.
    """
    blocks = decoder_blocks(model)
    states, arguments = _first_inputs(model, blocks, batches)
    exact = list(states) if passes else []
    placed = _placed(model, groups)
    observer = _Observer()
    with observed(model, observer):
        for number, block in enumerate(Progress(blocks, desc="quantize", unit="block")):
            home = next((p.device for p in block.parameters()), torch.device("cpu"))
            block.to(device)

            def run(
                window: int, block: torch.nn.Module = block, number: int = number, states: list = states
            ) -> torch.Tensor:
                args, kwargs = tree_map(
                    lambda a: a.to(device) if isinstance(a, torch.Tensor) else a, arguments[window][number]
                )
                return block(states[window].to(device), *args, **kwargs).to(states[window].device)

            own = {id(module) for module in block.modules()}
            here = {key: group for key, group in placed.items() if key[0] in own}
            order = observer.rows(here, partial(run, 0))
            exact = [run(i, states=exact) for i in range(len(exact))]
            runs = [partial(run, i) for i in range(len(states))]
            solved = (
                found
                for stage in _stages(here, order)
                for found in _solved(stage, observer, runs, solve, device)
            )
            yield from _distilled(block, here, list(solved), runs, exact, passes) if passes else solved
            states[:] = [run(i) for i in range(len(states))]
            block.to(home)
        output = model.get_output_embeddings()
        last = [group for group in placed.values() if group.sites[0].module is output]
        if last:
            last_runs = [
                partial(_run_behind, model, blocks, state, ids)
                for state, ids in zip(states, batches, strict=True)
            ]
            yield from _solved(last, observer, last_runs, solve, device)


def _solved(
    stage: list[_Group],
    observer: _Observer,
    runs: Sequence[Callable[[], Any]],
    solve: Solve,
    device: torch.device | str,
) -> Iterator[tuple[list[Layer], list[BlockScaledTensor], Inputs]]:
    """Quantizes the groups of a stage from the rows that they read while ``runs`` process the windows."""
    found = {group.key: Inputs() for group in stage}
    for group in stage:
        for site in group.sites:
            observer.scales[site.key] = "auto"
            observer.formats[site.key] = group.layers[0].recipe.activations
    for run in runs:
        for key, (rows, used) in observer.rows(found, run).items():
            found[key].add(rows.to(device), used.to(device))
    largest = max(inputs.amax for inputs in found.values())
    for group in stage:
        inputs = found[group.key]
        inputs.amax = inputs.amax if inputs.rows else largest
        solved = solve(group.layers, inputs)
        for weight, stored in zip(group.weights(), solved, strict=True):
            weight.copy_(stored.dequantize())
        for site in group.sites:
            observer.scales[site.key] = global_scale(torch.tensor(inputs.amax)).to(device)
        yield group.layers, solved, inputs


def _distilled(
    block: torch.nn.Module,
    here: Mapping[Key, _Group],
    solved: list[tuple[list[Layer], list[BlockScaledTensor], Inputs]],
    runs: Sequence[Callable[[], torch.Tensor]],
    targets: Sequence[torch.Tensor],
    passes: int,
) -> Iterator[tuple[list[Layer], list[BlockScaledTensor], Inputs]]:
    """Trains a block, and iterates over its groups with the trained weights."""
    by_name = {group.layers[0].name: group for group in here.values()}
    groups = [by_name[layers[0].name] for layers, _, _ in solved]
    views = lambda of: [view for group in groups for view in group.weights(of)]
    trained = iter(
        distill(block, [one for _, found, _ in solved for one in found], views, runs, targets, passes)
    )
    for layers, found, inputs in solved:
        yield layers, list(islice(trained, len(found))), inputs


def decoder_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the consecutive blocks of a model: its largest list of modules.

    Raises:
        ValueError: the model has no list of modules.
    """
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks; quantize it to nearest")
    sizes = [sum(p.numel() for p in one.parameters()) for one in lists]
    return list(lists[sizes.index(max(sizes))])


def norms_of(model: torch.nn.Module, files: TensorFiles) -> dict[str, torch.Tensor]:
    """Returns the weights of the norms in a model's blocks, by name in the checkpoint and in the checkpoint's dtypes."""
    modules = dict(model.named_modules())
    inside = {id(module) for block in decoder_blocks(model) for module in block.modules()}
    found = {}
    for name in files:
        for one in spellings(name.removesuffix(".weight")):
            if name.endswith("norm.weight") and one in modules and id(modules[one]) in inside:
                found[name] = modules[one].weight.detach().to(files[name].dtype)
    return found


def _first_inputs(
    model: Any, blocks: list[torch.nn.Module], batches: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[list[tuple]]]:
    """Returns the first block's input for every window, and the other arguments of blocks, by window and block."""
    states, arguments = [], []
    for ids in batches:
        given: list[tuple] = []

        def record(
            hidden: torch.Tensor, *args: Any, given: list[tuple] = given, **kwargs: Any
        ) -> torch.Tensor:
            given.append((hidden, (args, kwargs)))
            return hidden

        with _forward(blocks, record):
            model.base_model(ids.to(model.device), use_cache=False)
        states.append(given[0][0])
        arguments.append([rest for _, rest in given])
    return states, arguments


@contextmanager
def _forward(blocks: list[torch.nn.Module], function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Makes blocks compute ``function`` inside the context."""
    for block in blocks:
        block.forward = function
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _run_behind(model: Any, blocks: list[torch.nn.Module], state: torch.Tensor, ids: torch.Tensor) -> None:
    """Runs the part of the model after the blocks on the last block's output for a window."""
    with _forward(blocks, lambda hidden, *args, **kwargs: state.to(hidden.device)):
        model(ids.to(model.device), use_cache=False)


def _placed(model: Any, groups: Mapping[str, list[Layer]]) -> dict[Key, _Group]:
    """Returns the groups whose layers are all in the model.

    A matrix that is also the embedding is placed where it multiplies.
    """
    modules = dict(model.named_modules())
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    names = {one for layers in groups.values() for layer in layers for one in spellings(layer.name)}
    if (
        output is not None
        and output.weight is table.weight
        and not any(modules.get(name) is output for name in names)
    ):
        modules = {name: output if module is table else module for name, module in modules.items()}
    placed = {}
    for layers in groups.values():
        sites = [site for layer in layers if (site := _site(layer.name, modules)) is not None]
        if len(sites) == len(layers):
            group = _Group(layers, sites)
            placed[group.key] = group
    return placed


def _site(name: str, modules: Mapping[str, torch.nn.Module]) -> Site | None:
    for one in spellings(name):
        if isinstance(modules.get(one), torch.nn.Linear):
            return Site(modules[one])
    expert = expert_of(name)
    for one in spellings(expert[0]) if expert is not None and expert[2] is not None else ():
        if one in modules and is_experts(modules[one]):
            assert expert is not None
            return Site(modules[one], expert[2], expert[1] == "down")
    return None


def _stages(here: Mapping[Key, _Group], order: Iterable[Key]) -> list[list[_Group]]:
    """Returns a block's groups by stage, in the order in which their places are reached; unreached stages come last."""
    stages: dict[tuple[int, bool], list[_Group]] = {here[key].stage: [] for key in (*order, *here)}
    for group in here.values():
        stages[group.stage].append(group)
    return list(stages.values())
