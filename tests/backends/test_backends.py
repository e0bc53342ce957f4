"""Backends by name, and the GPU that the emulator represents."""

import pytest
import torch

from nvfp4_cute import UnsupportedTarget, backends
from nvfp4_cute.gpus import targets

CPU = torch.device("cpu")


def test_auto_follows_the_device(monkeypatch):
    monkeypatch.delenv("NVFP4_CUTE_BACKEND", raising=False)
    assert backends.resolve("auto", CPU) == "reference"
    assert backends.resolve("auto", torch.device("cuda")) == "cuda"


def test_the_emulator_takes_a_target_or_an_architecture():
    assert backends.get("emulator:rtx 5090", CPU).keywords == {"target": targets.RTX_5090}
    assert backends.get("emulator:sm_121a", CPU).keywords == {"target": targets.GB10}


@pytest.mark.parametrize(("name", "error"), [("emu", ValueError), ("emulator:rtx 9999", UnsupportedTarget)])
def test_what_is_unknown_is_refused(name, error):
    with pytest.raises(error, match="use one of"):
        backends.get(name, CPU)
