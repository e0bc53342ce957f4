"""Examples in the docstrings of the steps of a layer run and print what they show."""

import doctest

import pytest
import torch

from nvfp4_cute.experts import combine, gather, permutation
from nvfp4_cute.formats.block_format import NVFP4


@pytest.mark.parametrize("function", [permutation.permute, gather.gather, combine.finalize])
def test_examples(function):
    names = {"torch": torch, "NVFP4": NVFP4, function.__name__: function}
    test = doctest.DocTestParser().get_doctest(function.__doc__, names, function.__name__, None, None)
    lines: list[str] = []
    assert test.examples and not doctest.DocTestRunner().run(test, out=lines.append).failed, "".join(lines)
