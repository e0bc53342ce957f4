"""Exchanges between the ranks of a ``torch.distributed`` group: facts that must agree, and rows of bytes."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from nvfp4_cute.errors import RankError

# Number of int64 words for the text of a refusal.
TEXT_WORDS = 32
WORD_BYTES = 8
# Other ranks usually call within microseconds; the host polls without a pause for this long.
EAGER_SECONDS, POLL_SECONDS = 5e-3, 100e-6


def gather(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """Sends numbers [N], N equal on all ranks, to all ranks and waits for theirs.

    Returns:
        [ranks, N] on the CPU.

    Raises:
        RankError: a rank did not call within the group's timeout, or stopped.
    """
    copies = own.repeat(dist.get_world_size(group), 1)
    every, limit = torch.empty_like(copies), timeout_of(group, own.device)
    try:
        work = dist.all_to_all_single(every, copies, group=group, async_op=True)
        if not own.is_cuda:
            work.wait(limit)
            return every
        work.wait()
    except RuntimeError as reason:
        raise _lost(group, own.device, reason) from reason
    # Waiting for NCCL does not block the host, so the host polls the copy that follows it.
    table = torch.empty(every.shape, dtype=every.dtype, pin_memory=True).copy_(every, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    began = time.monotonic()
    while not copied.query():
        passed = time.monotonic() - began
        if passed > limit.total_seconds():
            raise RankError(lost_text(group, own.device))
        if passed > EAGER_SECONDS:
            time.sleep(POLL_SECONDS)
    return table


def agree(
    group: dist.ProcessGroup,
    device: torch.device,
    facts: Mapping[str, int],
    fault: Exception | None = None,
) -> None:
    """Sends this rank's facts to all ranks, and checks them against theirs.

    Every rank sees what all ranks sent, so either all of them raise or none does.

    Args:
        group: all its ranks make this call.
        device: device of the tensors that the group's backend sends.
        facts: numbers that have to be the same on every rank, by name.
        fault: why this rank cannot go on.

    Raises:
        ``fault``: on its own rank.
        RankError: another rank has a fault, facts differ, or a rank did not call within the group's timeout
            (``init_process_group(timeout=...)``), or stopped.
    """
    own = torch.tensor([int(fault is not None), *facts.values(), *_words(fault)], device=device)
    table = gather(group, own)
    if fault is not None:
        raise fault
    for rank, row in enumerate(table.tolist()):
        if row[0]:
            raise RankError(f"rank {rank} refused its operands: {_text(row[1 + len(facts) :])}")
    for index, name in enumerate(facts, 1):
        values = table[:, index].tolist()
        if len(set(values)) > 1:
            raise RankError(f"{name} is {values} on the ranks in turn; pass the same on every rank")


def send_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> torch.Tensor:
    """Exchanges rows, which are ordered by rank on both sides.

    Args:
        rows: [R, N], contiguous: rows for rank 0, then those for rank 1, and so on.
        group: all its ranks make this call.
        sent: number of rows for each rank; None for equal parts.
        received: number of rows from each rank; None for as many as are sent.

    Returns:
        The rows from rank 0, then those from rank 1, and so on, in the dtype of ``rows``.
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
    """Returns the timeout with which the group was made."""
    return group._get_backend(device).options._timeout


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Views rows as bytes [R, bytes of a row], because Gloo supports few dtypes."""
    return rows.view(torch.uint8)


def _lost(group: dist.ProcessGroup, device: torch.device, reason: RuntimeError) -> RankError:
    return RankError(f"{lost_text(group, device)}: {str(reason).splitlines()[0]}")


def lost_text(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the message for a rank that did not call in time."""
    seconds = timeout_of(group, device).total_seconds()
    return (
        f"rank {dist.get_rank(group)}: another of {dist.get_world_size(group)} ranks stopped, or did not come within "
        f"{seconds:g} s (init_process_group(timeout=...)); every rank makes the same calls"
    )


def _words(fault: Exception | None) -> list[int]:
    """Encodes the text of a fault as int64 words, cut to the available space."""
    room = TEXT_WORDS * WORD_BYTES
    text = b"" if fault is None else f"{type(fault).__name__}: {fault}".encode()[:room]
    padded = text.ljust(room, b"\0")
    return [
        int.from_bytes(padded[i : i + WORD_BYTES], "little", signed=True) for i in range(0, room, WORD_BYTES)
    ]


def _text(words: Sequence[int]) -> str:
    data = b"".join(word.to_bytes(WORD_BYTES, "little", signed=True) for word in words)
    return data.rstrip(b"\0").decode(errors="ignore")
