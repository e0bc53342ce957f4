"""``vllm serve`` with a checkpoint and the plug-in, and a client of OpenAI's API that queries it."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from nvfp4_cute import env
from nvfp4_cute.bench.vllm.folders import add_tokenizer, make_folder

REQUESTS = 32
TOKENS = 64


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(folder: Path, port: int, log: Path, *options: str) -> "subprocess.Popen[bytes]":
    """Starts ``vllm serve FOLDER`` in vLLM's default mode of several processes."""
    program = ["vllm.entrypoints.cli.main", "serve", str(folder)]
    if not any(one.metadata["Name"] == "vllm" for one in metadata.distributions()):
        # The build for CPUs has a different name, by which vLLM's command does not find its own version.
        program = ["vllm.entrypoints.openai.api_server", "--model", str(folder)]
    own = ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "model"]
    command = [sys.executable, "-m", *program, *own, *options]
    variables = {"VLLM_PLUGINS": "nvfp4_cute", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, env=env.with_variables(variables), start_new_session=True
        )


def wait(port: int, server: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Waits for at most ``seconds``. Returns whether the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


def ask(port: int, prompts: list[str], tokens: int) -> list[str]:
    """Sends all prompts at once. Returns the server's answers."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

    def one(prompt: str) -> str:
        answer = client.completions.create(model="model", prompt=prompt, max_tokens=tokens, temperature=0)
        return answer.choices[0].text

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def serve(folder: Path, seconds: float, logs: Path) -> dict[str, Any]:
    """Serves Qwen3-8B in W4A16 with random weights, queries it, and returns the result."""
    model = make_folder(folder / "served", "qwen3-8b", "w4a16")
    add_tokenizer(model, json.loads((model / "config.json").read_text())["vocab_size"])
    port, log, begun = free_port(), logs / "serve.log", time.monotonic()
    server = start(
        model,
        port,
        log,
        "--load-format",
        "dummy",
        "--max-model-len",
        "4096",
        "--gpu-memory-utilization",
        "0.5",
    )
    try:
        if not wait(port, server, seconds - 20):
            return {"error": f"no answer; the end of its log: {log.read_text(errors='replace')[-1500:]}"}
        started = time.monotonic() - begun
        prompts = [
            " ".join(f"t{(i * 37 + k * 11) % 100_000}" for k in range(5 + 9 * i)) for i in range(REQUESTS)
        ]
        asked = time.monotonic()
        answers = ask(port, prompts, TOKENS)
        took = time.monotonic() - asked
        words = [len(answer.split()) for answer in answers]
        compiled = log.read_text(errors="replace").count("JIT compilation during inference")
        return {
            "start_s": started,
            "requests": len(answers),
            "tokens": sum(words),
            "seconds": took,
            "compiled": compiled,
        }
    finally:
        threading.Timer(20, server.kill).start()
        server.terminate()
        server.wait()
