"""Accumulators of tcgen05.mma in tensor memory, and chains of products that accumulate in one of them.

A kernel adds many products to an accumulator before it reads the sum, and most of a product's time goes into reading,
proving and writing the accumulator. So block-scaled 4-bit products are delayed. Their operands and scale factors are
read when the instruction is executed, and the checker is notified then. The sum is computed when the columns are used
(`TensorMemory.words`), as one product if that provably gives the same bits (`numerics.accumulate_block_scaled`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator import numerics
from nvfp4_cute.emulator.descriptors import AccumulatorBlock

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta

LONGEST_CHAIN = 16
"""Largest number of products in a chain, whose operands are kept until the sum is computed."""


class Accumulator:
    """The rows of D that lie in one CTA's tensor memory."""

    def __init__(
        self,
        cta: "Cta",
        blocks: tuple[AccumulatorBlock, ...],
        column: int,
        first_row: int,
        shape: tuple[int, int],
        d_type: str,
    ):
        self.blocks, self.column = blocks, column
        self.first_row, self.shape, self.d_type, self.cta = first_row, shape, d_type, cta
        self.key = (column, shape, first_row, blocks)
        spans = [self.span(block) for block in blocks]
        for lanes, columns in spans:
            cta.tmem.check(lanes.start, lanes.stop - lanes.start, columns.start, columns.stop - columns.start)
        self.first = min(columns.start for _, columns in spans)
        self.last = max(columns.stop for _, columns in spans)

    def span(self, block: AccumulatorBlock) -> tuple[slice, slice]:
        """Returns the lanes and columns of a block in tensor memory."""
        start = self.column + block.column_offset
        return block.lanes, slice(start, start + block.columns.stop - block.columns.start)

    def _place(self, block: AccumulatorBlock) -> tuple[np.ndarray, tuple[slice, slice]]:
        """Returns the block's words, and its place in this CTA's rows of D."""
        rows = slice(block.rows.start - self.first_row, block.rows.stop - self.first_row)
        lanes, columns = self.span(block)
        words = self.cta.tmem.columns(columns.start, columns.stop - columns.start)
        return words[lanes, columns], (rows, block.columns)

    def require(self) -> None:
        """Requires, for the checker, that D was written, because the instruction reads it."""
        checker = self.cta.machine.checker
        if checker is not None:
            for block in self.blocks:
                lanes, columns = self.span(block)
                unwritten = checker.tensor[self.cta].unwritten_words(lanes, columns)
                checker.require_tensor("the accumulator", unwritten, columns)

    def note_write(self) -> None:
        """Tells the checker that the instruction writes D."""
        checker = self.cta.machine.checker
        if checker is not None:
            for block in self.blocks:
                checker.write_tensor(self.cta, *self.span(block))

    def read(self) -> np.ndarray:
        """Returns D as float32, float16, or int32 (rows, N); may be a view.

        Stores D; float16 goes to the low half of each word, with zero above. Lanes in `disabled` (one bit each) keep
        their words.
        """
        if len(self.blocks) == 1:
            bits = self._place(self.blocks[0])[0]
        else:
            bits = np.empty(self.shape, np.uint32)
            for block in self.blocks:
                words, place = self._place(block)
                bits[place] = words
        if self.d_type == "f16":
            return bits.astype(np.uint16).view(np.float16)
        return bits.view(np.float32 if self.d_type == "f32" else np.int32)

    def write(self, out: np.ndarray, disabled: tuple[int, ...] = ()) -> None:
        """Store D; float16 goes to the low half of each word, zero above. Lanes whose bit is set keep their words."""
        bits = out.view(np.uint16).astype(np.uint32) if self.d_type == "f16" else out.view(np.uint32)
        keep = None
        if any(disabled):
            keep = np.unpackbits(np.array(disabled, "<u4").view(np.uint8), bitorder="little").view(bool)
        for block in self.blocks:
            words, place = self._place(block)
            if keep is None:
                words[...] = bits[place]
            else:
                np.copyto(words, bits[place], where=~keep[block.lanes, None])


@dataclass
class Chain:
    """Products to be added to one accumulator, in order.

    Attributes:
        accumulator: the accumulator.
        settings: scale type and signs, equal for all products.
        accumulate: whether the first product adds to the old content.
        products: operands and scale factors (a, b, sfa, sfb).
    """

    accumulator: Accumulator
    settings: dict[str, Any]
    accumulate: bool
    products: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]

    def __post_init__(self) -> None:
        """Reserves the columns of the accumulator."""
        self.first, self.last = self.accumulator.first, self.accumulator.last

    def settle(self) -> None:
        """Computes and writes the sum."""
        accumulator = self.accumulator
        c = accumulator.read() if self.accumulate else None
        accumulator.write(numerics.accumulate_block_scaled(self.products, c, **self.settings))


def add_product(
    accumulator: Accumulator,
    settings: dict[str, Any],
    accumulate: bool,
    product: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Delays D = a * sfa @ (b * sfb)^T, plus D if `accumulate`, until D is used."""
    tmem = accumulator.cta.tmem
    chain = tmem.later.get(accumulator.first)
    if (
        isinstance(chain, Chain)
        and accumulate
        and len(chain.products) < LONGEST_CHAIN
        and chain.accumulator.key == accumulator.key
        and chain.settings == settings
        and chain.products[0][0].shape == product[0].shape
    ):
        chain.products.append(product)
        return
    tmem.put_off(Chain(accumulator, settings, accumulate, [product]))
