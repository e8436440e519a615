"""``GrammarGate``: tries a constraint in a process that may crash, hang and outgrow its memory.

A constraint is a program for llguidance's compiler, and a hostile one is small: 40 characters of JSON Schema
(`{"type": "integer", "multipleOf": 9999991}`) take minutes and gigabytes, a chain of some thousand references
overflows the stack, and neither can be stopped or caught in a thread. So each is tried first where that is harmless:
a child of ours (``grammar_trial``) forks for every trial, with bounds on processor time and memory. What has passed
costs about as much again where it is used, and no more.

Rules of this file: synchronous; callers with an event loop use a thread. Imports ``errors`` and
``structured_outputs``. The child ends when its standard input does, so it outlives nobody.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import TriolegError
from .structured_outputs import StructuredOutputsParams

__all__ = ["GrammarGate"]

# What has passed lately: most programs ask with a few schemas again and again.
_REMEMBERED = 512
# More than a trial may take by the clock (``grammar_trial``), and starting the child before it: a child that stands
# still is ended.
_ANSWER_S = 60.0


class GrammarGate:
    """Tries constraints, one after the other, in a child that is started by the first one.

    ``model_dir`` None: without a tokenizer, which finds less and starts in a tenth of a second. ``vocab_size`` goes
    with ``model_dir``. ``passed``: a memory that several gates share. ``close`` ends the child, whatever it is doing.
    """

    def __init__(
        self,
        model_dir: Path | None = None,
        vocab_size: int = 0,
        *,
        passed: OrderedDict[str, None] | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._one_at_a_time = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._passed = OrderedDict() if passed is None else passed
        self._closed = False

    def has_passed(self, params: StructuredOutputsParams) -> bool:
        """True if ``check`` would return at once."""
        return json.dumps(params.to_mapping()) in self._passed

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises ``InvalidRequestError`` with the reason if it cannot be enforced, or not within bounds;
        ``TriolegError`` if that cannot be found out."""
        fields = json.dumps(params.to_mapping())
        if fields in self._passed:
            return
        with self._one_at_a_time:
            if self._closed:
                raise TriolegError("grammars are not tried any more: the gate is closed")
            answer = self._ask(fields)
        if "failed" in answer:
            raise TriolegError(f"a grammar could not be tried: {answer['failed']}")
        if "beyond" in answer:
            raise params.refusal_beyond_bounds(answer["beyond"])
        if "reason" in answer:
            raise params.refusal(answer["reason"])
        self._passed[fields] = None
        if len(self._passed) > _REMEMBERED:
            self._passed.popitem(last=False)

    def close(self) -> None:
        """Ends the child; a check that waits for it raises ``TriolegError``. Idempotent."""
        self._closed = True
        child, self._child = self._child, None
        if child is not None:
            _end(child)

    def _ask(self, fields: str) -> Mapping[str, Any]:
        child = self._running_child()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(fields.encode() + b"\n")
            child.stdin.flush()
            # Not select, which takes no descriptor above 1023: a server with as many streams has them.
            poll = select.poll()
            poll.register(child.stdout, select.POLLIN)
            # A line is written at once, so whoever sees its beginning has it whole.
            answer = child.stdout.readline() if poll.poll(1000 * _ANSWER_S) else b""
        except (OSError, ValueError):
            answer = b""
        if not answer:
            self._child = None
            raise TriolegError(f"the process that tries grammars has ended ({_end(child)})")
        found: Mapping[str, Any] = json.loads(answer)
        return found

    def _running_child(self) -> subprocess.Popen[bytes]:
        child = self._child
        if child is not None and child.poll() is not None:
            _end(child)
            child = None
        self._child = child = child or self._start()
        # Once it is where ``close`` looks for it: one of the two ends it.
        if self._closed:
            _end(child)
        return child

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "trioleg.grammar_trial"]
        if self._model_dir is not None:
            command += [str(self._model_dir), str(self._vocab_size)]
        # The child must find this very package, wherever we were started.
        package = str(Path(__file__).parents[1])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            command,
            # A backtrace with each refusal, which nobody reads, would take seconds for a deep text.
            env=os.environ | {"PYTHONPATH": paths, "RUST_BACKTRACE": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Of its own, so that a Ctrl-C at the terminal is ours to answer.
            start_new_session=True,
        )


def _end(child: subprocess.Popen[bytes]) -> int:
    """Kills it and its trials, frees its pipes, and returns its exit code. May be called twice, by two threads."""
    # Its process group is of its own; gone already, it is no error.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            # What was written and not read has no reader any more.
            with suppress(OSError):
                pipe.close()
    return code
