"""``EngineWatch``: what a link can learn of its engine's process."""

from __future__ import annotations

import trio

from ..ipc.launch import EngineProcess

__all__ = ["EngineWatch", "ProcessWatch"]


class EngineWatch:
    """What a link can learn of an engine's process; this one knows nothing (someone else's engine)."""

    # Whether ``wait`` will ever return.
    sees_exit = False

    async def wait(self) -> str:
        """Returns how the process ended, as a clause ("it exited with status 1")."""
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    @property
    def death(self) -> str | None:
        """How the process ended, as ``wait`` says it, if that was not because of us."""
        return None

    @property
    def last_error(self) -> str:
        """The process's own last error line, or ""."""
        return ""

    def note_stuck(self, *, is_stuck: bool) -> None:
        """It answers nothing (or does again): to ask it to leave would be in vain."""

    def hurry(self) -> None:
        """It is not to be waited for any more: a process of ours is killed."""


class ProcessWatch(EngineWatch):
    """The watch of a process that we started."""

    sees_exit = True

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    async def wait(self) -> str:
        return str(await self._process.wait())

    @property
    def death(self) -> str | None:
        death = self._process.death
        return None if death is None else str(death)

    @property
    def last_error(self) -> str:
        return self._process.last_error

    def note_stuck(self, *, is_stuck: bool) -> None:
        self._process.is_stuck = is_stuck

    def hurry(self) -> None:
        self._process.hurry()
