"""Compiled kernels on disk: found, replaced if invalid, and compiled once by many processes."""

import json
import re
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import get_args

import cases
import pytest
import torch
from flat_parts import gemv, grouped_gemm
from new_process import forking
from oracle import assert_bitwise_equal

from nvfp4_cute import QuantizedLinear, cli, quantize
from nvfp4_cute.backends import installed
from nvfp4_cute.cli import compile as ahead
from nvfp4_cute.cli import doctor
from nvfp4_cute.compile import cache, disk_cache, object_file
from nvfp4_cute.compile.compiler import compile_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.compile.native import NativeFunction
from nvfp4_cute.compile.object_file import UnsupportedObject
from nvfp4_cute.compile.simt_keys import GemvKey
from nvfp4_cute.emulator.fronts.launch_shim import shim_is_built
from nvfp4_cute.errors import CacheError
from nvfp4_cute.launch import table_task
from nvfp4_cute.launch.plan import make_plan
from nvfp4_cute.ops.global_scale import find_global_scale
from nvfp4_cute.ops.quantize import find_and_quantize
from nvfp4_cute.planning.arch import base, sm90, sm100
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import WeightLayout

KEY = GemvKey("sm_100a", torch.float16, False)
FILES = (disk_cache.OBJECT, disk_cache.PTX, disk_cache.CUBIN, disk_cache.MANIFEST)


@pytest.fixture(scope="module")
def compiled():
    return compile_kernel(KEY)


@pytest.fixture
def compilations(monkeypatch, compiled):
    """Keys of compiled kernels. The kernel itself is compiled once for all tests."""
    keys = []

    def compile_once(key):
        keys.append(key)
        return compiled

    monkeypatch.setattr(disk_cache, "compile_kernel", compile_once)
    return keys


@pytest.fixture
def entry(tmp_path, compilations):
    """A folder's only entry, newly created."""
    disk_cache.fetch(tmp_path, KEY)
    (manifest,) = tmp_path.glob("*/entry.json")
    compilations.clear()
    return manifest.parent


def test_a_miss_is_kept_and_a_hit_is_loaded(tmp_path, compilations, compiled):
    folder = tmp_path / "made" / "when needed"
    assert disk_cache.contents(folder).num_entries == 0
    assert disk_cache.fetch(folder, KEY) is compiled
    found = disk_cache.fetch(folder, KEY)
    assert compilations == [KEY]
    assert found is not compiled and found.function is not compiled.function
    assert (found.key, found.ptx, found.cubin) == (KEY, compiled.ptx, compiled.cubin)
    assert found.resources == compiled.resources
    held = disk_cache.contents(folder)
    assert held.num_entries == 1 and held.nbytes > len(compiled.cubin) + len(compiled.ptx)


def test_loading_takes_milliseconds(entry, compilations):
    """Measures processor time, which does not depend on other processes. It was 2 ms when written."""
    times = []
    for _ in range(5):
        start = time.process_time()
        disk_cache.fetch(entry.parent, KEY)
        times.append(time.process_time() - start)
    assert not compilations and min(times) < 0.02


def test_another_kernel_is_another_entry(entry, compilations):
    other = GemvKey("sm_100a", torch.bfloat16, False)
    assert disk_cache.entry_name(other, disk_cache.identity_of(other)) != entry.name
    assert entry.name == disk_cache.entry_name(KEY, disk_cache.identity_of(KEY))


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_entry_is_replaced(entry, compilations, name, damage):
    damage(entry / name)
    disk_cache.fetch(entry.parent, KEY)
    assert compilations == [KEY]
    disk_cache.fetch(entry.parent, KEY)
    assert compilations == [KEY], "the replacement is valid"


@pytest.mark.parametrize("name", ["dsl", "arch", "sources", "key", "python", "host"])
def test_an_entry_made_from_something_else_is_replaced(entry, compilations, name):
    """Also if it is in the right place and intact."""
    path = entry / disk_cache.MANIFEST
    manifest = json.loads(path.read_bytes())
    manifest["identity"][name] = {"nvidia_cutlass_dsl": "4.7.0"} if name == "dsl" else "other"
    path.write_text(json.dumps(manifest))
    disk_cache.fetch(entry.parent, KEY)
    disk_cache.fetch(entry.parent, KEY)
    assert compilations == [KEY]
    assert json.loads(path.read_bytes())["identity"] == disk_cache.identity_of(KEY)


