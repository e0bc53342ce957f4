"""Compares two programs that compute one model layer by layer: in both, a quantized layer gets the same input.

Rounding to 4 bits can turn a difference in the last bit of a float32 sum into a difference of a third. So two programs
that sum in different orders generate different tokens. With equal inputs, quantized layers must agree in every bit, and
the operations between them may differ by as much as the order of a sum explains.
"""

from dataclasses import dataclass, field

import torch

from nvfp4_cute.nn.experts import ModelExperts, SortedExperts
from nvfp4_cute.nn.linear import QuantizedLinear

UNIT = 2.0**-24
"""How far float32 rounds, relatively."""


def closeness(terms: int) -> float:
    """Largest difference between two orders of a float32 sum, relative to the sum of magnitudes."""
    return 2 * terms * UNIT  # one rounding error per term and order


@dataclass
class Readers:
    """Calls of quantized layers that read the same tensor, such as those of q, k and v.

    Attributes:
        inputs: what they read; for experts also the ids and weights of experts.
        outputs: the result of each of them.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)


def quantized_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the layers that have 4-bit weights."""
    kinds = QuantizedLinear | ModelExperts | SortedExperts
    return [m for m in model.modules() if isinstance(m, kinds)]


class Recorded:
    """Records inputs and outputs of a model's quantized layers while it is entered, as rows, in the order of calls.

    Attributes:
        readers: of all calls.
    """

    def __init__(self, model: torch.nn.Module):
        self._model, self._last = model, None
        self.readers: list[Readers] = []

    def __enter__(self) -> "Recorded":
        self._hooks = [layer.register_forward_hook(self._keep) for layer in quantized_layers(self._model)]
        return self

    def __exit__(self, *error) -> None:
        for hook in self._hooks:
            hook.remove()

    def over(self, steps: int, rows: torch.Tensor) -> list[Readers]:
        """Joins the calls of a layer in all steps into one, with the inputs and outputs of all steps in ``rows``."""
        count, left = divmod(len(self.readers), steps)
        assert not left
        of_layers = [self.readers[number::count] for number in range(count)]
        joined = lambda tensors: [torch.cat(parts)[rows] for parts in zip(*tensors, strict=True)]
        return [
            Readers(joined([c.inputs for c in calls]), joined([c.outputs for c in calls]))
            for calls in of_layers
        ]

    def _keep(self, layer, inputs, output) -> None:
        if inputs[0] is not self._last:
            self.readers.append(Readers([rows_of(t) for t in inputs]))
        self._last = inputs[0]
        self.readers[-1].outputs.append(rows_of(output))


class Lockstep(Recorded):
    """Feeds recorded inputs of the other program to quantized layers, and compares the results.

    Args:
        expected: inputs and outputs of the other program's layers, one entry for all layers that read one tensor.
    """

    def __init__(self, model: torch.nn.Module, expected: list[Readers]):
        super().__init__(model)
        self._expected, self._count, self._read = expected, 0, None

    def __enter__(self) -> "Lockstep":
        super().__enter__()
        self._hooks += [m.register_forward_pre_hook(self._replace) for m in quantized_layers(self._model)]
        return self

    def _replace(self, layer, inputs) -> tuple[torch.Tensor, ...]:
        if inputs[0] is not self._read:
            self._given = self._next(inputs)
        self._read = inputs[0]
        return self._given

    def _next(self, inputs) -> tuple[torch.Tensor, ...]:
        known = self._expected[self._count]
        self._count += 1
        rows = rows_of(inputs[0])
        bound = closeness(rows.shape[1]) * known.inputs[0].abs().amax(1, keepdim=True)
        assert ((rows - known.inputs[0]).abs() <= bound).all(), f"rows of layer {self._count - 1}"
        if len(inputs) > 1:
            _, ids, weights = inputs
            ids, order = ids.sort(1)
            expected_ids, expected_order = known.inputs[1].sort(1)
            assert torch.equal(ids, expected_ids.to(ids.dtype))
            distance = weights.gather(1, order) / known.inputs[2].gather(1, expected_order) - 1
            assert distance.abs().max() <= closeness(rows.shape[1])
        return tuple(theirs.reshape(t.shape) for t, theirs in zip(inputs, known.inputs, strict=True))

    def check(self) -> None:
        """Checks that all layers were called and agreed in every bit."""
        assert len(self.readers) == len(self._expected)
        for number, (ours, theirs) in enumerate(zip(self.readers, self._expected, strict=True)):
            assert torch.equal(torch.cat(ours.outputs, 1), torch.cat(theirs.outputs, 1)), f"layer {number}"


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, [rows, columns]."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).clone()
