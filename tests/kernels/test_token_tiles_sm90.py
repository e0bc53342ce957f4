"""How stream-K divides a group's tokens among tiles: device and host agree, and results equal the reference."""

import cases
import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Int32
from flat_parts import grouped_gemm
from oracle import assert_bitwise_equal
from sm90_check import EMULATED, assert_sizes_on_the_device_match, config, run, stream

from nvfp4_cute import dequantize
from nvfp4_cute.backends.emulator import observe, on_emulator
from nvfp4_cute.compile.compiler import compile_jit
from nvfp4_cute.gpus.targets import H200
from nvfp4_cute.kernels.sm90.token_tiles import TokenTiles
from nvfp4_cute.planning.arch import sm90

SLOW = pytest.mark.slow
TILES = (16, 32, 48, 96, 112, 128, 192, 256)
MOST_TILES, THREADS = 5, 64


class TokenTable:
    """A kernel that writes first token and number of tokens of the tiles, for groups of 1, 2, ... tokens."""

    def __init__(self, tile_tokens):
        self.tile_tokens = tile_tokens

    @cute.jit
    def __call__(self, table: cute.Pointer):
        self.kernel(table).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, table: cute.Pointer):
        most = MOST_TILES * self.tile_tokens
        # (FIELD, TILE, GROUP)
        out = cute.make_tensor(table, cute.make_layout((2, MOST_TILES, most)))
        m = cute.arch.thread_idx()[0] + 1
        while m <= most:
            tiles = TokenTiles.of(m, self.tile_tokens)
            for index in cutlass.range(tiles.count, unroll=1):
                out[0, index, m - 1] = tiles.first_token(index)
                out[1, index, m - 1] = tiles.tokens(index)
            m += THREADS


def pointer(address):
    return cute.runtime.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


@pytest.mark.parametrize("tile_tokens", TILES)
def test_host_equals_device(tile_tokens):
    out = np.zeros((MOST_TILES * tile_tokens, MOST_TILES, 2), np.int32)
    with on_emulator(target=H200) as emulator:
        function, ptx, _ = compile_jit("sm_90a", TokenTable(tile_tokens), pointer(0))
        emulator.register(ptx)
        emulator.add_range("table", out.ctypes.data, out.nbytes)
        function(pointer(out.ctypes.data))
    firsts, tokens = out[..., 0], out[..., 1]
    m = np.arange(1, len(out) + 1)
    # The tiles cover all tokens without gaps, and none is empty or larger than the maximum.
    assert (tokens.sum(1) == m).all() and tokens.max() == tile_tokens
    assert ((tokens > 0).sum(1) == -(-m // tile_tokens)).all()
    assert ((firsts == np.cumsum(tokens, 1) - tokens) | (tokens == 0)).all()
    num_full, *last = sm90.last_tiles(m, tile_tokens, is_dealt=True)
    rows, behind = np.arange(len(m)), num_full + (last[1] > 0)
    assert (tokens[rows, num_full] == last[0]).all()
    assert (np.where(last[1] > 0, tokens[rows, behind], 0) == last[1]).all()
    step = sm90.least_step(tile_tokens)
    assert not (firsts % step).any()
    two = m > tile_tokens
    assert (abs(last[0] - last[1])[two] < 2 * step).all()


CASE = cases.Case(
    "left over",
    ((140, 264, 640), (0, 64, 128), (300, 136, 544), (20, 8, 208), (97, 128, 640)),
    11,
    has_alpha=True,
    padding="nan",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "mode"),
    [
        (96, "random:1"),
        pytest.param(128, "lazy", marks=SLOW),
        pytest.param(112, "random:2", marks=SLOW),
        pytest.param(192, "eager", marks=SLOW),
    ],
)
def test_what_is_left_is_divided_evenly(tokens, mode):
    operands = cases.make_operands(CASE)
    chosen = stream(tokens, num_cta=10)
    with observe(mode=mode, check=True):
        actual = run(CASE, operands, EMULATED, chosen)
    for got, want in zip(actual, run(CASE, operands, "reference"), strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.parametrize("form", ["ragged", pytest.param("masked", marks=SLOW)])
def test_sizes_on_the_device(form):
    """130 tokens are divided into 80 and 50."""
    assert_sizes_on_the_device_match(form, stream(112, num_cta=6), "random:1", k=640)


@SLOW
def test_quantized_results():
    """Scales of 100 tokens in tiles of 64 and 36, compared with those of undivided tiles."""
    *operands, _ = cases.make_operands(cases.Case("quantized", ((100, 272, 256), (3, 64, 288)), 5))
    expected, actual = (
        grouped_gemm(*operands, out_dtype="nvfp4", backend=EMULATED, config=chosen)
        for chosen in (config(64), stream(96))
    )
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(dequantize(got), dequantize(want))


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("tokens", [96, 112, 128, 192])
def test_what_is_left_is_divided_evenly_on_the_gpu(tokens):
    operands = cases.make_operands(CASE)
    for got, want in zip(
        run(CASE, operands, "cuda", stream(tokens)), run(CASE, operands, "reference"), strict=True
    ):
        assert_bitwise_equal(got, want)
