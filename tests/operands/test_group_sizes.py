"""Values of offs and masked_m: checked on the CPU, and on a GPU inside of debug()."""

import flat_parts as parts
import pytest
import torch

import nvfp4_cute as nv
from nvfp4_cute.launch import prepared
from nvfp4_cute.operands import group_sizes

ROWS = torch.randn(47, 64).bfloat16()
EXPERTS = nv.quantize(torch.randn(2, 128, 64))
WRONG = [
    ([40, 7], r"offs\[1\]=7 is less than offs\[0\]=40; these are sizes of groups: pass sizes.cumsum"),
    ([40, 60], r"offs\[1\]=60 exceeds the 47 rows"),
    ([-1, 47], r"offs\[0\]=-1 is negative"),
    ([47, 40], r"offs\[1\]=40 is less"),
]


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["reference", "emulator", "emulator:sm_90a"])
@pytest.mark.parametrize(("offs", "message"), WRONG, ids=str)
def test_wrong_ends_are_refused(offs, message, backend):
    data, scale = nv.grouped_quantize(ROWS, ends(40, 47))
    calls = [
        lambda o: parts.grouped_gemm(data, EXPERTS.data, scale, EXPERTS.scale, o, backend=backend),
        lambda o: parts.grouped_dual_gemm(
            data, EXPERTS.data, EXPERTS.data, scale, EXPERTS.scale, EXPERTS.scale, offs=o, backend=backend
        ),
        lambda o: nv.grouped_quantize(ROWS, o, backend=backend),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(ends(*offs))


@pytest.mark.parametrize("rows", [(40, 70), (-1, 3)])
def test_wrong_numbers_of_rows_are_refused(rows):
    a = nv.quantize(torch.randn(2, 64, 64))
    with pytest.raises(ValueError, match=r"masked_m\[.\]=.* is not between 0 and M_max=64"):
        nv.grouped_gemm(a, EXPERTS, masked_m=ends(*rows))


@pytest.mark.parametrize("backend", ["reference", "emulator:sm_90a"])
def test_rows_that_were_quantized_in_other_groups_are_refused(backend):
    """Every group's scales begin a new block of 128 rows, so other ends mean the scales of other rows."""
    x, w = torch.randn(300, 64).bfloat16(), nv.quantize(torch.randn(3, 128, 64))
    a = nv.grouped_quantize(x, ends(40, 40, 300), backend=backend)
    for same in ((40, 40, 300), (40, 300, 300), (40, 280, 280)):
        nv.grouped_gemm(a, w, offs=ends(*same), backend=backend)
    for other in ((10, 40, 300), (41, 300, 300), (300, 300, 300), (30, 40, 60)):
        with pytest.raises(ValueError, match=r"quantized in groups that end at \[40, 40, 300\], and offs is"):
            nv.grouped_gemm(a, w, offs=ends(*other), backend=backend)
    a = nv.grouped_quantize(x, ends(128, 256, 300))  # ends of blocks
    right = nv.grouped_gemm(nv.grouped_quantize(x, ends(256, 300, 300)), w, offs=ends(256, 300, 300))
    assert torch.equal(nv.grouped_gemm(a, w, offs=ends(256, 300, 300)), right)


def test_ends_with_a_leading_zero_and_int64_are_named():
    data, scale = nv.grouped_quantize(ROWS, ends(40, 47))
    with pytest.raises(ValueError, match="offs has no leading 0: pass"):
        parts.grouped_gemm(data, EXPERTS.data, scale, EXPERTS.scale, ends(0, 40, 47))
    for call in (
        lambda o: parts.grouped_gemm(data, EXPERTS.data, scale, EXPERTS.scale, o),
        lambda o: nv.grouped_quantize(ROWS, o),
    ):
        with pytest.raises(TypeError, match="cumsum"):
            call(torch.tensor([40, 7]).cumsum(0))


class OnGPU:
    """Sizes that appear to be on a GPU to the check."""

    is_cuda = True
    device = torch.device("cuda:0")
    reads = 0

    def tolist(self):
        self.reads += 1
        return [40, 7]


def test_sizes_on_a_gpu_are_read_only_inside_of_debug(monkeypatch):
    offs = OnGPU()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    group_sizes.check_offs(offs, 47)
    assert offs.reads == 0
    with nv.debug():
        with pytest.raises(ValueError, match="sizes of groups"):
            group_sizes.check_offs(offs, 47)
        with nv.debug(False):
            group_sizes.check_masked_m(offs, 3)
    assert offs.reads == 1
    group_sizes.check_offs(offs, 47)
    assert offs.reads == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with nv.debug(), pytest.raises(RuntimeError, match="a CUDA graph cannot capture"):
        group_sizes.check_offs(offs, 47)


def test_prepared_calls_are_checked_again_inside_of_debug():
    x = torch.zeros(4)
    with nv.debug():
        assert prepared.lookup([x], "one") == (None, None)
    assert prepared.lookup([x], "one")[0] is not None
