"""Runs one public script on the virtual GPU, and writes the forms that its kernels use, as JSON.

This is a separate process, because the script owns CuTe DSL (`emulator.fronts.script`). `bench.evidence` starts one per
case.
"""

import json
import sys
from pathlib import Path

from nvfp4_cute.emulator.fronts.script import run_script
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu
from nvfp4_cute.emulator.record.forms import recorded


def main(argv: list[str]) -> int:
    """Runs ``OUT ARCH SM_COUNT SCRIPT [ARGUMENT ...]``: writes forms to OUT and returns the script's exit code.

    Writes nothing if the script failed or launched nothing.
    """
    out, arch, sm_count, script, *arguments = argv
    with recorded() as log:
        gpu = VirtualGpu(arch, int(sm_count))
        outcome = run_script(Path(script), arguments, gpu)
    if outcome.error is not None:
        print(f"{outcome.trace}{type(outcome.error).__name__}: {outcome.error}", file=sys.stderr)
    if outcome.exit_code == 0 and gpu.launches:
        Path(out).write_text(json.dumps({"launches": len(gpu.launches), "forms": sorted(log.forms)}))
    return outcome.exit_code or int(not gpu.launches)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
