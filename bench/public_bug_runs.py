"""Small runs of public kernels with reported faults; `public_bugs` starts this file under the emulator.

Each function runs one kernel of an unpacked distribution, without the imports of the rest of its package.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class Edit:
    """A change of one line of a source file.

    Attributes:
        file: name of the file.
        line: number of the line.
        insert: code to insert before the line, with the line's indentation.
        replace: a part of the line, and the text that replaces it.
    """

    file: str
    line: int
    insert: str = ""
    replace: tuple[str, str] = ("", "")

    def apply(self, lines: list[str]) -> None:
        """Changes the lines in place."""
        text = lines[self.line - 1]
        indent = text[: len(text) - len(text.lstrip())]
        old, new = self.replace
        if old not in text:
            raise ValueError(f"{self.file}:{self.line} is {text.strip()!r}, which does not contain {old!r}")
        inserted = "".join(f"{indent}{one}\n" for one in self.insert.splitlines())
        lines[self.line - 1] = inserted + text.replace(old, new)


def edited(path: Path, edits: Sequence[Edit]) -> Path:
    """Returns the path of the source with its edits applied; `path` itself if there are none."""
    own = [edit for edit in edits if edit.file == path.name]
    if not own:
        return path
    lines = path.read_text().splitlines(keepends=True)
    for edit in own:
        edit.apply(lines)
    copy = Path(tempfile.mkdtemp(prefix="public_bugs_")) / path.name
    copy.write_text("".join(lines))
    return copy


M128 = "2cta_mma_blockscale_m128.py"
AWAIT_SFB = """while not prims.mbarrier_try_wait_parity(
    sfb_smem_full_mbar_ptr.subview(stage), phase_local, time_limit=10_000_000
):
    pass"""
WAITS_FOR_SFB = (Edit(M128, 677, AWAIT_SFB),)
WIDER_SCOPE = (
    *WAITS_FOR_SFB,
    *(Edit(M128, line, replace=("MemScope.CTA", "MemScope.CLUSTER")) for line in (679, 978)),
)


# ---- parts of packages -------------------------------------------------------------------------------------------------
def package(name: str, folder: Path) -> None:
    """Registers a package whose modules lie in `folder`, without its __init__.py."""
    made = ModuleType(name)
    made.__path__ = [str(folder)]
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = made


def stand_in(name: str, **attributes: Any) -> None:
    """Registers a module with a few attributes in place of one that the kernel does not need."""
    made = sys.modules[name] = ModuleType(name)
    made.__dict__.update(attributes)


def load(name: str, path: Path, edits: Sequence[Edit] = ()) -> Any:
    """Imports a file, edited, as a module."""
    spec = importlib.util.spec_from_file_location(name, edited(path, edits))
    assert spec is not None and spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def sglang(folder: Path) -> Path:
    """Registers the packages around SGLang's kernels. Returns the folder of its operations."""
    package("sglang", folder / "sglang")
    stand_in("sglang.kernels.kernel_api_logging", debug_kernel_api=lambda function: function)
    stand_in("sglang.srt")
    stand_in("sglang.srt.utils", get_device_sm=lambda: 100)
    stand_in("sglang.srt.utils.common", direct_register_custom_op=lambda **names: None)
    return folder / "sglang/kernels/ops"


def rand(*shape: int) -> torch.Tensor:
    """Returns a random bfloat16 tensor on the virtual GPU."""
    return torch.randn(shape, device="cuda").bfloat16()


# ---- kernels ---------------------------------------------------------------------------------------------------------------
def fused_a_gemm(folder: Path, edits: Sequence[Edit]) -> None:
    """SGLang's DeepSeek-V3 fused-A GEMM: 4 tokens, K = 1024, N = 32."""
    name = "gemm/cutedsl_dsv3_fused_a_gemm.py"
    module = load("sglang.kernels.ops.gemm.fused_a", sglang(folder) / name, edits)
    module._dsv3_fused_a_gemm_run(rand(4, 1024), rand(32, 1024).t())


def _prefill(folder: Path, family: str, name: str, edits: Sequence[Edit]) -> Any:
    """Imports a kernel of SGLang's prefill for linear attention, of a family ("gdn" or "kda")."""
    import cutlass.cute as cute

    def make_fake_tensor(dtype: Any, shape: tuple[Any, ...], divisibility: int = 1) -> Any:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        align = max(1, divisibility * dtype.width // 8)
        return cute.runtime.make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)

    ops = sglang(folder)
    stand_in("quack")
    stand_in("quack.compile_utils", make_fake_tensor=make_fake_tensor)
    for part in ("", ".linear", f".linear.{family}_blackwell"):
        package(f"sglang.kernels.ops.attention{part}", ops / f"attention{part.replace('.', '/')}")
    path = ops / f"attention/linear/{family}_blackwell" / f"{name}.py"
    return load(f"sglang.kernels.ops.attention.linear.{family}_blackwell.{name}", path, edits)


