"""Foreign kernels that the comparison runs: where they come from, and how one is called."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign.operands import GroupedOperands
from nvfp4_cute.bench.public_kernels import checkout_version
from nvfp4_cute.emulator.record.representatives import LaunchWork
from nvfp4_cute.formats.block_format import ATOM_ROWS


@dataclass(frozen=True)
class Tile:
    """Tile of a kernel.

    Attributes:
        m, n: rows and columns that an MMA computes; 256 rows take two CTAs.
        form: other choices of the kernel, as text for tables.
    """

    m: int
    n: int
    form: str = ""

    def __str__(self) -> str:
        return f"{self.m} x {self.n}" + f", {self.form}" * bool(self.form)


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to run.

    Attributes:
        run: makes the launches.
        kernel: regular expression for the name of the kernel that multiplies. Times of other launches do not count.
        work: work of its clusters, from which the emulator executes a few; None executes all.
        operands: operands of the call.
    """

    run: Callable[[], object]
    kernel: str
    work: LaunchWork | None
    operands: GroupedOperands


@dataclass(frozen=True)
class Foreign:
    """A foreign kernel.

    Attributes:
        name: name in tables.
        adapter: module of this package that calls it: ``refuses``, ``tiles``, and ``prepare``.
        needs: module that the adapter imports.
        distribution: installed distribution that has the version; None for a checkout.
        source: how to get the kernel, for people.
    """

    name: str
    adapter: str
    needs: str
    distribution: str | None
    source: str

    def missing(self) -> str | None:
        """Returns how to get the kernel if it is not there."""
        return None if importlib.util.find_spec(self.needs.partition(".")[0]) else self.source

    @property
    def version(self) -> str:
        """Version of the distribution, or of the checkout's change log."""
        if self.distribution:
            return metadata.version(self.distribution)
        spec = importlib.util.find_spec(self.needs.partition(".")[0])
        for folder in Path(next(iter(spec.submodule_search_locations or ("",)))).parents if spec else ():
            if (folder / "CHANGELOG.md").exists():
                return checkout_version(folder)
        return ""

    def load(self) -> ModuleType:
        """Imports the adapter."""
        return import_module(f"nvfp4_cute.bench.foreign.{self.adapter}")


MANY_EXPERTS = 128
CUTLASS = "a checkout of github.com/NVIDIA/cutlass (4.7): pass its folder examples/python/CuTeDSL/cute"
FOREIGN = {
    kernel.name: kernel
    for kernel in (
        Foreign(
            "LightMoE",
            "lightmoe",
            "lightmoe",
            "lightmoe",
            "`pip download --no-deps --ignore-requires-python lightmoe==0.1.0`, unzip the wheel, and pass its folder",
        ),
        Foreign(
            "CUTLASS moe",
            "cutlass_moe",
            "blackwell.kernel.moe",
            None,
            CUTLASS,
        ),
        Foreign(
            "CUTLASS list", "cutlass_grouped", "blackwell.kernel.blockscaled_grouped_gemm", None, CUTLASS
        ),
        Foreign(
            "QuACK",
            "quack_varlen",
            "quack",
            "quack-kernels",
            "`pip install quack-kernels==0.6.5`, or unzip its wheel and pass its folder; it needs triton and einops",
        ),
        Foreign(
            "FlashInfer masked",
            "flashinfer_masked",
            "flashinfer",
            "flashinfer-python",
            "`pip install flashinfer-python==0.7.4`, or unzip its wheel and pass its folder",
        ),
    )
}


def restricted(work: LaunchWork, launched: int) -> LaunchWork:
    """Returns the work of the first ``launched`` clusters."""
    return replace(work, clusters=work.clusters[:launched])


def narrow_tile(case: Case, sms: int = 148) -> Tile:
    """Returns the tile to try for few rows: of 64 columns where tiles of 128 leave SMs of a B200 idle, else of 128."""
    tiles = sum(-(-n // 128) for m, n, _ in case.sizes if m)
    return Tile(128, 64 if tiles < sms else 128)


def wide_tiles(case: Case) -> list[Tile]:
    """Returns the tiles to try for many rows: fewer of them for long launches, where those of 128 columns were slower."""
    many = len(case.sizes) >= MANY_EXPERTS and max(m for m, _, _ in case.sizes) > ATOM_ROWS
    sizes = ((128, 256), (256, 256)) if many else ((128, 128), (128, 256), (256, 128), (256, 256))
    return [Tile(m, n) for m, n in sizes]


def cluster_count(sms: int, ctas: int) -> int:
    """Returns the clusters of a persistent launch that fills a GPU."""
    return sms // ctas
