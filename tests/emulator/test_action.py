"""The GitHub Action: the commands of its steps, and the guide's example of a test."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from new_process import run_python

from nvfp4_cute import emulator
from nvfp4_cute.backends import installed

FOLDER = Path(emulator.__file__).parent
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())
RECORD = '#!/bin/sh\necho "$(basename $0)" "$@" >> calls\ncase "$*" in *bad*) exit 3;; esac\n'


def run_step(folder, **inputs):
    """Runs the last step with commands that record their calls. Returns its exit code and the calls."""
    step = ACTION["runs"]["steps"][-1]
    values = {name: one["default"] for name, one in ACTION["inputs"].items()} | inputs
    env = {
        name: values[re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", text)[1]]
        for name, text in step["env"].items()
    }
    stubs = folder / "bin"
    stubs.mkdir()
    for name in ("cute-emulate", "python"):
        (stubs / name).write_text(RECORD)
        (stubs / name).chmod(0o755)
    path = f"{stubs}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", step["run"]], cwd=folder, env={**os.environ, **env, "PATH": path})
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_scripts_and_tests_are_run(tmp_path):
    code, calls = run_step(tmp_path, arch="sm_90a", scripts="a.py --m 4\n\nb.py\n", tests="tests -q")
    common = "cute-emulate --arch sm_90a --sm-count 8 --check=errors --sarif cute-emulate"
    assert calls == [
        f"{common}/script-1.sarif a.py --m 4",
        f"{common}/script-2.sarif b.py",
        "python -m pytest --cute-emulate sm_90a --cute-sm-count 8 --cute-check errors --cute-sarif cute-emulate/tests.sarif tests -q",
    ]
    assert code == 0 and (tmp_path / "cute-emulate").is_dir()


def test_one_failure_fails_and_the_others_are_run(tmp_path):
    code, calls = run_step(tmp_path, scripts="bad.py\nb.py", check="all")
    assert code == 1 and len(calls) == 2 and "--check=all" in calls[1]


def test_the_workflow_in_the_guide_has_the_inputs():
    workflow = next(block for block in blocks("yaml") if "nvfp4_cute/emulator@" in block)
    steps = yaml.safe_load(workflow)["jobs"]["emulate"]["steps"]
    given = next(step["with"] for step in steps if "nvfp4_cute/emulator@" in step.get("uses", ""))
    assert set(given) <= set(ACTION["inputs"])
    sarif = next(step["with"]["sarif_file"] for step in steps if "upload-sarif" in step.get("uses", ""))
    assert sarif == ACTION["inputs"]["sarif"]["default"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (FOLDER / "START.md").read_text(), re.S)


@pytest.mark.skipif(bool(installed.shim_problem()), reason="the launch shim is not built")
def test_the_example_of_a_test_passes(tmp_path):
    (tmp_path / "test_double.py").write_text(next(b for b in blocks("python") if "test_double.py" in b))
    options = ("--cute-emulate", "sm_100a", "--cute-check", "errors", "-q", "--disable-plugin-autoload")
    plugin = ("-p", "nvfp4_cute.cli.pytest_plugin")
    done = run_python("-m", "pytest", *options, *plugin, "test_double.py", cwd=tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
