"""`python -m nvfp4_cute`: the command line tool where its script is not on the path."""

import sys

from nvfp4_cute.cli import main

sys.exit(main())
