"""Optional tools, KernelGuard and Nsight Compute, which scripts replace here."""

import shutil
import sys
import types

import pytest

from nvfp4_cute.competition import evaluate, export, genuine_process, kernelguard
from nvfp4_cute.problems import registry


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts a script that stores its input and prints a text at the front of PATH."""

    def install(name, text):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / name
        script.write_text(f"#!/bin/sh\ncat > {tmp_path}/asked\ncat <<'EOF'\n{text}\nEOF\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return install


def test_kernelguard_is_asked_where_it_is_installed(tmp_path, stand_in, capsys, monkeypatch):
    submission = tmp_path / "mine.py"
    submission.write_text("x = 1\n")
    request = evaluate.Request(submission, mode="benchmark")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert kernelguard.ask("x = 1\n") is None and not evaluate.refused(request)
    stand_in("kernelguard", '{"matched_patterns": [], "classification": "valid", "should_filter": false}')
    assert not evaluate.refused(request) and (tmp_path / "asked").read_text() == "x = 1\n"
    pattern = '{"pattern": "OBFUSCATED_EXEC", "severity": "critical", "evidence": "exec() of packed text"}'
    stand_in(
        "kernelguard",
        f'{{"matched_patterns": [{pattern}], "classification": "hacked", "should_filter": true}}',
    )
    assert evaluate.refused(request) and not evaluate.refused(evaluate.Request(submission))
    assert "OBFUSCATED_EXEC (critical): exec() of packed text" in capsys.readouterr().err
    stand_in("kernelguard", "no json")
    with pytest.raises(ValueError, match="kernelguard gave no answer"):
        evaluate.refused(request)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("kernelguard"), reason="kernelguard is not in PATH")
@pytest.mark.parametrize("name", registry.names())
def test_kernelguard_finds_nothing_in_our_exports(name):
    opinion = kernelguard.ask(export.make_submission(name).text)
    assert opinion is not None and (opinion.classification, opinion.patterns) == ("valid", ())


def test_the_genuine_harness_writes_less_where_it_is_asked_to(monkeypatch):
    """Covers both of its functions that clear L2, which are called later through the module."""
    written = []
    utils = types.SimpleNamespace(clear_l2_cache=None, clear_l2_cache_large=None)
    monkeypatch.setitem(sys.modules, "utils", utils)
    monkeypatch.setattr(
        "torch.empty", lambda size, **options: types.SimpleNamespace(fill_=lambda value: written.append(size))
    )
    genuine_process.replace_l2_clears(1 << 20)
    utils.clear_l2_cache()
    utils.clear_l2_cache_large()
    assert written == [1 << 20] * 2
    genuine_process.replace_l2_clears(0)
    utils.clear_l2_cache_large()
    assert len(written) == 2
