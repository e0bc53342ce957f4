"""A pytest plug-in: `pytest --cute-emulate sm_100a` runs a CuTe DSL test suite on a virtual GPU, without a GPU.

The whole run behaves like a script under `nvfp4-cute emulate`: torch tensors on cuda, compiled kernels, launches. A kernel
failure or a hazard fails the test in which it happened, even if the test ignores the error of its launch. The device is reset
for the next test.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

GROUP = "cute-emulate", "CuTe DSL kernels on a virtual GPU"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the plug-in."""
    group = parser.getgroup(*GROUP)
    group.addoption(
        "--cute-emulate", metavar="ARCH", help="run on a virtual GPU of this architecture: sm_100a"
    )
    group.addoption(
        "--cute-check",
        choices=("errors", "all"),
        help="look for hazards; errors fail their test, with `all` also warnings (slower)",
    )
    group.addoption("--cute-mode", default="eager", help="eager (default), lazy, or random:SEED")
    group.addoption(
        "--cute-sm-count", type=int, metavar="N", help="SMs (default: those of a GPU of that arch)"
    )
    group.addoption("--cute-sarif", metavar="FILE", help="write findings as SARIF, for code hosts")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Sets up the virtual GPU before any conftest looks for a GPU."""
    options = early_config.known_args_namespace
    if getattr(options, "cute_emulate", None):
        early_config.pluginmanager.register(Emulation(options), "cute-emulation")
    elif getattr(options, "cute_check", None) or getattr(options, "cute_sarif", None):
        raise pytest.UsageError(
            "--cute-check and --cute-sarif need a virtual GPU: also pass --cute-emulate sm_100a"
        )
    yield


class Emulation:
    """The virtual GPU of one pytest run, and its findings."""

    def __init__(self, options: Any):
        """Enters the emulation, which lasts until the run ends."""
        from nvfp4_cute.cli.emulate import kernel_store
        from nvfp4_cute.emulator.fronts.script import emulation
        from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu

        self.check: str = options.cute_check or "errors"
        self.sarif = options.cute_sarif
        self.gpu = VirtualGpu(
            options.cute_emulate,
            options.cute_sm_count,
            mode=options.cute_mode,
            check=options.cute_check is not None,
            store=kernel_store(),
        )
        self.findings: list[dict[str, Any]] = []
        self._seen = 0
        self._stack = ExitStack()
        self._stack.enter_context(emulation(self.gpu))

    def pytest_report_header(self, config: pytest.Config) -> str:
        """Returns the header line about the virtual GPU."""
        gpu = self.gpu
        checks = f"hazards: {self.check}" if gpu.machine.checker else "hazards: not looked for (--cute-check)"
        return f"cute-emulate: {gpu.product.name} ({gpu.device.arch}), {gpu.product.sm_count} SMs, virtual; {checks}"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Attributes kernel failures to the test, even if it handled them."""
        outcome: Any = yield
        self._judge(item, outcome)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Attributes failures of kernels that fixtures launch."""
        outcome: Any = yield
        self._judge(item, outcome)

    def _judge(self, item: pytest.Item, outcome: Any) -> None:
        failure = self._failure_of(item)
        if failure is not None:
            raised = outcome.excinfo
            then = f"\nThe test ended with {raised[0].__name__}." if raised else ""
            outcome.force_exception(pytest.fail.Exception(f"{failure}{then}", pytrace=False))

    def _failure_of(self, item: pytest.Item) -> BaseException | None:
        """Returns the failure of a test's launches since the last call; adds notes to its report."""
        from nvfp4_cute.emulator.check.findings import of_failure, record, reported
        from nvfp4_cute.emulator.check.ledger import HazardError

        hazards = self.gpu.hazards[self._seen :]
        self._seen += len(hazards)
        failure = self.gpu.take_failure()
        shown = reported(hazards, self.check)
        found = list(map(record, shown)) if shown else of_failure(failure, self.check)
        self.findings += [{**one, "test": item.nodeid} for one in found]
        failing = ("error", "warning") if self.check == "all" else ("error",)
        counted = [hazard for hazard in shown if hazard.severity in failing]
        remarks = "\n".join(str(hazard) for hazard in shown if hazard.severity not in failing)
        if remarks:
            item.add_report_section("call", "cute-emulate", remarks)
        return HazardError(counted) if counted else failure

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints how much ran, and one line per finding with the number of tests that have it."""
        from nvfp4_cute.emulator.check.ledger import counted

        launches, number = len(self.gpu.launches), len(self.findings)
        said = (
            f"{number} finding{'s' * (number != 1)}: {counted(found['severity'] for found in self.findings)}"
        )
        if not self.findings:
            said = "no finding" if self.gpu.machine.checker else "not checked for hazards (--cute-check)"
        terminalreporter.section("cute-emulate")
        executed = (
            f"{launches} launch{'es' * (launches != 1)}, {self.gpu.stats.instructions:,} warp instructions"
        )
        terminalreporter.line(f"{executed} on the virtual GPU; {said}")
        for line in findings_lines(self.findings):
            terminalreporter.line(line)
        if self.check != "all" and any(found["severity"] == "warning" for found in self.findings):
            terminalreporter.line("--cute-check all lets warnings fail their test and shows notes")

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Writes the findings, and leaves the emulation."""
        if self.sarif:
            import importlib.metadata

            from nvfp4_cute.cli.emulate import write_json
            from nvfp4_cute.emulator.check.findings import sarif

            version = importlib.metadata.version("nvfp4-cute")
            root = Path(config.rootpath)
            write_json(sarif(self.findings, version, root, root), Path(self.sarif))
        self._stack.close()


def findings_lines(findings: list[dict[str, Any]]) -> list[str]:
    """Formats one line per finding: severity, kind, kernel, place, and its tests; errors first."""
    from nvfp4_cute.emulator.check.ledger import SEVERITIES

    tests: dict[tuple[str, str, str, str], dict[str, None]] = {}
    for found in findings:
        site = found.get("site", {})
        place = f"{Path(site['file']).name}:{site['line']}" if "file" in site else ""
        key = found["severity"], found["kind"], found.get("kernel", ""), place or found["text"].split("\n")[0]
        tests.setdefault(key, {})[found["test"]] = None
    lines = []
    for key, met in sorted(tests.items(), key=lambda item: SEVERITIES.index(item[0][0])):
        severity, kind, kernel, place = key
        more = f" and {len(met) - 1} more" if len(met) > 1 else ""
        where = f" in `{kernel}`" if kernel else ""
        lines.append(f"{severity}: {kind}{where} at {place}, in {next(iter(met))}{more}")
    return lines
