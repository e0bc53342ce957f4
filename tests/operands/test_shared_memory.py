"""Results whose elements share memory, and operands with misleading strides, are refused before anything is written."""

import flat_parts as parts
import pytest
import torch

import nvfp4_cute as nv

BF = torch.bfloat16
BACKENDS = ("reference", "emulator", "emulator:sm_90a")


def shared(*shape, dtype=BF):
    """Returns a tensor whose first dimension has stride 0."""
    return torch.zeros(1, *shape[1:], dtype=dtype).expand(shape)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_a_result_share_no_memory(backend):
    x, w = nv.quantize(torch.randn(2, 8, 64)), nv.quantize(torch.randn(2, 128, 64))
    rows = torch.tensor([8, 8], dtype=torch.int32)
    near = torch.zeros(8 * 128 + 128, dtype=BF).as_strided((8, 128, 2), (128, 1, 128))
    calls = [
        lambda: nv.gemm(x, w, out=shared(2, 8, 128).permute(1, 2, 0), backend=backend),
        lambda: nv.gemm(x, w, out=near, backend=backend),
        lambda: nv.gemm(torch.randn(8, 64, 2, dtype=BF).permute(2, 0, 1).contiguous().permute(1, 2, 0), w,
                        out=shared(2, 8, 128).permute(1, 2, 0), backend=backend),
        lambda: nv.grouped_gemm(x, w, masked_m=rows, out=shared(2, 8, 128), backend=backend),
        lambda: parts.grouped_dual_gemm(x, w, w, masked_m=rows, out=shared(2, 8, 128), backend=backend),
        lambda: parts.dual_gemm(x, w, w, out=shared(2, 8, 128).permute(1, 2, 0), backend=backend),
    ]  # fmt: skip
    for number, call in enumerate(calls):
        with pytest.raises(ValueError, match="share memory|overlaps"):
            print(number)
            call()


def test_groups_of_a_quantized_result_share_no_memory():
    x, w = nv.quantize(torch.randn(2, 8, 64)), nv.quantize(torch.randn(2, 128, 64))
    rows = torch.tensor([8, 8], dtype=torch.int32)
    made = nv.grouped_gemm(x, w, masked_m=rows, out_dtype="nvfp4")
    out = nv.BlockScaledTensor.from_parts(shared(*made.data.shape, dtype=made.data.dtype), made.scale)
    with pytest.raises(ValueError, match="data of out has strides .* share memory"):
        nv.grouped_gemm(x, w, masked_m=rows, out_dtype="nvfp4", out=out)


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(("n", "groups"), [(200, 2), (120, 4)])
def test_scales_of_one_matrix_are_not_those_of_its_groups(n, groups, is_flat):
    """[G N] rows are padded at the end, groups of N rows each; the shape has to tell which is meant."""
    experts, offs = nv.quantize(torch.randn(groups * n, 128)), torch.tensor([40] + [47] * (groups - 1)).int()
    data, scale = nv.grouped_quantize(torch.randn(47, 128).bfloat16(), offs)
    given = experts.scale.flatten() if is_flat else experts.scale
    with pytest.raises(ValueError, match="Scales of one matrix of .* rows lie elsewhere"):
        parts.grouped_gemm(data, experts.data.view(groups, n, 64), scale, given, offs)
    with pytest.raises(ValueError, match="not others reshaped"):
        nv.BlockScaledTensor.from_parts(experts.data.view(groups, n, 64), given)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8_e4m3"])
def test_a_nan_in_padding_columns_is_refused(format):
    """Kernels multiply padding by zeros; the reference does not read it."""
    x, w = nv.quantize(torch.randn(9, 96), format=format), nv.quantize(torch.randn(128, 96), format=format)
    nv.gemm(x, w)
    w.scale.view(torch.uint8)[..., -1] = 0xFF
    for call in (lambda: nv.gemm(x, w), lambda: nv.grouped_gemm([x], [w])):
        with pytest.raises(ValueError, match="b_scale has NaN in its padding columns"):
            call()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_nan_in_padding_columns_of_rows_that_count_is_refused(format):
    """Rows of no group, and rows from masked_m on, may hold anything."""
    w, offs, rows = (
        nv.quantize(torch.randn(2, 128, 96), format=format),
        torch.tensor([40, 47], dtype=torch.int32),
        torch.tensor([5, 20], dtype=torch.int32),
    )
    a = nv.grouped_quantize(torch.randn(47, 96).bfloat16(), offs, format=format)
    x = nv.quantize(torch.randn(2, 20, 96), format=format)
    ragged = lambda: nv.grouped_gemm(a, w, offs=offs)
    masked = lambda: nv.grouped_gemm(x, w, masked_m=rows, out=torch.zeros(2, 20, 128, dtype=BF))
    # Row r of a block of 128 lies at [r % 32, r // 32] of an atom [32, 4, 4], whose last column is padding of 96 values.
    for tensor, call, unread, read in (
        (a, ragged, (1, -1, 7, 0, 3), (1, -1, 6, 0, 3)),
        (x, masked, (0, 0, -1, 5, 0, 3), (0, 0, -1, 4, 0, 3)),
    ):
        codes = tensor.scale.view(torch.uint8)
        codes[unread] = 0xFF
        assert call().isfinite().all()
        codes[read] = 0xFF
        with pytest.raises(ValueError, match="a_scale has NaN in its padding columns"):
            call()
