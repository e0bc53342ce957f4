"""Every PTX form of this package has evidence or is listed on the page. Also tests what is recorded as a form, and the page."""

import pytest

from nvfp4_cute.bench import evidence as tool
from nvfp4_cute.bench.evidence_cases import CASES, PROJECTS
from nvfp4_cute.bench.evidence_ours import ARCHS, case_names, forms_of_name
from nvfp4_cute.bench.evidence_page import RESULTS, Evidence, page
from nvfp4_cute.bench.evidence_sources import PROBES, SOURCES, Note, probe_of, source_of
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.ptx import parse
from nvfp4_cute.emulator.record.form_names import operation
from nvfp4_cute.emulator.record.forms import Form, recorded, static_forms

STORED = Evidence.load()
PAGE = (RESULTS / "evidence.md").read_text()
NAMES = [name for arch in ARCHS for name in case_names(arch)]
MIN_RUNS, MIN_PROJECTS, MAX_UNPROVEN = 40, 4, 4


# ---- our kernels against the page ------------------------------------------------------------------------------------
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_form_without_evidence_stands_on_the_page(name):
    forms, error = forms_of_name(name)
    assert not error
    missing = [str(f) for f in forms if f not in STORED.public and f"`{f}`" not in PAGE and not _is_proven(f)]
    assert not missing, "run `python -m nvfp4_cute.bench.evidence --ours-only` and look at what it lists"


def _is_proven(form):
    return form in STORED.ours and STORED.is_proven(form)


def test_the_page_is_what_the_data_say():
    assert page(STORED) == PAGE, "run `python -m nvfp4_cute.bench.evidence --ours-only`"


def test_enough_stands_behind_it():
    projects = STORED.projects()
    assert len(STORED.runs) >= MIN_RUNS and len(projects) >= MIN_PROJECTS and min(projects.values()) > 1
    assert {run.split(" ")[1] for run in STORED.runs} >= {"sm_90a", "sm_100a", "sm_103a", "sm_120a"}
    assert len(STORED.unproven()) <= MAX_UNPROVEN


def test_every_stored_run_and_kernel_is_one_of_the_table():
    assert set(STORED.runs) <= set(map(str, CASES))
    assert set(STORED.kernels) == set(NAMES), "run `python -m nvfp4_cute.bench.evidence --ours-only`"


def test_no_note_is_left_over():
    """A source that matches no form of this package should be deleted."""
    unused = [note.pattern for note in SOURCES if not any(note.fits(form) for form in STORED.open_forms())]
    assert not unused


# ---- forms -----------------------------------------------------------------------------------------------------------
HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"


def kernel(body, registers="", target="sm_100a", directives=".reqntid 64"):
    text = HEADER.replace("sm_100a", target)
    return f"{text}.visible .entry k()\n{directives}\n{{\n{registers}\n{body}\nret;\n}}\n"


def opcodes(body, registers=".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<2>;"):
    return {form.text for form in static_forms(parse(kernel(body, registers))) if form.kind == "opcode"}


@pytest.mark.parametrize(
    "one, other, are_same",
    [
        ("ld.shared::cta.u32 %r1, [%r2];", "ld.weak.shared.b32 %r1, [%r2];", True),
        (
            "mbarrier.arrive.shared::cta.b64 %rd1, [%r2];",
            "mbarrier.arrive.release.cta.shared.b64 %rd1, [%r2];",
            True,
        ),
        (
            "mbarrier.arrive.shared.b64 %rd1, [%r2];",
            "mbarrier.arrive.release.cluster.shared.b64 %rd1, [%r2];",
            False,
        ),
        ("st.global.b32 [%rd1], %r2;", "st.global.v2.b32 [%rd1], {%r2, %r3};", False),
        ("fence.proxy.async;", "fence.proxy.async.shared::cta;", False),
    ],
)
def test_spellings_that_mean_the_same_are_one_form(one, other, are_same):
    assert (opcodes(one) == opcodes(other)) is are_same


