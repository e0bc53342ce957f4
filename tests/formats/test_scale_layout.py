"""The blocked 128x4 layout: offsets against the permutation, round trips, padding, and zero-copy acceptance."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_bitwise_equal

from nvfp4_cute.formats import scale_layout
from nvfp4_cute.formats.scale_layout import as_blocked, blocked_offset, from_blocked, padded_shape, to_blocked

DTYPES = (torch.uint8, torch.float8_e4m3fn)
SIZES = {"rows": st.integers(0, 400), "k_blocks": st.integers(1, 25)}


def random_scale(*shape, dtype=torch.uint8, seed=0):
    """Draws every byte except 0, which distinguishes data from padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def permuted_view(blocked):
    """Views `[rm, rk, 32, 4, 4]` as `(32, 4, rm, 4, rk, 1)`, the form of kernel-competition inputs."""
    return blocked.unsqueeze(0).permute(3, 4, 1, 5, 2, 0)


# ---- the layout itself -------------------------------------------------------------------------------------------


def test_one_atom_by_hand():
    """Scales of one row are adjacent, rows 32 apart follow each other, and a row step is 16 bytes."""
    k_block = torch.arange(4)
    assert blocked_offset(0, k_block, 4).tolist() == [0, 1, 2, 3]
    assert [blocked_offset(row, 0, 4) for row in (1, 31, 32, 64, 96, 127)] == [16, 496, 4, 8, 12, 508]
    # The next 4 k blocks are the next atom; the next 128 rows come after all atoms of these rows.
    assert blocked_offset(0, 4, 9) == 512 and blocked_offset(128, 0, 9) == 3 * 512


@settings(deadline=None, max_examples=60)
@given(**SIZES)
def test_offset_formula_agrees_with_the_permutation(rows, k_blocks):
    scale = random_scale(rows, k_blocks)
    row, k_block = torch.arange(rows).unsqueeze(1), torch.arange(k_blocks)
    assert_bitwise_equal(to_blocked(scale).flatten()[blocked_offset(row, k_block, k_blocks)], scale)


@settings(deadline=None, max_examples=60)
@given(**SIZES)
def test_offsets_are_a_bijection_onto_the_padded_matrix(rows, k_blocks):
    padded_rows, padded_cols = padded_shape(rows, k_blocks)
    assert (padded_rows - rows) in range(128) and (padded_cols - k_blocks) in range(4)
    assert padded_rows % 128 == 0 and padded_cols % 4 == 0
    offsets = blocked_offset(torch.arange(padded_rows).unsqueeze(1), torch.arange(padded_cols), k_blocks)
    assert offsets.flatten().sort().values.tolist() == list(range(padded_rows * padded_cols))


@settings(deadline=None, max_examples=60)
@given(**SIZES, dtype=st.sampled_from(DTYPES))
def test_round_trip_and_zero_padding(rows, k_blocks, dtype):
    scale = random_scale(rows, k_blocks, dtype=dtype)
    blocked = to_blocked(scale)
    rm, rk = -(-rows // 128), -(-k_blocks // 4)
    assert blocked.shape == (rm, rk, 32, 4, 4) and blocked.is_contiguous()
    assert (blocked.view(torch.uint8) != 0).sum() == rows * k_blocks
    for form in (blocked, blocked.flatten()):
        assert_bitwise_equal(from_blocked(form, rows, k_blocks), scale)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 200), k_blocks=st.integers(1, 9))
def test_from_blocked_ignores_what_the_padding_holds(rows, k_blocks):
    scale = random_scale(rows, k_blocks)
    blocked = to_blocked(scale)
    blocked[blocked == 0] = 0x7F
    assert_bitwise_equal(from_blocked(blocked, rows, k_blocks), scale)


def test_leading_dimensions_are_batches():
    scale = random_scale(2, 3, 130, 5)
    blocked = to_blocked(scale)
    assert blocked.shape == (2, 3, 2, 2, 32, 4, 4)
    for i in range(2):
        for j in range(3):
            assert_bitwise_equal(blocked[i, j], to_blocked(scale[i, j]))
    assert_bitwise_equal(from_blocked(blocked, 130, 5), scale)


def test_strides_of_the_source_do_not_matter_and_it_is_not_modified():
    scale = random_scale(20, 300).t()
    before = scale.clone()
    assert_bitwise_equal(to_blocked(scale), to_blocked(scale.contiguous()))
    assert_bitwise_equal(scale, before)
    blocked = to_blocked(scale)
    strided = torch.stack((blocked, torch.zeros_like(blocked)), dim=-1)[..., 0]
    assert_bitwise_equal(from_blocked(strided, 300, 20), scale.contiguous())


