"""The one-file submission: its contents, the origin of every line, and that its text is stable."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from nvfp4_cute import cli
from nvfp4_cute.competition import bundle, export, rules
from nvfp4_cute.competition.bundle import BundleError, Recipe
from nvfp4_cute.errors import ConfigError
from nvfp4_cute.formats.block_format import format_named
from nvfp4_cute.problems import registry

ROOT = Path(__file__).resolve().parents[2]
WITH_KERNEL = [name for name in registry.names() if registry.load(name).submission]
EACH = pytest.mark.parametrize("problem", WITH_KERNEL)


@pytest.fixture(scope="module")
def submission():
    """Returns the submission of a problem, which is built on first use."""
    return cache(export.make_submission)


@EACH
def test_rules_of_the_server_and_ours(submission, problem):
    text = submission(problem).text
    assert rules.check_server_rules(text.encode()) == [] and rules.check_export_rules(text) == []
    assert rules.read_header(text).leaderboard == problem
    assert rules.read_header(text).gpus[0] in registry.load(problem).harness.gpus
    assert "Apache License" in text and "nvfp4_cute" in text
    assert b"stream" not in text.encode().lower()


@pytest.mark.sampled(1)
@EACH
def test_bytes_are_stable_across_processes(submission, problem):
    """The order of lines must not depend on sets and hashes."""
    program = (
        f"from nvfp4_cute.competition import export; print(end=export.make_submission({problem!r}).text)"
    )
    again = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "5"},
    )
    assert again.stdout == submission(problem).text


@EACH
def test_every_line_is_explained(submission, problem):
    """A line is a source line, unchanged or with a stated reason, or is generated for one of few reasons."""
    sources: dict[str, list[str]] = {}
    for line in submission(problem).lines:
        if not line.source:
            assert line.reasons and line.reasons[0] in (
                "header",
                "imports of all sources",
                "space",
                "section",
                "frozen value",
            )
            continue
        if line.source not in sources:
            sources[line.source] = (ROOT / line.source).read_text(encoding="utf-8").splitlines()
        same = sources[line.source][line.number - 1] == line.text
        assert same == (not line.reasons) or line.reasons == ("docstring as comment",)


@pytest.mark.parametrize(
    "name",
    ["nvfp4_gemv", *(pytest.param(n, marks=pytest.mark.slow) for n in WITH_KERNEL if n != "nvfp4_gemv")],
)
def test_it_computes_the_smallest_shape_strictly(submission, verdict, name):
    case = min(registry.load(name).tests, key=lambda case: case.work.flops)
    results = verdict(submission(name).text, strict=True, problem=name, cases=[case])
    assert results.passed, results


@EACH
def test_no_definition_is_unused(submission, problem):
    """Every top-level name is used elsewhere in the file, except the entry point."""
    tree = ast.parse(submission(problem).text)
    mentioned = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert defined - mentioned == {"custom_kernel"}


@EACH
def test_layers_in_one_launch_are_left_out(submission, problem):
    assert not any(line.source == "kernels/common/chain.py" for line in submission(problem).lines)


@EACH
def test_options_stand_in_one_comment_block_once(submission, problem):
    lines = submission(problem).text.splitlines()
    block = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    options = [line for line in lines if "POPCORN" in line]
    gpu = registry.load(problem).harness.gpus[0]
    assert options == block[:2] == [f"#!POPCORN leaderboard {problem}", f"#!POPCORN gpu {gpu}"]
    assert any("Apache License" in line for line in block)


@EACH
def test_host_code_neither_copies_nor_waits(submission, problem):
    """Host code uses torch only for addresses, shapes and the GPU, and calls nothing that moves data or synchronizes."""
    nodes = list(ast.walk(ast.parse(submission(problem).text)))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert not attributes & {"item", "cpu", "tolist", "synchronize", "pin_memory", "record", "wait", "numpy"}
    of_torch = {
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.")
    }
    queries = {"torch.cuda.get_device_properties", "torch.cuda.get_device_capability", "torch.Tensor"}
    properties = {f"{queries_of}(0).multi_processor_count" for queries_of in queries}
    assert of_torch <= queries | properties | {"torch.cuda"}


@EACH
def test_what_is_remembered_holds_no_data(submission, problem):
    """Cached functions take sizes, configs, formats and numbers. Nothing else outlives a call."""
    nodes = list(ast.walk(ast.parse(submission(problem).text)))
    assert not any(isinstance(node, ast.Global | ast.Nonlocal) for node in nodes)
    cached = [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    keys = {ast.unparse(arg.annotation) for node in cached for arg in node.args.args if arg.arg != "self"}
    assert cached and keys <= {"Sizes", "KernelConfig", "Formats | None", "int", "bool", "str | None"}


def test_a_config_is_frozen_in():
    text = export.make_submission("nvfp4_group_gemm", config="t128x128x256_s4a2").text
    assert "DEFAULT_CONFIG = KernelConfig(cta_tile_shape_mnk=(128, 128, 256), num_ab_stage=4" in text
    with pytest.raises(ValueError, match="config name 'fast'"):
        export.make_submission("nvfp4_group_gemm", config="fast")


@pytest.mark.parametrize(
    ("name", "formats"), [("t256x256x256_s9a2", "nvfp4"), ("t128x128x256_s4a2", "mxfp8_e4m3")]
)
def test_a_config_that_no_kernel_has_is_refused(name, formats):
    with pytest.raises(ConfigError, match=f"config {name}"):
        export.make_submission("nvfp4_gemm", config=name, formats=(format_named(formats),) * 2)


def test_command_writes_file_and_map(tmp_path, capsys):
    output, lines = tmp_path / "submission.py", tmp_path / "lines.tsv"
    assert cli.main(["export", "nvfp4_gemv", "-o", str(output), "--map", str(lines)]) == 0
    count = len(output.read_text().splitlines())
    said = capsys.readouterr().err
    assert f"{count:,} lines" in said and said.startswith("export: begun")
    rows = [row.split("\t") for row in lines.read_text().splitlines()]
    assert len(rows) == count and all(len(row) == 3 for row in rows)
    assert any(row[1].startswith("kernels/simt/") for row in rows)


def test_a_file_that_exists_is_overwritten_by_force_only(tmp_path, capsys):
    """If the submission or its map exists, neither is written."""
    output, lines = (tmp_path / name for name in ("submission.py", "lines.tsv"))
    command = ["export", "nvfp4_gemv", "-o", str(output), "--map", str(lines)]
    for there in (output, lines):
        there.write_text("mine")
        assert cli.main(command) == 2
        assert f"{there} would be overwritten" in capsys.readouterr().err
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
        there.unlink()
    output.write_text("mine")
    assert cli.main([*command, "--force"]) == 0
    assert output.read_text() != "mine" and lines.exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", registry.names())
def test_torchs_product_passes(verdict, name):
    text = export.make_submission(name, kind=export.TORCHS).text
    assert rules.check_server_rules(text.encode()) == [] and "cutlass" not in text
    case = min(registry.load(name).tests, key=lambda case: case.work.flops)
    results = verdict(text, strict=True, problem=name, cases=[case])
    assert results.passed, results


def test_torchs_product_has_no_configs(capsys):
    assert cli.main(["export", "nvfp4_gemm", "--torch", "--config", "t128x128x256_s4a2"]) == 2
    assert "--torch goes without" in capsys.readouterr().err


def test_a_problem_without_kernel_says_so(capsys):
    missing = [name for name in registry.names() if name not in WITH_KERNEL]
    for name in [*missing, "nvfp4_nothing"]:
        assert cli.main(["export", name]) == 2
        assert name in capsys.readouterr().err


# ---- the assembler on small modules --------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Assembles modules given as texts, which become submodules of the package."""
    import nvfp4_cute

    monkeypatch.setattr(nvfp4_cute, "__path__", [*nvfp4_cute.__path__, str(tmp_path)])

    def assemble(root: str, **modules: str) -> str:
        for name, text in {"small_root": root, **modules}.items():
            (tmp_path / f"{name}.py").write_text(text)
        return bundle.assemble(Recipe("nvfp4_cute.small_root", ("main",), ("tune",))).text

    return assemble


