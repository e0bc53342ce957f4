"""Calls that were checked once: what a signature tells apart, and which addresses send a call the long way again."""

import numpy as np
import pytest
import torch

from nvfp4_cute import prepared
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.launch import make_plan
from nvfp4_cute.prepared import PreparedCall, signature
from nvfp4_cute.problem import check_list_operands

SIZES = ((40, 72, 256), (0, 64, 128), (70, 128, 512))


def make_lists(sizes=SIZES):
    a = [torch.zeros(m, k // 2, dtype=torch.uint8) for m, _, k in sizes]
    b = [torch.zeros(n, k // 2, dtype=torch.uint8) for _, n, k in sizes]
    scales = [
        [torch.zeros(-(-rows // 128) * -(-k // 64) * 512, dtype=torch.uint8) for rows, k in pairs]
        for pairs in ([(m, k) for m, _, k in sizes], [(n, k) for _, n, k in sizes])
    ]
    out = [torch.zeros(m, n, dtype=torch.float16) for m, n, _ in sizes]
    return [a, b, *scales, out]


@pytest.fixture(scope="module")
def call():
    a, b, a_scale, b_scale, out = make_lists()
    problem, operands = check_list_operands(a, b, a_scale, b_scale, None, out, out_dtype=torch.float16)
    return PreparedCall.of(make_plan(problem, "sm_90a", 132, for_emulator=True), operands)


def test_equal_lists_have_equal_signatures():
    assert signature(make_lists(), "auto") == signature(make_lists(), "auto")


@pytest.mark.parametrize(
    "change",
    [
        lambda lists: lists[0].__setitem__(0, lists[0][0][:39]),
        lambda lists: lists[1].__setitem__(0, torch.zeros(72, 256, dtype=torch.uint8)[:, :128]),
        lambda lists: lists[4].__setitem__(2, lists[4][2].bfloat16()),
        lambda lists: lists.append([torch.ones(3)]),
        lambda lists: [tensors.pop() for tensors in lists],
    ],
)
def test_whatever_a_check_looks_at_changes_the_signature(change):
    lists = make_lists()
    change(lists)
    assert signature(lists, "auto") != signature(make_lists(), "auto")


def test_settings_change_the_signature():
    assert signature(make_lists(), "auto") != signature(make_lists(), "cuda")
    assert signature(make_lists(), None) != signature(make_lists(), KernelConfig())
    with torch.no_grad():
        assert signature(make_lists(), None) != signature_with_grad()


def signature_with_grad():
    with torch.enable_grad():
        return signature(make_lists(), None)


def test_what_is_no_list_of_tensors_has_no_signature():
    assert signature([[1.0]]) is None
    assert signature([3]) is None


def test_addresses_that_are_checked_again(call):
    lists = make_lists()
    addresses = prepared.addresses_of(*lists)
    assert call.accepts(addresses, own_out=True)
    odd = addresses.copy()
    odd[1] += 8
    assert not call.accepts(odd, own_out=False)
    overlapping = addresses.copy()
    overlapping[-1] = addresses[0] + 16
    assert not call.accepts(overlapping, own_out=True)
    assert call.accepts(overlapping, own_out=False), "new outputs overlap nothing"


def test_the_table_holds_the_addresses_of_the_call(call):
    """The launch table of other operands of the same kind is what a plan would make of them."""
    a, b, a_scale, b_scale, out = make_lists()
    _, operands = check_list_operands(a, b, a_scale, b_scale, None, out, out_dtype=torch.float16)
    call.fill(prepared.addresses_of(a, b, a_scale, b_scale, out))
    np.testing.assert_array_equal(call.table, call.plan.table(operands))


def test_the_oldest_call_is_forgotten(monkeypatch, call):
    monkeypatch.setattr(prepared, "MAX_PREPARED", 2)
    for key in ((1,), (2,), (3,)):
        prepared.remember(key, call)
    assert prepared.find((1,)) is None and prepared.find((3,)) is call