TOKENS, CHUNK, DIM = 256, 64, 128


def _chunks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns cumulative lengths, chunks and their number for one sequence."""
    count = TOKENS // CHUNK
    chunks = torch.stack([torch.zeros(count), torch.arange(count)], 1)
    lists = ([0, TOKENS], chunks.tolist(), [count])
    ends, indices, total = (torch.tensor(one, device="cuda").to(torch.int32) for one in lists)
    return ends, indices, total


def gdn_kkt(folder: Path, edits: Sequence[Edit]) -> None:
    """First kernel of SGLang's GDN prefill: one head, 256 tokens, two chunks per CTA."""
    module = _prefill(folder, "gdn", "kernel_kkt_inv_uw", edits)
    keys = torch.nn.functional.normalize(rand(TOKENS, 1, DIM).float(), dim=-1).bfloat16()
    gates, beta = -torch.rand(TOKENS, 1, device="cuda") / 10, torch.rand(TOKENS, 1, device="cuda")
    results = torch.empty_like(keys), torch.empty_like(keys)
    values = rand(TOKENS, 1, DIM)
    module.kkt_inv_uw_cutedsl(
        keys, values, *results, gates, beta, torch.empty_like(gates), *_chunks(), num_sms=2
    )


def kda_kkt(folder: Path, edits: Sequence[Edit]) -> None:
    """First kernel of SGLang's KDA prefill: one head, 256 tokens, two chunks per CTA."""
    module = _prefill(folder, "kda", "kernel_kkt_inv_uw", edits)
    keys = [torch.nn.functional.normalize(rand(TOKENS, 1, DIM).float(), dim=-1).bfloat16() for _ in range(3)]
    results = torch.empty_like(keys[0]), torch.empty_like(keys[0])
    beta = torch.rand(TOKENS, 1, device="cuda")
    module.kkt_inv_uw_cutedsl(*keys, rand(TOKENS, 1, DIM), *results, beta, *_chunks(), num_sms=2)


