"""Operands with gaps in small allocations, for which the driver would encode wrong tensor maps."""

import numpy as np
import pytest
import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.task import Launch
from nvfp4_cute.operands import tensor_map_fault

CUDA = torch.device("cuda", 0)
PITCHED = torch.zeros(40, 512, dtype=torch.uint8)[:, :256]


@pytest.fixture
def fault(monkeypatch):
    """Fakes a Blackwell GPU with a faulty driver; returns the reported size of every allocation, which tests may change."""
    monkeypatch.setattr(tensor_map_fault, "_has_fault", lambda device: True)
    allocated = {"bytes": 64 * 1024}
    monkeypatch.setattr(tensor_map_fault, "_allocated_bytes", lambda address: allocated["bytes"])
    return allocated


def test_rows_with_gaps_in_a_small_allocation_are_refused_by_name(fault):
    with pytest.raises(
        UnsupportedProblem, match=r"b\[1\] has shape \[40, 256\].*65536 bytes.*pass b\[1\].contiguous\(\)"
    ):
        tensor_map_fault.check({"a[0]": PITCHED.contiguous(), "b[1]": PITCHED}, CUDA)


def test_a_large_allocation_is_taken(fault):
    fault["bytes"] = 2 * 1024 * 1024
    tensor_map_fault.check({"a": PITCHED}, CUDA)


def test_other_drivers_and_gpus_take_everything(monkeypatch):
    monkeypatch.setattr(tensor_map_fault, "_has_fault", lambda device: False)
    monkeypatch.setattr(tensor_map_fault, "_allocated_bytes", lambda address: pytest.fail("asked the driver"))
    tensor_map_fault.check({"a": PITCHED}, CUDA)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (PITCHED, True),
        (PITCHED.contiguous(), False),
        (
            torch.zeros(300, 512, dtype=torch.uint8)[:, :256],
            False,
        ),  # spans more than a small allocation
        (torch.zeros(3, 8, 64, dtype=torch.uint8)[::2], True),  # gaps between batches
        (torch.zeros(0, 64, dtype=torch.uint8), False),
        (torch.zeros(4, 64)[:, :32], False),  # results have no tensor maps
    ],
)
def test_what_has_gaps(tensor, expected):
    assert tensor_map_fault.has_gaps(tensor) == expected


def test_calls_that_addresses_decide_are_not_remembered(monkeypatch):
    """The next call with operands of these shapes may find them in other allocations."""
    monkeypatch.setattr(tensor_map_fault, "concerns", lambda tensors: True)
    kept = []
    monkeypatch.setattr(prepared, "PreparedCall", lambda *arguments: kept.append(arguments))
    launch = Launch(None, np.array([PITCHED.data_ptr()]), [0])
    prepared.remember(("key",), launch, [PITCHED], 1)
    assert not kept
    monkeypatch.setattr(tensor_map_fault, "concerns", lambda tensors: False)
    prepared.remember(("key",), launch, [PITCHED], 1)
    assert len(kept) == 1
    prepared.forget()
