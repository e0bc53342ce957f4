"""SmolLM2-135M in NVFP4, with weights from the package index and matrices of 576 columns."""

import json

import pytest

from nvfp4_cute.bench import accuracy
from nvfp4_cute.models.accuracy import Accuracy


def test_page_is_that_of_the_record():
    record = accuracy.RESULTS / "accuracy.json"
    assert record.with_suffix(".md").read_text() == accuracy.page(json.loads(record.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_smollm2(tmp_path):
    """One window: error compensation loses less than half as much as rounding to nearest, and most with 4-bit activations."""
    for package in ("transformers", "gguf"):
        pytest.importorskip(
            package, reason="pip install transformers gguf, in the environment of make test-transformers"
        )
    nearest, gptq = (accuracy.Way("W4A16", method) for method in ("nearest", "gptq"))
    both = accuracy.Way("W4A4", "nearest", stored=True)
    found = accuracy.evaluate(accuracy.smollm2(tmp_path), tmp_path, 1, 8, (nearest, gptq, both))
    of = {way: Accuracy.of(found[str(way)]["texts"][accuracy.PLAY]) for way in (nearest, gptq, both)}
    assert 0 < of[gptq].kl < 0.6 * of[nearest].kl < of[both].kl
    assert 1 < of[gptq].ratio < 1.12 < of[nearest].ratio < of[both].ratio < 2
    assert all(len(one.layers) == 7 * 30 for one in of.values())
    assert all(entry["bits_per_weight"] == 4.5 for entry in found.values())
