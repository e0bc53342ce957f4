"""What ranks of a ``torch.distributed`` group tell each other: facts that must agree, and rows of bytes."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nvfp4_cute.errors import RankError

# A refusal travels as text, in so many int64.
TEXT_WORDS = 32
WORD_BYTES = 8
POLL_SECONDS = 20e-6


def agree(
    group: dist.ProcessGroup,
    device: torch.device,
    facts: Mapping[str, int],
    counts: torch.Tensor | None = None,
    fault: Exception | None = None,
) -> torch.Tensor:
    """Tell all ranks this rank's facts and counts, and wait for theirs.

    Every rank sees what all ranks sent, so either all of them raise or none does.

    Args:
        group: its ranks all call this.
        device: where the group's backend takes tensors.
        facts: numbers that are the same on every rank, by name.
        counts: int64 [C] on ``device``, C the same on every rank.
        fault: why this rank cannot go on.

    Returns:
        int64 [ranks, C] on the CPU: the counts of every rank.

    Raises:
        ``fault``: on its rank. RankError: another rank has a fault, facts differ, or a rank did not come within the group's
        timeout (``init_process_group(timeout=...)``), or stopped.
    """
    own = torch.tensor([int(fault is not None), *facts.values(), *_words(fault)], device=device)
    if counts is not None:
        own = torch.cat([own, counts])
    ranks = dist.get_world_size(group)
    every = torch.empty((ranks, len(own)), dtype=torch.int64, device=device)
    _wait(dist.all_to_all_single(every, own.repeat(ranks, 1), group=group, async_op=True), group, device)
    table = every.cpu()
    if fault is not None:
        raise fault
    for rank, row in enumerate(table.tolist()):
        if row[0]:
            raise RankError(f"rank {rank} refused its operands: {_text(row[1 + len(facts) :][:TEXT_WORDS])}")
    for index, name in enumerate(facts, 1):
        values = table[:, index].tolist()
        if len(set(values)) > 1:
            raise RankError(f"{name} is {values} on the ranks in turn; pass the same on every rank")
    return table[:, 1 + len(facts) + TEXT_WORDS :]


def send_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> torch.Tensor:
    """Exchange rows: those for rank 0 come first, then those for rank 1, and so on.

    Args:
        rows: [R, N], contiguous.
        sent: rows for each rank; None: equal parts. received: rows from each rank; None: as many as are sent.

    Returns:
        The rows from rank 0, then those from rank 1, and so on, of the dtype of ``rows``.
    """
    count = len(rows) if received is None else sum(received)
    result = rows.new_empty((count, *rows.shape[1:]))
    split = lambda counts: None if counts is None else list(counts)
    try:
        dist.all_to_all_single(_bytes(result), _bytes(rows), split(received), split(sent), group=group)
    except RuntimeError as reason:
        raise _lost(group, rows.device, reason) from reason
    return result


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a rank waits for the others: what the group was made with."""
    return group._get_backend(device).options._timeout


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Gloo knows few dtypes. [R, bytes of a row]."""
    return rows.view(torch.uint8)


def _wait(work: Any, group: dist.ProcessGroup, device: torch.device) -> None:
    """Until the collective is complete, or RankError. Waiting for NCCL does not block the host, so its event is asked."""
    limit = timeout_of(group, device)
    try:
        if device.type == "cpu":
            work.wait(limit)
            return
        end = time.monotonic() + limit.total_seconds()
        while not work.is_completed():
            if time.monotonic() > end:
                raise RankError(_lost_text(group, device))
            time.sleep(POLL_SECONDS)
        work.wait()
    except RankError:
        raise
    except RuntimeError as reason:
        raise _lost(group, device, reason) from reason


def _lost(group: dist.ProcessGroup, device: torch.device, reason: RuntimeError) -> RankError:
    return RankError(f"{_lost_text(group, device)}: {str(reason).splitlines()[0]}")


def _lost_text(group: dist.ProcessGroup, device: torch.device) -> str:
    seconds = timeout_of(group, device).total_seconds()
    return (
        f"rank {dist.get_rank(group)}: another of {dist.get_world_size(group)} ranks stopped, or did not come within "
        f"{seconds:g} s (init_process_group(timeout=...)); every rank makes the same calls"
    )


def _words(fault: Exception | None) -> list[int]:
    """The text of a fault as int64, cut to what there is room for."""
    room = TEXT_WORDS * WORD_BYTES
    text = b"" if fault is None else f"{type(fault).__name__}: {fault}".encode()[:room]
    padded = text.ljust(room, b"\0")
    return [
        int.from_bytes(padded[i : i + WORD_BYTES], "little", signed=True) for i in range(0, room, WORD_BYTES)
    ]


def _text(words: Sequence[int]) -> str:
    data = b"".join(word.to_bytes(WORD_BYTES, "little", signed=True) for word in words)
    return data.rstrip(b"\0").decode(errors="ignore")
