"""The page of measurements of whole models in vLLM."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from nvfp4_cute.bench.vllm.plan import METHODS
from nvfp4_cute.roofline import plot

MODELS = {
    "qwen3-8b": "Qwen3-8B, dense",
    "qwen3-30b-a3b": "Qwen3-30B-A3B, 128 experts",
    "nemotron-nano-9b-v2": "Nemotron-Nano-9B-v2, hybrid of Mamba-2, attention and MLP",
}
SCHEMES = {"bf16": "bf16", "w4a16": "NVFP4, W4A16", "w4a4": "NVFP4, W4A4"}
PACKAGES = ("vllm", "torch", "nvidia-cutlass-dsl", "triton", "humming-kernels", "transformers")


def machine() -> dict[str, str]:
    """Returns the GPU and the versions of the software."""
    import torch

    found = {"python": platform.python_version()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def line(record: dict[str, Any]) -> str:
    """Returns one line about an engine, for a terminal."""
    decode = " ".join(f"b{b}: {min(ms):.2f}" for b, ms in record.get("decode_ms", {}).items())
    prefill = " ".join(f"{k}: {min(ms):.1f}" for k, ms in record.get("prefill_ms", {}).items())
    soak = record.get("soak", {})
    jit = f" soak {soak['requests']}: {len(soak['ours'])} ours, {len(soak['others'])} others" if soak else ""
    return (
        f"{record['name']:34} start {record.get('start_s', 0):4.0f} s, {record.get('weights_gib', 0):5.2f} GiB | {decode} | "
        f"{prefill} |{jit} {record.get('error', '')[:200]}"
    )


def page(found: dict[str, Any], picture_name: str = "") -> str:
    """Returns the page in Markdown.

    Args:
        found: contents of the JSON file. "remarks", a list of paragraphs, is added by hand.
        picture_name: file name of the picture next to it, if there is one.
    """
    machine_of, engines = found["machine"], found["engines"].values()
    versions = ", ".join(f"{name} {version}" for name, version in machine_of.items() if name != "gpu")
    lines = [
        "# Whole models in vLLM",
        "",
        "Made by `python -m nvfp4_cute.bench.vllm --save h200 --out bench/results`, "
        f"on one {machine_of.get('gpu', 'CPU')}; {versions}.",
        "",
        "Models have real sizes and random weights. Engines run in one process, with CUDA graphs and greedy or sampled decoding. "
        "Decoding starts after prompts of 128 tokens; a step is the difference of two runs, over 128 steps. Each time was taken "
        "twice: the table has the shorter one, and the note after it lists pairs that differ by more than 15 %. Start is the "
        'time from the call of `LLM` with an empty cache, next to other engines that start. "vLLM\'s choice" is what vLLM takes '
        "by itself.",
    ]
    for remark in found.get("remarks", []):
        lines += ["", remark]
    if picture_name:
        lines += ["", f"![Decoding speed relative to bf16]({picture_name})"]
    for model, title in MODELS.items():
        records = [r for r in engines if r.get("job", {}).get("model") == model]
        if records:
            lines += ["", f"## {title}", "", *_table(records)]
    lines += _soaks(engines)
    if "serve" in found:
        lines += ["", "## `vllm serve`", "", _served(found["serve"])]
    lines += _profiles(engines)
    return "\n".join(lines) + "\n"


def picture(found: dict[str, Any], path: Path) -> None:
    """Draws decoding speed relative to bf16: the faster of W4A16 and W4A4, by the plug-in and by vLLM's own methods.

    Raises ValueError if matplotlib is not installed.
    """
    records = [r for r in found["engines"].values() if "decode_ms" in r]
    labels: list[str] = []
    series: dict[str, list[float | None]] = {
        "NVFP4, this package": [],
        "NVFP4, vLLM's own kernels": [],
        "bf16": [],
    }
    for model, title in MODELS.items():
        times = [(r["job"], r["decode_ms"]) for r in records if r["job"]["model"] == model]
        for batch in dict.fromkeys(b for _, ms in times for b in ms):
            ours, theirs, base = (
                min(
                    (min(ms[batch]) for job, ms in times if batch in ms and _contender(job) == who),
                    default=None,
                )
                for who in series
            )
            if base is not None:
                labels.append(f"{title.split(',')[0]}, {batch} sequence{'s' * (batch != '1')}")
                for name, ms_of in zip(series, (ours, theirs, base), strict=True):
                    series[name].append(base / ms_of if ms_of else None)
    where = found["machine"].get("gpu", "CPU")
    title = f"Decoding in vLLM {found['machine'].get('vllm', '')} on one {where}, measured"
    plot.bars(path, title, labels, series, unit="tokens per second, relative to bf16")


def _contender(job: dict[str, Any]) -> str:
    if job["scheme"] == "bf16":
        return "bf16"
    return "NVFP4, this package" if job["method"] == "plugin" else "NVFP4, vLLM's own kernels"


def _table(records: list[dict[str, Any]]) -> list[str]:
    batches = list(dict.fromkeys(b for r in records for b in r.get("decode_ms", {})))
    prefills = list(dict.fromkeys(p for r in records for p in r.get("prefill_ms", {})))
    lines = [
        f"| weights, activations | computed by | {' | '.join(f'batch {b}, tokens/s' for b in batches)} | "
        f"{' | '.join(f'prefill {p}, ms' for p in prefills)} | weights, GiB | start, s |",
        "|---" * (4 + len(batches) + len(prefills)) + "|",
    ]
    far = []
    for record in records:
        job = record["job"]
        who = "vLLM" if job["scheme"] == "bf16" else METHODS[job["method"]]
        cells = []
        for b in batches:
            ms = record.get("decode_ms", {}).get(b)
            cells.append(f"{int(b) / min(ms) * 1e3:.0f}" if ms else "")
            far += (
                [f"{record['name']} at {b}: {min(ms):.2f} and {max(ms):.2f} ms"]
                if ms and max(ms) > 1.15 * min(ms)
                else []
            )
        for p in prefills:
            ms = record.get("prefill_ms", {}).get(p)
            cells.append(f"{min(ms):.1f}" if ms else "")
            far += (
                [f"{record['name']}, {p}: {min(ms):.1f} and {max(ms):.1f} ms"]
                if ms and max(ms) > 1.15 * min(ms)
                else []
            )
        note = " (not finished)" if "error" in record else ""
        rest = f"{record.get('weights_gib', 0):.2f} | {record.get('start_s', 0):.0f}"
        lines.append(f"| {SCHEMES[job['scheme']]} | {who}{note} | {' | '.join(cells)} | {rest} |")
    return [*lines, *(["", "Far apart: " + "; ".join(far) + "."] if far else [])]


def _soaks(engines: Any) -> list[str]:
    soaks = [(r["name"], r["soak"]) for r in engines if "soak" in r]
    if not soaks:
        return []
    lines = [
        "", "## Requests of random lengths", "",
        "After the times, requests of 1 to 3,000 tokens, and the compilations that vLLM's monitor reported meanwhile.", "",
        "| engine | requests | seconds | of this package | of others |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, soak in soaks:
        lines.append(
            f"| {name} | {soak['requests']} | {soak['seconds']:.0f} | {len(soak['ours'])} | {len(soak['others'])} |"
        )
    return lines


def _served(served: dict[str, Any]) -> str:
    if "error" in served:
        return f"It did not answer: {served['error'].splitlines()[0]}"
    return (
        f"Qwen3-8B in W4A16, in vLLM's default mode: ready after {served['start_s']:.0f} s. {served['requests']} requests of an "
        f"OpenAI client at once, {served['tokens']} tokens in {served['seconds']:.1f} s, {served['compiled']} compilations."
    )


def _profiles(engines: Any) -> list[str]:
    lines = []
    for record in engines:
        for name, rows in record.get("profile", {}).items():
            what = (
                "a prefill of 2,048 tokens"
                if name == "prefill"
                else f"8 steps of {name} sequences with their prefill"
            )
            lines += ["", f"### {record['name']}: {what}", "", "| kernel | launches | ms |", "|---|---|---|"]
            lines += [
                f"| `{key.replace('|', '/')}` | {count} | {ms:.2f} |"
                for key, count, ms in rows[:10]
                if ms >= 0.05
            ]
    return ["", "## GPU time by kernel", *lines] if lines else []
