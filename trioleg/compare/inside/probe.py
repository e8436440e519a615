"""``Probe``: where a leg tells a scenario what there is within its process.

Standard library alone. A daemon thread waits at a Unix socket that keeps messages apart, and has what it is asked for
looked up in the loop's own thread, so that nothing changes meanwhile. Until somebody asks it costs nothing. It speaks
as ``bench/leg_control.py`` does, with one peer at a time: ``{"do": WORD}``, and one JSON object in return.

    census  {"tasks": n, "names": {name: n}, "requests": n, "threads": n}
            tasks alive in the loop; live requests that the front end holds; threads that Python knows, but for ours
    steps   {"steps": n}    how often a task was resumed since the first time that this was asked
    lanes   {"events": n}   written to the file that ``--lanes`` named

``{"error": …}``: the loop is not there, does not answer, or has no such thing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Probe"]

# For a loop that starts, and for one that is busy: a second is long for either.
_LOOP_S = 10.0
_MESSAGE_BYTES = 16 * 1024
# All names of a leg in good order; a thousand that are left over must not outgrow a message.
_NAMES_TOLD = 100


class Probe:
    """One for a process, listening at ``path`` from now on until the process ends. Raises ``OSError``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(path))
        self._listener.listen(1)
        self._is_attached = threading.Event()
        self._call_in_loop: Callable[[Callable[[], None]], object] = _nowhere
        self._words: dict[str, Callable[[], dict[str, Any]]] = {}
        threading.Thread(target=self._run, name="probe", daemon=True).start()

    def attach(
        self,
        call_in_loop: Callable[[Callable[[], None]], object],
        census: Callable[[], dict[str, Any]],
        lanes: Callable[[], int] | None = None,
        steps: Callable[[], int] | None = None,
    ) -> None:
        """The loop runs. ``call_in_loop(fn)`` has it run ``fn`` soon, from any thread. ``census`` gives ``tasks``,
        ``names`` and ``requests``, ``lanes`` the number of events written, ``steps`` that of steps counted; all are
        called in the loop."""
        self._call_in_loop = call_in_loop
        self._words["census"] = lambda: _told(census())
        if lanes is not None:
            self._words["lanes"] = lambda: {"events": lanes()}
        if steps is not None:
            self._words["steps"] = lambda: {"steps": steps()}
        self._is_attached.set()

    # ------------------------------------------------------------------ in its thread

    def _run(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            with peer:
                try:
                    self._serve(peer)
                except OSError:
                    continue  # it left before it had its answer

    def _serve(self, peer: socket.socket) -> None:
        while data := peer.recv(_MESSAGE_BYTES):
            peer.sendall(json.dumps(self._answer(json.loads(data)["do"])).encode())

    def _answer(self, word: str) -> dict[str, Any]:
        if not self._is_attached.wait(_LOOP_S):
            return {"error": f"the loop did not start within {_LOOP_S:g} s"}
        look_up = self._words.get(word)
        if look_up is None:
            return {"error": f"do is {word!r}; allowed: {', '.join(self._words)}"}
        answers: list[dict[str, Any]] = []
        is_done = threading.Event()

        def run() -> None:
            # An error here would be the loop's, which knows nothing of us.
            try:
                answers.append(look_up())
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                answers.append({"error": f"{type(error).__name__}: {error}"})
            is_done.set()

        try:
            self._call_in_loop(run)
        except Exception as error:  # noqa: BLE001 - each loop has its own for having ended
            return {"error": f"the loop has ended: {type(error).__name__}: {error}"}
        if not is_done.wait(_LOOP_S):
            return {"error": f"the loop did not answer within {_LOOP_S:g} s"}
        return answers[0]


def _nowhere(_function: Callable[[], None]) -> None:
    raise RuntimeError("no loop is attached")


def _told(census: dict[str, Any]) -> dict[str, Any]:
    names = sorted(census["names"].items(), key=lambda item: -item[1])[:_NAMES_TOLD]
    return {**census, "names": dict(names), "threads": threading.active_count() - 1}
