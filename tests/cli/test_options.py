"""Names that options accept are those that the package knows."""

from typing import get_args

import pytest

from nvfp4_cute import problem
from nvfp4_cute.bench import cases
from nvfp4_cute.cli import sol
from nvfp4_cute.cli.options import choices
from nvfp4_cute.competition import export as exports
from nvfp4_cute.competition import protocol
from nvfp4_cute.competition.trace import evaluate, export, matching, new
from nvfp4_cute.prove import plan

KNOWN = {
    "SUITES": cases.SUITES,
    "OPERATIONS": cases.OPERATIONS,
    "RESULTS": cases.RESULT_DTYPES,
    "QUANTIZED_RESULTS": problem.RESULT_FORMATS,
    # Layers of experts make routed groups; no caller does.
    "FORMS": [form for form in get_args(problem.Form) if form != "routed"],
    "WEIGHT_LAYOUTS": get_args(problem.WeightLayout),
    "MODES": protocol.MODES,
    "TRACE_DEVICES": evaluate.DEVICES,
    "TRACE_RULES": matching.RULES,
    "EXPORTS": (exports.GPU_MODE,),
    "TRACE_EXPORTS": export.FORMATS,
    "KINDS": new.kinds(),
    "STEPS": plan.STEPS,
    "PROBLEMS": sol.PROBLEMS,
}


@pytest.mark.parametrize("name", [name for name in vars(choices) if name.isupper()])
def test_choices_are_what_the_package_knows(name):
    assert getattr(choices, name) == tuple(KNOWN[name])


def test_operations_of_sol():
    assert tuple(sol.OPERATIONS) == choices.OPERATIONS