def test_what_every_gpu_has_needs_no_evidence_of_the_family():
    forms = static_forms(parse(kernel("fence.proxy.async; add.s32 %r1, %r2, 3;", ".reg .b32 %r<9>;")))
    scopes = {form.text: form.scope for form in forms}
    assert scopes["add.s32"] == "any" and scopes["fence.proxy.async"] == "sm_100"
    other = static_forms(parse(kernel("fence.proxy.async;", target="sm_103a")))
    assert Form("sm_100", "opcode", "fence.proxy.async") in other


def test_register_budgets_are_told_with_the_threads():
    forms = static_forms(
        parse(kernel("setmaxnreg.dec.sync.aligned.u32 40;\nsetmaxnreg.inc.sync.aligned.u32 232;"))
    )
    assert Form("sm_100", "registers", "64 threads: dec 40, inc 232") in forms


def test_what_stands_around_a_fence():
    body = """
      mbarrier.init.shared.b64 [%r1], 1;
      st.shared.b32 [%r1+8], %r1;
      fence.mbarrier_init.release.cluster;
      bar.sync 0;
      st.shared.b32 [%r1+8], %r1;
      fence.proxy.async.shared::cta;
      bar.sync 0;
    """
    with recorded() as log:
        run_ptx(kernel(f"mov.b32 %r1, 1024;{body}", ".reg .b32 %r<9>;"), block=64, smem_bytes=128)
    assert {form.text for form in log.forms if form.kind == "fence"} == {
        "mbarrier.init -> fence.mbarrier_init.release.cluster",
        "fence.mbarrier_init.release.cluster -> barrier",
        "store to shared memory -> fence.proxy.async.shared::cta",
        "fence.proxy.async.shared::cta -> barrier",
    }


SCALED = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"


def test_selectors_of_scales_are_values():
    zeros = "".join(f"mov.b32 %r{i}, 0; mov.b32 %f{i}, 0f00000000;" for i in range(8))
    body = f"""{zeros} mov.b16 %h0, 0; mov.b16 %h1, 1;
      {SCALED} {{%f0, %f1, %f2, %f3}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%f4, %f5, %f6, %f7}},
        {{%r6}}, {{%h0, %h1}}, {{%r7}}, {{%h0, %h0}};"""
    registers = ".reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b16 %h<3>;"
    with recorded() as log:
        run_ptx(kernel(body, registers, "sm_120a", ".reqntid 32"))
    (form,) = (form for form in log.forms if form.kind == "mma")
    assert form.scope == "sm_120" and form.text.endswith("scales at byte 0 thread 1 and byte 0 thread 0")


def test_nothing_is_noted_outside_a_block():
    with recorded() as log:
        pass
    run_ptx(kernel("bar.sync 0;"), block=64)
    assert not log.forms


def test_names_do_not_depend_on_the_order_of_qualifiers():
    one, other = (
        parse(kernel(f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{words} "
                     "[%r1], [%rd1, {%r2, %r3}], [%r4], %rd2;", ".reg .b32 %r<9>; .reg .b64 %rd<9>;"))
        for words in (".cta_group::2.L2::cache_hint", ".L2::cache_hint.cta_group::2")
    )  # fmt: skip
    assert operation(one.entries["k"].insts[0]) == operation(other.entries["k"].insts[0])


