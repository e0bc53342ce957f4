"""FP8 with fp32 scales: every config that may be chosen returns the reference's bits, for one product and for two."""

import pytest
from fp8_check import check_dual_ragged, check_ragged

import nvfp4_cute as nv
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.problem import Gate

PAIR = (nv.FP8_1x128, nv.FP8_128x128)
MODES = ("eager", "lazy", "random:1")
EVERY_CANDIDATE = [
    pytest.param(
        arch, config, gate is not None, MODES[i % 3], id=f"{arch}-{config.to_name()}{'-dual' if gate else ''}"
    )
    for arch in ("sm_100a", "sm_120a", "sm_90a")
    for gate in (None, Gate("relu2", None, "separate"))
    for i, config in enumerate(candidates(arch, "list", gate=gate, formats=PAIR))
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "config", "dual", "mode"), EVERY_CANDIDATE)
def test_every_config_that_may_be_chosen_is_right(arch, config, dual, mode):
    """Several K tiles; the last block of 128 weights has only 72 rows."""
    (check_dual_ragged if dual else check_ragged)(328, 640, config, f"emulator:{arch}", mode)
