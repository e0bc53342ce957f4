"""The comparison with foreign kernels: operands, schedules, comparison of results, records and page."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nvfp4_cute.bench import provenance
from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.foreign import __main__ as command
from nvfp4_cute.bench.foreign import cells, layers, lightmoe_layer, operands, ours, page
from nvfp4_cute.bench.foreign.compare import compare
from nvfp4_cute.bench.foreign.kernels import FOREIGN
from nvfp4_cute.bench.foreign.schedule import static_work
from nvfp4_cute.emulator.record.representatives import choose
from nvfp4_cute.formats.block_format import ATOM_ROWS
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.reference import grouped_gemm_reference

ROWS = (3, 0, 130, 1)


def case_of(rows=ROWS, n=256, k=512) -> Case:
    sizes = tuple((m, n, k) for m in rows)
    return Case("foreign", "some", "groups", "grouped_gemm", sizes, form="ragged", out="bf16")


def parts_of(made, group):
    """Operands of a group: a, b, and their scales."""
    m, first, atom = made.rows[group], made.starts[group], made.atoms[group]
    scale = made.a_scale[atom : atom + -(-m // ATOM_ROWS)]
    return made.a[first : first + m], made.b[group], scale, made.b_scale[group]


def test_expected_results_are_the_references():
    made = operands.make(case_of())
    for group in (0, 2, 3):
        a, b, a_scale, b_scale = parts_of(made, group)
        (reference,) = grouped_gemm_reference([a], [b], [a_scale], [b_scale], out_dtype=torch.float32)
        found = made.expected(group, np.arange(made.rows[group]), np.arange(256))
        assert np.array_equal(found, reference.numpy()) and np.count_nonzero(found) > found.size / 2
    assert not torch.equal(made.b[0], made.b[2]) and not torch.equal(made.a[0], made.a[1])


def test_other_layouts_hold_the_same_rows():
    made = operands.make(case_of())
    padded = made.padded(130)
    assert padded.starts == (0, 130, 260, 390) and padded.atoms == (0, 2, 4, 6)
    for group in (0, 2, 3):
        rows, columns = np.arange(made.rows[group]), np.arange(256)
        assert np.array_equal(padded.expected(group, rows, columns), made.expected(group, rows, columns))
    # Tiles of 8 rows with an atom each: row 129 of group 2 is row 1 of that group's atom 16.
    placed = made.scales_at((0, 1, 1, 18), 19, rows=8)
    assert torch.equal(placed[17, :, 1, 0], made.a_scale[2, :, 1, 0])
    assert torch.equal(placed[18, :, 0, 0], made.a_scale[3, :, 0, 0])


@pytest.mark.parametrize(
    ("fast", "tiles"),
    [
        ("m", [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]),
        ("n", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
        ("shorter", [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]),
        ("n in eights", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
    ],
)
def test_tiles_go_to_clusters_in_turn(fast, tiles):
    made = operands.make(case_of((200, 0, 128), n=384))
    work = static_work(made, (128, 128, 256), 4, fast)
    places = [divmod((tile.out - made.out.data_ptr()) // 2, 384) for of in work.clusters for tile in of]
    tiles = [(128 * m, 128 * n) for m, n in tiles] + [(200, 128 * n) for n in range(3)]
    assert places == [tiles[i] for first in range(4) for i in range(first, 9, 4)]
    assert all(tile.k_tiles == 2 for of in work.clusters for tile in of)
    rows = {(tile.out - made.out.data_ptr()) // 768: tile.rows for of in work.clusters for tile in of}
    assert rows == {0: 128, 128: 72, 200: 128}


def test_tiles_in_eights_turn_back_along_m():
    made = operands.make(case_of((384,), n=10 * 128))
    work = static_work(made, (128, 128, 256), 1, "n in eights")
    places = [divmod((tile.out - made.out.data_ptr()) // 2, 1280) for tile in work.clusters[0]]
    eight = [(128 * m, 128 * n) for m in range(3) for n in range(8)]
    assert places == eight + [(128 * m, 128 * n) for m in (2, 1, 0) for n in (8, 9)]


def test_wrong_missing_and_unexpected_results_are_found():
    made = operands.make(case_of((130, 5)))
    work = static_work(made, (128, 128, 256), 3, "m")
    made.out.fill_(torch.nan)
    for number in set(choose(work)):
        for tile in work.clusters[number]:
            row, column = divmod((tile.out - made.out.data_ptr()) // 2, 256)
            group, inside = (0, row) if row < 130 else (1, row - 130)
            exact = made.expected(group, inside + np.arange(tile.rows), column + np.arange(tile.columns))
            made.out[row : row + tile.rows, column : column + tile.columns] = torch.from_numpy(
                exact
            ).bfloat16()
    found = compare(made, work)
    assert found.compared > 128 * 128 and found.differing == found.outside == 0
    written = (~made.out.isnan()).nonzero()
    made.out[tuple(written[0])] = 1e30
    made.out[tuple(written[-1])] = torch.nan
    found = compare(made, work)
    assert (found.differing, found.outside) == (1, 1)


def test_our_kernel_has_a_time_and_the_expected_bits():
    made = operands.make(case_of((3, 0, 40), n=256, k=256))
    found = ours.record(case_of((3, 0, 40), n=256, k=256), made, B200)
    assert found["us"] > 2 and found["compared"] == 43 * 256
    assert found["differing"] == found["outside"] == 0


def test_a_missing_package_is_named_and_records_are_kept(tmp_path, monkeypatch, capsys):
    known = {"ours | x | ": {"us": 1.0}}
    path = tmp_path / "f.json"
    path.write_text(json.dumps(known))
    monkeypatch.setitem(FOREIGN, "LightMoE", replace(FOREIGN["LightMoE"], needs="no_such_package"))
    assert command.main(["--results", str(path), "--kernels", "LightMoE"]) == 0
    assert "LightMoE: not run: `pip download" in capsys.readouterr().err
    assert json.loads(path.read_text()) == known
    assert command.main(["--results", str(path), "--list"]) == 0
    assert "LightMoE: `pip download" in capsys.readouterr().out
    (tmp_path / "no_such_package.py").touch()
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert command.main(["--at", str(tmp_path), "--results", str(path), "--list"]) == 0
    assert "LightMoE: found" in capsys.readouterr().out


def test_every_kernel_has_tiles_for_every_cell():
    for name, kernel in FOREIGN.items():
        found = list(command.pieces(name, cells.cells()))
        assert len(set(found)) == len(found)
        taken = {cell for _, cell, tile in found if tile}
        refused = {str(case) for case in cells.cells() if kernel.load().refuses(case)}
        others = {str(case) for case in cells.cells() if case.problem != cells.FLASHINFER} - refused
        assert others <= taken


def test_the_page_shows_the_fastest_tile_and_says_what_differs():
    first, second = cells.cells()[:2]
    one = {"compared": 8, "differing": 0, "outside": 0, "sources": "s", "version": "1"}
    known = {
        f"ours | {first} | ": {**one, "us": 10.0},
        f"LightMoE | {first} | 128 x 128": {**one, "us": 12.0},
        f"LightMoE | {first} | 128 x 256": {**one, "us": 9.0, "outside": 2},
        f"QuACK | {first} | 128 x 128": {**one, "us": 20.0},
        f"ours | {second} | ": {**one, "us": 5.0},
        f"QuACK | {second} | 128 x 128": {"reason": "it does not run", "sources": "s"},
    }
    text = page.text(known, B200)
    assert "| 10.00 | 9.00 | - | - | 20.00 | - | 1.11 | LightMoE 128 x 256 | **differ** |" in text
    assert "| equal groups | 1 | 1.11 | 0.70 | 1.11 | 1.11 | 1 |" in text
    assert (
        f"| {str(first).removesuffix(' to bf16')} | 10.00 | 9.00 | 1.111 | 63 % | 70 % | LightMoE 128 x 256 |"
        in text
    )
    assert "QuACK: it does not run (1 cells and tiles)" in text and "3 of 4 of equal groups" in text
    assert "14 of 14 of 128 tokens" in text


def test_times_of_foreign_kernels_do_not_depend_on_ours(tmp_path, monkeypatch):
    cell, layer = str(cells.cells()[0]), str(layers.layers()[0])
    for name in ("timing", "kernels/sm100", "bench/foreign"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)

    def changed(path):
        found = lambda: [
            command.sources(*pair) for pair in (("ours", cell), ("QuACK", cell), ("LightMoE", layer))
        ]
        before = found()
        (tmp_path / path).write_text("1")
        return [one != other for one, other in zip(before, found(), strict=True)]

    assert changed("kernels/sm100/mma.py") == [True, False, False]
    assert changed("timing/replay.py") == [True, True, True]
    assert changed("bench/foreign/quack_varlen.py")[1:] == [True, False]
    assert changed("bench/foreign/lightmoe_layer.py")[1:] == [False, True]


def test_published_rows_have_the_published_totals():
    found = cells.published()
    assert len(found) == len(cells.MASKED_US)
    for (case, us), (groups, _, n, k), (known, total) in zip(
        found.items(), cells.MASKED_US, cells.MASKED_US.values(), strict=True
    ):
        rows = [m for m, _, _ in case.sizes]
        assert us == known and len(rows) == groups and abs(sum(rows) - total) <= groups / 2
        assert set(case.sizes) == {(m, n, k) for m in rows} and max(rows) > min(rows)


def test_layers_are_modelled_for_both_and_shown():
    tiny = layers.Layer(cells.Model("tiny", 256, 128, 8, 2), 3)
    found = layers.record(ours.NAME, tiny, B200)
    assert found["us"] > 4 and len(found["launches"]) >= 3
    layer = layers.layers()[0]
    known = {
        f"{name} | {layer} | ": {"us": us, "sources": "s"} for name, us in (("ours", 9.0), ("LightMoE", 12.0))
    }
    text = page.text(known, B200)
    assert (
        f"| {layer} | " in text
        and "| 9.00 | 12.00 | 0.75 |" in text
        and "| whole layers, 1 token | 1 | 0.75 |" in text
    )
    assert list(command.pieces("LightMoE", [layer])) == [("LightMoE", str(layer), "")]
    assert not list(command.pieces("QuACK", [layer]))


def test_tiles_of_a_foreign_layer_follow_its_gemms():
    works, execution = foreign_layer([[0]] * 3 + [[2]] * 9)
    work = works._product(False, 5)
    tiles = [tile for index in range(3) for of in work.clusters for tile in of[index : index + 1]]
    # 3 rows, 8 and 1 of the last expert; each with four tiles of 128 columns, which give 64 results of 4 bits.
    assert [tile.rows for tile in tiles] == [3] * 4 + [8] * 4 + [1] * 4
    assert [tile.out - execution.qh.data_ptr() for tile in tiles[4:8]] == [3 * 128 + 32 * n for n in range(4)]
    scales = [tile.inputs[-1] - execution.sfh.data_ptr() for tile in tiles[4:8]]
    assert scales == [2048 + 512 * n for n in range(4)]


def test_rows_of_a_foreign_layer_follow_its_choices():
    """Choices 2, 0 and 2, 1: rows 2, 0, 3, 1. Experts begin at rows 0, 1 and 2, and at atoms 0, 1 and 2."""
    works, execution = foreign_layer([[2, 0], [2, 1]])

    def places(work, tensor):
        which = [index for address, _, index in work.inputs if address == tensor.data_ptr()][0]
        return [[tile.inputs[which] - tensor.data_ptr() for tile in of] for of in work.clusters]

    row, atom_row = 256, 8 * 512
    assert places(works._sum(1), execution.routed_out) == [[2 * 1024, 0], [3 * 1024, 1024]]
    by_tokens = works._quantize_tokens(2)
    assert places(by_tokens, execution.qx) == [[2 * row, 0]] * 2 + [[3 * row, row]] * 2
    scales = [[2 * atom_row, 0]] * 2 + [
        [2 * atom_row, atom_row]
    ] * 2  # 16 bytes to row 1 are in the same sector
    assert places(by_tokens, execution.sfx) == scales
    by_rows = works._quantize_rows(2, 4)
    found = places(by_rows, works.x)
    assert [of[0] for of in found[:6]] == [0, 512, 1024, 1536, 0, 512] and found[4][1] == 1024
    assert found[6:] == [[], []] and {len(of) for of in found[:6]} == {128}
    assert [sum(tile.rows for tile in of) for of in by_rows.clusters] == [1, 1, 1, 1, 2, 2, 0, 0]
    assert places(by_rows, execution.qx)[5][:2] == [2 * row + 128, 3 * row + 128]


def foreign_layer(ids):
    """Works of LightMoE's layer with 3 experts of 512 x 256, and the execution that it reads."""
    width, hidden, rows = 256, 512, sum(map(len, ids))
    data = lambda *shape: torch.zeros(shape, dtype=torch.uint8)
    gemm = SimpleNamespace(
        n=2 * width, k=hidden, output_n=width, tile_m=128, tile_n=8, swap_ab=True, fast_decode_sched=True
    )
    execution = SimpleNamespace(
        fc1=gemm, qx=data(rows, hidden // 2), qh=data(rows, width // 2), sfx=data(1, 5, 8, 32, 4, 4),
        sfh=data(1, 5, 4, 32, 4, 4), routed_out=torch.zeros(rows, hidden, dtype=torch.bfloat16),
    )  # fmt: skip
    numbers = lambda count: torch.zeros(count, dtype=torch.int32)
    moe = SimpleNamespace(
        experts=3, _full_executions={0: execution}, qb1=data(3, 2 * width, hidden // 2), sfb1=data(3, 4, 8, 32, 4, 4),
        qb2=None, sfb2=None, _slots=numbers(rows), _gather=numbers(rows), _probs=numbers(rows),
        _out=torch.zeros(len(ids), hidden, dtype=torch.bfloat16),
    )  # fmt: skip
    x = torch.zeros(len(ids), hidden, dtype=torch.bfloat16)
    return lightmoe_layer.Works(moe, x, torch.tensor(ids, dtype=torch.int32)), execution
