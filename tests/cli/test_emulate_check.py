"""`nvfp4-cute emulate --check` and `--mode` on a script: a kernel without a needed barrier, and the repaired kernel."""

import gzip
import json

import pytest
from new_process import run_python

# Warp 0 writes shared memory, warp 1 reads it.
SCRIPT = """
import sys
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def exchange(x: cute.Tensor, out: cute.Tensor, synchronised: cutlass.Constexpr):
    tidx, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    shared = smem.allocate_tensor(Float32, cute.make_layout(32), 16)
    if tidx < 32:
        shared[tidx] = x[tidx]
    if cutlass.const_expr(synchronised):
        cute.arch.sync_threads()
    if tidx >= 32:
        out[tidx - 32] = shared[tidx - 32]


@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor, synchronised: cutlass.Constexpr):
    exchange(x, out, synchronised).launch(grid=(1, 1, 1), block=(64, 1, 1))


x = torch.arange(32, dtype=torch.float32, device="cuda")
out = torch.zeros(32, device="cuda")
launch(from_dlpack(x), from_dlpack(out), sys.argv[1] == "yes")
torch.cuda.synchronize()
assert torch.equal(out, x)
print("PASS")
"""


@pytest.fixture
def emulate(tmp_path):
    path = tmp_path / "exchange.py"
    path.write_text(SCRIPT)

    def run(*options):
        return run_python("-m", "nvfp4_cute.cli", "emulate", *options[:-1], path, options[-1])

    return run


def test_a_race_is_reported_with_both_places(emulate):
    done = emulate("--check", "no")
    assert done.returncode == 1
    assert done.stderr.startswith("nvfp4-cute emulate: 1 error in kernel `exchange`:\n")
    assert "race: ld.shared" in done.stderr
    assert "nothing orders them; a barrier between them would (cute.arch.sync_threads" in done.stderr
    # The report names both instructions with their Python lines.
    line = {text.strip(): i for i, text in enumerate(SCRIPT.split("\n"), 1)}
    for source in ("shared[tidx] = x[tidx]", "out[tidx - 32] = shared[tidx - 32]"):
        assert f"exchange.py:{line[source]}: {source}" in done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["eager", "lazy", "random:3"])
def test_the_repaired_kernel_is_clean_in_every_mode(emulate, mode):
    done = emulate("--check", "--arch", "B300", "--mode", mode, "yes")
    assert (done.returncode, done.stdout) == (0, "PASS\n"), done.stderr
    assert done.stderr.endswith("nvfp4-cute emulate: 1 launch checked: no hazards\n")


def test_installed_checkers_of_machine_code_speak_last(emulate, tmp_path, monkeypatch):
    for name in ("cuxray", "nvdisasm"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "advise" not in emulate("yes").stderr
    done = emulate("--check", "yes")
    assert done.returncode == 0
    assert [line.partition("emulate: ")[2] for line in done.stderr.splitlines()] == [
        "1 launch checked: no hazards",
        "cuxray says about the machine code of `exchange`:",
        "  advise kernel.cubin --threads 64 --smem-dynamic 128",
    ]


def test_an_unknown_mode_names_the_known_ones(emulate):
    done = emulate("--mode", "late", "yes")
    assert done.returncode == 2
    assert 'must be "eager", "lazy", or "random:SEED"' in done.stderr


def test_times_checks_and_files_in_one_run(emulate, tmp_path):
    """Times are recorded along with the checks and change no result. A finding does not hide them."""
    file = tmp_path / "f.json"
    options = [f"--json={file}"]
    timeline = tmp_path / "t.json.gz"
    done = emulate("--check", "--timing", "h200", "--trace", timeline, "--stats", *options, "yes")
    assert (done.returncode, done.stdout) == (0, "PASS\n"), done.stderr
    assert "1 launch checked: no hazards" in done.stderr and "us (modelled) on H200" in done.stderr
    found = json.loads(file.read_text())
    (launch,) = found["launches"]
    assert found["checked"] and launch["modelled"]["gpu"] == "H200" and launch["modelled"]["us"] > 1
    assert f"{launch['modelled']['us']:.2f} us (modelled) on H200" in done.stderr
    # Resources on an SM: from the machine code, and 128 bytes of shared memory.
    assert launch["registers"] > 0 and (launch["stack_bytes"], launch["shared_bytes"]) == (0, 128)
    rows = [line.split() for line in done.stderr.splitlines() if line.startswith("exchange ")]
    assert [row[:2] for row in rows] == [["exchange", "64"]] and rows[0][2] == str(launch["registers"])
    events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "launch"] == ["exchange"]
    done = emulate("--check", "--timing", "h200", *options, "no")
    assert done.returncode == 1 and "race: ld.shared" in done.stderr
    assert json.loads(file.read_text())["launches"][0]["modelled"]["us"] > 1


