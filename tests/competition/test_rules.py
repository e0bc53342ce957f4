"""Requirements that a server checks in a file before it runs it."""

import pytest

from nvfp4_cute.competition import rules


def messages(findings):
    return [str(finding) for finding in findings]


def test_a_plain_file_breaks_no_rule():
    assert rules.check_server_rules(b"#!POPCORN leaderboard x\nimport torch\n") == []


@pytest.mark.parametrize("text", ["# upstream", "torch.cuda.current_Stream()", "x = 'STREAM'", "stream=3"])
def test_the_refused_word_is_found_anywhere_in_any_case(text):
    (found,) = rules.check_server_rules(f"a = 1\n{text}\n".encode())
    assert found.line == 2 and "'stream'" in str(found)


def test_size_name_and_encoding():
    exactly = b"#" + b"a" * (rules.MAX_BYTES - 1)
    assert rules.check_server_rules(exactly) == []
    assert "1,000,001 bytes; at most 1,000,000" in messages(rules.check_server_rules(exactly + b"a"))[0]
    assert "must end in .py" in messages(rules.check_server_rules(b"", "submission.txt"))[0]
    assert messages(rules.check_server_rules(b"a = 1\nb = '\xff'\n")) == ["line 2: not UTF-8"]


def test_header_is_the_first_comment_block():
    header = rules.read_header(rules.header_text("nvfp4_gemv", "B200") + "\n#!POPCORN gpu A100\n")
    assert header == rules.Header("nvfp4_gemv", ("B200",))
    assert rules.read_header("#!POPCORN gpus A B\nimport x\n#!POPCORN leaderboard y\n") == rules.Header(
        None, ("A", "B")
    )
    assert rules.read_header("import x\n") == rules.Header()


@pytest.mark.parametrize(
    "text, message",
    [
        ("#!POPCORN gpu A\n#!POPCORN gpus B\n", "line 2: option 'gpus' is given twice"),
        ("#!POPCORN leader x\n", "line 1: option 'leader' is unknown"),
    ],
)
def test_a_wrong_header_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        rules.read_header(text)
    assert message in messages(rules.check_server_rules(text.encode()))[0]


@pytest.mark.parametrize(
    "line",
    [
        "import numpy",
        "from nvfp4_cute.planning.config import KernelConfig",
        "import reference",
        "from .spec import X",
        "exec(x)",
    ],
)
def test_exports_import_what_a_runner_has_and_execute_no_text(line):
    assert (
        rules.check_export_rules("import torch, cutlass.cute, os\nfrom cuda.bindings import driver\n") == []
    )
    (found,) = rules.check_export_rules(f"def f():\n    {line}\n")
    assert found.line == 2


def test_check_file_names_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="there is no file `.*absent.py`"):
        rules.check_file(tmp_path / "absent.py")