# ---- verdicts and the page -------------------------------------------------------------------------------------------
PUBLIC, SOURCED, OPEN = (Form("sm_100", "mma", text) for text in ("public", "sourced", "open"))
MEASURED = Form("any", "opcode", "measured")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Evidence of one public run and two kernels, with one source."""
    monkeypatch.setattr(
        "nvfp4_cute.bench.evidence_sources.SOURCES", (Note("sm_100", "sourced", "somebody did it"),)
    )
    found = Evidence().with_runs({"CUTLASS sm_100a x.py": [PUBLIC]}, {"CUTLASS": "abc"})
    return found.with_ours({"sm_100a one": [PUBLIC, SOURCED, OPEN, MEASURED], "sm_90a two": [MEASURED]})


def test_verdicts(small):
    assert small.open_forms() == [OPEN, SOURCED] and small.unproven() == [OPEN]
    text = page(small)
    unproven, sourced = text.index("## Unproven"), text.index("## With another source")
    assert unproven < text.index(f"`{OPEN}`") < sourced < text.index(f"`{SOURCED}`")
    assert f"`{PUBLIC}`" not in text and f"`{MEASURED}`" not in text
    assert text.index(probe_of(OPEN)) > unproven and "somebody did it" in text


def test_stored_and_loaded_again(small, tmp_path):
    small.save(tmp_path / "data.json")
    assert Evidence.load(tmp_path / "data.json") == small
    assert Evidence.load(tmp_path / "none.json") == Evidence()


def test_a_repeated_run_replaces_the_earlier_one(small):
    again = small.with_ours({"sm_100a one": [PUBLIC]})
    assert again.open_forms() == [] and again.kernels == small.kernels


def test_what_is_no_longer_in_the_table_is_dropped(small):
    assert small.kept(["CUTLASS sm_100a x.py"], ["sm_90a two"]).ours == {MEASURED: ["sm_90a two"]}
    assert small.kept([], []) == Evidence({"CUTLASS": "abc"})


def test_every_form_has_a_probe():
    assert all(probe_of(form) for form in STORED.ours)
    assert PROBES[-1].pattern == ""


def test_sources_are_scoped():
    note = Note("sm_100", "registers: 64", "x")
    assert note.fits(Form("sm_100", "registers", "64 threads"))
    assert not note.fits(Form("sm_120", "registers", "64 threads"))
    assert source_of(Form("sm_100", "mma", "no such form")) is None


# ---- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of the first project with an unexpected script, and empty results."""
    project = PROJECTS[0]
    (tmp_path / project.marker).parent.mkdir(parents=True)
    (tmp_path / project.marker).touch()
    (tmp_path / "COMMIT").write_text("abc\n")
    monkeypatch.setattr(tool, "CASES", (tool.Case(project, "sm_100a", "script.py", "--fast"),))
    monkeypatch.setattr(tool, "case_names", lambda arch: [])
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    monkeypatch.setattr(tool.Evidence, "save", lambda self: None)
    return tmp_path


def test_a_run_that_fails_is_shown_and_not_counted(checkout, capsys):
    (checkout / "script.py").write_text("import sys\nraise SystemExit(sys.argv[1] + ' is wrong')")
    assert tool.main([str(checkout), "--cache", str(checkout / "cache"), "--jobs", "1"]) == 1
    out = capsys.readouterr()
    assert "--fast is wrong" in out.out + out.err and "0 public runs" in out.out
    assert not list((checkout / "cache").iterdir())


@pytest.mark.slow
def test_a_script_that_launches_nothing_proves_nothing(checkout):
    (checkout / "script.py").write_text("print('fine')")
    assert tool.main([str(checkout), "--cache", str(checkout / "cache"), "--jobs", "1"]) == 1


def test_what_ran_is_kept(checkout, monkeypatch):
    kept = [[*PUBLIC]]
    cache = checkout / "cache"
    cache.mkdir()
    monkeypatch.setattr(tool, "_digest", lambda key: "kept")
    (cache / "kept.json").write_text(f'{{"forms": {str(kept).replace(chr(39), chr(34))}}}')
    assert tool.main([str(checkout), "--cache", str(cache), "--jobs", "1"]) == 0
    assert (
        f"{len(STORED.runs) + 1} public runs"
        in tool.Evidence.load().with_runs({"x y": [PUBLIC]}, {}).summary()
    )


@pytest.mark.parametrize(
    "arguments, words", [(["nowhere"], "is no checkout of a known project"), ([], "no run matches")]
)
def test_wrong_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    assert stop.value.code == 2 and words in capsys.readouterr().err
