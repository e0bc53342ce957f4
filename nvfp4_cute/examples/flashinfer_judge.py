"""FlashInfer-Bench's own evaluator on a virtual B200: nvfp4-cute emulate --arch sm_100a flashinfer_judge.py SET

SET is a data set such as `nvfp4-cute export nvfp4_moe --format trace-set -o SET` writes. Needs `pip install flashinfer-bench`.
"""

import sys

from flashinfer_bench.bench.config import BenchmarkConfig
from flashinfer_bench.bench.evaluators import resolve_evaluator
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import TraceSet


def main(folder: str, device: str = "cuda:0") -> bool:
    """Prints what the evaluator says of every solution; returns whether it accepts all."""
    found, accepted = TraceSet.from_path(folder), True
    config = BenchmarkConfig(num_trials=1, profile_baseline=False)
    for name, definition in found.definitions.items():
        evaluator = resolve_evaluator(definition)
        for trace in found.workloads[name]:
            base = evaluator.build_baseline(definition, trace.workload, config, device, found.root)
            for solution in found.solutions[name]:
                run = BuilderRegistry.get_instance().build(definition, solution)
                correctness, failure = evaluator.check_correctness(
                    definition, run, base.inputs, base.outputs, config, "", device
                )
                print(solution.name, failure or correctness)
                accepted &= failure is None
    return accepted


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
