"""doctor on this machine and on simulated ones."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from nvfp4_cute import cli
from nvfp4_cute.backends import installed
from nvfp4_cute.cli import doctor
from nvfp4_cute.emulator.fronts import launch_shim
from nvfp4_cute.formats.block_format import INT8, MXFP4, NVFP4, int4_format
from nvfp4_cute.gpus import targets

B200 = installed.Gpu(0, "NVIDIA B200", "sm_100a", targets.B200)
H200 = installed.Gpu(1, "NVIDIA H200", "sm_90a", targets.H200)
V100 = installed.Gpu(1, "NVIDIA V100", "sm_70")
A100 = installed.Gpu(0, "NVIDIA A100-SXM4-80GB", "sm_80", targets.A100_80GB)
DSL = installed.DSL_PREFIX


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulates a machine: `machine(gpus, shim_problem)` with the installed versions."""
    monkeypatch.delenv("NVFP4_CUTE_BACKEND", raising=False)
    # The report counts kernels in the cache, where other test processes store theirs meanwhile.
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(tmp_path))

    def pretend(gpus=(), shim=None):
        monkeypatch.setattr(installed, "gpus", lambda: list(gpus))
        monkeypatch.setattr(installed, "shim_problem", lambda: shim)

    return pretend


def test_versions_are_those_installed():
    found = installed.versions()
    assert torch.__version__.startswith(found["torch"])  # torch's version may have a local part, as +cpu
    for name in (DSL, f"{DSL}-libs-base", "nvfp4-cute"):
        assert found[name] == importlib.metadata.version(name)
    assert installed.version_problem(found) is None


def test_version_problem_names_the_fix():
    assert "pip install -e ." in installed.version_problem({DSL: None})
    mixed = {DSL: "4.8.1", f"{DSL}-libs-base": "4.7.0"}
    assert installed.version_problem(mixed) == (
        "nvidia-cutlass-dsl 4.8.1, nvidia-cutlass-dsl-libs-base 4.7.0: all must have one version; "
        "run `pip install --force-reinstall nvidia-cutlass-dsl==4.8.1`"
    )


def test_a_package_on_the_path_alone_is_not_usable(machine, monkeypatch):
    machine()
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    text, usable = doctor.report()
    assert (
        f"{DSL} {importlib.metadata.version(DSL)} is installed, but its module `cutlass` is not found" in text
    )
    assert "not usable: nvidia-cutlass-dsl" in text and not usable


def test_what_the_compiler_refuses_is_said(machine, monkeypatch):
    from cutlass.base_dsl import enums

    machine()
    assert installed.refused_archs() == ()
    monkeypatch.setattr(enums, "Arch", [arch for arch in enums.Arch if arch.name != "sm_121a"])
    text, _ = doctor.report()
    assert "sm_110a, sm_120a; compiling needs no GPU" in text
    assert f"sm_121a: refused, {DSL} {importlib.metadata.version(DSL)} does not know it" in text


def test_code_for_thor_needs_the_libraries_of_cuda_13(machine, monkeypatch):
    """CUDA 12's libraries compile for sm_101a, which the PTX and the flags of the cubin show."""
    machine()
    twelve = {DSL: "4.8.1", f"{DSL}-libs-base": "4.8.1", f"{DSL}-libs-cu12": "4.8.1"}
    fix = 'compiled as sm_101a, which CUDA 13 drivers refuse, since CuTe DSL\'s libraries of CUDA 13 are not installed; run `pip install "nvidia-cutlass-dsl[cu13]==4.8.1"`'
    assert installed.toolkit_problem("sm_110a", twelve) == f"sm_110a: {fix}"
    assert installed.toolkit_problem("sm_100a", twelve) is None
    assert installed.toolkit_problem("sm_110a", twelve | {f"{DSL}-libs-cu13": "4.8.1"}) is None
    monkeypatch.setattr(installed, "versions", lambda: twelve)
    assert fix in doctor.report()[0]


def test_missing_gpu_reason(machine):
    machine()
    assert installed.missing_gpu_reason("sm_100a") == "needs an sm_100a GPU; here: no GPU that torch can use"
    machine([B200, H200])
    assert installed.missing_gpu_reason("sm_100a") is None
    assert installed.missing_gpu_reason("sm_90a") is None
    assert installed.missing_gpu_reason("sm_120a") == (
        "needs an sm_120a GPU; here: NVIDIA B200 (sm_100a), NVIDIA H200 (sm_90a)"
    )


def test_missing_shim_says_what_to_do(monkeypatch):
    monkeypatch.setattr(launch_shim.importlib.util, "find_spec", lambda name: None)
    problem = installed.shim_problem()
    assert "no C compiler was found" in problem and "reinstall nvfp4_cute" in problem


def test_report_without_a_gpu(machine):
    machine()
    text, usable = doctor.report()
    assert usable
    assert "none that torch can use" in text
    assert "grouped_gemm compiles for sm_90a, sm_100a, sm_103a, sm_110a" in text
    assert "ready: the launch shim is built" in text
    assert "CPU tensors -> reference" in text
    assert "CUDA tensors -> cuda (refused: no GPU that torch can use)" in text


