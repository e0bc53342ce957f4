"""Last launches of a layer: its next call with tensors of the same kind repeats them without computing arguments."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvfp4_cute import env
from nvfp4_cute.backends.calls import MANY_ROWS, watching_chains
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.prepared import Launchable
from nvfp4_cute.operands.group_sizes import is_debugging
from nvfp4_cute.planning.rows import rounded_rows

# Kinds of calls that are kept at a time, for example few rows and many rows of a server that alternates between them.
MAX_KEPT = 4


class _Kept(NamedTuple):
    """A chain, and the calls that it serves.

    Attributes:
        settings: settings of the call.
        calls: the thread's prepared calls, which other threads and later plans do not have.
        guards: distinguish the call's tensors from those of other kinds.
        shape: shape of the result; None if the chain makes it so.
    """

    settings: tuple
    calls: dict
    guards: Any
    chain: Launchable
    shape: torch.Size | None


class LastChains:
    """The chains that the latest calls of one layer launched. They are neither stored nor copied with the layer.

    A call finds its chain by its settings and by the kind of its tensors: types, dtypes, shapes, strides, devices, and
    torch's dispatch keys, which distinguish gradients, inference mode, autocast and negated views. The caller has
    checked that torch does not record (``private_api.is_traced``).
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._missed: tuple = ()  # settings of the latest call that found no chain

    def __getstate__(self) -> dict[str, Any]:
        return vars(LastChains())

    def call(
        self,
        settings: tuple,
        tensors: list[torch.Tensor],
        run: Callable[..., torch.Tensor],
        *arguments: Any,
        with_rows: int = 0,
    ) -> torch.Tensor:
        """Calls ``run(*arguments)``, or launches its only chain at once if that was launched before.

        Args:
            settings: everything that determines how ``run`` computes, except tensors, the environment and batch
                invariance; hashable.
            tensors: all tensors that ``run`` reads, in the order of the chain's inputs. A chain that reads a converted
                copy of one of them is not kept.
            with_rows: number of leading tensors that have one row per row of the result. If it is not 0, a chain for a range of
                row counts (``calls.chain_of_rows``) serves all of them.
        """
        if with_rows > 1 and not prepared.have_equal_rows(tensors[:with_rows]):
            return run(*arguments)  # raises
        try:
            shape = tensors[0].shape
        except (AttributeError, RuntimeError):  # not a tensor, or a nested one
            return run(*arguments)  # raises
        rows = shape[0] if with_rows else 0
        capacity = rows if rows < MANY_ROWS else rounded_rows(rows)
        # The size comes first, because it differs most often.
        size = capacity if with_rows else shape
        settings = (size, len(tensors), env.backend(), is_debugging(), is_batch_invariant(), *settings)
        calls = prepared.of_thread()
        for kept in self._kept:
            if kept.settings == settings and kept.calls is calls and kept.guards.check(*tensors):
                repeated = kept.chain.try_launch(tensors, [])
                if repeated is not None:
                    return repeated[0] if kept.shape is None else repeated[0].view(kept.shape)
                break
        # A kind replaces a kept one only after two misses in a row. With more kinds than are kept, such as row counts that
        # alternate, keeping each one would cost more than it saves.
        is_first_miss, self._missed = settings != self._missed, settings
        if is_first_miss and len(self._kept) == MAX_KEPT:
            return run(*arguments)
        with watching_chains() as launched:
            result = run(*arguments)
        if len(launched) == 1 and prepared.TensorGuards is not None:
            chain, inputs, written, serves_fewer_rows = launched[0]
            # Autocast sets the result's dtype, and no guard covers it. Guards refuse a tensor that occurs twice.
            if (
                (rows < MANY_ROWS or serves_fewer_rows)
                and not torch.is_autocast_enabled(result.device.type)
                and len(set(map(id, tensors))) == len(tensors)
                and _addresses([*inputs, written]) == _addresses([*tensors, result])
            ):
                made = None if result.shape == written.shape else result.shape
                guards = prepared.guards_of(tensors, with_rows)
                self._kept = [_Kept(settings, calls, guards, chain, made), *self._kept[: MAX_KEPT - 1]]
        return result


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [*map(torch.Tensor.data_ptr, tensors)]
