"""SmolLM2-135M in NVFP4: real weights, 576 columns, downloaded from the package index."""

import json

import pytest

from nvfp4_cute.bench import accuracy


def test_page_is_that_of_the_record():
    record = accuracy.RESULTS / "accuracy.json"
    assert record.with_suffix(".md").read_text() == accuracy.page(json.loads(record.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2(tmp_path):
    """Weights alone lose less than weights and activations; both keep the model usable."""
    for package in ("transformers", "gguf"):
        pytest.importorskip(
            package, reason="pip install transformers gguf, in the environment of make test-transformers"
        )
    weights, both = accuracy.WAYS[:2]
    found = accuracy.evaluate(accuracy.smollm2(tmp_path), 1, (weights, both))
    assert 0 < found[weights].kl < found[both].kl
    assert 1 < found[weights].ratio < found[both].ratio < 2
    assert len(found[weights].layers) == 7 * 30
