"""`nvfp4-cute bench --compare A.json B.json`: compares two results of ``bench --json``, case by case."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_cute.bench.report import Time
from nvfp4_cute.roofline.plot import bars
from nvfp4_cute.terminal import text_table

WIDTH = 20
"""Characters of a bar on each side of equal times; a full side is a factor of two."""


@dataclass(frozen=True)
class Change:
    """One case in both results.

    Attributes:
        before, after: its times, with their first and ninth deciles if they were measured.
    """

    case: str
    before: Time
    after: Time

    @property
    def ratio(self) -> float:
        """After over before: less than 1 is faster."""
        return self.after.us / self.before.us

    @property
    def spread(self) -> tuple[float, float] | None:
        """Range of the ratio, by the deciles of both; None without deciles."""
        if None in (self.before.low, self.before.high, self.after.low, self.after.high):
            return None
        assert self.before.low and self.before.high and self.after.low and self.after.high
        return self.after.low / self.before.high, self.after.high / self.before.low

    @property
    def verdict(self) -> str:
        """Verdict: "same" if the range contains 1."""
        low, high = self.spread or (self.ratio, self.ratio)
        return "slower" if low > 1 else "faster" if high < 1 else "same"


def run(paths: Sequence[Path], plot: Path | None = None) -> int:
    """Prints the comparison. Returns 0, or 1 if a case is slower.

    Args:
        paths: earlier and later output of ``bench --json``.
        plot: also draw bars to this file.

    Raises:
        ValueError: a file is not such a result, they share no case, or one is measured and the other modelled.
    """
    (before, target), (after, other) = (read(path) for path in paths)
    found = changes(before, after)
    if target != other:
        print(f"{paths[0]} is of {target}, {paths[1]} of {other}")
    print(text(found))
    left_out = sorted(set(before) ^ set(after))
    if left_out:
        print(f"in one of the files only: {', '.join(left_out)}")
    if plot:
        names = [change.case for change in found]
        values = {
            f"{paths[0].name} ({found[0].before.kind})": [change.before.us for change in found],
            f"{paths[1].name} ({found[0].after.kind})": [change.after.us for change in found],
        }
        bars(plot, f"{target}: before and after", names, values, unit="us")
    return int(any(change.verdict == "slower" for change in found))


def read(path: Path) -> tuple[dict[str, Time], str]:
    """Returns times by case, and the target, of a result of ``bench --json``.

    Raises:
        ValueError: the file is not such a result.
    """
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in content["rows"] if row["time"] is not None]
        return {f"{row['problem']} {row['case']}": Time(**row["time"]) for row in rows}, content["target"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not what `nvfp4-cute bench --json` prints ({error!r})") from None


def changes(before: Mapping[str, Time], after: Mapping[str, Time]) -> list[Change]:
    """Returns the cases of both, in the order of the first.

    Raises:
        ValueError: there is none, or times of a case are of two kinds.
    """
    found = [Change(case, time, after[case]) for case, time in before.items() if case in after]
    if not found:
        raise ValueError("the two results share no case; name files of the same suites")
    for change in found:
        if change.before.kind != change.after.kind:
            raise ValueError(
                f"{change.case} is {change.before.kind} in one result and {change.after.kind} in the other; times of two kinds "
                "say nothing of each other"
            )
    return found


def text(found: Sequence[Change]) -> str:
    """Returns a table with a picture: bars to the left are faster, to the right slower."""
    header = ["case", "", "before us", "after us", "after / before", "spread", "kind", "faster | slower"]
    rows = []
    for change in found:
        spread = change.spread
        rows.append(
            [
                change.case,
                change.verdict,
                f"{change.before.us:.2f}",
                f"{change.after.us:.2f}",
                f"{change.ratio:.3f}",
                f"{spread[0]:.3f} to {spread[1]:.3f}" if spread else "-",
                change.before.kind,
                picture(change.ratio),
            ]
        )
    mean = math.exp(sum(math.log(change.ratio) for change in found) / len(found))
    counts = {name: sum(change.verdict == name for change in found) for name in ("faster", "same", "slower")}
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{text_table(header, rows, left=2)}\ngeometric mean {mean:.3f}; {listed}"


def picture(ratio: float) -> str:
    """Returns a bar from the middle: to the left for ratios below 1, to the right above, full at a factor of two."""
    length = min(WIDTH, round(abs(math.log2(ratio)) * WIDTH))
    left, right = ("#" * length, "") if ratio < 1 else ("", "#" * length)
    return f"{left.rjust(WIDTH)}|{right.ljust(WIDTH)}"
