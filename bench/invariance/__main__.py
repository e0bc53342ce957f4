"""Checks batch invariance on this machine's GPU: ``python -m nvfp4_cute.bench.invariance``."""

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args

import torch

from nvfp4_cute import set_batch_invariant
from nvfp4_cute.bench.invariance import cost
from nvfp4_cute.bench.invariance.answers import BATCHES, LONGEST, TOKENS, Runs, random_prompts
from nvfp4_cute.bench.invariance.draws import Found, cases, draw_numbered, sizing_of
from nvfp4_cute.bench.invariance.engine import Engine, Mode, dummy_options
from nvfp4_cute.bench.processes import write_json

EPILOG = """examples:
  python -m nvfp4_cute.bench.invariance draws --draws 200 --jobs 8    random batches of every operation, format and form
  python -m nvfp4_cute.bench.invariance cost                          time in the mode, divided by time without it
  python -m nvfp4_cute.bench.invariance transformers qwen3-8b 16bit   64 prompts at batch sizes 1, 7 and 32, whole and in chunks
  python -m nvfp4_cute.bench.invariance vllm qwen3-8b w4a16 on        the same in vLLM; "layers off" and "off" for comparison

The exit code is 1 if a bit differs in batch-invariant mode.
"""
CASES = tuple((batch, is_chunked) for is_chunked in (False, True) for batch in BATCHES)


def main(argv: list[str] | None = None) -> int:
    """Runs one of the commands. Returns 1 if a bit differs in batch-invariant mode."""
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4_cute.bench.invariance", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parts = parser.add_subparsers(dest="part", required=True)
    draws_parser = parts.add_parser("draws", help="random batches of operations")
    draws_parser.add_argument("--draws", type=int, default=200, help="batches per case")
    draws_parser.add_argument("--jobs", type=int, default=8, help="processes")
    cost_parser = parts.add_parser("cost", help="what the mode costs")
    cost_parser.add_argument(
        "--after", type=Path, metavar="FILE", help="compile, then wait for this file before timing"
    )
    cost_parser.add_argument("--jobs", type=int, help="processes that compile")
    transformers_parser = parts.add_parser("transformers", help="a whole model in transformers")
    vllm_parser = parts.add_parser("vllm", help="a whole model in vLLM")
    for part in (transformers_parser, vllm_parser):
        part.add_argument("model", help="name of a config in bench/models/configs, or a folder")
        part.add_argument("--layers", type=int, help="number of layers; default: all of the model")
        part.add_argument("--prompts", type=int, default=64, help="number of random prompts")
        part.add_argument("--tokens", type=int, default=TOKENS, help="tokens per answer")
    transformers_parser.add_argument("scheme", help="a scheme of random_model, such as 16bit or nvfp4")
    vllm_parser.add_argument(
        "scheme", help="w4a16 or w4a4 for random weights; checkpoint for those of a folder"
    )
    vllm_parser.add_argument(
        "mode",
        choices=get_args(Mode),
        help='on: VLLM_BATCH_INVARIANT=1; "layers off": only vLLM\'s own code in the mode; off: neither',
    )
    vllm_parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    for part in parts.choices.values():
        part.add_argument("--out", type=Path, default=Path(), help="folder for the JSON file")
        part.add_argument("--seconds", type=float, default=3600, help="time limit")
        part.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    args.end = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    return {"draws": run_draws, "cost": run_cost, "transformers": run_transformers, "vllm": run_vllm}[
        args.part
    ](args)


def run_draws(args: Any) -> int:
    """Draws batches of all cases in several processes."""
    count = len(list(cases(args.device, sizing_of(args.device))))
    work = [(number, args.draws, args.device, args.end) for number in range(count)]
    found: list[Found] = []
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for one in pool.imap_unordered(draw_numbered, work, chunksize=1):
            found.append(one)
            print(
                f"{one.name}: {one.refused or f'{one.draws} batches, {one.compared} rows, wrong {one.wrong}'}",
                flush=True,
            )
            write_json(args.out / "draws.json", [vars(case) for case in found])
    total = [sum(getattr(case, name) for case in found) for name in ("draws", "compared", "wrong")]
    empty = sum(not case.draws and not case.refused for case in found)
    print(
        f"all: {total[0]} batches, {total[1]} rows, wrong {total[2]}; {empty} of {len(found)} cases have no batches"
    )
    return int(total[2] > 0)


