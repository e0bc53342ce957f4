"""Planted faults against the rules of the chip: earlier versions of kernels and edits of their PTX, reported by rule."""

import re
from dataclasses import dataclass, replace

import cases
import pytest
import torch
from mutations import edit, every, matches, run_mutant, splice

from nvfp4_cute import KernelConfig, PersistentMLP, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.emulator.fronts.driver import Emulator
from nvfp4_cute.errors import EmulatorError

CASE = cases.Case("silicon", ((130, 136, 768),), seed=5)
ONE = ("emulator", "t128x128x256_s2a1")
PAIR = ("emulator", "t128x128x256_s2a1_2cta")
SPLIT = ("emulator", "t128x64x256_s2a1_swap_k2")
SM120 = ("emulator:sm_120a", "t128x64x128_s2a1")


@dataclass(frozen=True)
class Fault:
    """A planted fault: the rule that names it, the text of the report, and the kernel (backend, config)."""

    rule: str
    mutate: object
    text: str
    kernel: tuple[str, str] = PAIR
    times: int = 1


ALLOC = r"(tcgen05\.alloc\S+\s+)\[(\S+)\], (\S+);\n"
MMA = r"(tcgen05\.mma\S+ \[\S+\], .*), \[(\S+)\], \[(\S+)\], (\S+);"


def behind_alloc(text: str):
    """Inserts instructions after the allocation; `text` may refer to the place of the address and the columns."""
    return edit(ALLOC, r"\g<0>" + text, count=1)


def allocate_early(ptx: str) -> str:
    """Moves the allocation before the wait for the other CTA, where it once was."""
    alloc = matches(ptx, ALLOC, 1)[0]
    waits = list(re.finditer(r"barrier\.cluster\.wait;\n", ptx[: alloc.start()]))
    if waits and alloc.start() - waits[-1].end() < 200:
        wait = waits[-1]
        moved = splice(ptx, alloc, alloc.group() + wait.group())
        return splice(moved, wait, "")
    return ptx


def for_one_warp(action: str) -> str:
    """Restricts the action to the first warp of each warpgroup."""
    return (
        "{\n.reg .pred OTHERS;\n.reg .b32 WARP;\nmov.u32 WARP, %tid.x;\nand.b32 WARP, WARP, 96;\n"
        f"setp.eq.u32 OTHERS, WARP, 0;\n@OTHERS {action}\n}}\n"
    )


FREE = "{\n.reg .b32 BASE;\nld.shared.b32 BASE, [\\2];\ntcgen05.dealloc.cta_group::2.sync.aligned.b32 BASE, \\3;\n}\n"
ODD_COMMIT = (
    "{\n.reg .pred ODD;\n.reg .b32 RANK;\nmov.u32 RANK, %cluster_ctarank;\nsetp.eq.u32 ODD, RANK, 1;\n"
    "@ODD tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [\\2];\n}\n"
)
FAULTS = (
    Fault("even-scale-column", every(MMA, r"\1, [\2], [\3+1], \4;", count=4), r"SFB .* column \d*[13579]\b", ONE),
    Fault("even-scale-column", every(MMA, r"\1, [\2+1], [\3], \4;", count=4), r"SFA .* column \d*[13579]\b", PAIR),
    Fault("even-scale-column", edit(r"(tcgen05\.cp\S+) \[(\S+)\]", r"\1 [\2+1]", count=8), r"tcgen05\.cp.* column", ONE),
    Fault("pair-alloc-order", allocate_early, r"tcgen05\.alloc .* does not know that the CTA of rank 1 runs"),
    Fault("pair-dealloc-order", behind_alloc(FREE), r"rank 0 frees columns before that of rank 1 has allocated"),
    Fault("one-cta-group", edit(r"(tcgen05\.dealloc\.cta_group)::2", r"\1::1"), r"tcgen05\.dealloc\.cta_group::1"),
    Fault("commit-group", edit(r"(tcgen05\.commit\.cta_group)::2", r"\1::1", count=2), r"tcgen05\.commit\.cta_group::1"),
    Fault("pair-leader", behind_alloc(ODD_COMMIT), r"the CTA of rank 1 issues"),
    Fault("empty-multicast-commit", lambda ptx: re.sub(r"tcgen05\.(cp|mma)\.[^;]*;", "", ptx), r"tcgen05\.commit .* with nothing pending"),
    Fault("pdl-order", lambda ptx: ptx.replace("griddepcontrol.wait;", ""), r"st\.global .* writes, without griddep", ONE, 2),
    Fault("pdl-order", lambda ptx: ptx.replace("griddepcontrol.wait;", ""), r"st\.global .* writes, without griddep", SM120, 2),
    Fault("pdl-chain", lambda ptx: ptx.replace("griddepcontrol.wait;", ""), r"2 of 2 CTAs .* end without a wait", ONE, 2),
    Fault("async-store-scope", edit(r"\.acquire\.cluster", ""), r"mbarrier\.try_wait .* waits for st\.async .* with \.cta scope", SPLIT),
    Fault("register-pool", edit(r"setmaxnreg\.inc(\S+)(\s+)224", r"setmaxnreg.inc\1\g<2>240"), r"launched with 64512", SM120),
    Fault("register-direction", edit(r"setmaxnreg\.dec", "setmaxnreg.inc"), r"setmaxnreg\.inc 56 by a warp .* 168", SM120),
    Fault("register-warpgroup", edit(r"setmaxnreg\.dec[^;]*;", r"\g<0>\n" + for_one_warp("setmaxnreg.dec.sync.aligned.u32 48;")), r"warp \d+ \[56, 48\], warp \d+ \[56\]", SM120),
    Fault("register-bounds", edit(r"\.minnctapersm 1\n", ""), r"setmaxnreg\.(inc|dec) .* without \.minnctapersm", SM120),
)  # fmt: skip


