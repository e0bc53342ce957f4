"""Launches: argument packing, launch checks, and CuTe DSL host code that calls the shim."""

import ctypes
import os
from functools import lru_cache

import numpy as np
import pytest
import torch
from new_process import run_python

from nvfp4_cute.emulator.fronts import driver, launch_shim
from nvfp4_cute.emulator.fronts.driver import Emulator, run_ptx
from nvfp4_cute.emulator.fronts.launch_shim import shim_path
from nvfp4_cute.emulator.targets import Device, ptx_arch
from nvfp4_cute.emulator.tensormap import encode
from nvfp4_cute.errors import EmulatorError


def test_arguments_are_packed_by_the_signature() -> None:
    text = """.version 8.8
.target sm_100a
.visible .entry k(.param .u32 n, .param .f32 x, .param .align 8 .b8 s[8], .param .u64 out) {
.reg .b32 %r<9>; .reg .b64 %rd<9>;
ld.param.b32 %r1, [n]; ld.param.b32 %r2, [x]; ld.param.b32 %r3, [s+4]; ld.param.b64 %rd1, [out];
st.global.v2.b32 [%rd1], {%r1, %r2}; st.global.b32 [%rd1+8], %r3; ret; }"""
    out = np.zeros(4, np.uint32)
    run_ptx(text, "k", 1, 1, [-2, 1.5, b"abcdwxyz", out])
    assert out.tolist() == [0xFFFFFFFE, 0x3FC00000, int.from_bytes(b"wxyz", "little"), 0]
    with pytest.raises(EmulatorError, match="takes 4 parameters, got 1"):
        run_ptx(text, "k", 1, 1, [1])
    with pytest.raises(EmulatorError, match="parameter s has 8 bytes, the argument has 3"):
        run_ptx(text, "k", 1, 1, [1, 1.0, b"abc", out])
    with pytest.raises(EmulatorError, match=r"no entry `other` in the module; it has \['k'\]"):
        run_ptx(text, "other")


@pytest.mark.parametrize(
    "directive, launch, message",
    [
        (".reqntid 64, 1, 1", {"block": 32}, r"requires blocks of \(64, 1, 1\)"),
        (".maxntid 64", {"block": 96}, "96 threads per CTA, allowed are 1..64"),
        ("", {"block": 1056}, "1056 threads per CTA"),
        ("", {"smem_bytes": 232449}, "232449 bytes of shared memory, a CTA on sm_100a has 232448"),
        ("", {"cluster": 32, "grid": 32}, "more than 16 CTAs"),
    ],
)
def test_launches_that_hardware_refuses(directive: str, launch: dict, message: str) -> None:
    text = f".version 8.8\n.target sm_100a\n.visible .entry k()\n{directive}\n{{ ret; }}"
    with pytest.raises(EmulatorError, match=message):
        run_ptx(text, "k", **launch)


COUNTS = """.version 8.8
.target sm_100a
{variable}
.visible .entry k(.param .u64 out) {{
.reg .b32 %r<9>; .reg .b64 %rd<9>;
ld.param.b64 %rd1, [out]; mov.u64 %rd2, {place};
ld.b32 %r1, [%rd2]; add.u32 %r1, %r1, 1; st.b32 [%rd2], %r1; st.global.b32 [%rd1], %r1; ret; }}"""


def test_a_module_is_compiled_once_unless_it_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, really = [], driver.compiled

    def counted(*args, **keywords):
        compiled.append(args)
        return really(*args, **keywords)

    monkeypatch.setattr(driver, "compiled", counted)
    monkeypatch.setattr(driver, "_shared_code", lru_cache(driver.KEPT)(counted))
    out, checked = np.zeros(1, np.uint32), driver.Machine(check=True)
    for variable, place, expected in (
        ("", "%rd1", [1, 2, 3]),
        (".global .align 4 .b32 c[1] = {7};", "c", [8, 8, 8]),
    ):
        text, out[0], compiled[:] = COUNTS.format(variable=variable, place=place), 0, []
        for machine, want in zip((None, None, checked), expected, strict=True):
            run_ptx(text, "k", args=[out], machine=machine)
            assert out.tolist() == [want]
        # A machine with the checker runs different code.
        assert len(compiled) == (3 if variable else 2)


def test_device_attributes() -> None:
    blackwell = Device("sm_100a", 148).attributes()
    assert (blackwell[97], blackwell[16], blackwell[75], blackwell[76]) == (232448, 148, 10, 0)
    geforce = Device("sm_120a", 170).attributes()
    assert (geforce[97], geforce[75]) == (101376, 12)
    assert Device("sm_90a", 132).capability == (9, 0)
    assert ptx_arch("sm_101a, debug") == "sm_110a"
    with pytest.raises(EmulatorError, match="unknown architecture `sm_70`"):
        Emulator("sm_70")


def test_ptx_of_another_architecture_is_refused() -> None:
    with pytest.raises(EmulatorError, match="the PTX is for sm_90a, this emulator is sm_100a"):
        Emulator().register(".version 8.8\n.target sm_90a\n.visible .entry k() { ret; }")


