"""PersistentMLP compared with the gemm calls that it replaces, modelled on a GPU that need not be present.

    python -m nvfp4_cute.bench.mlp [--save]

prints (and with --save writes to ``bench/results/b200_mlp.md``) the modelled time of equal layers in one launch, the
sum of one ``gemm`` per layer with NVFP4 results, and the time in which memory delivers the weights. Takes a few
minutes.
"""

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from nvfp4_cute.bench.command import RESULTS
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.gpus.targets import B200, Target
from nvfp4_cute.gpus.timing_figures import MODEL_ERROR, constants_of
from nvfp4_cute.ops.gemm_chain import ChainWorkspace, gemm_chain
from nvfp4_cute.ops.parts import gemm
from nvfp4_cute.problem import NVFP4
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.roofline.modelled import modelled_times

LAYERS = 18
# (rows, N): decode of a few and of many sequences.
SHAPES = ((16, 2048), (128, 2048), (16, 4096))
HEADER = (
    "rows x N",
    "PersistentMLP us",
    "a gemm a layer, us",
    "faster",
    "MB read",
    "weights' speed of light us",
)


def model(m: int, n: int, target: Target = B200, layers: int = LAYERS) -> tuple[str, ...]:
    """Returns the row of a shape: ``layers`` layers of N x N on M rows. Every gemm is assumed to be as fast as the first."""
    values = lambda rows: torch.empty(rows, NVFP4_FORMAT.row_bytes(n), dtype=torch.uint8)
    scales = lambda rows: torch.empty(NVFP4_FORMAT.scale_bytes(rows, n), dtype=torch.uint8)
    weights = torch.empty(layers, n, NVFP4_FORMAT.row_bytes(n), dtype=torch.uint8)
    weight_scales = torch.stack([scales(n).view(n // 128, -1, 32, 4, 4) for _ in range(layers)])
    x, x_scale, alpha, global_scale = values(m), scales(m), torch.ones(layers), torch.ones(layers)
    workspace = ChainWorkspace.make(layers, m, n, x.device)
    (chained,) = modelled_times(
        lambda backend: gemm_chain(
            x, weights, x_scale, weight_scales, alpha, global_scale, workspace, backend=backend
        ),
        target,
    )
    (single,) = modelled_times(
        lambda backend: gemm(
            x, weights[0], x_scale, weight_scales[0], alpha[:1],
            out_dtype=NVFP4, out_global_scale=global_scale[:1], backend=backend,
        ),
        target,
    )  # fmt: skip
    work = light.grouped_gemm([(m, n, n)] * layers, out="nvfp4")
    read = sum(operand.bytes for operand in work.operands if operand.name.startswith("b"))
    return (
        f"{m} x {n}",
        f"{chained.us:.1f}",
        f"{layers} x {single.us:.2f} = {layers * single.us:.1f}",
        f"{layers * single.us / chained.us:.2f}",
        f"{chained.hbm_bytes / 1e6:.1f}",
        f"{1e6 * read / target.bandwidth_bytes_per_s:.1f}",
    )


def page(target: Target = B200) -> str:
    """Returns the table of modelled times in Markdown."""
    rows = [model(m, n, target) for m, n in tqdm(SHAPES, desc="PersistentMLP")]
    launch = constants_of(target).us(constants_of(target).launch)
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "\n\n".join(
        [
            f"# {LAYERS} equal layers on a {target.name}",
            f"{MODEL_ERROR} Made by `python -m nvfp4_cute.bench.mlp --save`.",
            "\n".join("| " + " | ".join(cells) + " |" for cells in lines),
            f"- Every time contains its launches: {launch:.2f} us each, as CUDA events measure an empty kernel. In a CUDA "
            "graph launches that follow each other cost less than that.",
            "- Weights are read from device memory, results of inner layers from L2.",
        ]
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="also write the page into bench/results")
    arguments = parser.parse_args()
    text = page() + "\n"
    print(text)
    if arguments.save:
        path: Path = RESULTS / f"{B200.name.lower()}_mlp.md"
        path.write_text(text)
        print(f"saved to {path}")


if __name__ == "__main__":
    main()
