"""Rows of a report's tables as plain text: for a terminal, for Markdown, and for a browser."""

from typing import Any

TIMES_HEADER = (
    "case", "us", "deciles", "predicted", "ratio", "% of SOL", "TB/s", "clean L2 us", "torch us", "torch's way", "kernels",
)  # fmt: skip
CONSTANTS_HEADER = ("figure", "measured", "the model has", "ratio", "what")


def time_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns one row per timed case, in the order of ``TIMES_HEADER``."""
    rows: list[tuple[str, ...]] = []
    for row in found["timed"]:
        peers = sorted(row["peers"].items(), key=lambda item: item[1])
        best = peers[0] if peers else ("-", None)
        share = None if row["us"] is None or row["floor_us"] is None else 100 * row["floor_us"] / row["us"]
        rate = None if row["us"] is None or row["bytes"] is None else row["bytes"] / row["us"] / 1e6
        rows.append(
            (
                row["case"], _us(row["us"]), f"{_us(row['low'])}-{_us(row['high'])}", _us(row["predicted_us"]),
                _us(row["ratio"]) + " slow" * row["is_slow"], _us(share), _us(rate), _us(row["clean_us"]), _us(best[1]),
                best[0], row["verdict"] if row["us"] is None else row["kernels"],
            )
        )  # fmt: skip
    return rows


def constant_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns measured constants with those of the timing model, in the order of ``CONSTANTS_HEADER``."""
    rows: list[tuple[str, ...]] = []
    for line in found["constants"]:
        value, model = line["value"], line["model"]
        ratio = "-" if value is None or not model else f"{value / model:.2f}"
        rows.append((line["name"], _figure(value), _figure(model), ratio, line["unit"]))
    return rows


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