def test_what_nobody_looked_at_is_not_called_good(emulate, tmp_path):
    file = tmp_path / "f.json"
    done = emulate("--json", file, "yes")
    assert (
        done.returncode == 0
        and not json.loads(file.read_text())["checked"]
        and "no hazards" not in done.stderr
    )
    empty = tmp_path / "empty.py"
    empty.write_text("import sys\nsys.exit(2)\n")
    done = run_python("-m", "nvfp4_cute.cli", "emulate", "--check", empty)
    assert done.returncode == 2 and "nothing was checked" in done.stderr and "no hazards" not in done.stderr


def test_findings_for_machines(emulate, tmp_path):
    """JSON and SARIF name both places. A clean run has no findings."""
    options = [f"--{kind}={tmp_path / 'f'}.{kind}" for kind in ("json", "sarif")]
    done = emulate("--check", *options, "no")
    assert done.returncode == 1
    found = json.loads((tmp_path / "f.json").read_text())
    assert (found["exit_code"], found["arch"], found["mode"]) == (1, "sm_100a", "eager")
    ((launch,), (finding,)) = found["launches"], found["findings"]
    assert launch["grid"] == [1, 1, 1] and not launch["finished"]
    assert (finding["kind"], finding["severity"], finding["count"]) == ("race", "error", 1)
    lines = {text.strip(): i for i, text in enumerate(SCRIPT.split("\n"), 1)}
    places = lines["out[tidx - 32] = shared[tidx - 32]"], lines["shared[tidx] = x[tidx]"]
    assert (finding["site"]["line"], finding["other"]["line"]) == places
    assert finding["site"]["ptx"].startswith("ld.shared") and finding["site"]["warp"] == 1
    assert finding["site"]["python"] == "out[tidx - 32] = shared[tidx - 32]"
    assert (finding["kernel"], found["checked"]) == ("exchange", True)
    (result,) = json.loads((tmp_path / "f.sarif").read_text())["runs"][0]["results"]
    assert (result["ruleId"], result["level"]) == ("race", "error")
    for where, line in zip((result["locations"][0], result["relatedLocations"][0]), places, strict=True):
        place = where["physicalLocation"]
        assert (
            place["artifactLocation"]["uri"].endswith("exchange.py") and place["region"]["startLine"] == line
        )
    done = emulate("--check=all", "--json", str(tmp_path / "f.json"), "yes")
    assert done.returncode == 0 and json.loads((tmp_path / "f.json").read_text())["findings"] == []


# Both CTAs write the same words, with equal bytes or with their own indices.
TWICE = """
import sys
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def twice(out: cute.Tensor, own: cutlass.Constexpr):
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    out[tidx] = bidx if cutlass.const_expr(own) else 7


@cute.jit
def launch(out: cute.Tensor, own: cutlass.Constexpr):
    twice(out, own).launch(grid=(2, 1, 1), block=(32, 1, 1))


out = torch.zeros(32, device="cuda", dtype=torch.int32)
launch(from_dlpack(out), sys.argv[1] == "own")
torch.cuda.synchronize()
print("done", out[0].item())
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("check", "argument", "code", "said"),
    [
        ("--check=errors", "same", 0, "double-store (warning)"),
        ("--check=all", "same", 3, "double-store (warning)"),
        ("--check=all", "own", 1, "double-store: "),
        ("--check", "own", 1, "double-store: "),
    ],
)
def test_exit_codes_by_severity(tmp_path, check, argument, code, said):
    path = tmp_path / "twice.py"
    path.write_text(TWICE)
    done = run_python("-m", "nvfp4_cute.cli", "emulate", check, path, argument)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert (done.stdout == "done 7\n") == (argument == "same")
