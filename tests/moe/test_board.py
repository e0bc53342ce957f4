"""experts.board: ranks exchange numbers through shared memory, round by round; a missing rank is reported."""

import mmap
import threading

import pytest
import torch

from nvfp4_cute.experts import board
from nvfp4_cute.experts.board import GONE, Board


def boards(ranks, seconds=200.0):
    memory = mmap.mmap(-1, Board.nbytes(ranks))
    return [Board(memory, rank, ranks, seconds) for rank in range(ranks)]


def test_every_rank_reads_every_turn():
    """Ranks are late in different rounds; numbers of rounds never mix."""
    ranks, turns = 3, 40
    found = [[] for _ in range(ranks)]

    def body(rank, board):
        for turn in range(turns):
            if turn % ranks == rank:
                threading.Event().wait(0.001)
            found[rank].append(board.exchange(turn * 7 - 1 + rank, turn))

    threads = [threading.Thread(target=body, args=pair) for pair in enumerate(boards(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = [[(turn * 7 - 1 + rank, turn) for rank in range(ranks)] for turn in range(turns)]
    assert found == [want] * ranks


@pytest.mark.parametrize("numbers", [(-1, 0), (0, 2**29 - 1), (2**31 - 1, 3)])
def test_least_and_most(numbers):
    (alone,) = boards(1)
    assert alone.exchange(*numbers) == [numbers]


def test_a_rank_that_gave_up_is_known_at_once():
    first, second = boards(2, 0.05)
    assert first.exchange(5, 6) is None
    assert second._words[:, 0].tolist() == [GONE] * 2
    second._seconds = 600.0
    assert second.exchange(5, 6) is None


def test_a_page_that_cannot_be_mapped_leaves_no_file(tmp_path, monkeypatch):
    def no_memory(file, nbytes):
        assert nbytes == Board.nbytes(1) and len(list(tmp_path.iterdir())) == 1
        raise OSError("no memory")

    monkeypatch.setattr(board, "FOLDER", tmp_path)
    monkeypatch.setattr(board.mmap, "mmap", no_memory)
    monkeypatch.setattr(board, "gather", lambda group, own: own[None])
    monkeypatch.setattr(board.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(board.dist, "get_world_size", lambda group: 1)
    assert board._make(None, torch.device("cpu")) is None and not list(tmp_path.iterdir())
