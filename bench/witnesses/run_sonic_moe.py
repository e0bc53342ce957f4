"""SonicMoE: its top-k with softmax, and a layer on QuACK's grouped products."""

from functools import partial

import torch
from sonicmoe.functional import forward

from nvfp4_cute.bench.witnesses.support import close, main, rand

TOKENS, EXPERTS, TOP = 48, 64, 8


def top_k(is_softmax_over_topk: bool) -> None:
    """Compares the chosen experts and their probabilities."""
    logits = rand(TOKENS, EXPERTS, dtype=torch.float32)
    values = torch.empty(TOKENS, TOP, device="cuda")
    indices = torch.empty(TOKENS, TOP, dtype=torch.int32, device="cuda")
    forward._topk_fwd(logits, TOP, values, indices, is_softmax_over_topk, False)
    exact = logits.cpu().double()
    chosen = exact.topk(TOP) if is_softmax_over_topk else exact.softmax(-1).topk(TOP)
    close(indices, chosen.indices, 0)
    close(values, chosen.values.softmax(-1) if is_softmax_over_topk else chosen.values, 1e-5)


main({"softmax-over-top-k": partial(top_k, True), "top-k-over-softmax": partial(top_k, False)})
