"""Compiles everything that an export compiles. `make test-dsl` also runs this with older versions of CuTe DSL."""

import subprocess
import sys

import pytest

from nvfp4_cute.competition import export
from nvfp4_cute.problems import registry

EXPORTED = [name for name in registry.names() if registry.load(name).submission]
# Processor time that a server's mode leaves for compiling all of its shapes.
LIMIT_S = 60
# Runs in a separate process, because a submission's import binds to a virtual GPU for good.
PROGRAM = """
import importlib, sys, time
from contextlib import ExitStack
from dataclasses import replace
from nvfp4_cute.competition.worker import emulated_process
with ExitStack() as stack:
    emulated_process("sm_100a", stack)
    sys.path.insert(0, ".")
    submission = importlib.import_module("submission")
    began = time.process_time()
    configs = getattr(submission, "CONFIGS", None)
    if configs is None:
        submission._compiled()
    else:
        activation = getattr(submission, "ACTIVATION", None)
        assert configs
        for sizes, config in configs.items():
            resolved = submission.resolve(config, 1 if activation is None else 2)
            submission._compiled(replace(resolved, num_cta=None), len(sizes), activation, None)
    print(time.process_time() - began)
"""


@pytest.mark.slow
@pytest.mark.parametrize("problem", EXPORTED)
def test_chosen_configs_compile(problem, tmp_path):
    (tmp_path / "submission.py").write_text(export.make_submission(problem).text)
    (tmp_path / "task.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < LIMIT_S
