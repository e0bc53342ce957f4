"""Environment variables: defaults, refusals, and the description that doctor and the docs print."""

import pytest

from nvfp4_cute import env


@pytest.mark.parametrize("value", [None, ""])
def test_backend_defaults_to_auto(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("NVFP4_CUTE_BACKEND", raising=False)
    else:
        monkeypatch.setenv("NVFP4_CUTE_BACKEND", value)
    assert env.backend() == "auto"


@pytest.mark.parametrize("value", env.BACKENDS)
def test_backend_follows_the_environment(monkeypatch, value):
    monkeypatch.setenv("NVFP4_CUTE_BACKEND", value)
    assert env.backend() == value


@pytest.mark.parametrize("value", ["gpu", "Emulator", " cuda"])
def test_backend_refuses_what_it_does_not_know(monkeypatch, value):
    monkeypatch.setenv("NVFP4_CUTE_BACKEND", value)
    with pytest.raises(
        ValueError, match=r"NVFP4_CUTE_BACKEND=.*is not one of auto, cuda, emulator, reference; unset"
    ):
        env.backend()


def test_describe_names_every_variable_and_its_setting(monkeypatch):
    monkeypatch.setenv("NVFP4_CUTE_BACKEND", "reference")
    text = env.describe()
    for variable in env.VARIABLES:
        assert variable.name in text and variable.effect in text and f"default {variable.default}" in text
    assert "NVFP4_CUTE_BACKEND=reference" in text
    monkeypatch.delenv("NVFP4_CUTE_BACKEND")
    assert "NVFP4_CUTE_BACKEND (not set)" in env.describe()


def test_describe_survives_a_wrong_setting(monkeypatch):
    """doctor must be able to show the setting that breaks everything else."""
    monkeypatch.setenv("NVFP4_CUTE_BACKEND", "nonsense")
    assert "NVFP4_CUTE_BACKEND=nonsense" in env.describe()


def test_checkout_of_cutlass(monkeypatch):
    monkeypatch.delenv("NVFP4_CUTE_CUTLASS", raising=False)
    assert env.cutlass_checkout() is None
    assert "NVFP4_CUTE_CUTLASS (not set)" in env.describe() and "a path; default none" in env.describe()
    monkeypatch.setenv("NVFP4_CUTE_CUTLASS", "/some/where")
    assert str(env.cutlass_checkout()) == "/some/where"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("NVFP4_CUTE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / ".cache" / "nvfp4_cute"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(env.cache_dir()) == "/caches/nvfp4_cute"
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == tmp_path / "kernels"
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", "off")
    assert env.cache_dir() is None


def test_describe_names_variables_that_nothing_reads(monkeypatch):
    monkeypatch.setenv("NVFP4_CUTE_BACKNED", "emulator")
    assert "NVFP4_CUTE_BACKNED is set, and nothing reads it" in env.describe()