@pytest.mark.parametrize("stray", ["file", "link", "unfinished"])
def test_what_lies_in_the_place_of_an_entry_gives_way(tmp_path, entry, compilations, stray):
    target = tmp_path / "elsewhere"
    entry.rename(target)
    if stray == "file":
        entry.write_text("not a folder")
    elif stray == "link":
        flip_a_bit(target / disk_cache.PTX)
        entry.symlink_to(target)
    else:
        entry.with_name(f"{entry.name}.partial").mkdir()
    disk_cache.fetch(tmp_path, KEY)
    disk_cache.fetch(tmp_path, KEY)
    assert compilations == [KEY]
    assert target.exists() and entry.is_dir() and not entry.is_symlink()


def test_versions_in_an_identity_are_those_installed():
    found = {
        name: version
        for name, version in installed.versions().items()
        if name.startswith(installed.DSL_PREFIX)
    }
    assert {name.replace("_", "-"): version for name, version in disk_cache.dsl_versions().items()} == found


def test_sources_in_an_identity_are_those_of_the_kernels(monkeypatch, tmp_path):
    """A changed byte in any of them changes the digest."""
    before = disk_cache.source_digest.__wrapped__()
    assert before == disk_cache.source_digest.__wrapped__()
    read = Path.read_bytes
    for changed in ("scale_layout.py", "sm90.py", "quantize.py"):
        with monkeypatch.context() as patch:
            patch.setattr(
                Path, "read_bytes", lambda path, name=changed: read(path) + b"#" * (path.name == name)
            )
            assert disk_cache.source_digest.__wrapped__() != before, changed


# ---- folders that cannot be written ----------------------------------------------------------------------------


@pytest.fixture
def no_writes(monkeypatch):
    """Makes all writes fail, because permissions would not stop a superuser."""

    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)


def test_a_folder_that_cannot_be_written_serves_what_it_has(entry, compilations, no_writes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disk_cache.fetch(entry.parent, KEY)
    assert compilations == []


def test_a_folder_that_cannot_be_written_says_so_for_what_it_lacks(
    tmp_path, compilations, compiled, no_writes
):
    with pytest.warns(RuntimeWarning, match=r"no valid entry .* Read-only file system.*NVFP4_CUTE_CACHE_DIR"):
        assert disk_cache.fetch(tmp_path / "x", KEY) is compiled
    with pytest.raises(CacheError, match="Read-only file system"):
        disk_cache.ensure(tmp_path / "x", KEY)
    assert compilations == [KEY, KEY]


def test_a_file_in_the_place_of_the_folder_says_so(tmp_path, compilations, compiled):
    (tmp_path / "x").write_text("")
    with pytest.warns(RuntimeWarning, match="File exists"):
        assert disk_cache.fetch(tmp_path / "x", KEY) is compiled


def test_a_full_disk_is_not_kept_full(tmp_path, compilations, compiled, monkeypatch):
    write = Path.write_bytes

    def until_full(path, data):
        if path.name == disk_cache.CUBIN:
            write(path, data[:10])
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", until_full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert disk_cache.fetch(tmp_path, KEY) is compiled
    assert [p for p in tmp_path.rglob("*") if p.suffix != ".lock"] == []


# ---- in use ----------------------------------------------------------------------------------------------------


def fetch_at_once(folder, barrier, results):
    """Runs in a process. Records what it compiled, and the register count of the kernel that it got."""
    keys = []
    real = disk_cache.compile_kernel
    disk_cache.compile_kernel = lambda key: keys.append(key.to_name()) or real(key)
    barrier.wait(120)
    kernel = disk_cache.fetch(folder, KEY)
    results.put((keys, kernel.resources.registers))


def test_processes_that_start_at_once_compile_once(tmp_path, compiled):
    context = forking()
    barrier, results = context.Barrier(2), context.Queue()
    children = [
        context.Process(target=fetch_at_once, args=(tmp_path, barrier, results), daemon=True)
        for _ in range(2)
    ]
    for child in children:
        child.start()
    found = [results.get(timeout=120) for _ in children]
    assert sorted(keys for keys, _ in found) == [[], [KEY.to_name()]]
    assert {registers for _, registers in found} == {compiled.resources.registers}


@pytest.mark.skipif(not shim_is_built(), reason="needs the launch shim")
def test_a_loaded_grouped_gemm_computes(monkeypatch, tmp_path):
    """The compiled kernel and the loaded one return the same bits."""
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(tmp_path))
    operands = list(cases.make_operands(cases.Case("loaded", ((130, 40, 256), (60, 128, 512)), seed=3)))[:4]
    results = []
    for _ in range(2):
        monkeypatch.setattr(cache, "_kernels", {})
        make_plan.cache_clear()
        results.append(grouped_gemm(*operands, backend="emulator"))
        monkeypatch.setattr(disk_cache, "compile_kernel", None)  # nothing may be compiled the second time
    assert disk_cache.contents(tmp_path).num_entries == 1
    reference = grouped_gemm(*operands, backend="reference")
    for compiled_out, loaded_out, expected in zip(*results, reference, strict=True):
        assert_bitwise_equal(loaded_out, compiled_out)
        assert_bitwise_equal(loaded_out, expected)


