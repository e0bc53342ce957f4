"""Operands of every pair of formats with exact products in float32, and functions that run and compare every form."""

from dataclasses import dataclass

import flat_parts as on_parts
import torch
from oracle import assert_bitwise_equal, poisoned, repro_line

import nvfp4_cute as nv
from nvfp4_cute.formats.block_format import BlockFormat, Formats
from nvfp4_cute.formats.codecs import encode
from nvfp4_cute.formats.scale_layout import to_blocked

# The largest n for which an element type holds all integers from -n to n.
INTEGERS = {"e2m1": 4, "e4m3": 15, "e5m2": 7}
# Codes of 1/2, 1 and 2, and of NaN.
SCALE_CODES = {"ue4m3": (0x30, 0x38, 0x40), "ue8m0": (126, 127, 128)}
NAN_CODES = {"ue4m3": 0x7F, "ue8m0": 0xFF}


def operand(format: BlockFormat, rows: int, k: int, generator: torch.Generator) -> nv.BlockScaledTensor:
    """Integers times powers of two. Padding rows of the scales are NaN, padding columns zero; the row pitch exceeds the row."""
    most = INTEGERS[format.element.name]
    numbers = torch.randint(-most, most + 1, (rows, k), generator=generator).float()
    data = torch.full((rows, format.pitch_bytes(k) + 32), 0x77, dtype=torch.uint8)[:, : format.row_bytes(k)]
    data.copy_(encode(numbers, format.element).view(torch.uint8))
    name, k_blocks = format.scale.name, format.num_k_blocks(k)
    codes = torch.tensor(SCALE_CODES[name], dtype=torch.uint8)
    padded_rows, _ = format.padded_scale_shape(rows, k)
    scale = codes[torch.randint(0, 3, (padded_rows, k_blocks), generator=generator)]
    scale[rows:] = NAN_CODES[name]
    options = {} if format == nv.NVFP4 else {"format": format}
    kind = nv.NVFP4Tensor if format == nv.NVFP4 else nv.BlockScaledTensor
    return kind(data, to_blocked(scale), None, (rows, k), **options)


@dataclass
class Groups:
    """Operands of groups of (m, n, k), with the second weights of a dual GEMM and a factor per group."""

    formats: Formats
    a: list[nv.BlockScaledTensor]
    b: list[nv.BlockScaledTensor]
    b2: list[nv.BlockScaledTensor]
    alpha: torch.Tensor

    @classmethod
    def of(cls, formats: Formats, sizes, seed=0) -> "Groups":
        """Draws operands from a seed."""
        generator = torch.Generator().manual_seed(seed)
        a_format, b_format = formats
        a, b, b2 = [], [], []
        for m, n, k in sizes:
            a.append(operand(a_format, m, k, generator))
            b.append(operand(b_format, n, k, generator))
            b2.append(operand(b_format, n, k, generator))
        return cls(formats, a, b, b2, torch.tensor([1.0, -0.5, 2.0, 0.25])[: len(sizes)])

    def run(self, form: str, backend: str, config=None, dual=False, m_major=False, **options):
        """Runs the operation and returns one tensor per group with its valid rows, whatever the form."""
        weights = [self.b, self.b2] if dual else [self.b]
        run = on_parts.grouped_dual_gemm if dual else on_parts.grouped_gemm
        told = {
            "a_format": self.formats[0],
            "b_format": self.formats[1],
            "backend": backend,
            "config": config,
        }
        told |= {"out_dtype": torch.float32, "activation": "relu2"} if dual else {"out_dtype": torch.float32}
        told |= {"alpha1": self.alpha, "alpha2": None} if dual else {"alpha": self.alpha}
        told |= options
        if form == "list":
            if m_major:
                told["out"] = [
                    poisoned(y.shape[0], x.shape[0], dtype=torch.float32).T
                    for x, y in zip(self.a, self.b, strict=True)
                ]
            return run(self.a, *weights, **told)
        rows = [x.shape[0] for x in self.a]
        stacked = [
            (torch.stack([x.data for x in side]), torch.stack([x.scale for x in side])) for side in weights
        ]
        if form == "ragged":
            a = torch.cat([x.data for x in self.a]), torch.cat([x.scale for x in self.a])
            told["offs"] = torch.tensor(rows).cumsum(0).to(torch.int32)
        else:
            data = torch.full((len(rows), max(rows), self.a[0].data.shape[1]), 0x77, dtype=torch.uint8)
            scale = torch.full(
                (len(rows), -(-max(rows) // 128), *self.a[0].scale.shape[1:]), 0xFF, dtype=torch.uint8
            )
            for g, x in enumerate(self.a):
                data[g, : rows[g]], scale[g, : len(x.scale)] = x.data, x.scale
            a = data, scale
            told["masked_m"] = torch.tensor(rows, dtype=torch.int32)
        data, scales = (list(parts) for parts in zip(*stacked, strict=True))
        # The row pitch is a multiple of 16 bytes, also where K/2 bytes are not.
        sides = [_pitched(x) for x in (a[0], *data)]
        out = run(sides[0], *sides[1:], a[1], *scales, **told)
        if form == "masked":
            return [out[g, :m] for g, m in enumerate(rows)]
        return list(out.split(rows))

    def check(self, form: str, backend: str, config=None, dual=False, **options) -> None:
        """Compares with the reference bit for bit, or within an error bound for a dual GEMM, whose factors are float32."""
        found = self.run(form, backend, config, dual, **options)
        for got, want in zip(found, self.run(form, "reference", None, dual, **options), strict=True):
            if dual:
                assert bool(((got - want).abs() <= 2.0**-22 * want.abs()).all()), repro_line(
                    form=form, config=config
                )
            else:
                assert_bitwise_equal(got, want, form=form, config=config)


def _pitched(data: torch.Tensor) -> torch.Tensor:
    length = data.shape[-1]
    buffer = torch.full((*data.shape[:-1], -(-length // 16) * 16), 0x77, dtype=torch.uint8)
    buffer[..., :length] = data
    return buffer[..., :length]
