"""CUTLASS Operators: operators of each class that accept float16 operands."""

from functools import partial

import cutlass.operators as ops
import torch

from nvfp4_cute.bench.witnesses.support import close, main, rand

SIZE = 256


def product(name: str, *which: int) -> None:
    """Multiplies with operators of a class. which: their indices among those that accept the operands."""
    a, b = rand(SIZE, SIZE, dtype=torch.float16), rand(SIZE, SIZE, dtype=torch.float16)
    out = torch.empty(SIZE, SIZE, dtype=torch.float16, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    arguments = ops.GemmArguments(a, b, out, accumulator_type=torch.float32)
    found = ops.get_operators(arguments, target_sm=f"{major}{minor}")
    chosen = [one for one in found if type(one).__name__ == name]
    assert chosen, f"no {name} among {sorted({type(one).__name__ for one in found})}"
    for index in which:
        out.fill_(torch.nan)
        chosen[index].run(arguments)
        close(out, a.cpu().double() @ b.cpu().double(), 0.002)


main(
    {
        "persistent": partial(product, "PersistentDenseGemmOperator", 0, -1),
        "preferred-cluster": partial(product, "PersistentDenseGemmPreferredClusterOperator", 0),
        "custom-epilogue": partial(product, "PersistentDenseGemmEFCOperator", 0),
        "sm80": partial(product, "Sm80TensorOpGemmOperator", 0, -1),
    }
)
