"""What ranks of a ``torch.distributed`` group tell each other: facts that must agree, and rows of bytes."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from nvfp4_cute.errors import RankError

# A refusal travels as text, in so many int64.
TEXT_WORDS = 32
WORD_BYTES = 8
# Other ranks come within microseconds, as a rule: so long the host asks without a pause.
EAGER_SECONDS, POLL_SECONDS = 5e-3, 100e-6


def gather(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """Tell all ranks some numbers, [N], N the same on every rank, and wait for theirs: [ranks, N] on the CPU.

    Raises:
        RankError: a rank does not come within the group's timeout, or stopped.
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
    # A wait for NCCL does not block the host, so the copy that follows it is asked.
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
    """Tell all ranks this rank's facts, and wait for theirs.

    Every rank sees what all ranks sent, so either all of them raise or none does.

    Args:
        group: its ranks all call this.
        device: where the group's backend takes tensors.
        facts: numbers that are the same on every rank, by name.
        fault: why this rank cannot go on.

    Raises:
        ``fault``: on its rank. RankError: another rank has a fault, facts differ, or a rank did not come within the group's
        timeout (``init_process_group(timeout=...)``), or stopped.
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


def _lost(group: dist.ProcessGroup, device: torch.device, reason: RuntimeError) -> RankError:
    return RankError(f"{lost_text(group, device)}: {str(reason).splitlines()[0]}")


def lost_text(group: dist.ProcessGroup, device: torch.device) -> str:
    """Of the error where a rank did not come."""
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
