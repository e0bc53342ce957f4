"""Plants faults: edits the PTX of a kernel before the emulator gets it."""

import re
from collections.abc import Callable

import cases
from flat_parts import grouped_gemm
from oracle import poisoned

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.emulator.fronts.driver import Emulator


def register_mutants(patch, mutate: Callable[[str], str]) -> None:
    """Passes every later PTX text through `mutate` before the emulator gets it."""
    register = Emulator.register
    patch.setattr(Emulator, "register", lambda self, ptx, *cubin: register(self, mutate(ptx), *cubin))


def run_mutant(monkeypatch, mode, mutate, *, case, backend="emulator", config, times=1, found=None):
    """Returns the outputs of a grouped GEMM whose PTX went through `mutate`, launched `times` under the checker.

    Appends all findings to `found`, including notes. Raises what the checker raises.
    """
    operands = cases.make_operands(case)
    out = [poisoned(m, n, dtype=case.out_dtype) for m, n, _ in case.sizes]
    with monkeypatch.context() as patch, observe(mode=mode, check=True) as observer:
        register_mutants(patch, mutate)
        try:
            for _ in range(times):
                grouped_gemm(
                    *list(operands)[:4], out=out, out_dtype=case.out_dtype, backend=backend, config=config
                )
        finally:
            if found is not None:
                found += observer.hazards
    return out


def matches(ptx: str, pattern: str | re.Pattern, count: int) -> list[re.Match]:
    found = list(re.finditer(pattern, ptx))
    assert len(found) == count, f"{pattern}: {len(found)} matches, expected {count}: the kernel has changed"
    return found


def splice(ptx: str, match: re.Match, text: str) -> str:
    return ptx[: match.start()] + text + ptx[match.end() :]


def edit(pattern: str, text: str, *, count: int = 1, index: int = 0) -> Callable[[str], str]:
    """Replace match `index` of `count` by `text`, which may refer to groups."""

    def mutate(ptx: str) -> str:
        match = matches(ptx, pattern, count)[index]
        return splice(ptx, match, match.expand(text))

    return mutate


def every(pattern: str, text: str, *, count: int) -> Callable[[str], str]:
    """Replace all `count` matches."""

    def mutate(ptx: str) -> str:
        matches(ptx, pattern, count)
        return re.sub(pattern, text, ptx)

    return mutate


def move(pattern: str, count: int, index: int, before: str) -> Callable[[str], str]:
    """Move an instruction before the first match of another."""

    def mutate(ptx: str) -> str:
        match = matches(ptx, pattern, count)[index]
        ptx = splice(ptx, match, "")
        place = re.search(before, ptx)
        return ptx[: place.start()] + match.group() + ptx[place.start() :]

    return mutate
