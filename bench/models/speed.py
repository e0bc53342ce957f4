"""Measures a whole model: tokens per second of prefill and of decoding, eager and in a CUDA graph, and memory."""

import gc
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from nvfp4_cute.bench.models.random_model import Scheme, random_model
from nvfp4_cute.terminal import Progress

WARM_UPS = 3
REPEATS = 5  # repetitions of prefill; the result is their median
EAGER_STEPS = 16  # timed steps, with a wait after each
SPARE_TOKENS = 64  # room in the cache for these steps, and for warming up


@dataclass(frozen=True)
class Speed:
    """Measurements of one model in one scheme.

    Attributes:
        scheme: see ``random_model``.
        attention: name in transformers.
        batch, prompt, tokens: number of sequences, tokens per prompt, decoded tokens.
        prefill_s: device time from prompts to first tokens of all sequences, median.
        first_token_s: clock time from ids on the host to the first token on the host, median.
        eager_s: time of a decoding step of all sequences, launched kernel by kernel, median.
        decode_s: time of a decoding step by ``decode``, mean.
        decode: "CUDA graph", or "eager" and the reason why the model cannot be captured.
        weight_bytes: bytes in use after the model was made.
        peak_bytes: peak while it ran; 0 on the CPU.
    """

    scheme: str
    attention: str
    batch: int
    prompt: int
    tokens: int
    prefill_s: float
    first_token_s: float
    eager_s: float
    decode_s: float
    decode: str
    weight_bytes: int
    peak_bytes: int

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.batch * self.prompt / self.prefill_s

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second, all sequences together."""
        return self.batch / self.decode_s

    def as_dict(self) -> dict[str, Any]:
        """Returns the measurements for JSON."""
        return asdict(self) | {
            "prefill_tokens_per_s": self.prefill_rate,
            "decode_tokens_per_s": self.decode_rate,
        }


@dataclass
class ModelSpeed:
    """Measurements of a model.

    Attributes:
        model: its name.
        layers: its number of layers here.
        speeds: measurements of every scheme and case.
        left_out: cases that did not fit, with reasons.
    """

    model: str
    layers: int
    speeds: list[Speed] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Returns the measurements of all schemes for JSON."""
        return asdict(self) | {"speeds": [speed.as_dict() for speed in self.speeds]}


def measure_schemes(
    name: str,
    config: Any,
    schemes: Sequence[Scheme],
    cases: Sequence[tuple[int, int]],
    *,
    attentions: Sequence[str | None] = (None,),
    tokens: int = 128,
    device: str = "cuda",
    fuse: bool = True,
) -> ModelSpeed:
    """Measures a config in every scheme. The model of a scheme is made once, and freed before the next.

    Args:
        name: name of the model.
        config: a config of transformers.
        schemes, fuse: see ``random_model``.
        cases: pairs (batch, prompt).
        attentions: names in transformers, None for the model's own, or "grouped_sdpa" (``models.attention``).
        tokens: see ``measure``.
        device: see ``random_model``.
    """
    import nvfp4_cute.models.transformers  # noqa: F401 (registers the attention)

    runs = [(attention, *case) for attention in attentions for case in cases]
    found = ModelSpeed(name, config.get_text_config().num_hidden_layers)
    with Progress(total=len(schemes) * len(runs), desc=name, unit="run") as bar:
        for scheme in schemes:
            model: Any = None
            done = 0
            try:
                model = random_model(config, scheme, device, fuse=fuse)
                own = model.config._attn_implementation
                for attention, batch, prompt in runs:
                    bar.set_postfix_str(f"{scheme} {batch} x {prompt}")
                    model.set_attn_implementation(attention or own)
                    found.speeds.append(measure(model, scheme, batch=batch, prompt=prompt, tokens=tokens))
                    bar.update()
                    done += 1
            except torch.cuda.OutOfMemoryError:
                left = ", ".join(f"{batch} x {prompt}" for _, batch, prompt in runs[done:])
                found.left_out.append(f"{scheme}, {left}: does not fit the GPU's memory")
                bar.update(len(runs) - done)
            model = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return found


@torch.no_grad()
def measure(model: Any, scheme: str, *, batch: int = 1, prompt: int = 512, tokens: int = 128) -> Speed:
    """Times a causal model of transformers on its device.

    Prefill is the whole prompt, logits of its last token, and the chosen token; the median of five. Decoding is steps of one
    token with a StaticCache, each choosing the input of the next. Steps are launched one by one, and replayed from a CUDA graph
    without the host in between (mean over ``tokens`` steps). On the CPU, and where the capture fails, only the former are
    measured.

    Args:
        model: in eval mode.
        scheme: name for the result.
        batch, prompt, tokens: see Speed.
    """
    from transformers import StaticCache

    device = model.device
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    weight_bytes = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (batch, prompt))
    length = prompt + tokens + SPARE_TOKENS
    # transformers renamed this argument.
    parameters = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"

    def prefill(given: torch.Tensor) -> tuple[Any, torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=length)
        logits = model(given, use_cache=True, logits_to_keep=1, **{name: cache}).logits
        return cache, logits[:, -1].argmax(-1, keepdim=True)

    on_device = ids.to(device)
    times = [_seconds(lambda: prefill(on_device), device) for _ in range(2 + REPEATS)][2:]
    first = [_first_token(prefill, ids, device) for _ in range(REPEATS)]
    cache, token = prefill(on_device)

    def step() -> None:
        logits = model(token, use_cache=True, **{name: cache}).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    for _ in range(WARM_UPS):
        step()
    eager_s = statistics.median(_seconds(step, device) for _ in range(min(tokens, EAGER_STEPS)))
    how, decode_s = "eager", eager_s
    if is_cuda:
        try:
            replay = _captured(step)
            decode_s = _seconds(partial(_repeated, replay, tokens), device) / tokens
            how = "CUDA graph"
        except Exception as error:  # runs any model's code; steps are then launched one by one
            how = f"eager ({type(error).__name__}: {str(error).splitlines()[0][:60]})"
            torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else 0
    times_of = (statistics.median(times), statistics.median(first), eager_s, decode_s)
    attention = model.config._attn_implementation
    return Speed(scheme, attention, batch, prompt, tokens, *times_of, how, weight_bytes, peak)


def _repeated(function: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        function()


def _first_token(prefill: Callable[[torch.Tensor], Any], ids: torch.Tensor, device: torch.device) -> float:
    begin = time.perf_counter()
    _, token = prefill(ids.to(device))
    token.tolist()
    return time.perf_counter() - begin


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Captures ``step`` in a graph without running it."""
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
