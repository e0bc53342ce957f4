"""Records of number formats against sizes computed by hand, layouts of scales, and torch's dtypes."""

import pickle
import subprocess
import sys

import pytest
import torch

from nvfp4_cute.formats import block_format, codecs, scale_layout
from nvfp4_cute.formats.block_format import FORMATS, NVFP4, format_named
from nvfp4_cute.operands.operand import Operand

# For 200 rows of K=384: bytes per row, blocks per row, shape of the scales as kernels read them, and their bytes.
BY_HAND = {
    "nvfp4": (192, 24, (2, 6, 32, 4, 4), 2 * 6 * 512),
    "mxfp4": (192, 12, (2, 3, 32, 4, 4), 2 * 3 * 512),
    "mxfp8_e4m3": (384, 12, (2, 3, 32, 4, 4), 2 * 3 * 512),
    "mxfp8_e5m2": (384, 12, (2, 3, 32, 4, 4), 2 * 3 * 512),
    "fp8_1xk": (384, 1, (200, 1), 200 * 4),
    "fp8_1x128": (384, 3, (200, 3), 200 * 3 * 4),
    "fp8_128x128": (384, 3, (2, 3), 2 * 3 * 4),
    "int8": (384, 1, (200, 1), 200 * 4),
}


@pytest.mark.parametrize("name", FORMATS)
def test_sizes(name):
    f = format_named(name)
    row_bytes, k_blocks, scale_shape, scale_bytes = BY_HAND[name]
    assert (f.row_bytes(384), f.num_k_blocks(384)) == (row_bytes, k_blocks)
    assert f.elements(row_bytes) == 384
    assert (f.scale_shape(200, 384), f.scale_bytes(200, 384)) == (scale_shape, scale_bytes)
    row_blocks = 2 if name == "fp8_128x128" else 200
    assert f.scale_shape(200, 384, "rowmajor") == (row_blocks, k_blocks)
    assert f.nbytes(200, 384) == 200 * row_bytes + row_blocks * k_blocks * f.scale.bits // 8
    assert f.scale_bytes(200, 384) == f.scale_atoms(200, 384)[0] * f.atom_row_bytes(384)


@pytest.mark.parametrize("name", FORMATS)
def test_a_k_of_broken_blocks_is_refused(name):
    f = format_named(name)
    step = f.block_k or 16
    for k, padded in ((step + 1, 2 * step), (0, step), (-step, step)):
        with pytest.raises(ValueError, match=rf"K={k} is not .* of {step} \({f.title}.*pad K to {padded}$"):
            f.num_k_blocks(k)


def test_nvfp4_says_what_the_layout_of_its_scales_says():
    for rows, k in ((1, 16), (128, 64), (129, 80), (200, 384), (0, 16)):
        atoms = scale_layout.atom_counts(rows, scale_layout.num_k_blocks(k))
        assert NVFP4.scale_atoms(rows, k) == atoms
        assert NVFP4.scale_shape(rows, k) == (*atoms, 32, 4, 4)
    assert (NVFP4.atom_k, NVFP4.pitch_bytes(16), NVFP4.pitch_bytes(48)) == (64, 16, 32)


@pytest.mark.parametrize("name", FORMATS)
def test_the_numbers_are_those_of_torch_and_of_the_codecs(name):
    f = format_named(name)
    for number, dtypes in ((f.element, f.data_dtypes), (f.scale, f.scale_dtypes)):
        assert [str(dtype) for dtype in dtypes] == [f"torch.{named}" for named in number.dtypes]
        assert {8 * dtype.itemsize for dtype in dtypes} == {max(number.bits, 8)}
        if number.name == "e2m1":
            assert number.max == max(codecs.E2M1_VALUES)
        elif number.name == "s8":
            assert number.max == torch.iinfo(dtypes[-1]).max
        else:
            assert number.max == torch.finfo(dtypes[-1]).max
        assert 2.0**number.max_exponent <= number.max < 2.0 ** (number.max_exponent + 1)


def test_names():
    assert all(str(f) == f.name == name for name, f in FORMATS.items())
    assert pickle.loads(pickle.dumps(NVFP4)) == NVFP4
    with pytest.raises(ValueError, match="format='fp6' is unknown; use one of nvfp4, mxfp4"):
        format_named("fp6")


def test_the_module_needs_no_torch():
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); assert not {'torch', 'nvfp4_cute'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, block_format.__file__], check=True)


def test_an_operand_counts_in_elements():
    data = torch.zeros(3, 5, 64, dtype=torch.uint8)[..., :32]
    operand = Operand(data, torch.zeros(3, 512, dtype=torch.uint8), NVFP4, 5, 64, 3)
    assert (operand.pitch, operand.batch_pitch, operand.atom_row_bytes) == (128, 640, 512)
    assert operand.device == data.device
    of_bytes = Operand(data[0], operand.scale[0], block_format.MXFP8_E4M3, 5, 32)
    assert (of_bytes.pitch, of_bytes.batch_pitch) == (64, 0)


def test_16_bit_values_are_a_format_without_scales():
    """They describe ``a`` of weight-only products; nothing is quantized to them."""
    for dtype, f in ((torch.bfloat16, block_format.BFLOAT16), (torch.float16, block_format.FLOAT16)):
        assert block_format.format_of_values(dtype) is f and f.data_dtypes == (dtype,)
        assert not f.has_scales and not f.is_1xk
        assert (f.row_bytes(48), f.elements(96), f.nbytes(3, 48)) == (96, 48, 288)
        with pytest.raises(ValueError, match=f"format='{f}' is unknown"):
            block_format.format_named(f.name)
    x = torch.zeros(2, 5, 64).half()
    operand = Operand.of_values(x[:, :, :48])
    assert (operand.rows, operand.k, operand.batches, operand.pitch, operand.batch_pitch) == (
        5,
        48,
        2,
        64,
        320,
    )
