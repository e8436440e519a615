"""What a person sees of a pull, on stderr: a bar on a terminal, else a line for each stage.

Rules of this file: nothing is shown, and nothing loaded, if there is no work: most pulls find the model
where it was.
"""

from __future__ import annotations

from typing import Self

__all__ = ["PullBar"]

_STAGES = {
    "wait": "waiting for another pull of",
    "download": "downloading",
    "convert": "converting",
}


class PullBar:
    """``model_store.Progress`` for the command line. Leaving the block ends the display."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stage:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        if not self._stage:
            self._start()
        if stage != self._stage:
            self._stage = stage
            title = f"{_STAGES[stage]} {self._name}"
            self._task = self._progress.add_task(title, total=None)
            if not self._progress.console.is_terminal:
                self._progress.console.out(title, highlight=False)
        self._progress.update(self._task, completed=done, total=total or None)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        console = Console(stderr=True)
        columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._progress.start()
