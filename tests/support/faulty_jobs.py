"""A child process of `prove` whose jobs fail as their arguments say. Tests check how the parent handles that."""

import os
import signal
import sys
import time

from nvfp4_cute.prove import jobs
from nvfp4_cute.prove.outcome import PASSED, Outcome


def act(job):
    what = job.arguments["what"]
    if what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        time.sleep(1000)
    if what == "fault":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if what == "break":
        raise KeyError("a name")
    return Outcome(job.kind, job.name, PASSED, f"process {os.getpid()}")


jobs.KINDS["probe"] = act

if __name__ == "__main__":
    code = jobs.main()
    sys.stderr.flush()
    os._exit(code)
