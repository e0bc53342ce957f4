"""Two numbers that ranks tell each other, for which the host waits: no launch, and on one host no collective.

Processes of one host have a page of shared memory. A word of 64 bits a rank holds both numbers and a mark of the round, so that
it is stored at once, and needs nothing to order it. Rounds use two rows of words alternately: a rank tells the next numbers after
it has read all of the last ones, so nobody overwrites what another has still to read.
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
# Of a word: the mark of a round, 1 to 3; 32 bits of the checksum, plus 1; the rest are tokens.
MARK_BITS, CHECKSUM_BITS = 2, 32
MARK, CHECKSUM = (1 << MARK_BITS) - 1, (1 << CHECKSUM_BITS) - 1
# Of a rank that has given up.
GONE = -1


class Board:
    """The page of a group, as one rank has it, and how many seconds a rank waits for the others."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, seconds: float):
        self._words = np.frombuffer(memory, np.int64)[: 2 * ranks].reshape(2, ranks)
        self._rank, self._seconds = rank, seconds
        self._round = 0

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Of the page."""
        return 2 * 8 * ranks

    def tell(self, checksum: int, tokens: int) -> list[tuple[int, int]] | None:
        """Both numbers of every rank; None where one did not come in time, or has given up."""
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


# None where the ranks of a group are on several hosts.
_boards: "WeakKeyDictionary[dist.ProcessGroup, Board | None]" = WeakKeyDictionary()


def tell(
    group: dist.ProcessGroup, device: torch.device, checksum: int, tokens: int = 0
) -> list[tuple[int, int]]:
    """Tell all ranks of a group two numbers, and wait for theirs. The first call of a group makes its page.

    Args:
        device: where the group's backend takes tensors. checksum: from -1 to 2^31 - 1. tokens: from 0 to 2^29 - 1.

    Raises:
        RankError: a rank did not come within the group's timeout, or stopped.
    """
    if group not in _boards:
        _boards[group] = _make(group, device)
    board = _boards[group]
    if board is None:
        table = gather(group, torch.tensor([checksum, tokens], device=device))
        return [(first, second) for first, second in table.tolist()]
    found = board.tell(checksum, tokens)
    if found is None:
        raise RankError(lost_text(group, device))
    return found


def _make(group: dist.ProcessGroup, device: torch.device) -> Board | None:
    """Rank 0 makes a file, and removes its name when all have opened it, or could not."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    number = secrets.randbits(62)
    own = _opened(number, Board.nbytes(ranks), is_new=True) if rank == 0 else None
    number = int(gather(group, torch.tensor([number], device=device))[0, 0])
    memory = own if rank == 0 else _opened(number, Board.nbytes(ranks), is_new=False)
    have = gather(group, torch.tensor([int(memory is not None)], device=device))
    if rank == 0:
        _path(number).unlink(missing_ok=True)  # of a file that could not be mapped, too
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