def test_cooperative_launches_must_fit_on_the_device() -> None:
    """The driver returns an error code, and the device still works. Other launches may be larger."""
    emulator = Emulator(sm_count=1)
    emulator.register(".version 8.8\n.target sm_100a\n.visible .entry k() { ret; }")
    record = driver.LaunchRecord(name=b"k", grid=(3, 1, 1), block=(1024, 1, 1), attributes=1)
    assert emulator._guard(lambda: emulator.launch(record), driver.LAUNCH_FAILURE) == 720
    record.grid[0] = 2
    assert emulator._guard(lambda: emulator.launch(record), driver.LAUNCH_FAILURE) == driver.SUCCESS
    record.grid[0], record.attributes = 3, 0
    assert emulator._guard(lambda: emulator.launch(record), driver.LAUNCH_FAILURE) == driver.SUCCESS
    assert emulator.stats.ctas == 5


def encode_through_the_shim(descriptor: ctypes.Array, swizzle: int = 3, inner_box: int = 64) -> int:
    """Calls cuTensorMapEncodeTiled as compiled host code does, for f16 [8, 256] in boxes of 4 rows."""
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    dims, strides = (u64 * 2)(256, 8), (u64 * 1)(512)
    box, steps = (u32 * 2)(inner_box, 4), (u32 * 2)(1, 2)
    with Emulator():
        encode = ctypes.CDLL(shim_path())._cuTensorMapEncodeTiled
        return encode(descriptor, 6, 2, ctypes.c_void_p(1 << 20), dims, strides, box, steps, 0, swizzle, 2, 1)


def test_host_code_encodes_tensor_maps() -> None:
    descriptor = ctypes.create_string_buffer(128)
    assert encode_through_the_shim(descriptor) == driver.SUCCESS
    options = {"element_strides": (1, 2), "swizzle": "128B", "nan_fill": True}
    assert descriptor.raw == encode(1 << 20, "f16", (256, 8), (512,), (64, 4), **options)


def test_a_refused_tensor_map_says_why(capfd) -> None:
    """The reason goes to stderr, because the host code ends the process, and is also kept for the caller."""
    descriptor = ctypes.create_string_buffer(128)
    with pytest.raises(EmulatorError, match="inner box of 128 bytes exceeds the 32B swizzle span"):
        encode_through_the_shim(descriptor, swizzle=1)
    assert "cuTensorMapEncodeTiled: tensor map: inner box" in capfd.readouterr().err
    with pytest.raises(ValueError, match="boxes are 1 to 256"):
        encode_through_the_shim(descriptor, inner_box=300)


def test_host_code_of_old_versions_asks_for_names_of_errors() -> None:
    """CuTe DSL 4.3's host code for TVM-FFI calls this function; the DSL's own runtime library has it, but needs a driver."""
    name = ctypes.CDLL(shim_path()).cuda_dialect_get_error_name
    name.restype = ctypes.c_char_p
    assert name(1)


def test_missing_shim_says_how_to_repair_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_shim.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmulatorError, match="no C compiler was found.*reinstall"):
        shim_path()


# ---- CuTe DSL, in a separate process, because prepare_cutlass changes the DSL for the whole process -------

SCRIPT_HEAD = """
import os, sys
os.environ["CUTE_DSL_ARCH"] = "sm_100a"
from nvfp4_cute.emulator.fronts.driver import Emulator
from nvfp4_cute.emulator.fronts.launch_shim import prepare_cutlass
from nvfp4_cute.errors import EmulatorError
{first}
import cutlass, cutlass.cute as cute, cutlass.pipeline as pipeline, torch
from cutlass import Float32, Int32
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import from_dlpack
{second}

STAGES = 3

class ScaledColumnSums:
    \"\"\"Warp 0 feeds columns into a shared-memory ring, warp 1 adds them up: out[i] = factor * sum_k x[i, k].\"\"\"

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, factor: Float32, ctas: Int32):
        self.kernel(x, out, factor).launch(grid=(ctas, 1, 1), block=(64, 1, 1), cluster=(2, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, factor: Float32):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        storage = cutlass.memory.SmemAllocator()
        barriers = storage.allocate_array(cutlass.Int64, 2 * STAGES)
        ring = storage.allocate_tensor(Float32, cute.make_layout((32, STAGES)), 128)
        group = pipeline.CooperativeGroup(pipeline.Agent.Thread, 32)
        producer, consumer = pipeline.PipelineAsync.create(
            barrier_storage=barriers, num_stages=STAGES, producer_group=group, consumer_group=group
        ).make_participants()
        count = cute.size(x, mode=[1])
        if warp == 0:
            for k in cutlass.range(count, unroll=1):
                slot = producer.acquire_and_advance()
                ring[lane, slot.index] = x[lane, k]
                slot.commit()
            producer.tail()
        if warp == 1:
            total = Float32(0.0)
            for k in cutlass.range(count, unroll=1):
                slot = consumer.wait_and_advance()
                total = total + ring[lane, slot.index]
                slot.release()
            out[lane, cta] = total * factor

def compiled(x, out):
    tensors = [from_dlpack(t, assumed_align=16) for t in (x, out)]
    with __import__("tempfile").TemporaryDirectory() as folder:
        function = cute.compile[cute.KeepPTX(True), DumpDir(folder)](ScaledColumnSums(), *tensors, Float32(1.0), Int32(1))
        ptx = open(os.path.join(folder, next(f for f in os.listdir(folder) if f.endswith(".ptx")))).read()
    return function, ptx, tensors

x = torch.randint(-8, 8, (17, 32)).float().T  # (32, 17), columns contiguous
out = torch.full((4, 32), float("nan")).T
function, ptx, tensors = compiled(x, out)
emulator = Emulator(sm_count=4)
"""


pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")


def run_file(path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL")}
    done = run_python(path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cute_dsl_function_runs_on_cpu_tensors(tmp_path) -> None:
    """The script imports the DSL first and only then points it at the shim."""
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT_HEAD.format(first="", second="prepare_cutlass()")
        + """
assert len(emulator.register(ptx)) == 1
with emulator:
    function(*tensors, Float32(2.0), Int32(4))
want = 2 * x.sum(1)
assert torch.equal(out, want[:, None].expand(32, 4)), out
with emulator:
    function(*tensors, Float32(-1.0), Int32(2))
assert torch.equal(out[:, :2], -x.sum(1)[:, None].expand(32, 2)) and torch.equal(out[:, 2], want)
print(emulator.stats.launches, emulator.stats.ctas)
"""
    )
    assert run_file(path) == "2 6\n"


def test_errors_cross_the_native_host_code(tmp_path) -> None:
    """The script installs the shim before it imports the DSL."""
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT_HEAD.format(first="prepare_cutlass()", second="")
        + """
def failure(action):
    try:
        action()
    except EmulatorError as error:
        return str(error)
    raise SystemExit("no error")

def launch():
    with emulator:
        function(*tensors, Float32(1.0), Int32(2))

assert "its PTX is not registered" in failure(launch)
emulator.register(ptx)
emulator.add_range("x", x.data_ptr(), 17 * 32 * 4)
message = failure(launch)
assert "st.global" in message and "`x`" in message and "cta (0, 0, 0) warp 1" in message, message
emulator.add_range("out", out.data_ptr(), 4 * 32 * 4)
launch()
assert torch.equal(out[:, 0], x.sum(1))
def interrupted(done, total):
    raise KeyboardInterrupt
emulator.machine.progress = interrupted
try:
    launch()
except KeyboardInterrupt:
    print("ok")
"""
    )
    assert run_file(path) == "ok\n"


def test_a_process_that_compiled_without_the_shim_is_told(tmp_path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT_HEAD.format(first="", second="")
        + """
try:
    prepare_cutlass()
except EmulatorError as error:
    assert "before the first compilation" in str(error)
    print("told")
"""
    )
    assert run_file(path) == "told\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch would reach the GPU with CPU pointers")
def test_outside_an_emulator_launches_go_to_the_real_runtime(tmp_path) -> None:
    """No driver is installed here, and the caller must get that error."""
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT_HEAD.format(first="prepare_cutlass()", second="")
        + """
emulator.register(ptx)
try:
    function(*tensors, Float32(1.0), Int32(2))
except Exception as error:
    assert "cudaErrorInsufficientDriver" in str(error) or "cudaErrorNoDevice" in str(error), error
    print("refused")
with emulator:
    compiled(x, out)[0](*tensors, Float32(1.0), Int32(2))
assert torch.equal(out[:, 0], x.sum(1))
"""
    )
    assert run_file(path) == "refused\n"


def test_modules_with_kernels_of_one_name_are_told_apart_by_their_code(tmp_path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        """
import os
os.environ["CUTE_DSL_ARCH"] = "sm_100a"
from nvfp4_cute.emulator.fronts.driver import Emulator
from nvfp4_cute.emulator.fronts.launch_shim import prepare_cutlass
prepare_cutlass()
import cutlass.cute as cute, torch
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import from_dlpack

class Fill:
    def __init__(self, value):
        self.value = value

    @cute.jit
    def __call__(self, out: cute.Tensor):
        self.kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        out[thread] = self.value

out = torch.zeros(32)
emulator, functions, names = Emulator(), [], set()
for value in (1.0, 2.0):
    with __import__("tempfile").TemporaryDirectory() as folder:
        options = cute.KeepPTX(True), cute.KeepCUBIN(True), DumpDir(folder)
        functions.append(cute.compile[options](Fill(value), from_dlpack(out)))
    names.update(emulator.register(functions[-1].artifacts.PTX, functions[-1].artifacts.CUBIN))
assert len(names) == 1, names
with emulator:
    for value, function in zip((2.0, 1.0), reversed(functions)):
        function(from_dlpack(out))
        assert (out == value).all(), out
print("ok")
"""
    )
    assert run_file(path) == "ok\n"