def launched_as(monkeypatch, *, cooperative):
    """Sets or removes the cooperative attribute of every later launch."""
    decode = Emulator.decode
    monkeypatch.setattr(
        Emulator, "decode", lambda self, record: replace(decode(self, record), cooperative=cooperative)
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.rule}-{f.kernel[1]}")
def test_fault(monkeypatch, fault):
    """The launch stops with an error, or succeeds with a note that names the fault."""
    backend, name = fault.kernel
    config = replace(KernelConfig.from_name(name), num_cta=2)
    found, texts = [], []
    try:
        run_mutant(
            monkeypatch, "eager", fault.mutate,
            case=CASE, backend=backend, config=config, times=fault.times, found=found,
        )  # fmt: skip
    except EmulatorError as error:
        texts.append(str(error))
    texts += [hazard.text for hazard in found]
    assert any(re.search(f"{fault.rule}: .*{fault.text}", text) for text in texts), "\n".join(texts)


@pytest.mark.parametrize("kernel", [ONE, PAIR, SPLIT, SM120], ids=lambda kernel: kernel[1])
def test_the_kernels_are_clean(monkeypatch, kernel):
    """Two launches in a row, with at most notes."""
    backend, name = kernel
    config, found = replace(KernelConfig.from_name(name), num_cta=2), []
    run_mutant(
        monkeypatch, "eager", lambda ptx: ptx, case=CASE, backend=backend, config=config, times=2, found=found
    )
    assert {hazard.rule for hazard in found} <= {"scale-width"}


def test_layers_that_wait_for_each_other(monkeypatch):
    """Without a cooperative launch, as in an earlier version."""
    generator = torch.Generator().manual_seed(0)
    x = quantize(torch.randn(40, 288, generator=generator), global_scale=0.002)
    weights = [
        quantize(torch.randn(288, 288, generator=generator) / 17, global_scale=0.001) for _ in range(3)
    ]
    config = KernelConfig.from_name("t128x64x256_s0a4_swap_p3")
    mlp = PersistentMLP(weights, [0.002] * 4, backend="emulator", config=config)
    with monkeypatch.context() as patch, observe(check=True) as observer:
        launched_as(patch, cooperative=False)
        mlp(x)
    spin = next(hazard for hazard in observer.hazards if hazard.rule == "spin-without-co-residency")
    assert re.search(r"ld\.acquire .* waits in a loop for CTAs that have not started", spin.text)
    launched_as(monkeypatch, cooperative=True)
    with observe(check=True) as observer:
        mlp(x)
    assert not [hazard for hazard in observer.hazards if hazard.rule == "spin-without-co-residency"]
