"""The examples in the docstrings of public operations and modules run and print the output shown."""

import doctest
import inspect

import pytest
import torch

import nvfp4_cute

OPERATIONS = (
    "QuantizedLinear", "MoE", "PersistentMLP", "dual_gemm", "gemm", "gemv", "grouped_dual_gemm", "grouped_gemm",
    "grouped_quantize", "moe", "quantize", "route",
)  # fmt: skip
NAMES = {name: getattr(nvfp4_cute, name) for name in nvfp4_cute.__all__} | {"torch": torch}


@pytest.mark.parametrize("name", OPERATIONS)
def test_examples(name):
    """Each example has at most three lines of use after the operands."""
    torch.manual_seed(0)
    text = NAMES[name].__doc__
    test = doctest.DocTestParser().get_doctest(text, dict(NAMES), name, None, None)
    assert any(f"{name}(" in example.source or f"{name}." in example.source for example in test.examples)
    lines: list[str] = []
    result = doctest.DocTestRunner().run(test, out=lines.append)
    assert not result.failed, "".join(lines)


def test_public_functions_have_at_most_ten_arguments():
    """Constructors of torch modules and the record of a config have more."""
    functions = {name: f for name, f in NAMES.items() if inspect.isfunction(f)}
    assert len(functions) > 15 and {"route", "moe", "quantize"} <= set(functions)
    long = {name for name, f in functions.items() if len(inspect.signature(f).parameters) > 10}
    assert not long