WARM_START = """
    import ctypes, sys, time
    from pathlib import Path
    import numpy as np, torch
    start = time.process_time()
    from nvfp4_cute.compile import compiler, disk_cache
    from nvfp4_cute.compile.simt_keys import GemvKey
    from nvfp4_cute.emulator.fronts import launch_shim
    disk_cache.compile_kernel = None
    kernel = disk_cache.fetch(Path(sys.argv[1]), GemvKey("sm_100a", torch.float16, False))
    took, grids = time.process_time() - start, []
    # Replacements for the GPU functions that the shim calls for launches, device attributes and tensor maps.
    launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(
        lambda record: grids.append(ctypes.c_uint32.from_address(record + 8).value) or FAILS
    )
    attribute = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int)(lambda value, which: 0)
    shim = ctypes.CDLL(launch_shim.shim_path())
    shim.nvfp4_cute_set_callbacks(launch, attribute, None)
    launch_shim.active_emulators.append(None)
    table = np.ones(64, np.int64)
    launcher = compiler.Launcher(kernel.function, table)
    try:
        launcher(0), launcher(0)
    except RuntimeError as error:
        print(error)
    print(len(grids), "cutlass" in sys.modules, took)
"""


@pytest.mark.skipif(not shim_is_built(), reason="needs the launch shim")
@pytest.mark.parametrize("fails", [0, 701])
def test_a_warm_start_imports_no_dsl(entry, fails):
    """A new process loads a kernel and launches it, or reports CUDA's error. Without torch this takes less than a second."""
    code = textwrap.dedent(WARM_START).replace("FAILS", str(fails))
    command = [sys.executable, "-c", code, str(entry.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    launches, imported, took = last.split()
    assert imported == "False" and float(took) < 1
    if fails:
        assert launches == "1" and "CUDA error 701, cudaErrorLaunchOutOfResources" in said[0]
    else:
        assert launches == "2" and not said


@pytest.mark.skipif(not shim_is_built(), reason="needs the launch shim")
def test_an_object_that_only_the_dsl_can_load(entry, monkeypatch):
    """Refuses objects of another machine, truncated ones, and unknown relocations.

    The DSL loads the latter, with the same results.
    """
    content = (entry / disk_cache.OBJECT).read_bytes()
    for changed in (
        b"",
        content[:7],
        content.replace(b"\x7fELF\x02", b"\x7fELF\x01", 1),
        content[:18] + b"\xb7\0" + content[20:],
    ):
        with pytest.raises(UnsupportedObject):
            NativeFunction(changed, KEY.to_name())
    with monkeypatch.context() as patch:
        patch.setattr(object_file, "R_X86_64_GOTOFF64", -1)
        with pytest.raises(UnsupportedObject, match="relocation 25"):
            NativeFunction(content, KEY.to_name())
        kernel = disk_cache.fetch(entry.parent, KEY)
        assert not isinstance(kernel.function, NativeFunction)
        monkeypatch.setattr(cache, "_kernels", {(KEY, True): kernel})
        a, b = (quantize(torch.randint(-3, 4, (rows, 256)).float()) for rows in (8, 1))
        operands = a.data, b.data[0], a.scale, b.scale
        emulated = gemv(*operands, out_dtype=torch.float16, backend="emulator:sm_100a")
    assert_bitwise_equal(emulated, gemv(*operands, out_dtype=torch.float16, backend="reference"))


def test_off_keeps_nothing(monkeypatch, compiled):
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", "off")
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setattr(cache, "compile_kernel", lambda key: compiled)
    monkeypatch.setattr(disk_cache, "fetch", None)
    assert cache.get_kernel(KEY) is compiled
    assert "compiled kernels\n  kept in memory only\n" in doctor.report()[0]


def test_doctor_counts_entries(monkeypatch, entry):
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(entry.parent))
    assert f"compiled kernels\n  {entry.parent}: 1 kernel, 0." in doctor.report()[0]
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(entry.parent / "missing"))
    assert "missing: 0 kernels, 0.0 MB (made when the first kernel is compiled)" in doctor.report()[0]