def test_report_says_where_a_pair_of_formats_runs(machine, capsys):
    machine()
    assert cli.main(["doctor", "--formats", "mxfp8_e4m3,mxfp4"]) == 0
    text = capsys.readouterr().out
    assert "mxfp8_e4m3 x mxfp4" in text and "sm_90a: dequantized to bf16" in text
    assert "sm_100a, sm_103a, sm_110a, sm_120a, sm_121a: tensor cores, mxf8f6f4" in text
    text, _ = doctor.report((NVFP4, MXFP4))
    assert (
        "  sm_90a: no kernel for nvfp4 x mxfp4" in text
        and "  sm_100a, sm_110a, sm_120a, sm_121a: no kernel for nvfp4 x mxfp4" in text
        and "quantize a to MXFP4" in text
    )
    for b in (int4_format(128), INT8):
        line = (
            f"  16-bit a x {b}: gemm and gemv on every GPU; grouped and dual products on sm_80, sm_86, sm_89, sm_90a, "
            "sm_100a, sm_103a, sm_110a, sm_120a, sm_121a\n"
        )
        assert line in doctor.report((b, b))[0]


def test_report_without_gpu_and_shim_is_not_usable(machine):
    machine(shim="not built (no C compiler is on PATH): install one")
    text, usable = doctor.report()
    assert not usable
    assert "not usable: not built (no C compiler is on PATH): install one" in text


def test_report_with_a_kernel_for_one_gpu_of_two(machine):
    machine([B200, V100], shim="not built")
    text, usable = doctor.report()
    assert usable
    assert "cuda:0 NVIDIA B200 (sm_100a): grouped_gemm runs on it" in text
    assert "cuda:1 NVIDIA V100 (sm_70): no kernel for it here" in text
    assert "CUDA tensors -> cuda (on cuda:0)\n" in text


def test_report_with_a_gpu_whose_products_are_weight_only(machine):
    machine([A100], shim="not built")
    text, usable = doctor.report()
    assert usable
    assert "cuda:0 NVIDIA A100-SXM4-80GB (sm_80): weight-only products run on it" in text
    assert (
        "weight-only products, quantize and the launches around experts' products also compile for sm_80, sm_86"
        in text
    )
    assert (
        "sm_80, sm_86, sm_89: a has 16 bits; layers whose checkpoint quantizes a are weight-only there"
        in text
    )


def test_report_shows_the_target_of_every_gpu(machine):
    machine([B200, V100])
    text, _ = doctor.report()
    b200, v100 = text.index("cuda:0 NVIDIA B200"), text.index("cuda:1 NVIDIA V100")
    assert "target B200: 148 SMs, 7.5 TB/s" in text[b200:v100]
    assert "not in the table of targets" in text[v100:]


def test_gpus_are_looked_up_in_the_table(monkeypatch):
    names = ("NVIDIA B200", "NVIDIA H200 MIG 1g.18gb")
    properties = [SimpleNamespace(name=name, multi_processor_count=148) for name in names]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((10, 0), (9, 0))[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    assert installed.gpus() == [B200, installed.Gpu(1, names[1], "sm_90a", None)]


def test_report_with_a_gpu_that_has_no_kernel(machine):
    machine([V100])
    text, _ = doctor.report()
    assert "CUDA tensors -> cuda (refused: no kernel for these GPUs)" in text


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("emulator", "CPU tensors -> emulator (because NVFP4_CUTE_BACKEND says so)"),
        ("nonsense", "NVFP4_CUTE_BACKEND='nonsense' is not one of auto, cuda, emulator, reference"),
    ],
)
def test_report_follows_the_environment(machine, monkeypatch, value, line):
    machine()
    monkeypatch.setenv("NVFP4_CUTE_BACKEND", value)
    assert line in doctor.report()[0]


def test_run_prints_the_report_and_returns_whether_a_kernel_can_run(machine, capsys):
    machine()
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == doctor.report()[0]
    machine(shim="not built")
    assert cli.main(["doctor"]) == 1


def test_report_begins_with_what_can_be_done(machine, monkeypatch):
    for gpus, shim, said, not_said in (
        ((), None, "virtual GPU, slowly: nvfp4-cute demo", "kernels on cuda"),
        ((B200, H200), None, "kernels on cuda:0 NVIDIA B200, cuda:1 NVIDIA H200", "no GPU here"),
        ((A100,), "not built", "no virtual GPU", "nvfp4-cute demo"),
    ):
        machine(gpus, shim)
        first = doctor.report()[0].split("\nversions\n")[0]
        assert first.startswith("what you can do here\n") and said in first and not_said not in first
    monkeypatch.setattr(installed, "version_problem", lambda found: "the DSL is broken")
    assert "no kernels: the DSL is broken" in doctor.report()[0].split("\nversions\n")[0]


def test_variables_are_listed_on_request_and_misspelt_ones_always(machine, monkeypatch, capsys):
    machine()
    assert "POPCORN_API_URL" not in doctor.report()[0]
    assert cli.main(["doctor", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "GPU MODE's server" in shown.split("\nenvironment\n")[1]
    monkeypatch.setenv("NVFP4_CUTE_BACKNED", "emulator")
    assert "NVFP4_CUTE_BACKNED is set, and nothing reads it" in doctor.report()[0]


@pytest.mark.gpu("sm_100a")
def test_gpu_marker_runs_only_on_that_gpu():
    assert torch.cuda.get_device_capability() == (10, 0)
