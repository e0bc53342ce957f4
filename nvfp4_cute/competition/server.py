"""Queries a competition's server before a submission: whether the leaderboard is open and has the GPU.

Reads only the public address ``/leaderboards``; nobody is identified.
"""

import json
import urllib.request
from dataclasses import dataclass
from datetime import datetime, timezone

from nvfp4_cute import env
from nvfp4_cute.problems import registry

TIMEOUT_S = 10
TRY_LOCALLY = "try the file with `nvfp4-cute eval`"


@dataclass(frozen=True)
class Board:
    """A leaderboard as described by its server; ``deadline`` is None if it has none."""

    name: str
    deadline: datetime | None
    gpus: tuple[str, ...]


def objections(leaderboard: str, gpu: str, now: datetime | None = None) -> tuple[list[str], bool]:
    """Returns why a submission to ``leaderboard`` on ``gpu`` would be refused.

    Returns:
        (objections, whether the server was queried). Without the server only known deadlines count.
    """
    now = now or datetime.now(timezone.utc)
    boards = fetch_boards()
    if boards is None:
        return known_objections(leaderboard, now), False
    board = next((board for board in boards if board.name == leaderboard), None)
    if board is None:
        names = ", ".join(sorted(board.name for board in boards))
        return [f"the server has no leaderboard {leaderboard}; it has {names}"], True
    found = []
    if board.deadline and board.deadline < now:
        found.append(_closed(leaderboard, board.deadline))
    if board.gpus and gpu.lower() not in (name.lower() for name in board.gpus):
        found.append(f"leaderboard {leaderboard} has no GPU {gpu}; it has {', '.join(board.gpus)}")
    return found, True


def known_objections(leaderboard: str, now: datetime | None = None) -> list[str]:
    """Returns why a submission would be refused by the deadlines that we know, without querying a server."""
    known = registry.load(leaderboard).deadline if leaderboard in registry.names() else None
    return [_closed(leaderboard, known)] if known and known < (now or datetime.now(timezone.utc)) else []


def fetch_boards() -> list[Board] | None:
    """Returns every leaderboard of the server that POPCORN_API_URL names; None if it cannot be read."""
    try:
        with urllib.request.urlopen(f"{env.popcorn_api_url()}/leaderboards", timeout=TIMEOUT_S) as answer:
            return [_board(entry) for entry in json.load(answer)]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _board(entry: dict) -> Board:
    deadline = entry.get("deadline")
    when = datetime.fromisoformat(deadline.replace("Z", "+00:00")) if deadline else None
    if when and when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return Board(entry["name"], when, tuple(entry.get("gpu_types") or ()))


def _closed(leaderboard: str, deadline: datetime) -> str:
    return f"leaderboard {leaderboard} is closed: its deadline was {deadline:%Y-%m-%d}; {TRY_LOCALLY}"