def test_doctor_says_why_a_folder_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    assert f"cannot be made: {tmp_path / 'file'} is a file" in doctor.report()[0]
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(tmp_path / "file"))
    assert f"cannot be made: {tmp_path / 'file'} is a file" in doctor.report()[0]
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", "/proc/.cache/kernels")
    assert "cannot be made: /proc: " in doctor.report()[0]


def test_doctor_says_that_a_folder_is_not_trusted(monkeypatch, entry):
    entry.parent.chmod(0o777)
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(entry.parent))
    assert "not used: every user may write it; set NVFP4_CUTE_CACHE_DIR" in doctor.report()[0]


# ---- ahead of time ---------------------------------------------------------------------------------------------


def test_compile_verb(tmp_path, monkeypatch, capsys):
    arguments = (
        f"compile gemv --dtype float16 --arch sm_100a --arch sm_90a --jobs 1 --out {tmp_path}/kernels".split()
    )
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "holds 2 kernels" in printed and "the 2 asked for, of which 2 are new" in printed
    monkeypatch.setattr(disk_cache, "compile_kernel", None)
    assert disk_cache.fetch(tmp_path / "kernels", KEY).resources.registers > 0


def test_compile_verb_warns_where_code_for_thor_will_not_load(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(installed, "versions", lambda: {installed.DSL_PREFIX: "4.8.1"})
    monkeypatch.setattr(ahead, "compile_all", lambda *_: 0)
    line = f"compile gemv --arch sm_100a --arch sm_110a --out {tmp_path}/kernels"
    assert cli.main(line.split()) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: sm_110a: compiled as sm_101a, which CUDA 13 drivers refuse")


def test_compile_verb_leaves_out_what_writes_no_formats(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ahead, "compile_all", lambda keys, *_: asked.extend(keys) or 0)
    line = f"compile --formats fp8_1x128,fp8_128x128 --dtype fp8_1x128 --arch sm_90a --out {tmp_path}/kernels"
    assert cli.main(line.split()) == 0
    assert asked and all(type(key) is KernelKey and key.out_dtype == "fp8_1x128" for key in asked)


def test_compile_verb_refuses(tmp_path, capsys):
    (tmp_path / "x").write_text("")
    for arguments, message in [
        (f"gemv --arch sm_100a --jobs 1 --out {tmp_path}/x", "File exists"),
        (
            f"gemm --arch sm_100a --out {tmp_path}/y",
            "'gemm' is none of grouped_gemm, grouped_dual_gemm, gemv",
        ),
        (f"gemm --dtype nvfp4 --arch sm_100a --out {tmp_path}/y", "'gemm' is none of grouped_gemm"),
        (f"gemv --dtype nvfp4 --arch sm_100a --out {tmp_path}/y", "gemv writes no nvfp4"),
        (f"quantize --dtype float32 --arch sm_100a --out {tmp_path}/y", "float16 or bfloat16"),
        (f"--arch sm_75 --out {tmp_path}/y", "no grouped GEMM kernel for sm_75"),
        (
            f"grouped_gemm --groups 9999 --arch sm_100a --out {tmp_path}/y",
            f"9999 groups: .* into calls of at most {base.max_list_groups()}",
        ),
        (
            f"grouped_dual_gemm --groups 2,60 --dtype nvfp4 --arch sm_90a --out {tmp_path}/y",
            f"60 groups: .* into calls of at most {base.max_list_groups(2, True)}",
        ),
        (
            f"grouped_gemm --formats fp8_1x128,fp8_128x128 --dtype mxfp4 --arch sm_100a --out {tmp_path}/y",
            "products of FP8_1X128 x FP8_128X128 have float32 scales, and are not quantized to it",
        ),
    ]:
        assert cli.main(["compile", *arguments.split()]) in (
            1,
            2,
        )  # 1: a file in the way, an architecture without kernels
        assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_global_scale_that_is_found_launches_what_the_verb_compiles(arch, monkeypatch):
    """For ``quantize`` and layers, few and many values, and scales in either layout."""
    launched = []

    class Launched(Exception):
        pass

    def stop(key, **_):
        launched.append(key)
        raise Launched

    monkeypatch.setattr(table_task, "get_kernel", stop)
    backend, x = f"emulator:{arch}", torch.ones(8, 256, dtype=torch.bfloat16)
    layer = QuantizedLinear(256, 64, backend=backend)
    factors = [torch.ones(()), torch.ones(())]
    for call in (
        lambda: layer(x),
        lambda: layer(x.repeat(256, 1)),
        lambda: quantize(x, global_scale="auto", backend=backend),
        lambda: quantize(x, global_scale="auto", scale_layout="rowmajor", backend=backend),
        lambda: find_and_quantize(x, *factors, backend=backend),
        lambda: find_global_scale(x, *factors, backend=backend),
    ):
        with pytest.raises(Launched):
            call()
    found = set(ahead.keys(["quantize"], KernelKey(arch, KernelConfig(), 1, torch.bfloat16, False)))
    assert len(set(launched)) == 6 and set(launched) <= found


def test_what_the_compile_verb_compiles():
    """It compiles everything that an operation may choose, and what its options name."""
    key = KernelKey("sm_100a", KernelConfig(), 1, torch.bfloat16, True, activation="relu2")
    found = list(ahead.keys(ahead.OPERATIONS, key, (2, 8)))
    assert len(found) == 2 * (len(sm100.CANDIDATES) + len(sm100.DUAL_CANDIDATES)) + 1 + 1 + 5 + 2 * 16 + 12
    assert len({key.to_name() for key in found}) == len(found)
    ragged = list(ahead.keys(["grouped_gemm"], replace(key, form="ragged"), (2, 8)))
    assert {key.num_groups for key in ragged} == {1} and {key.form for key in ragged} == {"ragged"}
    quantized = replace(key, form="masked", out_dtype="nvfp4", weight_layout=get_args(WeightLayout)[1])
    duals = list(ahead.keys(["grouped_dual_gemm"], replace(quantized, has_limit=True)))
    assert {(key.form, key.out_dtype, key.has_limit) for key in duals} == {("masked", "nvfp4", True)}
    assert not any(key.config.swap_ab for key in duals)
    products = ["grouped_gemm", "gemv", "few_rows", "w4a16"]
    biased = list(ahead.keys(products, replace(key, bias_dtype=torch.float16), (2, 8)))
    assert {key.bias_dtype for key in biased} == {torch.float16}
    assert not {key.to_name() for key in biased} & {key.to_name() for key in found}
    with pytest.raises(ValueError, match="gemv writes no nvfp4"):
        list(ahead.keys(["gemv"], quantized))
    (chosen,) = ahead.keys(["grouped_gemm"], replace(key, arch="sm_90a"), (3,), [sm90.DEFAULT_CONFIG])
    assert chosen == KernelKey("sm_90a", sm90.DEFAULT_CONFIG, 3, torch.bfloat16, True).validated()
