"""``Puppet``: the scenario's side of the engine that does what it is told (``puppet_engine.py``)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..bench.leg_control import Remote
from ..errors import TriolegError

__all__ = ["PUPPET", "Puppet", "PuppetState", "puppet_command"]

# The module of its program.
PUPPET = "trioleg.compare.puppet_engine"

# What takes milliseconds; this is for a machine under load.
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class PuppetState:
    """``arrived``, ``aborted``: requests so far; n > 1 are as many. ``live``: those that it works on, with ``blocks``.
    The times are by the monotonic clock, None if there was none."""

    pid: int
    arrived: int
    aborted: int
    live: int
    blocks: int
    steps: int
    tokens: int
    last_arrival: float | None
    first_abort: float | None
    last_abort: float | None


def puppet_command(
    control: Path,
    token_ids: Sequence[int],
    *,
    die: Literal["loading", "ready"] | None = None,
    module: str = PUPPET,
) -> list[str]:
    """The engine as a leg starts it, but for ``--handshake ADDRESS``, which the leg adds. ``module``: of another
    program in its place, which takes the same but for ``die``.

    It runs in our own environment, whatever that of its leg is.
    """
    root = Path(__file__).parents[2]
    command = ["env", "-u", "PYTHONSAFEPATH", f"PYTHONPATH={root}", sys.executable]
    command += ["-m", module, str(control), ",".join(map(str, token_ids))]
    return command if die is None else [*command, "--die", die]


class Puppet:
    """One of them, reached. Its methods raise ``TriolegError`` once the engine has gone."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._pid: int | None = None

    async def state(self) -> PuppetState:
        """What there is now."""
        return await self._tell("state")

    async def say(
        self,
        requests: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        *,
        finish: Literal["length", "stop"] | None = None,
        steps: int = 1,
    ) -> PuppetState:
        """Tokens for ``requests`` (numbers in order of arrival; None: all that live). With ``finish`` the last of
        ``steps`` steps ends them."""
        return await self._tell(
            "say",
            requests=None if requests is None else list(requests),
            tokens=None if tokens is None else list(tokens),
            finish=finish,
            steps=steps,
        )

    async def pace(self, rate: float, limit: int | None = None) -> PuppetState:
        """Steps for all that live, ``rate`` a second from now on (0: none), no more than ``limit``."""
        return await self._tell("pace", rate=rate, limit=limit)

    async def wait_requests(self, arrived: int, seconds: float = PATIENCE_S) -> PuppetState:
        """Until so many have come in all. Raises ``TriolegError`` if they do not."""
        state = await self._tell("await", arrived=arrived, aborted=0, seconds=seconds)
        if state.arrived < arrived:
            raise TriolegError(
                f"{state.arrived} requests reached the engine within {seconds:g} s, not {arrived}"
            )
        return state

    async def wait_aborts(self, aborted: int, seconds: float) -> PuppetState:
        """Until so many have had their ABORT in all, or the time is over: see ``PuppetState.aborted``."""
        return await self._tell("await", arrived=0, aborted=aborted, seconds=seconds)

    async def fail(self, how: Literal["raise", "exit"]) -> None:
        """The engine dies: having said so ("raise"), or without a word ("exit")."""
        await self._tell("fail", how=how)

    async def garble(self) -> None:
        """A message that nobody can read goes to the front end."""
        await self._tell("garble")

    async def signal(self, number: signal.Signals) -> None:
        """SIGKILL, SIGSTOP, SIGCONT: to the engine's process. A stopped one answers nothing until it goes on."""
        if self._pid is None:
            await self.state()
        assert self._pid is not None
        os.kill(self._pid, number)

    def let_go_on(self) -> None:
        """SIGCONT if it is there: nobody can end what is stopped. Idempotent."""
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGCONT)

    async def _tell(self, word: str, **figures: object) -> PuppetState:
        state = PuppetState(**await self._remote.tell(word, **figures))
        self._pid = state.pid
        return state
