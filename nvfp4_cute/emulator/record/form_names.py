"""Names of instructions as forms: all modifiers, with equivalent spellings made equal."""

import re
from functools import lru_cache

from nvfp4_cute.emulator.isa.requirements import architecture
from nvfp4_cute.emulator.ptx import Inst

FAMILIES = {100: "sm_100", 103: "sm_100", 110: "sm_100", 120: "sm_120", 121: "sm_120"}
"""Architectures whose kernels are compiled from one source for one kind of hardware; others are families of their own."""

_UNTYPED = {"ld", "st", "mov", "selp", "and", "or", "xor", "not", "shl", "shfl", "ldu"}
_OLD_SHARED = {"ld", "st", "mbarrier", "ldmatrix", "stmatrix", "atom", "red", "mapa"}
_DEFAULTS = {"mbarrier": ({"release", "cta"}, {"acquire", "cta"}), "ld": ({"weak"},), "st": ({"weak"},)}

_MMA_ORDER = ("sync", "aligned", r"m\d+n", "row", "col", "kind", "block_scale", "scale_vec", "")
"""Order of mma's qualifiers, as patterns of their first characters."""

_HARDWARE = re.compile(
    r"^(tcgen05|wgmma|cp\.async\.bulk|cp\.reduce|mbarrier|fence\.(proxy|mbarrier)|[a-z]+\.async\.|st\.bulk|setmaxnreg|griddepcontrol"
    r"|barrier\.cluster|mapa|getctarank|multimem|tensormap|clusterlaunchcontrol|elect|createpolicy|stmatrix|discard"
    r"|applypriority|prefetch|mma\.sync\..*(kind::|block_scale|e\dm\d))"
    r"|shared::cluster|\.cluster(\.|$)|u?e\dm\d|L2::|L1::|\.v8\.|f32x2|ldmatrix.*\.b8|b8x16"
)
"""Features that differ between GPUs. Evidence for them counts only within a family of architectures."""

_IDIOMS = (
    (r"^(fence|membar|tcgen05\.fence|tcgen05\.wait)", None),
    (r"^mbarrier\.(init|inval)", "mbarrier.init"),
    (r"^mbarrier\.(try_wait|test_wait)", "mbarrier wait"),
    (r"^mbarrier\.arrive", "mbarrier.arrive"),
    (r"^bar(rier)?\.(cta\.)?(sync|red|arrive)|^barrier\.cluster\.", "barrier"),
    (r"^tcgen05\.(mma|cp|ld|st|commit|alloc|dealloc)", None),
    (r"^wgmma\.(mma_async|commit_group|wait_group)", None),
    (r"^(cp|cp\.reduce)\.async\.bulk\..*global\.shared::cta", "bulk store"),
    (r"^cp\.async\.bulk\.(commit_group|wait_group)", None),
    (r"^cp\.async\.bulk\.(tensor|shared)", "bulk load"),
    (r"^cp\.async\.(ca|cg)", "cp.async"),
    (r"^(st|stmatrix)\..*shared|^stmatrix", "store to shared memory"),
    (r"^(ld|ldmatrix)\..*shared|^ldmatrix", "load from shared memory"),
    (r"^(atom|red)\.", "atomic operation"),
    (r"^st\.(global|b|v|relaxed|release|volatile)", "store to global memory"),
    (r"^ld\.(global|b|v|relaxed|acquire|volatile)", "load from global memory"),
    (r"^(griddepcontrol|tensormap)\.", None),
)
"""Instructions that fences concern: pattern of the name, and its short name (None: the first two words)."""


@lru_cache(64)
def family_of(target: str) -> str:
    """Returns the family of a PTX target: "sm_100" for sm_103a."""
    number = architecture(target).number
    return FAMILIES.get(number, f"sm_{number}")


def operation(inst: Inst) -> str:
    """Returns the opcode with all modifiers, except explicit defaults and types that change nothing."""
    return _operation((inst.opcode.split(".")[0], *inst.mods))


@lru_cache(8192)
def _operation(words: tuple[str, ...]) -> str:
    first, mods = words[0], list(words[1:])
    if first in _OLD_SHARED:
        mods = ["shared" if m == "shared::cta" else m for m in mods]
    for default in _DEFAULTS.get(first, ()):
        if default <= set(mods):
            mods = [m for m in mods if m not in default]
    if first in _UNTYPED:
        mods = [re.sub(r"^[usf](\d+)$", r"b\1", m) for m in mods]
    if first == "tcgen05" and "collector::a::discard" in mods:
        mods.remove("collector::a::discard")
    if first == "mma":  # the assembler also accepts the qualifier order of earlier versions
        mods.sort(key=lambda m: next(i for i, p in enumerate(_MMA_ORDER) if re.match(p, m)))
    if first == "cp":
        mods.sort(key=lambda m: m.startswith("cta_group"))
    return ".".join((first, *mods))


@lru_cache(8192)
def scope_of(name: str, family: str) -> str:
    """Returns the family of architectures that an instruction is a form of; "any" for instructions of every GPU."""
    return family if _HARDWARE.search(name) else "any"


def idiom_name(inst: Inst) -> str | None:
    """Returns the name of an instruction in pairs with fences; None for instructions that no fence concerns."""
    return _idiom_name(operation(inst))


@lru_cache(8192)
def _idiom_name(name: str) -> str | None:
    for pattern, called in _IDIOMS:
        if re.search(pattern, name):
            if is_fence(name):
                return name
            return called or ".".join(name.split(".")[:2])
    return None


def is_fence(name: str) -> bool:
    """Whether an instruction only orders other instructions."""
    return name.startswith(("fence", "membar", "tcgen05.fence", "tcgen05.wait"))


_NEIGHBOURS = (
    (
        r"^tcgen05\.wait",
        r"^tcgen05\.(ld|st)$",
        r"^(tcgen05\.(fence|mma|cp|st|dealloc)|mbarrier\.arrive|barrier)",
    ),
    (r"before_thread_sync", r"^tcgen05\.", r"^(mbarrier\.arrive|barrier)"),
    (r"after_thread_sync", r"^(mbarrier wait|barrier)", r"^tcgen05\.(ld|st|mma|cp|dealloc)"),
    (r"mbarrier_init", r"^mbarrier\.init", r"^(barrier|bulk load|mbarrier\.(arrive|wait))"),
    (r"", r"", r""),
)
"""Fence -> patterns of instructions that it may concern before it, and after it."""


@lru_cache(4096)
def is_ordered(fence: str, other: str, *, after: bool) -> bool:
    """Whether a fence may concern an instruction before it, or after it (`after`)."""
    _, front, back = next(row for row in _NEIGHBOURS if re.search(row[0], fence))
    return re.search(back if after else front, other) is not None
