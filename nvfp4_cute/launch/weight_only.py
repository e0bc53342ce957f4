"""The task of a product with 16-bit ``a``: a grouped GEMM, or the kernel for few rows."""

from dataclasses import replace

from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.simt import W4A16Task
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands.products import Product
from nvfp4_cute.planning.arch import is_faster_than_few_rows
from nvfp4_cute.planning.rows import rounded_rows
from nvfp4_cute.problem import INT32_MAX


def product_task(product: Product, gpu: Gpu) -> Task:
    """Returns the task of a product, or batch, with 16-bit ``a``: a grouped GEMM if it exists and estimates favor it."""
    b, out = product.b, product.out
    batches, m, n = out.shape
    is_plain, is_invariant = (
        (n <= 1 or out.stride(2) == 1) and n <= out.stride(1) <= INT32_MAX,
        is_batch_invariant(),
    )
    if is_invariant and not is_plain:
        raise UnsupportedProblem(
            "out has contiguous columns; batch-invariant products of 16-bit a write rows: allocate it as torch.empty(M, N)"
        )
    if not out.numel() or not is_plain:
        return W4A16Task(product)
    size = rounded_rows(m), b.rows, b.k, batches, b.format
    if b.format.order == "rows" and not is_invariant:
        if not is_faster_than_few_rows(gpu.arch, gpu.num_sms, *size):
            return W4A16Task(product)
    problem, operands = product.grouped()
    return GroupedTask(replace(problem, out_m_major=False), operands)
