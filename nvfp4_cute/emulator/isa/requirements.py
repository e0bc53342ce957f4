"""Architectures of instructions: a kernel that would not assemble for its target must not run here either.

Every rule is a sentence of the PTX ISA's "Target ISA Notes", checked against the assembler of CUDA 13.0.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from nvfp4_cute.emulator.targets import ptx_arch

TENSOR_MEMORY = (100, 103, 110)
"""Architectures with tensor memory; all are specific ones (suffix a or f)."""

ACCELERATED = (*TENSOR_MEMORY, 120, 121)
"""Blackwell architectures as specific ones (suffix a or f)."""


@dataclass(frozen=True)
class Architecture:
    """A PTX target: number 100 and suffix "a" of sm_100a. Suffix "f" means a family, "" the common features."""

    number: int
    suffix: str

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"


def architecture(target: str) -> Architecture:
    """Returns the architecture of a ``.target`` directive. An unknown one has no features: number 0."""
    match = re.fullmatch(r"sm_(\d+)([af]?)", ptx_arch(target))
    return Architecture(int(match.group(1)), match.group(2)) if match else Architecture(0, "")


@dataclass(frozen=True)
class Rule:
    """Instructions that start with `opcode` and have all of `words` among their modifiers need an architecture.

    Attributes:
        least: the lowest number with this feature.
        only: the numbers of the specific architectures that have it; () means every one from `least`.
        suffixes: the suffixes that have it; family targets ("f") lack some features.
    """

    opcode: str
    words: tuple[str, ...] = ()
    least: int = 0
    only: tuple[int, ...] = ()
    suffixes: str = "af"

    def matches(self, words: tuple[str, ...]) -> bool:
        """Whether the rule applies to the instruction with these dotted words."""
        head = tuple(self.opcode.split("."))
        return words[: len(head)] == head and all(w in words for w in self.words)

    def allows(self, arch: Architecture) -> bool:
        """Whether the architecture has the instructions of the rule."""
        if self.only:
            return arch.number in self.only and arch.suffix != "" and arch.suffix in self.suffixes
        return arch.number >= self.least

    def needs(self) -> str:
        """Names the required architecture, for a message."""
        if self.only:
            return " or ".join(f"sm_{n}{s}" for n in self.only for s in self.suffixes)
        return f"sm_{self.least} or later"


def _since(least: int, *opcodes: str) -> tuple[Rule, ...]:
    return tuple(Rule(opcode, least=least) for opcode in opcodes)


_BF16 = ("bf16", "bf16x2")
_NOT_F32 = ("f16", "f64", *(f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)))
_CLUSTER = ("cluster", "shared::cluster")
_NARROW = ("e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2")

RULES: tuple[Rule, ...] = (
    Rule("tcgen05", only=TENSOR_MEMORY),
    Rule("tcgen05.mma", ("kind::i8",), only=(100, 110), suffixes="a"),
    *(
        Rule("tcgen05.mma", (f"scale_vec::{n}X",), only=TENSOR_MEMORY, suffixes="a")
        for n in (1, 2, 4)
    ),
    Rule("tcgen05.shift", only=TENSOR_MEMORY, suffixes="a"),
    Rule("tcgen05.ld.red", only=(103, 110)),
    Rule("wgmma", only=(90,), suffixes="a"),
    Rule("setmaxnreg", only=(90, *ACCELERATED)),
    Rule("tensormap.replace", only=(90, *ACCELERATED)),
    *(Rule("mma.sync", (f"kind::{k}",), only=(120, 121)) for k in ("f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4")),
    *(Rule("mma.sync", (t,), least=89) for t in ("e4m3", "e5m2")),
    Rule("ldmatrix", ("m16n16",), only=ACCELERATED),
    Rule("ldmatrix", ("m8n16",), only=ACCELERATED),
    Rule("stmatrix", least=90),
    Rule("stmatrix", ("m16n8",), only=ACCELERATED),
    Rule("redux.sync", ("f32",), only=(100, 103)),
    *(Rule("cvt", (t,), only=ACCELERATED) for t in _NARROW),
    *(Rule("cvt", (t,), least=89) for t in ("e4m3x2", "e5m2x2")),
    Rule("cvt", ("rs",), only=(100, 103), suffixes="a"),
    Rule("cp.async.bulk", least=90),
    Rule("cp.async.bulk", ("cta_group::2",), only=TENSOR_MEMORY),
    Rule("cp.async.bulk", ("cta_group::1",), only=TENSOR_MEMORY),
    Rule("cp.async.bulk", ("cp_mask",), least=100),
    Rule("cp.async.bulk.tensor", ("tile::gather4",), least=100),
    Rule("cp.async.bulk.tensor", ("tile::gather4", "shared::cluster"), only=TENSOR_MEMORY),
    Rule("cp.async.bulk.tensor", ("tile::scatter4",), only=TENSOR_MEMORY),
    Rule("clusterlaunchcontrol.try_cancel", ("multicast::cluster::all",), only=ACCELERATED),
    *(Rule(o, ("f32x2",), least=100) for o in ("add", "sub", "mul", "fma")),
    *(Rule(o, ("f32", t), least=100) for o in ("add", "sub", "fma") for t in ("f16", "bf16")),
    Rule("ld", ("v8",), least=100),
    Rule("st", ("v8",), least=100),
    *(Rule(o, ("v4", t), least=100) for o in ("ld", "st") for t in ("b64", "u64", "s64", "f64")),
    *(Rule(o, (v,), least=90) for o in ("atom", "red") for v in ("v2", "v4", "v8", "bf16", "bf16x2", "b128")),
    *(Rule(o, (t,), least=90) for o in ("add", "sub", "mul", "ex2", "tanh", "set", "setp") for t in _BF16),
    *(Rule("cvt", ("bf16", t), least=90) for t in _NOT_F32),
    Rule("cvt", ("tf32", "rn", "satfinite"), least=100),
    Rule("cvt", ("tf32", "rn"), least=90),
    Rule("fma", ("oob",), least=90),
    *(Rule(o, (t,), least=90) for o in ("add", "min", "max") for t in ("s16x2", "u16x2")),
    *(Rule(o, ("relu", "s32"), least=90) for o in ("min", "max")),
    *(Rule(o, ("xorsign",), least=86) for o in ("min", "max")),
    *(Rule(o, (w,), least=90) for o in ("ld", "st", "atom", "red", "fence", "mbarrier") for w in _CLUSTER),
    *(Rule(o, ("shared::cluster",), least=90) for o in ("cvta", "isspacep")),
    Rule("mbarrier", ("expect_tx",), least=90),
    Rule("fence.proxy", ("tensormap::generic",), least=90),
    Rule("prefetch", ("tensormap",), least=90),
    Rule("st.async", ("release",), least=100),
    Rule("red.async", ("release",), least=100),
    *_since(
        90, "elect", "griddepcontrol", "barrier.cluster", "mapa", "getctarank", "mbarrier.try_wait",
        "mbarrier.expect_tx", "mbarrier.complete_tx", "cp.reduce.async.bulk", "tensormap", "st.async", "red.async",
        "multimem", "fence.proxy.async", "fence.mbarrier_init",
    ),
    *_since(100, "clusterlaunchcontrol", "st.bulk"),
    *_since(80, "mbarrier", "cp.async", "redux", "mma.sync", "createpolicy"),
)  # fmt: skip


@lru_cache(4096)
def missing_on(words: tuple[str, ...], arch: Architecture) -> str | None:
    """Returns why an architecture does not have the instruction with these dotted words, or None."""
    for rule in RULES:
        if rule.matches(words) and not rule.allows(arch):
            what = ".".join((rule.opcode, *rule.words))
            return f"{arch} has no {what}; it needs {rule.needs()} (PTX ISA, {words[0]}, Target ISA Notes)"
    return None


def missing_operand(words: tuple[str, ...], count: int, arch: Architecture) -> str | None:
    """Returns why an architecture does not have the instruction with `count` operands, or None."""
    arrives = words[0] == "mbarrier" and words[1] in ("arrive", "arrive_drop") and "noComplete" not in words
    if arrives and count == 3 and arch.number < 90:
        return f"{arch} has no mbarrier.{words[1]} with a count; it needs sm_90 or later (PTX ISA, mbarrier, Target ISA Notes)"
    if words[0] in ("min", "max") and count == 4 and arch.number < 100:
        return f"{arch} has no {words[0]} of three values; it needs sm_100 or later (PTX ISA, {words[0]}, Target ISA Notes)"
    return None


def missing_register(name: str, arch: Architecture) -> str | None:
    """Returns why an architecture lacks a special register ("%clusterid"), or None (PTX ISA 10, Target ISA Notes)."""
    if arch.number >= 90 or not CLUSTER_REGISTER.match(name):
        return None
    return f"{arch} has no {name.split('.')[0]}; it needs sm_90 or later (PTX ISA, Special Registers)"


CLUSTER_REGISTER = re.compile("%(n?clusterid|cluster_n?cta(id|rank)|is_explicit_cluster|aggr_smem_size)")
