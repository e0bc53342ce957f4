"""Last launches of a layer: its next call with tensors of the same kind repeats them without computing arguments."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvfp4_cute import env
from nvfp4_cute.backends.calls import watching_chains
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.prepared_chain import PreparedChain
from nvfp4_cute.operands.group_sizes import is_debugging

# Kinds of calls that are kept at a time, for example few rows and many rows of a server that alternates between them.
MAX_KEPT = 4


class _Kept(NamedTuple):
    """A chain, and the calls that it serves.

    Attributes:
        settings: settings of the call.
        calls: the thread's prepared calls, which other threads and later plans do not have.
        guards: distinguish the call's tensors from those of other kinds.
        new, layout: make the result with its shape and strides.
    """

    settings: tuple
    calls: dict
    guards: Any
    chain: PreparedChain
    new: Callable[..., torch.Tensor]
    layout: tuple


class LastChains:
    """The chains that the latest calls of one layer launched. They are neither stored nor copied with the layer.

    A call finds its chain by its settings and by the kind of its tensors: types, dtypes, shapes, strides, devices, and
    torch's dispatch keys, which distinguish gradients, inference mode, autocast and negated views. The caller has
    checked that torch does not record (``private_api.is_traced``).
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": []}

    def call(
        self,
        settings: tuple,
        tensors: Sequence[torch.Tensor],
        run: Callable[..., torch.Tensor],
        *arguments: Any,
    ) -> torch.Tensor:
        """Calls ``run(*arguments)``, or launches its only chain at once if that was launched before.

        Args:
            settings: everything that determines how ``run`` computes, except tensors, the environment and batch
                invariance; hashable.
            tensors: all tensors that ``run`` reads, in the order of the chain's inputs. A chain that reads a converted
                copy of one of them is not kept.
        """
        settings += (len(tensors), env.backend(), is_debugging(), is_batch_invariant())
        calls = prepared.of_thread()
        for kept in self._kept:
            if kept.settings == settings and kept.calls is calls and kept.guards.check(*tensors):
                result = kept.new(*kept.layout)
                if kept.chain.launch(tensors, result):
                    return result
                break
        with watching_chains() as launched:
            result = run(*arguments)
        if len(launched) == 1 and prepared.TensorGuards is not None:
            chain, inputs, written = launched[0]
            has_dtype = torch.is_autocast_enabled(
                result.device.type
            )  # set by autocast, which no guard covers
            if not has_dtype and _addresses([*inputs, written]) == _addresses([*tensors, result]):
                new, layout = result.new_empty(0).new_empty_strided, (result.shape, result.stride())
                one = _Kept(settings, calls, prepared.guards_of(tensors), chain, new, layout)
                self._kept = [one, *self._kept[: MAX_KEPT - 1]]
        return result


def _addresses(tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.dtype]]:
    return [(tensor.data_ptr(), tensor.dtype) for tensor in tensors]
