"""Layers know, compile and load their kernels before the first call."""

import pytest
import torch

from nvfp4_cute.compile import cache, disk_cache, parallel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.compile.simt_keys import GemvKey, QuantizeKey
from nvfp4_cute.errors import CacheError
from nvfp4_cute.nn import prepare
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.moe import MoE
from nvfp4_cute.planning.rows import representative_rows, rounded_rows

H200 = "emulator:H200"
KEYS = [
    GemvKey("sm_90a", torch.bfloat16, True, None),
    QuantizeKey("sm_90a", torch.bfloat16, True, False, True, False),
]


def linear(activations):
    scale = 0.01 if activations == "nvfp4" else None
    return QuantizedLinear(512, 640, bias=False, activations=activations, input_scale=scale, backend=H200)


def experts(activations):
    scales = {"input_scale": 0.01, "hidden_scale": 0.01} if activations == "nvfp4" else {}
    return MoE(16, 256, 128, activations=activations, backend=H200, **scales)


def test_rounded_rows_are_no_fewer_and_at_most_a_quarter_more():
    assert [rounded_rows(n) for n in (0, 1, 16, 17, 24, 25, 64, 65, 128, 129, 5000)] == [
        0,
        1,
        16,
        24,
        24,
        32,
        64,
        80,
        128,
        160,
        5120,
    ]
    assert all(n <= rounded_rows(n) <= max(1.25 * n, n + 7) for n in range(1, 9000))


@pytest.mark.parametrize("most", [0, 1, 20, 300])
def test_representatives_are_the_ends_of_every_range(most):
    rows = list(representative_rows(most))
    assert rows == sorted(set(rows)) and (not most or (rows[0], rows[-1]) == (1, most))
    for n in range(1, most + 1):
        same = [m for m in range(1, most + 1) if rounded_rows(m) == rounded_rows(n)]
        assert same[0] in rows and same[-1] in rows


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_no_number_of_rows_takes_a_kernel_that_is_not_prepared(activations):
    layer = linear(activations)
    prepared = set(layer.kernels(140))
    every = set(prepare.kernels_of(lambda n: layer(torch.empty(n, 512).bfloat16()), range(1, 141)))
    assert prepared == every and len(prepared) >= 3


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_no_number_of_tokens_takes_a_kernel_that_is_not_prepared(activations):
    layer = experts(activations)
    prepared = prepare.expert_kernels(layer, 256, 16, 3, 90, torch.bfloat16, "cpu")

    def call(n):
        ids = torch.zeros((n, 3), dtype=torch.int32)
        layer(torch.empty(n, 256).bfloat16(), ids, torch.ones(n, 3))

    assert set(prepared) == set(prepare.kernels_of(call, range(1, 91)))


def test_kernels_that_the_process_has_are_asked_for_again(monkeypatch):
    """Plans are cached with their kernels, both by earlier calls and by the first request for kernels."""

    class Everything(dict):
        def get(self, entry, default=None):
            return object()

    monkeypatch.setattr(cache, "_kernels", Everything())
    layer = experts("nvfp4")
    first, second = (prepare.expert_kernels(layer, 256, 16, 3, 90, torch.bfloat16, "cpu") for _ in range(2))
    assert first == second and any(isinstance(key, KernelKey) for key in first)


def test_planning_launches_and_compiles_nothing(monkeypatch):
    def fail(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(cache, "compile_kernel", fail)
    monkeypatch.setattr(disk_cache, "compile_kernel", fail)
    layer = linear("nvfp4")
    assert layer.kernels(3)
    with cache.planning() as asked:
        layer(torch.zeros(1, 512).bfloat16())
    assert len(asked) == 2 and not cache.is_planning()


def test_a_prepared_layer_compiles_nothing(monkeypatch, tmp_path):
    """Two processes compile two kernels; then a process that must not compile calls the layer on the emulator.

    The working directory has another package of the same name, as a clone has next to an installation.
    """
    (tmp_path / "clone" / "nvfp4_cute").mkdir(parents=True)
    (tmp_path / "clone" / "nvfp4_cute" / "__init__.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path / "clone")
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_kernels", {})
    layer = linear("nvfp4")
    assert layer.prepare(1, jobs=2) == 2
    assert len(list(tmp_path.glob("*/entry.json"))) == 2
    monkeypatch.setattr(disk_cache, "compile_kernel", None)
    monkeypatch.setattr(cache, "compile_kernel", None)
    assert layer.prepare(1) == 0
    assert torch.equal(layer(torch.ones(1, 512).bfloat16()), torch.zeros(1, 640).bfloat16())


def test_on_the_cpu_there_is_nothing_to_prepare():
    layer = QuantizedLinear(64, 32)
    assert layer.prepare(64) == 0
    assert MoE(4, 64, 32).prepare(64, top_k=2) == 0


def test_what_is_in_the_folder_is_not_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_cache, "has", lambda folder, key: True)
    monkeypatch.setattr(parallel, "Compilers", None)
    parallel.ensure_all(tmp_path, KEYS)


@pytest.mark.slow
def test_errors_of_a_worker_are_raised_here(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be written"):
        parallel.ensure_all(tmp_path / "file", KEYS[:1], jobs=1)
