"""Data and page of `bench.evidence`: forms of public kernels and of ours, and knowledge of those that only ours use."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nvfp4_cute.bench.evidence_cases import PROJECTS
from nvfp4_cute.bench.evidence_sources import probe_of, source_of
from nvfp4_cute.emulator.record.forms import Form

RESULTS = Path(__file__).parent / "results"
DATA = RESULTS / "evidence.json"
ON_HARDWARE = "sm_90a "
"""Our kernels whose names begin with this were measured and tested on an H100 or H200, so their forms are also proven."""

INTRODUCTION = """\
Every form in which our kernels use the hardware and no public kernel that ran there does: opcodes with all modifiers, fields of
descriptors, columns of tensor memory, tensor maps, registers, launch attributes, and what stands around fences
(`nvfp4_cute/emulator/record/forms.py`). Forms of sm_90, sm_100 and sm_120 need evidence of the same family; those of "any" are
what every GPU of these has. `python -m nvfp4_cute.bench.evidence` makes this page, and tests/bench/test_evidence.py reads it."""


@dataclass(frozen=True)
class Evidence:
    """Collected evidence.

    Attributes:
        versions: project -> commit that ran.
        public: form -> public runs that use it.
        ours: form -> kernels of ours that use it.
        runs: public runs that passed.
        kernels: kernels of ours that ran.
    """

    versions: dict[str, str] = field(default_factory=dict)
    public: dict[Form, list[str]] = field(default_factory=dict)
    ours: dict[Form, list[str]] = field(default_factory=dict)
    runs: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    @staticmethod
    def load(path: Path = DATA) -> "Evidence":
        """Loads the stored evidence; empty without a file."""
        if not path.is_file():
            return Evidence()
        stored: dict[str, Any] = json.loads(path.read_text())
        public, ours = (
            _unpacked(stored[key], stored[names]) for key, names in (("public", "runs"), ("ours", "kernels"))
        )
        return Evidence(stored["versions"], public, ours, tuple(stored["runs"]), tuple(stored["kernels"]))

    def save(self, path: Path = DATA) -> None:
        """Stores the evidence."""
        stored = {
            "versions": self.versions,
            "runs": self.runs,
            "kernels": self.kernels,
            "public": _packed(self.public, self.runs),
            "ours": _packed(self.ours, self.kernels),
        }
        lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in stored.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def with_runs(self, found: Mapping[str, Iterable[Form]], versions: Mapping[str, str]) -> "Evidence":
        """Returns evidence with added public runs, which replace earlier runs of the same names."""
        forms, names = _merged(self.public, self.runs, found)
        return replace(self, public=forms, runs=names, versions={**self.versions, **versions})

    def with_ours(self, found: Mapping[str, Iterable[Form]]) -> "Evidence":
        """Returns evidence with added kernels of ours, which replace earlier ones of the same names."""
        forms, names = _merged(self.ours, self.kernels, found)
        return replace(self, ours=forms, kernels=names)

    def kept(self, runs: Iterable[str], kernels: Iterable[str]) -> "Evidence":
        """Returns evidence without runs and kernels that are not among these."""
        public, ours = set(runs), set(kernels)
        return Evidence(
            self.versions,
            _used_by(self.public, public),
            _used_by(self.ours, ours),
            tuple(run for run in self.runs if run in public),
            tuple(name for name in self.kernels if name in ours),
        )

    # ---- verdicts ----------------------------------------------------------------------------------------------------
    def is_proven(self, form: Form) -> bool:
        """Whether a public kernel uses a form on the hardware, or a kernel of ours used it on an H100 or H200."""
        return form in self.public or any(name.startswith(ON_HARDWARE) for name in self.ours.get(form, ()))

    def open_forms(self) -> list[Form]:
        """Returns forms of ours that are not proven."""
        return sorted(form for form in self.ours if not self.is_proven(form))

    def unproven(self) -> list[Form]:
        """Returns open forms without a source."""
        return [form for form in self.open_forms() if source_of(form) is None]

    def projects(self) -> Counter[str]:
        """Returns the number of public runs by project."""
        return Counter(run.split(" ")[0] for run in self.runs)

    def summary(self) -> str:
        """Returns a summary in one sentence."""
        unproven, listed = len(self.unproven()), len(self.open_forms())
        runs = ", ".join(f"{count} of {name}" for name, count in sorted(self.projects().items()))
        return (
            f"{len(self.runs)} public runs ({runs}) use {len(self.public)} forms. {len(self.kernels)} kernels of ours use "
            f"{len(self.ours)}: {len(self.ours) - listed} are proven, {listed - unproven} have another source, "
            f"{unproven} are unproven."
        )


def _used_by(forms: Mapping[Form, list[str]], names: set[str]) -> dict[Form, list[str]]:
    used = {form: [user for user in users if user in names] for form, users in forms.items()}
    return {form: users for form, users in used.items() if users}


def _packed(forms: Mapping[Form, list[str]], names: tuple[str, ...]) -> dict[str, list[int]]:
    number = {name: index for index, name in enumerate(names)}
    return {"|".join(form): sorted(number[name] for name in forms[form]) for form in sorted(forms)}


def _unpacked(packed: Mapping[str, list[int]], names: list[str]) -> dict[Form, list[str]]:
    return {Form(*key.split("|", 2)): [names[i] for i in numbers] for key, numbers in packed.items()}


def _lines(value: Any) -> str:
    """Returns JSON with one entry per line."""
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n}"
    return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n]"


def _merged(
    forms: Mapping[Form, list[str]], names: tuple[str, ...], found: Mapping[str, Iterable[Form]]
) -> tuple[dict[Form, list[str]], tuple[str, ...]]:
    merged: dict[Form, list[str]] = defaultdict(list)
    for form, users in forms.items():
        merged[form] += [user for user in users if user not in found]
    for name, used in found.items():
        for form in used:
            merged[form].append(name)
    kept = {form: sorted(users) for form, users in merged.items() if users}
    return kept, tuple(sorted({*names, *found}))


# ---- the page --------------------------------------------------------------------------------------------------------
def page(evidence: Evidence) -> str:
    """Returns the page in Markdown."""
    parts = ["# Evidence by form", INTRODUCTION, evidence.summary(), "## Public kernels", _projects(evidence)]
    parts += ["## Unproven", _unproven(evidence), "## With another source", _sourced(evidence)]
    parts += ["## Proven", _proven(evidence)]
    return "\n\n".join(parts) + "\n"


def _projects(evidence: Evidence) -> str:
    rows = []
    for project in PROJECTS:
        runs = [run for run in evidence.runs if run.startswith(f"{project.name} ")]
        archs = sorted({run.split(" ")[1] for run in runs})
        commit = evidence.versions.get(project.name, "-")[:12]
        rows.append(f"| {project.name} | {commit} | {len(runs)} | {', '.join(archs)} | {project.proof} |")
    ours = [name for name in evidence.kernels if name.startswith(ON_HARDWARE)]
    rows.append(
        f"| ours on an H100 or H200 | | {len(ours)} kernels | sm_90a | measured and tested there: bench/results/h200.md, "
        "bench/results/prove-h100_sxm.md |"
    )
    return "\n".join(
        ["| project | commit | runs | architectures | why it counts |", "|---|---|---|---|---|", *rows]
    )


def _unproven(evidence: Evidence) -> str:
    by_probe = defaultdict(list)
    for form in evidence.unproven():
        by_probe[probe_of(form)].append(form)
    if not by_probe:
        return "None."
    return "\n\n".join(
        f"Settled by {probe}:\n\n{_table(evidence, forms)}" for probe, forms in by_probe.items()
    )


def _sourced(evidence: Evidence) -> str:
    by_source = defaultdict(list)
    for form in evidence.open_forms():
        source = source_of(form)
        if source is not None:
            by_source[source].append(form)
    return (
        "\n\n".join(f"{source}:\n\n{_table(evidence, forms)}" for source, forms in by_source.items())
        or "None."
    )


def _table(evidence: Evidence, forms: Iterable[Form]) -> str:
    """Returns a table of forms with the number of our kernels that use each, and one of their names."""
    rows = [f"| `{form}` | {len(evidence.ours[form])} | {evidence.ours[form][0]} |" for form in forms]
    return "\n".join(["| form | kernels | for example |", "|---|---|---|", *rows])


def _proven(evidence: Evidence) -> str:
    """Returns how many forms of each kind are proven, and by whom; the data has all of them."""
    counts = Counter((form.scope, form.kind) for form in evidence.ours if evidence.is_proven(form))
    rows = [f"| {scope} | {kind} | {count} |" for (scope, kind), count in sorted(counts.items())]
    table = "\n".join(["| scope | kind | forms |", "|---|---|---|", *rows])
    return f"Each with the runs that use it in evidence.json.\n\n{table}"
