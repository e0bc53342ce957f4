"""Runs the harness on the emulator in few processes."""

import io
from concurrent.futures import ProcessPoolExecutor

import pytest
from new_process import forking

from nvfp4_cute.competition import evaluator, protocol, worker
from nvfp4_cute.problems import registry
from nvfp4_cute.problems.nvfp4_group_gemm import spec

SMALL_CASE = spec.GroupCase((8, 12), (128, 128), (256, 256))


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """Returns a function that judges a submission's text.

    It forks a server that has loaded torch, because spawning takes seconds.
    """
    monkeypatch.syspath_prepend(str(tmp_path))

    def judge(
        text: str, *, strict: bool, mode: str = "test", problem: str = "nvfp4_group_gemm", cases=(SMALL_CASE,)
    ) -> protocol.Results:
        (tmp_path / "submission.py").write_text(text)
        modelled = mode != "test"
        settings = worker.Settings(problem, "sm_100a", modelled, strict=strict)
        with ProcessPoolExecutor(1, forking(), worker.start, (settings,)) as pool:
            harness = evaluator.Harness(
                registry.load(problem), pool, strict=strict, modelled=modelled, num_inputs=2
            )
            file = io.StringIO()
            lines = [(protocol.format_case(case.arguments), case) for case in cases]
            code = harness.run(mode, lines, evaluator.Log(file))
        return protocol.parse_results(file.getvalue(), code)

    return judge
