"""Exports for operands of other formats: the file runs on a virtual GPU, and an unsupported export states the reason."""

import subprocess
import sys

import pytest

from nvfp4_cute.cli import main
from nvfp4_cute.competition.export import make_submission
from nvfp4_cute.formats.block_format import MXFP4, MXFP8_E4M3

SCRIPT = """
import torch
from nvfp4_cute import quantize
from nvfp4_cute.formats.block_format import format_named
from nvfp4_cute.problems.submission_parts import permuted_scale
import exported

torch.manual_seed(0)
formats, (m, n, k) = [format_named(name) for name in {names}], (40, 256, 256)
tensors = [quantize(torch.randint(-2, 3, (rows, k)).float(), format=f) for f, rows in zip(formats, (m, n, n))]
a, b, b2 = (t.dequantize(torch.float64) for t in tensors)
one, other = a @ b.T, a @ b2.T
data = [t.data.cuda()[..., None] for t in tensors]
scales = [permuted_scale(t.scale.view(torch.uint8).cuda()) for t in tensors]
c = torch.zeros(m, n, 1, dtype=torch.float16, device="cuda")
if {problem!r} == "nvfp4_dual_gemm":
    exported.custom_kernel((*data, None, None, None, *scales, c))
    want = torch.nn.functional.silu(one) * other
elif {problem!r} == "nvfp4_group_gemm":
    exported.custom_kernel(([(*data[:2], c)], None, [tuple(scales[:2])], None))
    want = one
else:
    exported.custom_kernel((*data[:2], None, None, *scales[:2], c))
    want = one
torch.cuda.synchronize()
torch.testing.assert_close(c.cpu()[..., 0], want.half(), rtol=2e-3, atol=2e-3)
assert want.abs().max() > 8
print("as the reference")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "names"),
    [
        ("nvfp4_gemm", ("mxfp8_e4m3", "mxfp4", "mxfp4")),
        ("nvfp4_group_gemm", ("mxfp4", "mxfp4", "mxfp4")),
        ("nvfp4_dual_gemm", ("mxfp8_e5m2", "mxfp8_e4m3", "mxfp8_e4m3")),
    ],
)
def test_an_export_runs(problem, names, tmp_path):
    options = ["--formats", ",".join(names[:2]), "-o", str(tmp_path / "exported.py")]
    assert main(["export", problem, *options]) == 0
    (tmp_path / "script.py").write_text(SCRIPT.format(problem=problem, names=names))
    command = [sys.executable, "-m", "nvfp4_cute", "emulate", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "as the reference" in done.stdout, done.stderr


def test_formats_are_frozen_in():
    text = make_submission("nvfp4_gemm", formats=(MXFP8_E4M3, MXFP4)).text
    assert (
        "FORMATS: Formats | None = (BlockFormat('mxfp8_e4m3'" in text
        and "MXFP8_E4M3 x MXFP4 block-scaled GEMM" in text
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nvfp4_gemm", "--formats", "fp8_1x128,fp8_128x128"],
            "--formats fp8_1x128,fp8_128x128: the kernel of nvfp4_gemm does not multiply them; use one of nvfp4,nvfp4;",
        ),
        (
            ["nvfp4_gemv", "--formats", "mxfp4"],
            "the kernel of nvfp4_gemv multiplies NVFP4 alone; leave it out",
        ),
        (["nvfp4_gemm", "--formats", "mxfp4", "--torch"], "leave --formats or --torch out"),
        (["nvfp4_gemm", "--formats", "mxfp4", "--format", "trace"], "--map and --formats"),
    ],
    ids=str,
)
def test_what_is_not_exported(words, message, tmp_path, capsys):
    assert main(["export", *words, "-o", str(tmp_path / "out")]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
