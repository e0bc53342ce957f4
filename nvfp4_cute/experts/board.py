"""Exchanges two numbers between ranks while the host waits: without a launch and, on one host, without a collective.

Processes of one host share a page of memory. One 64-bit word per rank holds both numbers and the mark of a round, so a single
store publishes them and nothing else has to be ordered. Rounds alternate between two rows of words: a rank publishes its next
numbers only after it has read all previous ones, so no word is overwritten before every rank has read it.
"""

import mmap
import os
import secrets
import time
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from nvfp4_cute.errors import RankError
from nvfp4_cute.experts.exchange import EAGER_SECONDS, POLL_SECONDS, gather, lost_text, timeout_of

FOLDER = Path("/dev/shm")
# Fields of a word: the mark of a round (1 to 3), 32 bits for the checksum plus 1, and tokens in the remaining bits.
MARK_BITS, CHECKSUM_BITS = 2, 32
MARK, CHECKSUM = (1 << MARK_BITS) - 1, (1 << CHECKSUM_BITS) - 1
# The word of a rank that has given up.
GONE = -1


class Board:
    """The page of a group, mapped by one rank, and the seconds that the rank waits for the others."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, seconds: float):
        self._words = np.frombuffer(memory, np.int64)[: 2 * ranks].reshape(2, ranks)
        self._rank, self._seconds = rank, seconds
        self._round = 0

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Returns the size of the page in bytes."""
        return 2 * 8 * ranks

    def exchange(self, checksum: int, tokens: int) -> list[tuple[int, int]] | None:
        """Returns both numbers of every rank, or None if one is late or has given up."""
        self._round += 1
        row, mark = self._words[self._round % 2], 1 + self._round // 2 % 3
        row[self._rank] = (tokens << CHECKSUM_BITS | (checksum + 1)) << MARK_BITS | mark
        began = time.monotonic()
        while True:
            words = row.tolist()
            if all(word & MARK == mark and word != GONE for word in words):
                numbers = [word >> MARK_BITS for word in words]
                return [((one & CHECKSUM) - 1, one >> CHECKSUM_BITS) for one in numbers]
            passed = time.monotonic() - began
            if passed > self._seconds or GONE in words:
                self._words[:, self._rank] = GONE
                return None
            if passed > EAGER_SECONDS:
                time.sleep(POLL_SECONDS)
            else:
                os.sched_yield()


# None for groups whose ranks are on several hosts.
_boards: "WeakKeyDictionary[dist.ProcessGroup, Board | None]" = WeakKeyDictionary()


def exchange(
    group: dist.ProcessGroup, device: torch.device, checksum: int, tokens: int = 0
) -> list[tuple[int, int]]:
    """Sends two numbers to all ranks of a group and waits for theirs. The first call of a group makes its page.

    Args:
        group: all its ranks make this call.
        device: device of the tensors that the group's backend sends.
        checksum: from -1 to 2^31 - 1.
        tokens: from 0 to 2^29 - 1.

    Returns:
        (checksum, tokens) of every rank.

    Raises:
        RankError: a rank did not call within the group's timeout, or stopped.
    """
    if group not in _boards:
        _boards[group] = _make(group, device)
    board = _boards[group]
    if board is None:
        table = gather(group, torch.tensor([checksum, tokens], device=device))
        return [(first, second) for first, second in table.tolist()]
    found = board.exchange(checksum, tokens)
    if found is None:
        raise RankError(lost_text(group, device))
    return found


def _make(group: dist.ProcessGroup, device: torch.device) -> Board | None:
    """Makes the page. Rank 0 creates a file and removes its name after all ranks have opened it or failed to."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    number = secrets.randbits(62)
    own = _opened(number, Board.nbytes(ranks), is_new=True) if rank == 0 else None
    number = int(gather(group, torch.tensor([number], device=device))[0, 0])
    memory = own if rank == 0 else _opened(number, Board.nbytes(ranks), is_new=False)
    have = gather(group, torch.tensor([int(memory is not None)], device=device))
    if rank == 0:
        _path(number).unlink(missing_ok=True)  # also when the file could not be mapped
    if memory is None or not have.all():
        return None
    return Board(memory, rank, ranks, timeout_of(group, device).total_seconds())


def _path(number: int) -> Path:
    return FOLDER / f"nvfp4_cute_{number:x}"


def _opened(number: int, nbytes: int, is_new: bool) -> mmap.mmap | None:
    try:
        file = os.open(_path(number), os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o600)
        try:
            if is_new:
                os.ftruncate(file, nbytes)
            return mmap.mmap(file, nbytes)
        finally:
            os.close(file)
    except OSError:
        return None
