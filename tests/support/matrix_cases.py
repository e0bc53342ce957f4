"""Matrix instructions with operands and results, for the emulator, the slow model, and a real device."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import matrix_kernels as kernels
import matrix_model as model
import numpy as np
from probes.backends import Device

from nvfp4_cute.emulator.fronts.driver import run_ptx

FP8 = ("e4m3", "e5m2")


def compare(got: np.ndarray, expected: Callable[[int, int], int], samples: int) -> None:
    """Compare some elements of D (bits) with the slow model: expected(i, j)."""
    rng = np.random.default_rng(5)
    for place in rng.choice(got.size, min(samples, got.size), replace=False):
        i, j = divmod(int(place), got.shape[1])
        assert hex(got[i, j]) == hex(expected(i, j)), f"D[{i}, {j}]"


class Case:
    """A kernel for `threads` threads. `arguments()` returns new arguments on each call; number `result` is the output."""

    text: str
    threads: int = 32
    smem_bytes: int = 0
    result: int

    def arguments(self) -> list[Any]:
        raise NotImplementedError

    def matrix(self, words: np.ndarray) -> np.ndarray:
        """Bits of D (rows, columns) from its registers."""
        raise NotImplementedError

    def emulate(self) -> np.ndarray:
        """Bits of D from the emulator."""
        args = self.arguments()
        run_ptx(self.text, block=self.threads, args=args, smem_bytes=self.smem_bytes)
        return self.matrix(args[self.result])

    def on_device(self) -> np.ndarray:
        """Bits of D from a GPU."""
        args = self.arguments()
        Device().launch(self.text, args, block=self.threads, smem_bytes=self.smem_bytes)
        return self.matrix(args[self.result])

    def fingerprint(self) -> str:
        """Changes when the kernel or its inputs do."""
        digest = hashlib.sha256(self.text.encode())
        for argument in self.arguments():
            digest.update(argument.tobytes() if isinstance(argument, np.ndarray) else str(argument).encode())
        return digest.hexdigest()[:16]


# ---- mma.sync ----------------------------------------------------------------------------------------------------
def fragment_counts(k: int, bits: int, d: str) -> dict[str, int]:
    """32-bit registers of each fragment of m16n8kK."""
    c = 2 if d == "f16" else 4
    return {"a": 16 * k * bits // 1024, "b": 8 * k * bits // 1024, "c": c, "d": c}


class MmaCase(Case):
    """One plain mma.sync."""

    def __init__(
        self, kind: str, k: int, a: str, b: str, d: str, *, saturate: str = "", regime: str = "moderate"
    ):
        rng = np.random.default_rng([k, len(a), len(b), len(regime)])
        self.types, self.saturate = (a, b, d), bool(saturate)
        self.bits, self.d_bits = model.WIDTH[a], model.WIDTH[d]
        self.a = model.draw_codes(rng, a, (16, k), regime)
        self.b = model.draw_codes(rng, b, (k, 8), regime)
        self.c = model.draw_codes(rng, d, (16, 8), regime)
        if d == "s32":
            self.c[0], self.c[1], self.a[2], self.b[:, 3] = 0x7FFFFFFF, 0x80000000, 255, 255
        counts = fragment_counts(k, self.bits, d)
        opcode = f"mma.sync.aligned.m16n8k{k}.row.col{kind}{saturate}.{d}.{a}.{b}.{d}"
        target = "sm_120a" if kind else "sm_90a"
        self.text = kernels.register_kernel(f"{opcode} {{d}}, {{a}}, {{b}}, {{c}};", counts, target=target)
        self.result = 3

    def arguments(self) -> list[Any]:
        a, b = model.container(self.a, self.types[0]), model.container(self.b, self.types[1])
        c = model.pack_c(self.c, self.d_bits)
        return [model.pack_a(a, self.bits), model.pack_b(b, self.bits), c, np.full_like(c, 0xDEADBEEF)]

    def matrix(self, words: np.ndarray) -> np.ndarray:
        return model.unpack_c(words, self.d_bits)

    def expected(self, i: int, j: int) -> int:
        if self.types[2] == "s32":
            return model.integer_element(self.a[i], self.b[:, j], self.c[i, j], self.types, self.saturate)
        return model.fused_dot(self.a[i], self.b[:, j], self.c[i, j], self.types)

    def check(self, samples: int = 32) -> None:
        """Emulate, and compare with the model."""
        compare(self.emulate(), self.expected, samples)


class MoveCase(Case):
    """movmatrix of random words."""

    def __init__(self) -> None:
        self.words = np.random.default_rng(0).integers(0, 1 << 32, (1, 32), np.uint32)
        self.text = kernels.register_kernel(
            "movmatrix.sync.aligned.m8n8.trans.b16 %d0, %a0;", {"a": 1, "d": 1}, target="sm_90a"
        )
        self.result = 1

    def arguments(self) -> list[Any]:
        return [self.words, np.zeros_like(self.words)]

    def matrix(self, words: np.ndarray) -> np.ndarray:
        return words


# ---- wgmma -------------------------------------------------------------------------------------------------------
WGMMA_TYPES = [
    ("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
    *((d, a, b) for a in FP8 for b in FP8 for d in ("f32", "f16")),
]  # fmt: skip
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
CODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1}


# ---- operands in shared memory -----------------------------------------------------------------------------------
class Layout:
    """Where element (row of M or N, k) of an operand lies, from the canonical CuTe layouts of the ISA.

    K-major: ((8,m),(T,2k)) : ((1T,SBO),(1,LBO)) without swizzle, ((8,m),(T,2k)) : ((S,SBO),(1,T)) with one, where S
    is the span in elements. MN-major: ((T,1,m),(8,k)) : ((1,T,SBO),(1T,LBO)) without, ((T,S/T,m),(8,k)) :
    ((1,T,LBO),(S,SBO)) with. T = 16 bytes. The swizzle XORs address bits 4-6 with bits 7-9 (as many as it has).
    """

    def __init__(self, rows: int, esize: int, swizzle: str, mn_major: bool, k_steps: int = 1):
        self.esize, self.swizzle, self.mn_major = esize, swizzle, mn_major
        span, depth = SPAN[swizzle], 32 // esize * k_steps
        plain = swizzle == "none"
        if not mn_major:
            self.leading, self.stride = (128 * (rows // 8), 128) if plain else (16, 8 * span)
            self.nbytes = 16 * rows * (2 * k_steps) if plain else span * rows
        elif plain:
            blocks = rows * esize // 16
            self.stride, self.leading = 128, 128 * blocks
            self.nbytes = 128 * blocks * (depth // 8)
        else:
            self.stride, self.leading = 8 * span, span * depth
            self.nbytes = -(-rows * esize // span) * span * depth

    def address(self, start: int, row: int, k: int) -> int:
        span, plain = SPAN[self.swizzle], self.swizzle == "none"
        if not self.mn_major:
            byte = k * self.esize
            pitch = self.leading if plain else 16
            linear = row % 8 * span + row // 8 * self.stride + byte % 16 + byte // 16 * pitch
        else:
            byte = row * self.esize
            if plain:
                linear = byte % 16 + byte // 16 * self.stride + k % 8 * 16 + k // 8 * self.leading
            else:
                linear = byte % span + byte // span * self.leading + k % 8 * span + k // 8 * self.stride
        absolute = start + linear
        return absolute ^ (absolute >> 7 & (span // 16 - 1)) << 4

    def descriptor(self, start: int) -> int:
        return start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | CODE[self.swizzle] << 62

    def store(self, image: np.ndarray, start: int, codes: np.ndarray) -> None:
        """codes (rows, K). Shared memory begins at a multiple of 1024, so swizzles see the same address bits."""
        for row, k in np.ndindex(*codes.shape):
            at = self.address(start, row, k)
            image[at : at + self.esize] = np.frombuffer(
                int(codes[row, k]).to_bytes(self.esize, "little"), np.uint8
            )


class WgmmaCase(Case):
    """One wgmma: operands, the kernel, and how to run it."""

    def __init__(
        self, d, a, b, n=16, *, swizzle_a="128B", swizzle_b="128B", mn_a=False, mn_b=False, a_registers=False,
        signs=(1, 1), accumulate=True, saturate="", regime="integers", seed=0, threads=128, k_steps=1,
    ):  # fmt: skip
        rng = np.random.default_rng([seed, n, len(d + a + b)])
        self.d, self.a, self.b, self.n, self.signs, self.accumulate = d, a, b, n, signs, accumulate
        self.saturate, self.threads, self.k_steps = bool(saturate), threads, k_steps
        self.k = 32 // BYTES[a]
        depth = self.k * k_steps
        groups = threads // 128
        self.codes_a = model.draw_codes(rng, a, (64 * groups, depth), regime)
        self.codes_b = model.draw_codes(rng, b, (n, depth), regime)
        self.c = model.draw_codes(rng, d, (64 * groups, n), regime)
        self.bits = model.WIDTH[d]
        layout_a = Layout(64, BYTES[a], swizzle_a, mn_a, k_steps)
        layout_b = Layout(n, BYTES[b], swizzle_b, mn_b, k_steps)
        start_b = -(-layout_a.nbytes // 1024) * 1024
        image = rng.integers(0, 256, -(-(start_b + layout_b.nbytes) // 1024) * 1024, np.uint8)
        layout_a.store(image, 0, self.codes_a[:64])
        layout_b.store(image, start_b, self.codes_b)
        self.image, self.smem_bytes, self.result = image.view(np.uint32), image.size, 4
        self.descriptors = layout_a.descriptor(0), layout_b.descriptor(start_b)
        literals = ""
        if d != "s32":
            literals = f", {signs[0]}, {signs[1]}"
            if a in ("f16", "bf16"):
                literals += f", {int(mn_b)}" if a_registers else f", {int(mn_a)}, {int(mn_b)}"
        self.opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{self.k}{saturate}.{d}.{a}.{b}"
        self.registers = n * self.bits // 64
        self.text = kernels.wgmma_kernel(
            self.opcode, literals, self.registers, image.size, a_registers=a_registers, steps=k_steps
        )
        self.a_words = np.zeros((4, threads), np.uint32)
        if a_registers:
            for w in range(threads // 32):
                self.a_words[:, 32 * w : 32 * w + 32] = model.pack_a(
                    self.codes_a[16 * w : 16 * w + 16], 8 * BYTES[a]
                )

    def arguments(self):
        out = np.concatenate(
            [model.pack_c(self.c[16 * w : 16 * w + 16], self.bits) for w in range(self.threads // 32)], 1
        )
        return [self.image, self.a_words, *self.descriptors, np.ascontiguousarray(out), int(self.accumulate)]

    def matrix(self, words: np.ndarray) -> np.ndarray:
        warps = [words[:, 32 * w : 32 * w + 32] for w in range(self.threads // 32)]
        return np.concatenate([model.unpack_c(w, self.bits) for w in warps])

    def expected(self, i: int, j: int) -> int:
        c = int(self.c[i, j]) if self.accumulate else 0
        for step in range(self.k_steps):
            part = slice(step * self.k, step * self.k + self.k)
            c = self._one(self.codes_a[i, part], self.codes_b[j, part], c)
        return c

    def _one(self, a: np.ndarray, b: np.ndarray, c: int) -> int:
        if self.d == "s32":
            a, b = (
                x.astype(np.uint8).astype(np.int8) if t == "s8" else x for x, t in ((a, self.a), (b, self.b))
            )
            total = model.integer_dot(a, b, int(np.uint32(c).view(np.int32)), self.saturate)
            return total & 0xFFFFFFFF
        fp8 = self.a in FP8
        return model.fused_dot(
            a, b, c, (self.a, self.b, self.d), fraction_bits=13 if fp8 else 25, mantissa_bits=13 if fp8 and self.d == "f32" else None,
            signs=self.signs,
        )  # fmt: skip

    def check(self, samples: int = 48) -> None:
        """Emulate, and compare with the model."""
        got = self.emulate()
        assert got.shape == (self.threads // 2, self.n)
        compare(got, self.expected, samples)


# ---- what a device was asked -------------------------------------------------------------------------------------
def device_cases() -> dict[str, Callable[[], Case]]:
    """Cases that an sm_90a device can run, by name."""
    cases: dict[str, Callable[[], Case]] = {}
    plain = [
        ("f16", "f32", (8, 16)),
        ("f16", "f16", (8, 16)),
        ("bf16", "f32", (8, 16)),
        ("tf32", "f32", (4, 8)),
    ]
    for regime in ("integers", "moderate", "tiny", "any"):
        for a, d, ks in plain:
            for k in ks:
                cases[f"mma m16n8k{k} {d} {a} {regime}"] = partial(MmaCase, "", k, a, a, d, regime=regime)
        for types in WGMMA_TYPES:
            cases[f"wgmma {' '.join(types)} {regime}"] = partial(WgmmaCase, *types, 8, regime=regime)
    moderate = partial(WgmmaCase, regime="moderate")
    for types in WGMMA_TYPES:
        cases[f"wgmma {' '.join(types)} a in registers"] = partial(moderate, *types, 8, a_registers=True)
    for saturate in ("", ".satfinite"):
        for k in (16, 32):
            cases[f"mma m16n8k{k}{saturate} s32 s8 u8"] = partial(
                MmaCase, "", k, "s8", "u8", "s32", saturate=saturate
            )
        cases[f"wgmma{saturate} s32 u8 s8"] = partial(WgmmaCase, "s32", "u8", "s8", 8, saturate=saturate)
    for swizzle in SPAN:
        both = {"swizzle_a": swizzle, "swizzle_b": swizzle}
        for major, mn in (("k", False), ("mn", True)):
            cases[f"wgmma f16 {major}-major swizzle {swizzle}"] = partial(
                WgmmaCase, "f32", "f16", "f16", 16, mn_a=mn, mn_b=mn, **both
            )
        cases[f"wgmma tf32 swizzle {swizzle}"] = partial(WgmmaCase, "f32", "tf32", "tf32", **both)
        cases[f"wgmma fp8 swizzle {swizzle}"] = partial(WgmmaCase, "f32", "e4m3", "e5m2", **both)
    # 64 columns of 2 bytes are four atoms of the 32-byte swizzle.
    cases["wgmma wide mn-major"] = partial(WgmmaCase, "f32", "f16", "f16", 64, swizzle_b="32B", mn_b=True)
    cases["wgmma signs"] = partial(moderate, "f32", "f16", "f16", signs=(-1, 1))
    cases["wgmma fp8 signs"] = partial(moderate, "f32", "e4m3", "e5m2", signs=(1, -1))
    cases["wgmma no accumulation"] = partial(moderate, "f32", "f16", "f16", accumulate=False)
    cases["wgmma four steps"] = partial(moderate, "f32", "f16", "f16", k_steps=4)
    cases["wgmma four steps fp8"] = partial(moderate, "f32", "e4m3", "e4m3", k_steps=4)
    cases["wgmma two warpgroups"] = partial(moderate, "f32", "f16", "f16", 8, threads=256, a_registers=True)
    cases["movmatrix"] = MoveCase
    return cases
