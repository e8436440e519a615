"""``Outcome``: what came of one run of a scenario against one leg.

Plain data, which is written as JSON and read again; nothing here runs anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["HANG", "LEAK", "SWALLOW", "Outcome", "Verdict"]

Verdict: TypeAlias = Literal["leak", "hang", "swallow"]
# Something is still there that belongs to nobody.
LEAK: Verdict = "leak"
# Somebody waits for what cannot come.
HANG: Verdict = "hang"
# An error was met, and whoever had to hear of it did not.
SWALLOW: Verdict = "swallow"


@dataclass(slots=True)
class Outcome:
    """All times are seconds, from the scenario's cause (the client's FIN, the signal, the fault) on.

    ``client``: what the client, or the consumer of the library, saw, in one clause. ``told_engine_s``: until the engine
    had the ABORT of the last request concerned; None with ``has_told_engine`` False: it never came within the
    scenario's bound; None with None: nobody had to tell it. ``noticed_s``: who else noticed, after how long.
    ``leaked``: what was there afterwards and not before, by its kind: ``tasks``, ``requests`` (states of the front
    end), ``blocks`` (of the engine), ``descriptors``, ``processes``; kinds with nothing are left out. ``memory_kb``: resident memory
    that came to stay. ``error``: the error as it surfaced (type and message), ``surfaced``: where (the client, the
    log, the exit, nowhere). ``cause``: the error that it names as its cause. ``exit_code``: of the process, where it
    ended; negative: a signal. ``exit_s``: how long that took. ``figures``: what else a scenario measures, by name with
    its unit. ``remarks``: sentences for whoever reads the row. ``is_absent``: the leg has no such thing, so nothing
    was played; ``remarks`` says what it lacks. ``cause_at``: when the cause was, by the monotonic clock, so that a
    picture of the tasks' lives can begin there.
    """

    scenario: str
    leg: str
    run: int
    client: str = ""
    told_engine_s: float | None = None
    has_told_engine: bool | None = None
    noticed_s: dict[str, float] = field(default_factory=dict)
    leaked: dict[str, int] = field(default_factory=dict)
    memory_kb: int | None = None
    error: str = ""
    surfaced: str = ""
    cause: str = ""
    exit_code: int | None = None
    exit_s: float | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    is_absent: bool = False
    cause_at: float | None = None

    def find(self, verdict: Verdict, remark: str) -> None:
        """The run has shown this; ``remark`` says what exactly."""
        if verdict not in self.verdicts:
            self.verdicts.append(verdict)
        self.remarks.append(remark)

    def summary(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
