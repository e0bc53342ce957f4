"""Every program of nvfp4_cute/examples runs and does what its page says."""

import importlib.util
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "nvfp4_cute" / "examples"
CHECKPOINT = TESTS / "data" / "checkpoints" / "ct-qwen3-nvfp4"

needs_openai = pytest.mark.skipif(
    not importlib.util.find_spec("openai"), reason="the package openai is not installed"
)
needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"),
    reason="the extra models is not installed (make test-transformers)",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_every_example_is_tested():
    here = Path(__file__).read_text() + (TESTS / "competition/trace/test_flashinfer_bench.py").read_text()
    for path in EXAMPLES.glob("[!_]*.py"):
        assert path.stem in here


@pytest.mark.parametrize("name", ["grouped_gemm", "moe_block"])
def test_examples_run(name):
    done = run("-m", f"nvfp4_cute.examples.{name}")
    assert done.returncode == 0, done.stderr
    assert "(40, 256)" in done.stdout


def test_grouped_gemm_gives_the_same_bits_on_the_emulator():
    from nvfp4_cute.examples import grouped_gemm

    for got, expected in zip(grouped_gemm.main(backend="emulator"), grouped_gemm.main(), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("fixed", [False, True])
def test_planted_race_is_found(fixed):
    script = str(EXAMPLES / "planted_race.py")
    done = run("-m", "nvfp4_cute", "emulate", "--check", script, *(["--fixed"] if fixed else []))
    assert done.returncode == (0 if fixed else 1), done.stderr
    assert ("race: " in done.stderr) != fixed
    if fixed:
        assert "[32, 64, 96, 0]" in done.stdout


@needs_transformers
def test_checkpoint_to_tokens_generates():
    from nvfp4_cute.examples import checkpoint_to_tokens

    tokens = checkpoint_to_tokens.main([str(CHECKPOINT), "--tokens", "3"])
    assert len(tokens) == 4


class _Server(BaseHTTPRequestHandler):
    """Answers as vLLM's OpenAI server does, with one model and one completion."""

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self._answer(
            '{"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "us"}]}'
        )

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        choice = '{"index": 0, "text": " scattering", "finish_reason": "length", "logprobs": null}'
        self._answer(
            f'{{"id": "1", "object": "text_completion", "created": 0, "model": "tiny", "choices": [{choice}]}}'
        )

    def log_message(self, *_):
        pass


@needs_openai
def test_vllm_client_prints_the_completion(capsys):
    from nvfp4_cute.examples import vllm_client

    server = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        assert vllm_client.main(["Why is the sky blue?", "--url", url]) == " scattering"
    finally:
        server.shutdown()
        thread.join()
    assert "scattering" in capsys.readouterr().out
