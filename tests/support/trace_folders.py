"""Small problems in the schema of FlashInfer-Bench, and a process that judges solutions."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from new_process import forking

from nvfp4_cute.competition.trace import evaluate, session
from nvfp4_cute.problems import trace_schema as schema

# Axes of every problem that the package has, small enough for a test.
SMALL = {
    "nvfp4_gemm": {"N": (256,), "K": (512,), "M": (40,)},
    "nvfp4_group_gemm": {"N": (256,), "K": (512,), "M": ((40, 3),)},
    "nvfp4_dual_gemm": {"N": (256,), "K": (512,), "M": (40,)},
    "nvfp4_gemv": {"M": (256,), "K": (512,), "L": (2,)},
    "nvfp4_grouped_gemm": {"G": (4,), "N": (256,), "K": (512,), "M": (50,)},
    "nvfp4_moe": {"E": (8,), "H": (256,), "I": (128,), "TOPK": (2,), "T": (9,)},
    "nvfp4_quantize": {"K": (512,), "M": (40,)},
}
SCALE = "import torch\n\ndef run(x, factor):\n    return x * factor, x.sum(dim=0)\n"
RIGHT = "def run(x, factor, y, total):\n    y.copy_(x * factor)\n    total.copy_(x.sum(dim=0))\n"


def definition(**changes):
    """y = x * factor and the sums of x's columns."""
    content = {
        "name": "scale_n8",
        "op_type": "elementwise",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 8}},
        "inputs": {
            "x": {"shape": ["M", "N"], "dtype": "float32"},
            "factor": {"shape": None, "dtype": "float32"},
        },
        "outputs": {
            "y": {"shape": ["M", "N"], "dtype": "float32"},
            "total": {"shape": ["N"], "dtype": "float32"},
        },
        "reference": SCALE,
    }
    return content | changes


def workload(**changes):
    inputs = {"x": {"type": "random"}, "factor": {"type": "scalar", "value": 2.5}}
    return {"uuid": "w", "axes": {"M": 5}, "inputs": inputs} | changes


def solution(text=RIGHT, **changes):
    spec = {"language": "python", "target_hardware": ["LOCAL"], "entry_point": "main.py::run"}
    return {
        "name": "s",
        "definition": "scale_n8",
        "author": "a",
        "spec": spec | changes,
        "sources": [{"path": "main.py", "content": text}],
    }


def write(folder, definition_json=None, workloads=None, solution_json=None):
    """Writes the three files. Defaults are valid."""
    folder.mkdir(exist_ok=True)
    (folder / schema.DEFINITION_FILE).write_text(json.dumps(definition_json or definition()))
    lines = "\n".join(map(json.dumps, workloads or [workload()]))
    (folder / schema.WORKLOAD_FILE).write_text(lines)
    (folder / schema.SOLUTION_FILE).write_text(json.dumps(solution_json or solution()))
    return folder


def judge(folder, device="cpu", rules="sol-execbench", timed=False):
    """Judges a folder in a process forked from a server that has loaded torch, which saves seconds. Returns the results."""
    place, own = folder / "solution", folder / "judge"
    own.mkdir(exist_ok=True)
    evaluate.write_sources(schema.read_folder(folder)[2], place)
    settings = session.Settings(str(folder), None, str(place), device, rules, 2, timed)
    with ProcessPoolExecutor(1, forking()) as pool:
        lines = pool.submit(_run, json.dumps(asdict(settings)), str(own)).result()
    return [session.Result(**json.loads(line)) for line in lines]


def _run(settings, folder):
    os.chdir(folder)
    os.environ["POPCORN_FD"] = str(os.open("results", os.O_CREAT | os.O_WRONLY | os.O_TRUNC))
    session.main([settings])
    with open("results") as file:
        return file.readlines()