# ---- as_blocked --------------------------------------------------------------------------------------------------

FORMS = {"flat": torch.flatten, "atoms": lambda blocked: blocked, "permuted": permuted_view}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, k", [(1, 16), (128, 64), (130, 256), (300, 48), (0, 64), (248, 7168)])
def test_as_blocked_takes_every_form_without_a_copy(form, dtype, rows, k):
    blocked = to_blocked(random_scale(rows, k // 16, dtype=dtype))
    view = as_blocked(FORMS[form](blocked), rows, k)
    assert view.dtype == torch.uint8 and view.ndim == 1 and view.is_contiguous()
    assert view.data_ptr() == blocked.data_ptr()
    assert_bitwise_equal(view, blocked.view(torch.uint8).flatten())


def test_permuted_view_has_the_published_strides():
    blocked = to_blocked(random_scale(300, 112))
    assert permuted_view(blocked).shape == (32, 4, 3, 4, 28, 1)
    assert permuted_view(blocked).stride()[:5] == (16, 4, 512 * 28, 1, 512)


def test_as_blocked_takes_a_slice_of_a_larger_buffer():
    blocked = to_blocked(random_scale(3, 256, 8))
    whole = blocked.permute(3, 4, 1, 5, 2, 0)
    for i in range(3):
        assert as_blocked(whole[..., i : i + 1], 256, 128).data_ptr() == blocked[i].data_ptr()
        assert as_blocked(blocked[i], 256, 128).data_ptr() == blocked[i].data_ptr()


def refusal(scale, rows, k, error=ValueError):
    with pytest.raises(error) as caught:
        as_blocked(scale, rows, k)
    return str(caught.value)


BAD_SHAPES = {
    "row-major": (random_scale(130, 8), 'row-major: pass scale_layout="rowmajor" or convert'),
    "padded 2-D": (random_scale(256, 8), "already blocked, pass scale.flatten()"),
    "two batches": (permuted_view(to_blocked(random_scale(130, 8))).expand(-1, -1, -1, -1, -1, 2), "l=2"),
    "too short": (random_scale(1024), "to_blocked"),
    "other rows": (to_blocked(random_scale(129 + 128, 8)), "to_blocked"),
    "other k": (to_blocked(random_scale(130, 9)), "to_blocked"),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_as_blocked_names_the_expected_shapes_and_a_fix(name):
    scale, fix = BAD_SHAPES[name]
    message = refusal(scale, 130, 128)
    assert "[2048], [2, 2, 32, 4, 4], or the permuted view (32, 4, 2, 4, 2, 1)" in message
    assert str(tuple(scale.shape)) in message
    assert fix in message


def test_as_blocked_refuses_the_right_shape_with_wrong_strides():
    blocked = to_blocked(random_scale(130, 8))
    assert "rebuild it as .permute(3, 4, 1, 5, 2, 0)" in refusal(
        permuted_view(blocked).contiguous(), 130, 128
    )
    assert "call .contiguous()" in refusal(blocked.transpose(-1, -2), 130, 128)
    assert "call .contiguous()" in refusal(random_scale(2048, 2)[:, 0], 130, 128)


def test_as_blocked_refuses_k_that_is_no_multiple_of_16():
    assert refusal(random_scale(2048), 130, 100) == (
        "K=100 is not a positive multiple of 16 (NVFP4 block size); pad K to 112"
    )
    assert "pad K to 16" in refusal(random_scale(2048), 130, 0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e5m2])
def test_other_dtypes_are_refused(dtype):
    scale = torch.zeros(2048, dtype=dtype)
    for call in (lambda: as_blocked(scale, 130, 128), lambda: from_blocked(scale, 130, 8)):
        with pytest.raises(TypeError, match="torch.uint8 or torch.float8_e4m3fn"):
            call()
    with pytest.raises(TypeError, match="encode_e4m3"):
        to_blocked(scale.view(16, 128))


def test_bad_shapes_of_the_conversions():
    with pytest.raises(ValueError, match="reshape first"):
        to_blocked(random_scale(128))
    with pytest.raises(ValueError, match=r"\[..., 2, 2, 32, 4, 4\] or, flat, \[2048\]"):
        from_blocked(random_scale(1, 2, 32, 4, 4), 130, 8)


def test_constants_describe_the_atom():
    assert scale_layout.ATOM_BYTES == 512 == torch.Size(scale_layout.ATOM_SHAPE).numel()
