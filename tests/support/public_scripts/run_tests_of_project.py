"""Run tests of a project in this process, so that their kernels run on the virtual GPU: arguments are pytest's."""

import sys

import pytest

raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
