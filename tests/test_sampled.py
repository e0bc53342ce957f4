"""``sampled`` in conftest.py: which of a test's many variants are fast."""

from pathlib import Path

import pytest

CONFTEST = str(Path(__file__).parent / "conftest.py")


class Item:
    """A test, reduced to what its marks need."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator):
        self.nodeid = nodeid
        self.marks = list(marks)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark.mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark)

    @property
    def is_slow(self) -> bool:
        return self.get_closest_marker("slow") is not None


def test_so_many_variants_are_fast_and_all_others_slow(pytestconfig):
    mark = pytestconfig.pluginmanager.get_plugin(CONFTEST).pytest_collection_modifyitems
    sampled, slow = pytest.mark.sampled(3), pytest.mark.slow

    def fast() -> list[str]:
        items = [
            *(Item(f"a.py::many[{i}]", sampled) for i in range(20)),
            *(Item(f"a.py::few[{i}]", sampled) for i in range(2)),
            *(Item(f"a.py::unmarked[{i}]") for i in range(5)),
            *(Item(f"a.py::mixed[{i}]", sampled, *[slow] * (i < 4)) for i in range(8)),
        ]
        mark(items)
        return [item.nodeid.split("::")[1] for item in items if not item.is_slow]

    found = fast()
    counts = {
        name: sum(nodeid.startswith(name) for nodeid in found)
        for name in ("many", "few", "unmarked", "mixed")
    }
    assert counts == {"many": 3, "few": 2, "unmarked": 5, "mixed": 3}
    assert not {f"mixed[{i}]" for i in range(4)} & set(found)
    assert found == fast()
