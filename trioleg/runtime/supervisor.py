"""``Supervisor``: starts the engine of an ``LLM``, and, where that is wanted, another one after its death.

    loading ──► ready ──► (dead) ──► restarting ──► ready …
                  └────────────────► dead, for good

Every engine gets a link, a transport and a process of its own, so nothing that belongs to an engine that died
can reach the requests of the next. The first start must succeed: a setting that does not work will not work the
second time either. Later starts may fail a few times in a row, with longer and longer waits between.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from ..config import LLMConfig
from ..errors import EngineDeadError, EngineStartError, EngineUnavailableError, TriolegError
from .endings import one_line
from .engine_link import EngineLink
from .engines import Engine, OpenEngine
from .health import Health, LLMState
from .unwrap import unwrapped

__all__ = ["Supervisor"]

_log = logging.getLogger("trioleg.engine")

# Waits before a new start: 1, 2, 4, … seconds. A minute is the most that an operator would want.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
# An engine that has served for so long was well: what kills the next one is another thing.
_WELL_AFTER_S = 60.0
# What the first answer may take at least.
_ANSWER_TIMEOUT_S = 10.0
# What loading is guessed to take as long as nobody has seen it; SmolLM2 takes 3 s here, vLLM 25.
_LOADING_GUESS_S = 10.0


class Supervisor:
    """``run`` is its task. ``link`` is the engine's of the moment, or the last one's; None before the first.

    ``ready``: set once, when the first engine is ready. ``dead``: set when the last one is gone for good;
    ``cause_of_death`` says why. ``num_restarts``: engines that were started after the first, and were ready.
    ``restore`` is awaited with the link of an engine that has started, before requests can reach it.
    """

    def __init__(
        self,
        open_engine: OpenEngine,
        make_link: Callable[[Engine], EngineLink],
        config: LLMConfig,
        restore: Callable[[EngineLink], Awaitable[None]],
    ) -> None:
        self.link: EngineLink | None = None
        self.ready = trio.Event()
        self.dead = trio.Event()
        self.cause_of_death: str | None = None
        self.num_restarts = 0
        self._open_engine = open_engine
        self._make_link = make_link
        self._config = config
        self._restore = restore
        # Why the last attempt to start another engine came to nothing.
        self._last_failure = ""
        # Whoever waits for the state to change.
        self._changes = trio.lowlevel.ParkingLot()
        self._start_at = trio.current_time()
        self._is_ending = False
        self._loading_took = _LOADING_GUESS_S

    @property
    def health(self) -> Health:
        """Of the engine alone."""
        if self.cause_of_death is not None:
            return Health(LLMState.DEAD, self.cause_of_death)
        link = self.link
        if link is None:
            return Health(LLMState.LOADING, "the engine is being started", self._retry_after)
        if link.cause_of_death is not None:
            # Also in the moment before this is noted here: a client that was told may ask at once.
            if not self._config.restart_engine:
                return Health(LLMState.DEAD, link.cause_of_death)
            cause = f"the engine is being restarted: {self._last_failure or link.cause_of_death}"
            return Health(LLMState.RESTARTING, cause, self._retry_after)
        if link.contact.lost is not None:
            cause = f"engine {link.rank} does not answer: {link.contact.lost}"
            return Health(LLMState.FROZEN, cause, 1.0)
        return Health(LLMState.READY)

    @property
    def _retry_after(self) -> float:
        """If loading takes as long as the last time; a second at least."""
        return max(1.0, self._start_at + self._loading_took - trio.current_time())

    async def wait_change(self) -> None:
        """Returns when ``health`` may be another one. Cancel-safe."""
        await self._changes.park()

    def note_change(self) -> None:
        """Wake those in ``wait_change``."""
        self._changes.unpark_all()

    def start_no_more(self) -> None:
        """The LLM is being shut down: an engine that is gone is not followed by another. Synchronous."""
        self._is_ending = True

    def ready_link(self) -> EngineLink:
        """The link to send a request to. Raises ``EngineDeadError`` or ``EngineUnavailableError``.

        A link that is out of contact for a moment is one: the request waits there.
        """
        link = self.link
        if link is not None and link.cause_of_death is None:
            return link
        health = self.health
        if health.state is LLMState.DEAD:
            raise EngineDeadError(health.cause)
        raise EngineUnavailableError(health.cause, retry_after=health.retry_after or 0.0)

    async def run(self) -> None:
        """Returns when the engine is gone for good and all streams have been told.

        Raises what the first start raises, ``EngineStartError`` mostly. A cancel ends the engine.
        """
        failures = 0
        while True:
            cause, served = await self._live_once()
            failures = 1 if served > _WELL_AFTER_S else failures + 1
            if not self._config.restart_engine:
                break
            if failures > self._config.max_engine_restarts:
                limit = self._config.max_engine_restarts
                cause += f"; no engine is started again, since max_engine_restarts is {limit}"
                break
            await self._wait_before_restart(failures)
        self._end(cause)

    async def _live_once(self) -> tuple[str, float]:
        """One engine from its start to its end; why it ended, and for how long it was ready."""
        started = trio.current_time()
        ready_at: float | None = None
        link: EngineLink | None = None
        try:
            with unwrapped():
                async with self._open_engine() as engine, trio.open_nursery() as nursery:
                    link = self._make_link(engine)
                    link.on_change = self.note_change
                    await nursery.start(link.run, name="engine link")
                    with self._within_start(link, started):
                        # Which also shows that the engine answers.
                        link.supported_tasks = frozenset(await link.get_supported_tasks())
                        await self._restore(link)
                    ready_at = trio.current_time()
                    self._loading_took = ready_at - started
                    self._take_over(link)
                    await link.dead.wait()
                    self._start_at = trio.current_time() + _FIRST_WAIT_S
                    self.note_change()
                    if not self._config.restart_engine:
                        # Before its process is taken down, which may take seconds: nobody has to wait.
                        self._end(link.cause_of_death or "")
        except (TriolegError, OSError) as error:
            # OSError: no process, no memory, no room for a socket, which may be otherwise the next time.
            if ready_at is not None or not self.ready.is_set():
                raise
            self._last_failure = str(error)
            _log.error("%s", one_line(self._last_failure))
            return self._last_failure, 0.0
        finally:
            # A cancel (there was a signal, say) does not hide a death that came right before it.
            if link is not None:
                link.note_unseen_death()
                if link.cause_of_death is not None and not self._config.restart_engine:
                    self._end(link.cause_of_death)
        assert link is not None, "there is one when the block has ended without an error"
        assert ready_at is not None
        return link.cause_of_death or "", trio.current_time() - ready_at

    @contextmanager
    def _within_start(self, link: EngineLink, started: float) -> Iterator[None]:
        """For the first questions to an engine: within the one deadline for its start."""
        patience = self._config.start_timeout
        # An engine that somebody else starts may have taken longer.
        last_moment = trio.current_time() + min(_ANSWER_TIMEOUT_S, patience)
        with trio.move_on_at(max(started + patience, last_moment)) as scope:
            try:
                yield
            except TriolegError as error:
                raise EngineStartError(str(error)) from error
        if scope.cancelled_caught:
            raise EngineStartError(
                f"engine {link.rank} said that it was ready, and answers nothing (start_timeout is "
                f"{patience:g} s)"
            )

    def _end(self, cause: str) -> None:
        self.cause_of_death = cause
        self.dead.set()
        self.note_change()

    def _take_over(self, link: EngineLink) -> None:
        if self.ready.is_set():
            self.num_restarts += 1
            self._last_failure = ""
            _log.warning("engine %d is ready again", link.rank)
        self.link = link
        self.ready.set()
        self.note_change()

    async def _wait_before_restart(self, failures: int) -> None:
        wait = min(_FIRST_WAIT_S * 2.0 ** (failures - 1), _LONGEST_WAIT_S)
        self._start_at = trio.current_time() + wait
        if not self._is_ending:
            _log.warning("the engine is started again in %g s", wait)
            await trio.sleep(wait)
        if self._is_ending:
            await trio.sleep_forever()
