"""Numbers given as Python floats are copied from the host at most once, and never while a graph is captured."""

import math

import pytest
import torch

from nvfp4_cute.operands import numbers_on_device
from nvfp4_cute.operands.numbers_on_device import numbers_of, numbers_on, one_number_on

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Makes CPU tensors appear to be on a GPU; records how tensors are made, and can simulate a capture."""
    made, state = [], {"captures": False}
    full, tensor = torch.full, torch.tensor

    def of(name, make):
        def call(*arguments, device=None, **options):
            made.append(name)
            return make(*arguments, **options)

        return call

    monkeypatch.setattr(torch, "full", of("fill", full))
    monkeypatch.setattr(torch, "tensor", of("copy", tensor))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["captures"])
    monkeypatch.setattr(numbers_on_device, "_kept", numbers_on_device.OrderedDict())
    monkeypatch.setattr(numbers_on_device, "_captured", {})
    return made, state


def test_values_and_dtype():
    assert numbers_on(CPU, [0.5, 3]).tolist() == [0.5, 3.0] and numbers_on(CPU, [1]).dtype == torch.float32


@pytest.mark.parametrize("wrong", [["x"], [None], [[1.0]]])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises((TypeError, ValueError)):
        numbers_on(CPU, wrong)


def test_equal_numbers_are_a_fill(gpu):
    made, state = gpu
    state["captures"] = True
    assert numbers_on(CUDA, [0.25]).tolist() == [0.25] and numbers_on(CUDA, [2, 2, 2]).tolist() == [2.0] * 3
    assert made == ["fill", "fill"]


def test_a_number_is_filled_once_per_stream(gpu, monkeypatch):
    """Also zeros of both signs. A capture, and a result that holds the number, have their own; full memory is replaced."""
    made, state = gpu
    streams, x = iter([7, 7, 7, 7, 8, 7]), type("OnGpu", (torch.Tensor,), {"device": CUDA, "is_cuda": True})()
    monkeypatch.setattr(numbers_on_device, "_shared", {})
    monkeypatch.setattr(numbers_on_device, "MAX_KEPT", 3)
    monkeypatch.setattr(numbers_on_device, "_memory", lambda device: torch.empty(numbers_on_device.MAX_KEPT))
    monkeypatch.setattr(numbers_on_device.private_api, "outside_of_pools", lambda index, make: make())
    monkeypatch.setattr(numbers_on_device.private_api, "current_stream", lambda index: next(streams))
    first, again, zero, minus, other = (one_number_on(number, x) for number in (0.5, 0.5, 0.0, -0.0, 0.5))
    assert again is first and other.data_ptr() != first.data_ptr() and made == []
    assert [t.item() for t in (first, other)] == [0.5, 0.5] and math.copysign(
        1, minus.item()
    ) == -1 != zero.item()
    full = one_number_on(3.0, x)
    assert first.item() == 0.5 and full.item() == 3.0 and full.shape == (1,)
    own = one_number_on(0.5, x, is_in_result=True)
    state["captures"] = True
    assert own.item() == one_number_on(0.5, x).item() == 0.5 and made == ["fill", "fill"]


def test_different_numbers_are_copied_once(gpu):
    made, _ = gpu
    first = numbers_on(CUDA, [1.0, 2.0])
    assert numbers_on(CUDA, (1, 2)) is first and made == ["copy"]
    numbers_on(CUDA, [2.0, 1.0])
    assert made == ["copy", "copy"]


def test_what_a_result_holds_is_its_own(gpu):
    """Writing to a result's global scale changes neither the next call's nor another result's."""
    groups = [type("OnGpu", (torch.Tensor,), {"device": CUDA})() for _ in range(2)]
    held, other = (numbers_of([1.0, 2.0], groups, is_in_result=True) for _ in range(2))
    held.mul_(2)
    assert other.tolist() == [1.0, 2.0] and numbers_of([1.0, 2.0], groups).tolist() == [1.0, 2.0]


def test_a_capture_makes_no_copy_and_what_it_read_stays(gpu, monkeypatch):
    _, state = gpu
    monkeypatch.setattr(numbers_on_device, "MAX_KEPT", 2)
    known = numbers_on(CUDA, [1.0, 2.0])
    state["captures"] = True
    assert numbers_on(CUDA, [1.0, 2.0]) is known
    with pytest.raises(RuntimeError, match="make the call once before"):
        numbers_on(CUDA, [5.0, 6.0])
    state["captures"] = False
    for i in range(5):
        numbers_on(CUDA, [float(i), -1.0])
    assert numbers_on(CUDA, [1.0, 2.0]) is known and len(numbers_on_device._kept) == 2


@pytest.mark.gpu("sm_90a")
def test_every_call_with_numbers_can_be_captured():
    from flat_parts import dual_gemm, gemm, grouped_gemm

    from nvfp4_cute import quantize

    torch.manual_seed(0)
    x, gate, up = (torch.randn(rows, 256, device="cuda").bfloat16() for rows in (40, 128, 128))
    a, b1, b2 = (quantize(t, global_scale=0.01) for t in (x, gate, up))

    def calls():
        yield quantize(x, global_scale=0.01).data
        yield gemm(a.data, b1.data, a.scale, b1.scale, 0.5)
        lists = [a.data, a.data], [b1.data, b2.data], [a.scale, a.scale], [b1.scale, b2.scale]
        yield from grouped_gemm(*lists, alpha=[0.5, 0.25])
        quantized = grouped_gemm(*lists, alpha=[0.5, 0.25], out_dtype="nvfp4", out_global_scale=[0.5, 2.0])
        yield from (result.data for result in quantized)
        yield dual_gemm(a.data, b1.data, b2.data, a.scale, b1.scale, b2.scale, 0.5, 0.25)

    expected = [result.clone() for result in calls()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = list(calls())
    graph.replay()
    assert all(torch.equal(got, want) for got, want in zip(captured, expected, strict=True))
