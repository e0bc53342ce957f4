"""The API reference that `make docs` builds: every public name has an entry with its own text."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nvfp4_cute

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("pdoc", reason="pdoc is not installed; `make docs` installs it (the extra `docs`)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder that the command of `make docs` writes."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    modules = re.search(r"^API := (.*)$", makefile, re.MULTILINE)[1].split()
    options = re.search(r"/pdoc (.*?)--output-directory", makefile)[1].split()
    path = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "pdoc", *options, "--output-directory", str(path), *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stderr
    assert modules[0] == "nvfp4_cute" and {name.replace(".", "/") for name in modules} <= {
        str(page.relative_to(path).with_suffix("")) for page in path.rglob("*.html")
    }
    return path


# Another name for QuantizedLinear has no text of its own.
@pytest.mark.parametrize("name", [name for name in nvfp4_cute.__all__ if name != "LinearNVFP4"])
def test_every_public_name_has_an_entry(folder, name):
    page = (folder / "nvfp4_cute.html").read_text()
    entry = re.search(rf'<section id="{name}">(.*?)</section>', page, re.DOTALL)
    assert entry and '<div class="docstring">' in entry[1]
    text = re.sub(r"<[^>]*>", "", entry[1])
    # Records of formats are described where they are named, everything else by its own docstring.
    own = re.search(
        rf'^{name}: "BlockFormat"\n"""(.*?)"""', (ROOT / "nvfp4_cute/__init__.py").read_text(), re.M | re.S
    )
    first = (own[1] if own else inspect.getdoc(getattr(nvfp4_cute, name))).split()[:3]
    assert all(re.sub(r"\W", "", word) in re.sub(r"[^\w\s]", "", text) for word in first)
