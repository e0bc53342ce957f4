"""Runs pytest in this process, so that a project's tests use the virtual GPU. Arguments are pytest's."""

import sys

import pytest

raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
