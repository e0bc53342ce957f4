"""The page of all results: its rows are those of the committed files, and a browser displays them."""

import json
import re

import pytest
from browser import check_needs_no_network, look

from nvfp4_cute import cli
from nvfp4_cute.bench import gallery


@pytest.fixture(scope="module")
def found():
    return gallery.entries(gallery.RESULTS)


def test_rows_are_those_of_the_pages(found):
    b200 = [entry for entry in found if entry.gpu == "B200"]
    lines = (gallery.RESULTS / "b200.md").read_text().splitlines()
    table = [line for line in lines if re.match(r"\S.* modelled +\d", line)]
    assert len(b200) == len(table) > 10
    for entry, line in zip(b200, table, strict=True):
        assert line.startswith(entry.problem) and entry.case in line
        for number in (entry.sol_us, entry.us, *([] if entry.peer_us is None else [entry.peer_us])):
            assert f" {number:.2f} " in line
        assert entry.percent == pytest.approx(float(line.split(entry.kind)[1].split()[0]), abs=0.2)
    assert {entry.kind for entry in b200} == {"modelled"}
    assert {e.peer_kind for e in b200 if e.problem.startswith("nvfp4_")} == {"published"}


def test_every_gpu_with_times_is_there_and_says_whether_they_are_measured(found):
    kinds = {gpu: {e.kind for e in found if e.gpu == gpu} for gpu in {e.gpu for e in found}}
    assert kinds["H200"] == kinds["H100 SXM"] == {"measured"}
    assert kinds["B300"] == kinds["RTX 5090"] == kinds["RTX PRO 6000"] == {"modelled"}
    assert len({(e.gpu, e.problem, e.case) for e in found}) == len(found)
    experts = [e for e in found if e.problem.startswith("experts")]
    content = json.loads((gallery.RESULTS / "h100_moe.json").read_text())
    assert len(experts) == sum(map(len, content["models"].values()))
    assert all(e.sol_us is None for e in experts)
    first = next(e for e in experts if "qwen3" in e.problem and e.case == "1 tokens")
    others = {name: known["qwen3-30b-a3b"]["1"] for name, known in content["peers"].items()}
    assert first.peer_us == min(others.values()) and first.peer in others


def test_the_page_needs_no_network(found):
    check_needs_no_network(gallery.page(found))


def test_names_cannot_break_the_page():
    entry = gallery.Entry("<i>", 'a"b', "<script>", 1.0, "measured", None, "x & <y>", 2.0, "measured", "p.md")
    text = gallery.page([entry])
    assert "<i></i>" in text and "<i>," not in text and text.count("<script>") == 1
    assert (
        "&lt;script&gt;" in text
        and "x &amp; &lt;y&gt;, measured" in text
        and 'data-problem="a&quot;b"' in text
    )


def test_the_command_writes_it_and_goes_alone(tmp_path, capsys):
    path = tmp_path / "times.html"
    assert cli.main(["bench", "--html", str(path)]) == 0
    assert re.search(r"\d+ cases on \d+ GPUs", capsys.readouterr().out) and path.read_text().startswith(
        "<!doctype"
    )
    assert cli.main(["bench", "--html", str(path), "--json"]) == 2
    assert "leave out json" in capsys.readouterr().err


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no page of `nvfp4-cute bench --save`"):
        gallery.entries(tmp_path)


# What a person would see: a script that runs after the page's own reads the laid-out page.
LOOK = """
const seen = () => [...document.querySelectorAll("tbody tr")].filter(r => r.offsetHeight > 0);
const texts = index => seen().map(r => r.cells[index].innerText.trim());
const click = name => [...document.querySelectorAll("th button")].find(b => b.textContent === name).click();
const set = (name, value) => { field(name).value = value; document.querySelector("form").dispatchEvent(new Event("input")); };
const ours = () => seen().map(r => parseFloat(r.cells[4].dataset.value));
const bar = document.querySelector("tbody .bar.ours.modelled i"), track = bar.parentElement;
const report = {all: seen().length, count: field("count").textContent};
report.width = [document.documentElement.scrollWidth, innerWidth];
report.bar = [bar.offsetWidth / track.offsetWidth, parseFloat(track.innerText) / 100];
const fill = kind => getComputedStyle(document.querySelector(`tbody .bar.ours.${kind} i`)).backgroundImage;
report.fills = [fill("measured"), fill("modelled").slice(0, 9)];
report.label = getComputedStyle(document.querySelector("td"), "::before").content;
set("gpu", "H200"); report.h200 = [...new Set(texts(0))]; report.h200count = field("count").textContent; set("gpu", "");
set("kind", "modelled"); report.modelled = texts(4).every(t => t.includes("modelled")); set("kind", "");
set("words", "group_gemm case B200"); report.words = texts(1); set("words", "");
click("ours, us"); const up = ours(); report.rising = up.every((v, i) => !i || up[i - 1] <= v);
click("ours, us"); const down = ours(); report.falling = down.every((v, i) => !i || down[i - 1] >= v);
click("other / ours"); report.lastEmpty = seen().at(-1).cells[8].dataset.value === "";
"""


@pytest.mark.parametrize("width", [1280, 500])  # 500 is the smallest width of a headless window
def test_what_a_person_sees(width, found, tmp_path):
    report = look(gallery.page(found), LOOK, width, tmp_path)
    assert report["all"] == len(found) and report["count"] == f"{len(found)} cases"
    page_width, window = report["width"]
    assert page_width <= window, "the page is wider than the window"
    drawn, said = report["bar"]
    assert drawn == pytest.approx(said, abs=0.02)
    assert report["fills"] == ["none", "repeating"]
    assert report["label"] == ("none" if width > 800 else '"GPU"')  # cards with labels on a phone
    assert report["h200"] == ["H200"]
    assert report["h200count"] == f"{sum(e.gpu == 'H200' for e in found)} cases"
    assert report["modelled"] and report["rising"] and report["falling"] and report["lastEmpty"]
    assert report["words"] == ["nvfp4_group_gemm"] * 4
