"""Runs the command line tool as `python -m nvfp4_cute.cli`, for environments without its script on the path."""

import sys

from nvfp4_cute.cli import main

sys.exit(main())