def test_names_that_meet_are_told_apart(small):
    text = small(
        "from nvfp4_cute.small_a import f\nfrom nvfp4_cute import small_b\ndef main():\n    return f() + small_b.g()\n",
        small_a="def _help():\n    return 1\ndef f():\n    return _help()\n",
        small_b="def _help():\n    return 2\ndef g():\n    return _help() + h()\ndef h():\n    return 4\ndef unused():\n    pass\n",
    )
    scope: dict = {}
    exec(text, scope)
    assert scope["main"]() == 7
    assert (
        "def _small_b_help" in text
        and "unused" not in text
        and "nvfp4_cute" not in text.replace("# ---- nvfp4_cute/", "")
    )


def test_local_names_do_not_count(small):
    text = small(
        "from nvfp4_cute.small_a import size\ndef main(size=3):\n    return size\n",
        small_a="def size():\n    return 1\n",
    )
    assert "small_a" not in text


def test_methods_that_nothing_mentions_are_dropped(small):
    text = small(
        '''class A:
    """Text."""

    x: int = 3

    # About used.
    def used(self):
        return self.x

    # About idle.
    @property
    def idle(self):
        return 0


def main():
    return A().used()
'''
    )
    assert "About used" in text and "idle" not in text
    scope: dict = {}
    exec(text, scope)
    assert scope["main"]() == 3


def test_queue_arguments_are_dropped_with_the_parameter_that_served_them(small):
    text = small(
        '''SETTING = 3

def main(x, queue):
    """Launch.

    Args:
        queue: CUstream.
    """
    # upstream
    x.tune(3)
    x.launch(
        1,
        tune=SETTING,
        stream=queue,
    )
'''
    )
    assert (
        "def main(x):" in text
        and "queue: " not in text
        and "stream" not in text.lower()
        and "tune" not in text
        and "SETTING" not in text
    )
    assert "# upqueue" in text


@pytest.mark.parametrize(
    "root, message",
    [
        (
            "def main(x):\n    return x.stream\n",
            "small_root.py:2: 'return x.stream' holds the word 'stream' in code",
        ),
        (
            "def main(x, q):\n    x(1, stream=q)\n",
            "small_root.py:2: argument stream is dropped; put it on a line of its own",
        ),
        ("print(1)\ndef main():\n    pass\n", "small_root.py:1: neither definition nor import"),
        (
            "from nvfp4_cute.planning import config\ndef main():\n    return config\n",
            "small_root.py:3: module nvfp4_cute.planning.config is used as a value",
        ),
        (
            "from nvfp4_cute.planning.config import Nothing\ndef main():\n    return Nothing\n",
            "config.py has no Nothing",
        ),
    ],
)
def test_what_cannot_be_bundled_is_named(small, root, message):
    with pytest.raises(BundleError) as error:
        small(root)
    assert message in str(error.value)