def run_cost(args: Any) -> int:
    """Compiles the kernels of all cells, then times them."""
    begun = time.monotonic()
    kernels = cost.compile_all(args.device, args.jobs)
    print(f"{kernels} kernels after {time.monotonic() - begun:.0f} s", flush=True)
    while args.after and not args.after.exists():
        time.sleep(0.2)
    costs: list[cost.Cost] = []
    for cells in cost.groups_of_cells(args.device):
        for one in cost.timed(cells, args.end):
            costs.append(one)
            print(
                f"{one.name}, {one.rows} rows, {one.scheme}: {one.free_us:.1f} -> {one.fixed_us:.1f} us, {one.factor:.2f}",
                flush=True,
            )
        write_json(args.out / "cost.json", [vars(one) for one in costs])
    print(cost.table(costs))
    return 0


def run_transformers(args: Any) -> int:
    """Answers prompts with one model, in batch-invariant mode and without it."""
    from nvfp4_cute.bench.invariance.packed import PackedModel
    from nvfp4_cute.bench.models.random_model import config_of, random_model

    config = config_of(args.model)
    if args.layers:
        config.num_hidden_layers = args.layers
    torch.manual_seed(0)
    begun = time.monotonic()
    packed = PackedModel(random_model(config, args.scheme, args.device), LONGEST + args.tokens)
    print(f"{config.num_hidden_layers} layers, made in {time.monotonic() - begun:.0f} s", flush=True)
    prompts = random_prompts(config.vocab_size, args.prompts)
    plan = [("on", CASES[:3]), ("off", CASES[:3]), ("on", CASES[3:][::-1]), ("off", CASES[3:][::-1])]
    runs = {
        mode: Runs(f"{Path(args.model).name} {args.scheme} in transformers, {mode}", prompts)
        for mode in ("on", "off")
    }
    for mode, some in plan:
        for case in some:
            with set_batch_invariant(mode == "on"), torch.no_grad():
                runs[mode].run(
                    [case],
                    lambda group, is_chunked: packed.answer(group, args.tokens, is_chunked),
                    args.end,
                )
            kept = [
                one.as_dict() | {"layers": config.num_hidden_layers}
                for one in runs.values()
                if one.differences
            ]
            write_json(args.out / f"transformers_{Path(args.model).name}_{args.scheme}.json", kept)
    return int(runs["on"].differs)


def run_vllm(args: Any) -> int:
    """Answers prompts with one engine in one mode."""
    from nvfp4_cute.bench.vllm.folders import make_folder

    if args.scheme == "checkpoint":
        folder, options = Path(args.model), {}
    else:
        changes = {"num_hidden_layers": args.layers} if args.layers else {}
        folder = make_folder(args.out / f"model_{os.getpid()}", args.model, args.scheme, changes)
        options = dummy_options()
    name = f"{Path(args.model).name} {args.scheme} in vLLM, {args.mode}"
    begun = time.monotonic()
    engine = Engine(folder, args.mode, options, device=args.device, eager=args.eager, tokens=args.tokens)
    print(f"{name}: started in {time.monotonic() - begun:.0f} s", flush=True)
    runs = Runs(name, random_prompts(engine.vocabulary, args.prompts))
    for case in (*CASES[:3], *CASES[3:][::-1]):
        runs.run([case], engine.answer, args.end)
        if runs.differences:
            file = f"vllm_{Path(args.model).name}_{args.scheme}_{args.mode.replace(' ', '_')}.json"
            write_json(args.out / file, runs.as_dict())
    engine.close()
    return int(args.mode == "on" and runs.differs)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # vLLM's threads would keep the process
