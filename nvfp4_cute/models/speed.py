"""Tokens per second of a whole model: prefill, decode in a CUDA graph, memory."""

import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

WARM_UPS = 3
REPEATS = 5  # of prefill; the median counts
SPARE_TOKENS = 16  # room of the cache for warming up


@dataclass(frozen=True)
class Speed:
    """What was measured of one model in one way.

    Attributes:
        way: as of ``random_model``. batch, prompt, tokens: sequences, tokens of each prompt, tokens decoded.
        prefill_s: from prompt to first token, batch of ``batch``, median. decode_s: of one step, all sequences, mean.
        decode: "CUDA graph", or "eager" where the model cannot be captured, and why.
        weight_bytes: after the model was made. peak_bytes: while it ran; 0 on the CPU.
    """

    way: str
    batch: int
    prompt: int
    tokens: int
    prefill_s: float
    decode_s: float
    decode: str
    weight_bytes: int
    peak_bytes: int

    @property
    def prefill_rate(self) -> float:
        """Tokens of prompts per second."""
        return self.batch * self.prompt / self.prefill_s

    @property
    def decode_rate(self) -> float:
        """Tokens generated per second, all sequences together."""
        return self.batch / self.decode_s

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self) | {
            "prefill_tokens_per_s": self.prefill_rate,
            "decode_tokens_per_s": self.decode_rate,
        }


@torch.no_grad()
def measure(model: Any, way: str, *, batch: int = 1, prompt: int = 512, tokens: int = 128) -> Speed:
    """Time a causal model of transformers on the device where it is.

    Prefill: the whole prompt, logits of its last token, the token chosen; the median of five. Decode: steps of one token with
    a StaticCache, each choosing the token of the next one, replayed from a CUDA graph without the host between; the mean
    over ``tokens`` steps. Where capturing fails, or on the CPU, steps are launched one by one.

    Args:
        model: in eval mode. way: for the result.
    """
    from transformers import StaticCache

    device = model.device
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    weight_bytes = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt), device=device)
    length = prompt + tokens + SPARE_TOKENS
    # transformers renames the argument.
    parameters = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"

    def prefill() -> tuple[Any, torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=length)
        logits = model(ids, use_cache=True, logits_to_keep=1, **{name: cache}).logits
        return cache, logits[:, -1].argmax(-1, keepdim=True)

    times = [_seconds(prefill, device) for _ in range(2 + REPEATS)][2:]
    cache, token = prefill()

    def step() -> None:
        logits = model(token, use_cache=True, **{name: cache}).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    for _ in range(WARM_UPS):
        step()
    how, run = "eager", step
    if is_cuda:
        try:
            run = _captured(step)
            how = "CUDA graph"
        except Exception as error:  # noqa: BLE001 (any model's code; what remains is to launch its steps one by one)
            how = f"eager ({type(error).__name__}: {str(error).splitlines()[0][:60]})"
            torch.cuda.synchronize()
            cache, token = prefill()

    def decode() -> None:
        for _ in range(tokens):
            run()

    decode_s = _seconds(decode, device) / tokens
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else 0
    return Speed(way, batch, prompt, tokens, statistics.median(times), decode_s, how, weight_bytes, peak)


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """``step`` as a graph; capturing runs nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
