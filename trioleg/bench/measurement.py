"""What was measured, how it is summed up, and how it is shown. Pure, but for the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Measurement", "about_minutes", "percentile", "show_measurements"]


@dataclass(slots=True)
class Measurement:
    """One figure: ``seconds`` of each try that came to its end, ``missing``: tries that did not in time."""

    what: str
    goal: str
    seconds: list[float] = field(default_factory=list)
    missing: int = 0

    def note(self, seconds: float | None) -> None:
        """Add a try; None if what was waited for did not come."""
        if seconds is None:
            self.missing += 1
        else:
            self.seconds.append(seconds)

    def summary(self) -> dict[str, Any]:
        """For JSON; times in milliseconds, None without a try that came to its end."""
        times = self.seconds
        return {
            "what": self.what,
            "goal": self.goal,
            "median_ms": _ms(statistics.median(times)) if times else None,
            "p99_ms": _ms(percentile(times, 0.99)) if times else None,
            "worst_ms": _ms(max(times)) if times else None,
            "tries": len(times),
            "missing": self.missing,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of ``values`` do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def about_minutes(seconds: float) -> str:
    """How long something will take, for who is to wait for it."""
    minutes = math.ceil(seconds / 60)
    return f"this takes about {minutes} minute{'s' if minutes > 1 else ''}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def show_measurements(measurements: Sequence[Measurement], console: Console) -> None:
    """Print the table; times in milliseconds."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("from → to")
    for name in ("median ms", "p99", "worst", "tries", "missing"):
        table.add_column(name, justify="right")
    table.add_column("goal")
    for one in measurements:
        summary = one.summary()
        times = (summary[name] for name in ("median_ms", "p99_ms", "worst_ms"))
        shown = ("–" if time is None else f"{time:.2f}" for time in times)
        table.add_row(one.what, *shown, str(len(one.seconds)), str(one.missing), one.goal)
    console.print(table)
