"""Runs models of transformers as serving engines do: rows of all sequences packed into one batch, prompts whole or in chunks.

Every operation outside of this package's layers is computed in blocks of a fixed number of rows. Its kernels then have one
shape, and a row's bits do not depend on the other rows. What differs between two batches comes from this package's layers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nvfp4_cute.bench.invariance.answers import CHUNK, Answer

ATTENTION = "rows_in_blocks"
ATTENTION_ROWS, LAYER_ROWS = 8, 32  # rows of a block


class FixedRows(torch.nn.Module):
    """Computes a module in blocks of ``LAYER_ROWS`` rows; the last block is filled up with zeros.

    Args:
        module: takes one tensor [1, T, ...] or [T, ...]. Returns a tensor, or a tuple of tensors, with T rows.
    """

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        """Returns what the module returns."""
        dim = 1 if x.ndim > 2 else 0
        rows = x.shape[dim]
        blocks = [self.module(block) for block in _filled(x, dim).split(LAYER_ROWS, dim)]
        if isinstance(blocks[0], torch.Tensor):
            return torch.cat(blocks, dim).narrow(dim, 0, rows)
        return tuple(torch.cat(parts, 0).narrow(0, 0, rows) for parts in zip(*blocks, strict=True))


def _filled(x: torch.Tensor, dim: int, rows: int = LAYER_ROWS) -> torch.Tensor:
    """Appends zeros, up to a multiple of ``rows`` along ``dim``."""
    missing = -x.shape[dim] % rows
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim) if missing else x


class PackedModel:
    """A causal model of transformers whose batches are packed rows.

    Changes the model in place: norms, routers and the output layer run in blocks of rows, and so does attention, which keeps
    keys and values itself.

    Args:
        model: a decoder with full attention in every layer, in eval mode.
        longest: most tokens per sequence, prompt and answer together.
    """

    def __init__(self, model: Any, longest: int):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.model, self.longest = model, longest
        self.device = next(model.parameters()).device
        for name, module in list(model.named_modules()):
            if _needs_fixed_rows(module):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, FixedRows(module))
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)
        model.set_attn_implementation(ATTENTION)
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots = self._places = torch.empty(0, dtype=torch.long)
        self._num_sequences = 0

    @torch.no_grad()
    def answer(self, prompts: Sequence[list[int]], tokens: int, is_chunked: bool = False) -> list[Answer]:
        """Returns greedy answers to all prompts, which form one batch.

        Args:
            prompts: ids.
            tokens: length of the answers.
            is_chunked: whether a step has at most ``CHUNK`` rows. Otherwise the first one has all rows of all prompts.
        """
        self._cache.clear()
        self._num_sequences = len(prompts)
        ids = [list(prompt) for prompt in prompts]
        found: list[list[float]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        while any(len(one) < tokens for one in found):
            work = list(self._step(ids, done, found, tokens, CHUNK if is_chunked else 1 << 30))
            rows = [(slot, place) for slot, first, last in work for place in range(first, last)]
            ends, at = [], -1
            for slot, first, last in work:
                at += last - first
                done[slot] = last
                if last == len(ids[slot]):
                    ends.append((slot, at))
            self._slots = torch.tensor([slot for slot, _ in rows], device=self.device)
            self._places = torch.tensor([place for _, place in rows], device=self.device)
            given = torch.tensor([[ids[slot][place] for slot, place in rows]], device=self.device)
            logits = self.model(
                given, position_ids=self._places[None], use_cache=False,
                logits_to_keep=torch.tensor([at for _, at in ends], device=self.device, dtype=torch.long),
            ).logits[0]  # fmt: skip
            for (slot, _), row in zip(ends, logits, strict=True):
                of_all = torch.log_softmax(row.float(), -1)
                token = int(of_all.argmax())
                ids[slot].append(token)
                found[slot].append(float(of_all[token]))
        return [
            Answer(tuple(all_ids[len(prompt) :]), tuple(logs))
            for all_ids, prompt, logs in zip(ids, prompts, found, strict=True)
        ]

    @staticmethod
    def _step(ids, done, found, tokens: int, budget: int) -> Iterator[tuple[int, int, int]]:
        """Yields (sequence, first place, end) of the next step: first sequences that decode, then parts of prompts."""
        for is_prompt in (False, True):
            for slot, known in enumerate(ids):
                if bool(found[slot]) is is_prompt or len(found[slot]) == tokens or not budget:
                    continue
                end = min(len(known), done[slot] + budget)
                budget -= end - done[slot]
                yield slot, done[slot], end

    def _attend(self, module, query, key, value, mask, scaling=None, **_) -> tuple[torch.Tensor, None]:
        """Computes attention of packed rows in blocks of ``ATTENTION_ROWS``, over all ``longest`` places.

        Args:
            query: [1, heads, T, D]; key, value: [1, kv_heads, T, D], as transformers passes them.

        Returns:
            [1, T, heads, D].
        """
        keys, values = self._stored(module.layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
        rows, kv_heads = query.shape[2], key.shape[1]
        grouped = _filled(query[0].transpose(0, 1).unflatten(1, (kv_heads, -1)), 0, ATTENTION_ROWS)
        slots, places = (_filled(t, 0, ATTENTION_ROWS) for t in (self._slots, self._places))
        later = torch.arange(self.longest, device=query.device) > places[:, None]
        parts = []
        for q, slot, is_later in zip(
            *(t.split(ATTENTION_ROWS) for t in (grouped, slots, later)), strict=True
        ):
            scores = torch.matmul(q, keys[slot].transpose(-1, -2)).float() * scaling
            scores = scores.masked_fill(is_later[:, None, None], -torch.inf)
            parts.append(torch.matmul(scores.softmax(-1).to(q.dtype), values[slot]))
        return torch.cat(parts)[:rows].flatten(1, 2)[None], None

    def _stored(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores rows [T, kv_heads, D] and returns those of all sequences, [sequences, kv_heads, longest, D]."""
        if layer not in self._cache:
            shape = (self._num_sequences, key.shape[1], self.longest, key.shape[2])
            self._cache[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        for stored, new in zip(self._cache[layer], (key, value), strict=True):
            stored[self._slots, :, self._places] = new
        return self._cache[layer]


def _needs_fixed_rows(module: torch.nn.Module) -> bool:
    """Returns whether torch computes a module's sums over features: norms, routers and plain linear layers."""
    own = dict(module.named_parameters(recurse=False))
    is_ours = type(module).__module__.startswith("nvfp4_cute")
    return bool(own) and not is_ours and not isinstance(module, torch.nn.Embedding)
