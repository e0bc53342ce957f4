"""One engine of vLLM with random weights in a separate process: starts, waits for the others of its wave, then measures.

    python -m nvfp4_cute.bench.vllm.engine JOB.json WAVE_FOLDER NAME...

writes WAVE_FOLDER/NAME.json after every step, so finished measurements exist whenever the process is ended.
"""

import cProfile
import json
import logging
import os
import pstats
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.bench.vllm.folders import make_folder
from nvfp4_cute.bench.vllm.plan import Job

PROMPT = 128
SHORT = 16
"""Tokens of the shorter of two runs whose difference is the time of decoding steps."""
SECONDS_TO_WAIT = 240
STEPS = ("started", "measured", "done")
"""Steps of an engine; it creates a file with this ending after each."""
SEED = 0
WORDS = 100  # of one line of a profile


class JitCounter(logging.Handler):
    """Counts reports of vLLM's monitor about kernels that are compiled during a request.

    Attributes:
        ours: names of kernels of CuTe DSL.
        others: all other reports.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ours: list[str] = []
        self.others: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Handles one line of vLLM's log."""
        text = record.getMessage()
        if "during inference" in text:
            (self.ours if "CuTeDSL" in text else self.others).append(text.split(". This causes")[0])


class Measured:
    """An engine and its measurements."""

    def __init__(self, job: Job, folder: Path):
        self.job, self.folder = job, folder
        self.record: dict[str, Any] = {"name": job.name, "job": job.as_dict()}

    def save(self) -> None:
        """Writes the current measurements."""
        (self.folder / f"{self.job.name}.json").write_text(json.dumps(self.record))

    def start(self) -> None:
        """Makes the engine, and notes its start time and memory."""
        begun = time.perf_counter()
        import vllm.model_executor.model_loader.dummy_loader as dummy_loader
        from vllm import LLM

        self.record["import_s"] = time.perf_counter() - begun
        dummy_loader.DummyModelLoader.load_weights = load_weights
        job = self.job
        folder = make_folder(self.folder / "models" / job.name, job.model, job.scheme, job.config)
        options: dict[str, Any] = dict(
            load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, max_num_seqs=job.seqs,
            max_num_batched_tokens=8192, enable_prefix_caching=False, gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=int(job.kv_gib * 2**30), seed=SEED,
            compilation_config={"cudagraph_capture_sizes": [s for s in (1, 2, 4, 8, 16, 32, 64, 128) if s <= job.seqs]},
        )  # fmt: skip
        if job.method == "marlin":
            options |= {"linear_backend": "marlin", "moe_backend": "marlin"}
        begun = time.perf_counter()
        self.engine = LLM(str(folder), **options | job.engine)
        self.record["start_s"] = time.perf_counter() - begun
        config = self.engine.llm_engine.vllm_config.model_config
        self.size, self.longest = config.get_vocab_size(), config.max_model_len
        runner = (
            self.engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        )
        self.record["weights_gib"] = getattr(runner, "model_memory_usage", 0) / 2**30
        self.record["quantization"] = str(self.engine.llm_engine.vllm_config.model_config.quantization)

    def generate(self, prompts: list[int], tokens: int) -> float:
        """Returns the seconds for ``tokens`` tokens after random prompts of these lengths."""
        from vllm import SamplingParams

        rng = random.Random(f"{prompts[:4]} {len(prompts)}")
        inputs: Any = [{"prompt_token_ids": [rng.randrange(self.size) for _ in range(n)]} for n in prompts]
        sampling = SamplingParams(
            temperature=self.job.temperature, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begun = time.perf_counter()
        self.engine.generate(inputs, sampling, use_tqdm=False)
        return time.perf_counter() - begun

    def measure(self) -> None:
        """Times decoding and prefill, each twice."""
        job, record = self.job, self.record
        self.generate([SHORT], 8)
        record["decode_ms"], record["prefill_ms"] = {}, {}
        for batch in job.batches:
            prompts, times = [PROMPT] * batch, []
            self.generate(prompts, 6)
            for _ in range(2):
                short, long = (self.generate(prompts, SHORT + more) for more in (0, job.steps))
                times.append((long - short) / job.steps * 1e3)
            record["decode_ms"][str(batch)] = times
            self.save()
        for sequences, length in job.prefills:
            prompts = [length] * sequences
            self.generate(prompts, 1)
            record["prefill_ms"][f"{sequences} x {length}"] = [
                min(self.generate(prompts, 1) for _ in range(8)) * 1e3 for _ in range(2)
            ]
        self.save()
        record["is_measured"] = True
        self.save()

    def profile(self) -> None:
        """Lists the kernels with the most GPU time."""
        for name in self.job.profiled:
            self.record.setdefault("profile", {})[name] = self._profile(name)
            self.save()
            if name == "prefill":
                self.record["host"] = self._host_profile()

    def soak(self) -> None:
        """Serves requests of random lengths, and notes kernels that are compiled meanwhile."""
        if not self.job.soak:
            return
        counter, rng = JitCounter(), random.Random(SEED)
        logging.getLogger("vllm").addHandler(counter)
        done, begun = 0, time.perf_counter()
        while done < self.job.soak:
            group = min(rng.randrange(1, self.job.seqs), self.job.soak - done)
            lengths = [min(int(2 ** rng.uniform(0, 11.5)), self.longest - 64) for _ in range(group)]
            self.generate(lengths, rng.randrange(1, 40))
            done += group
        self.record["soak"] = {
            "requests": done, "seconds": time.perf_counter() - begun, "ours": counter.ours, "others": counter.others
        }  # fmt: skip
        self.save()

    def _profile(self, name: str) -> list[tuple[str, int, float]]:
        """Returns wall time, GPU time, and the kernels with the most GPU time: name, launches, total ms."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            if name == "prefill":
                seconds = self.generate([min(2048, self.longest - 64)], 1)
            else:
                seconds = self.generate([PROMPT] * int(name), 8)
        events = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
        rows = [(row.key[:WORDS], row.count, row.self_device_time_total / 1e3) for row in events]
        kernels = [
            row for row, event in zip(rows, events, strict=True) if event.device_type == DeviceType.CUDA
        ]
        total = sum(ms for _, _, ms in kernels)
        return [
            ("on the clock", 1, seconds * 1e3),
            ("all kernels", sum(n for _, n, _ in kernels), total),
            *kernels[:16],
        ]

    def _host_profile(self) -> list[tuple[str, int, float, float]]:
        """Returns the functions in which a prefill spends host time: name, calls, ms of its own, ms with its callees."""
        profiler = cProfile.Profile()
        profiler.enable()
        self.generate([min(2048, self.longest - 64)], 1)
        profiler.disable()
        stats = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
        rows = [(f"{path.rpartition('site-packages/')[2]}:{name}", calls, own * 1e3, cumulated * 1e3)
                for (path, _, name), (_, calls, own, cumulated, _) in stats]  # fmt: skip
        most_own = sorted(rows, key=lambda row: -row[2])[:60]
        ours = sorted((row for row in rows if "nvfp4_cute" in row[0]), key=lambda row: -row[3])[:30]
        return [*dict.fromkeys(most_own + ours)]


def load_weights(loader: Any, model: torch.nn.Module, config: Any) -> None:
    """Fills weights, in place of vLLM's loader, with random values whose products neither vanish nor overflow."""
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    torch.manual_seed(SEED)
    for layer in model.modules():
        for name, tensor in get_layer_tensors(layer).items():
            if name not in layer._non_persistent_buffers_set and tensor.device.type != "meta":
                _fill(name, tensor.data)


def _fill(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.uint8:
        tensor.random_(0, 256)
    elif tensor.element_size() == 1:  # block scales
        tensor.copy_(torch.empty(tensor.shape, dtype=torch.float16, device=tensor.device).uniform_(64, 448))
    elif "scale" in name and tensor.dtype == torch.float32 and tensor.numel() <= 4096:
        of_cache = name[-8:] in ("_k_scale", "_v_scale", "_q_scale") or "prob" in name
        factor = (5.0 if "input" in name else 0.05) / 2688
        tensor.fill_(1.0 if of_cache else 1 / factor if "global" in name else factor)
    elif tensor.is_floating_point():
        if tensor.ndim == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, 0.02)


def wait_for(folder: Path, names: list[str], what: str, seconds: float = SECONDS_TO_WAIT) -> None:
    """Waits until every engine of ``names`` has reached step ``what``, or has failed, for at most ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if all((folder / f"{name}.{what}").exists() for name in names):
            return
        time.sleep(0.2)


def main() -> int:
    """Measures one job. Returns 1 if something went wrong, which the record states.

    Once all engines of the wave have started, they are measured in its order. Profiles and requests follow in that order.
    """
    job = Job.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    folder, names = Path(sys.argv[2]), sys.argv[3:]
    before = names[: names.index(job.name)]
    measured = Measured(job, folder)
    try:
        measured.start()
        measured.save()
        (folder / f"{job.name}.started").touch()
        wait_for(folder, names, "started")
        wait_for(folder, before, "measured")
        measured.measure()
        (folder / f"{job.name}.measured").touch()
        wait_for(folder, names, "measured")
        wait_for(folder, before, "done")
        measured.soak()
        measured.profile()
    except BaseException as error:
        measured.record["error"] = f"{type(error).__name__}: {error}"[:800]
        measured.record["trace"] = traceback.format_exc()[-3000:]
        traceback.print_exc()
    finally:
        measured.save()
        for what in STEPS:
            (folder / f"{job.name}.{what}").touch()
    return 1 if "error" in measured.record else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # vLLM's threads would keep the process