def gdn_output(folder: Path, edits: Sequence[Edit]) -> None:
    """Last kernel of SGLang's GDN prefill: one head, 256 tokens, two chunks per CTA."""
    module = _prefill(folder, "gdn", "kernel_o", edits)
    queries, keys, values = (rand(TOKENS, 1, DIM) for _ in range(3))
    states, count = rand(TOKENS // CHUNK, 1, DIM, DIM), TOKENS // CHUNK
    gates = -torch.rand(TOKENS, 1, device="cuda") / 10
    module.o_cutedsl(
        queries, keys, values.view(count, CHUNK, 1, DIM), states, gates, torch.empty_like(values), *_chunks(), DIM**-0.5,
        num_sms=2,
    )  # fmt: skip


def indexer_backward(folder: Path, edits: Sequence[Edit]) -> None:
    """cuDNN frontend's backward pass of the sparse indexer: one query, 64 heads, 256 keys."""
    for part in ("", ".indexer_backward", ".utils"):
        where = folder / "cudnn/deepseek_sparse_attention" / part[1:]
        package(f"cudnn.deepseek_sparse_attention{part}", where)
    package("cudnn", folder / "cudnn")
    torch.cuda.nvtx.range = lambda *names: contextlib.nullcontext()  # type: ignore[assignment]
    module = importlib.import_module(
        "cudnn.deepseek_sparse_attention.indexer_backward.indexer_backward_sm100"
    )
    heads, keys = 64, 256
    query, weights, key = rand(1, 1, heads, DIM), rand(1, 1, heads), rand(1, keys, DIM)
    signal = torch.randn(1, 1, keys, device="cuda")
    chosen = torch.arange(keys, device="cuda").to(torch.int32).view(1, 1, keys)
    run = module._build_cute_dsl_kernel(heads, DIM, keys, DIM**-0.5, 128)
    grads = torch.empty_like(query), torch.empty_like(weights), torch.zeros(1, keys, DIM, device="cuda")
    run.gemm_only(query, weights, key, *grads, signal, chosen)


def grouped_gemm(folder: Path, edits: Sequence[Edit], which: str) -> None:
    """cuDNN frontend's grouped GEMM with MXFP8 operands: two experts of 256 rows, N = 256, K = 128."""
    for name in ("cudnn", "cudnn.gemm", "cudnn.gemm.cutedsl", "cudnn.gemm.cutedsl.grouped"):
        package(name, folder / name.replace(".", "/"))
    module = importlib.import_module(f"cudnn.gemm.cutedsl.grouped.{which}.api")
    rows, columns, depth, experts, block = 512, 256, 128, 2, 32

    def scales(batch: int, count: int) -> torch.Tensor:
        shape = (batch, -(-count // 128), -(-depth // block // 4), 32, 4, 4)
        ones = torch.full(shape, 127, dtype=torch.uint8, device="cuda")
        return ones.view(torch.float8_e8m0fnu).permute(3, 4, 1, 5, 2, 0)

    a, b = (
        rand(*shape).to(torch.float8_e4m3fn).permute(1, 2, 0)
        for shape in ((1, rows, depth), (experts, columns, depth))
    )
    getattr(module, f"grouped_gemm_{which}_wrapper_sm100")(
        a_tensor=a,
        b_tensor=b,
        sfa_tensor=scales(1, rows),
        sfb_tensor=scales(experts, columns),
        padded_offsets=torch.tensor([256, 512], device="cuda").to(torch.int32),
        alpha_tensor=torch.ones(experts, device="cuda"),
        prob_tensor=torch.ones(rows, 1, 1, device="cuda"),
        mma_tiler_mn=(256, 256),
        cluster_shape_mn=(2, 1),
        sf_vec_size=block,
    )


def top_k(folder: Path, edits: Sequence[Edit]) -> None:
    """FlashInfer's GVR top-k: one row of 4096 values, hints that all name the first one."""
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    for name in ("flashinfer", "flashinfer.topk_varlen", "flashinfer.topk_varlen.kernels"):
        package(name, folder / name.replace(".", "/"))
    path = folder / "flashinfer/topk_varlen/kernels/gvr_topk_decode.py"
    module = load("flashinfer.topk_varlen.kernels.gvr_topk_decode", path, edits)
    count, length = 1024, 4096
    hints, found = (torch.zeros(1, count, device="cuda").to(torch.int32) for _ in range(2))
    lengths = torch.tensor([length], device="cuda").to(torch.int32)
    tensors = (torch.randn(1, length, device="cuda"), hints, lengths, found)
    values, hinted, lengths_, out = (from_dlpack(tensor, assumed_align=16) for tensor in tensors)
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    kernel = module.GvrTopKKernel(
        cutlass.Float32, count, return_output_values=False, min_blocks_per_mp=1,
        p2_warp_redundant=False, p4_warp_redundant=False,
    )  # fmt: skip
    arguments = (values, hinted, lengths_, None, out, None, stream)
    cute.compile(kernel, *arguments)(*arguments)


def blockscale_m128(folder: Path, edits: Sequence[Edit], *options: str) -> None:
    """CUTLASS's example of a 2-CTA block-scaled product with M = 128, at 256 x 256 x 512."""
    if "sfb_awaited" in options and not edits:
        edits = WAITS_FOR_SFB
    sys.argv[1:] = ["--mnk", "256,256,512"]
    runpy.run_path(str(edited(folder / M128, edits)), run_name="__main__")


def dense_blockscaled(folder: Path, edits: Sequence[Edit]) -> None:
    """CUTLASS's dense block-scaled GEMM with overlapping accumulators, at 512 x 512 x 256."""
    sys.argv[1:] = ["--mma_tiler_mn", "256,256", "--cluster_shape_mn", "2,1", "--mnkl", "512,512,256,1"]
    runpy.run_path(str(folder / "dense_blockscaled_gemm_persistent.py"), run_name="__main__")


RUNS: tuple[Callable[..., None], ...] = (
    fused_a_gemm, gdn_kkt, gdn_output, kda_kkt, indexer_backward, grouped_gemm, top_k, blockscale_m128, dense_blockscaled,
)  # fmt: skip


def command(name: str, folder: Path, edits: Sequence[Edit], arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with which this file runs a kernel."""
    return [__file__, name, str(folder), json.dumps([asdict(edit) for edit in edits]), *arguments]


def main(name: str, folder: str, edits: str, *arguments: str) -> None:
    """Runs the kernel of that name."""
    torch.manual_seed(0)
    run = next(run for run in RUNS if run.__name__ == name)
    run(Path(folder), [Edit(**edit) for edit in json.loads(edits)], *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
