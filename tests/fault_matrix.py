"""The fault matrix: what ends a request, and what comes of it in each phase of the request's life.

One table, three uses: ``server/test_fault_matrix.py`` plays every cell in virtual time,
``server/test_fault_matrix_real.py`` the main ones with a process and sockets, and the tables of
docs/endings.md that tell of them are these rows, word for word.

A request's life here: a prompt becomes ids, waits in the engine's queue, is prefilled, and then gets a token
every tenth of a second, "a", "b", "c" and again; its second choice begins with "b", its third with "c".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import trio

from trioleg import errors
from trioleg.config import LLMConfig
from trioleg.engine.scripted import ScriptedCore
from trioleg.ipc.codec import encode
from trioleg.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    refusal_reason,
)
from trioleg.outputs import EndingKind
from trioleg.runtime.llm import LLM
from trioleg.runtime.request_stream import RequestStream
from trioleg.testing import ScriptedTransport
from trioleg.timeouts import Timeouts

__all__ = [
    "FAULTS",
    "MODES",
    "PHASES",
    "Fault",
    "Struck",
    "document_tables",
    "ending_rows",
    "full_text",
    "phase_rows",
]

# When it strikes, in seconds behind the request.
PHASES = {
    "tokenizing": 0.5,
    "queued": 0.5,
    "prefill": 0.5,
    "decoding": 1.5,
    "text held back": 1.5,
    "answer not read yet": 1.5,
}
# Two clients of the server, and two callers in the program itself.
MODES = ("stream", "plain", "receive", "generate")

# What becomes of the request, phase by phase.
ENDS, TURNED_AWAY, GOES_ON, NEVER = "ends", "turned away", "goes on", "–"


class Struck(Protocol):
    """What a fault can reach: ``stream`` is the request's, once it has been submitted."""

    llm: LLM
    transport: ScriptedTransport
    stream: RequestStream | None

    def leave(self) -> None: ...


def nothing(struck: Struck) -> None:
    """For what comes by itself."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row. ``effects`` has a word for each phase. ``widely``: the engine's other requests fare alike.

    ``tells``: what the end of a stream says. ``status`` and ``code``: of an answer without a stream;
    ``parameter``: the one that an error names. ``late``: the error, status and code of a request that was
    turned away.
    ``aborts``: what the engine is told. ``afterwards``: what the next request gets; None: its answer.
    ``unusable``: tokens that were counted, and have no text. ``needs_connection``: only a real one shows it.
    ``asked`` and ``texts`` are those of the phase, for what the request itself asks for.
    """

    name: str
    kind: EndingKind
    error: type[Exception] | None
    tells: str
    status: int | None
    code: str | None = None
    parameter: str | None = None
    aborts: str
    effects: tuple[str, ...]
    strike: Callable[[Struck], None] = nothing
    later: tuple[float, Callable[[Struck], None]] | None = None
    widely: bool = False
    late: tuple[type[Exception], int, str] | None = None
    afterwards: type[Exception] | None = None
    modes: tuple[str, ...] = MODES
    config: Callable[[float], LLMConfig] = lambda _at: LLMConfig()
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    texts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    max_tokens: int = 8
    reader_stops: bool = False
    unusable: int = 0
    needs_connection: bool = False

    def effect(self, phase: str) -> str:
        return self.effects[list(PHASES).index(phase)]


def full_text(index: int, tokens: int) -> str:
    """The first ``tokens`` tokens of a choice."""
    return ("abc" * (tokens // 3 + 2))[index : index + tokens]


# ---------------------------------------------------------------------------- strikes


def _engine_ids(struck: Struck) -> list[str]:
    assert struck.stream is not None
    return struck.stream.submission.engine_request_ids


def _report(
    struck: Struck,
    count: int | None,
    finish: FinishReason | None,
    token_ids: list[int],
    reason: str | None = None,
) -> None:
    """Outputs of the engine's for the request's first choices; after a finish it has dropped them."""
    chosen = _engine_ids(struck)[:count]
    if finish is not None:
        core: ScriptedCore = struck.transport.core
        core.abort_requests(chosen)
    outputs = [
        EngineCoreOutput(one, token_ids, finish_reason=finish, stop_reason=reason) for one in chosen
    ]
    struck.transport.inject([encode(EngineCoreOutputs(outputs=outputs))])


def _repeats(struck: Struck) -> None:
    """Each choice gets its sixth token, which ends its second "abc", "bca" or "cab"."""
    core: ScriptedCore = struck.transport.core
    repetition = {
        "finish_reason": FinishReason.REPETITION,
        "stop_reason": "repetition_detected",
    }
    chosen = _engine_ids(struck)
    steps = [next(core._running[one].steps) for one in chosen]
    outputs = [
        EngineCoreOutput(one, token_ids, **repetition)
        for one, (token_ids, _) in zip(chosen, steps, strict=True)
    ]
    core.abort_requests(chosen)
    struck.transport.inject([encode(EngineCoreOutputs(outputs=outputs))])


def _refuse(struck: Struck) -> None:
    reason = refusal_reason("seed", "seed is 7; allowed: None, by this engine")
    _report(struck, None, FinishReason.ERROR, [], reason)


def _abort_by_id(struck: Struck) -> None:
    assert struck.stream is not None
    assert struck.llm.abort(struck.stream.request_id)


def _gone(struck: Struck) -> None:
    struck.transport.make_unreachable("its process was killed")


def _total(at: float) -> LLMConfig:
    return LLMConfig(timeouts=Timeouts(total=at))


def _first_token(at: float) -> LLMConfig:
    return LLMConfig(timeouts=Timeouts(first_token=at))


# ---------------------------------------------------------------------------- rows

_NATURAL = (NEVER, NEVER, ENDS, ENDS, ENDS, NEVER)
_BY_ITSELF = (NEVER, ENDS, ENDS, ENDS, ENDS, GOES_ON)
_ALWAYS = (ENDS, ENDS, ENDS, ENDS, ENDS, GOES_ON)
_NOT_TAKEN = (TURNED_AWAY, ENDS, ENDS, ENDS, ENDS, GOES_ON)
_ONLY_WITHIN = (GOES_ON, ENDS, ENDS, ENDS, ENDS, GOES_ON)

_DEAD = (errors.EngineDeadError, 503, "engine_dead")
_HELD = {"stop": ["cabd"]}
_TWICE = {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 3, "min_count": 2}}
_DIES: dict[str, Any] = {
    "kind": EndingKind.ENGINE_DEAD,
    "error": errors.EngineDeadError,
    "tells": "error",
    "status": 503,
    "code": "engine_dead",
    "widely": True,
}
_FAILS: dict[str, Any] = {
    "kind": EndingKind.OUTPUT_ERROR,
    "error": errors.OutputError,
    "tells": "error",
    "status": 500,
    "code": "output_error",
}
_LEFT: dict[str, Any] = {
    "kind": EndingKind.LEFT,
    "error": None,
    "tells": "nothing",
    "status": None,
    "aborts": "ABORT",
    "effects": _ALWAYS,
    "strike": lambda struck: struck.leave(),
}
_OVERDUE: dict[str, Any] = {
    "kind": EndingKind.DEADLINE,
    "error": errors.DeadlineExceeded,
    "tells": "error",
    "status": 504,
    "code": "deadline_exceeded",
    "aborts": "ABORT",
}
_GOOD: dict[str, Any] = {
    "error": trio.EndOfChannel,
    "tells": "finish",
    "status": 200,
    "effects": _NATURAL,
}

FAULTS = (
    Fault(
        name="a stop token",
        kind=EndingKind.STOP,
        aborts="nothing",
        asked={
            "prefill": {"stop_token_ids": [263, 264, 265]},
            "decoding": {"stop_token_ids": [265], "min_tokens": 4},
            "text held back": {"stop_token_ids": [265], "min_tokens": 4, **_HELD},
        },
        texts={
            "prefill": ("", "", ""),
            "decoding": ("abcab", "bcab", "cab"),
            "text held back": ("abcab", "bcab", "cab"),
        },
        **_GOOD,
    ),
    Fault(
        name="a stop string",
        kind=EndingKind.STOP_STRING,
        aborts="ABORT",
        asked={
            "prefill": {"stop": ["a", "b", "c"]},
            "decoding": {"stop": "cab", "include_stop_str_in_output": True},
            "text held back": {"stop": "cab"},
        },
        texts={
            "prefill": ("", "", ""),
            "decoding": ("abcab", "bcab", "cab"),
            "text held back": ("ab", "b", ""),
        },
        **_GOOD,
    ),
    Fault(
        name="its length",
        kind=EndingKind.LENGTH,
        aborts="nothing",
        asked={
            "prefill": {"max_tokens": 1},
            "decoding": {"max_tokens": 5},
            "text held back": {"max_tokens": 5, **_HELD},
        },
        texts={
            "prefill": ("a", "b", "c"),
            "decoding": ("abcab", "bcabc", "cabca"),
            "text held back": ("abcab", "bcabc", "cabca"),
        },
        **_GOOD,
    ),
    Fault(
        name="its own repetition",
        kind=EndingKind.REPETITION,
        aborts="nothing",
        strike=_repeats,
        asked={"decoding": _TWICE, "text held back": _TWICE},
        texts={
            "decoding": ("abcabc", "bcabca", "cabcab"),
            "text held back": ("abcabc", "bcabca", "cabcab"),
        },
        **{**_GOOD, "effects": (NEVER, NEVER, NEVER, ENDS, ENDS, NEVER)},
    ),
    Fault(name="the client leaves", modes=("stream", "plain"), **_LEFT),
    Fault(name="the caller's scope is cancelled", modes=("receive", "generate"), **_LEFT),
    Fault(
        name="the deadline of the first token",
        effects=(ENDS, ENDS, ENDS, GOES_ON, GOES_ON, GOES_ON),
        config=_first_token,
        **_OVERDUE,
    ),
    Fault(name="the deadline of the whole", effects=_ALWAYS, config=_total, **_OVERDUE),
    Fault(
        name="an abort by id",
        kind=EndingKind.ABORTED,
        error=errors.RequestAborted,
        tells="abort",
        status=500,
        code="request_aborted",
        aborts="ABORT",
        effects=(NEVER, ENDS, ENDS, ENDS, ENDS, NEVER),
        strike=_abort_by_id,
    ),
    Fault(
        name="the engine aborts it",
        kind=EndingKind.ABORTED,
        error=errors.RequestAborted,
        tells="abort",
        status=500,
        code="request_aborted",
        aborts="ABORT of its other choices",
        effects=(NEVER, ENDS, ENDS, ENDS, ENDS, NEVER),
        strike=lambda struck: _report(struck, None, FinishReason.ABORT, []),
    ),
    Fault(
        name="the engine refuses it",
        kind=EndingKind.REFUSED,
        error=errors.RequestRefused,
        tells="error",
        status=400,
        parameter="seed",
        aborts="ABORT of its other choices",
        effects=(NEVER, ENDS, ENDS, ENDS, ENDS, NEVER),
        strike=_refuse,
        asked={phase: {"seed": 7} for phase in PHASES},
    ),
    Fault(
        name="the engine reports an error for it",
        aborts="ABORT of its other choices",
        effects=(NEVER, ENDS, ENDS, ENDS, ENDS, NEVER),
        strike=lambda struck: _report(struck, 1, FinishReason.ERROR, []),
        **_FAILS,
    ),
    Fault(
        name="an output of it cannot be used",
        aborts="ABORT",
        effects=(NEVER, ENDS, ENDS, ENDS, ENDS, NEVER),
        strike=lambda struck: _report(struck, 1, None, [-1]),
        unusable=1,
        **_FAILS,
    ),
    Fault(
        name="a message of the engine cannot be read",
        aborts="ABORT",
        effects=_ONLY_WITHIN,
        strike=lambda struck: struck.transport.inject([b"\xc1"]),
        widely=True,
        **_FAILS,
    ),
    Fault(
        name="the engine reports its own death",
        aborts="nothing",
        effects=_NOT_TAKEN,
        strike=lambda struck: struck.transport.inject_dead(),
        late=_DEAD,
        afterwards=errors.EngineDeadError,
        **_DIES,
    ),
    Fault(
        name="the engine's process is gone",
        aborts="nothing",
        effects=_NOT_TAKEN,
        strike=_gone,
        late=_DEAD,
        afterwards=errors.EngineDeadError,
        **_DIES,
    ),
    Fault(
        name="the engine dies and is restarted",
        aborts="nothing",
        effects=_NOT_TAKEN,
        strike=lambda struck: struck.transport.inject_dead(),
        late=(errors.EngineUnavailableError, 503, "engine_unavailable"),
        config=lambda _at: LLMConfig(restart_engine=True),
        **_DIES,
    ),
    Fault(
        name="the engine is frozen for good",
        aborts="nothing that reaches it",
        effects=_ALWAYS,
        strike=lambda struck: struck.transport.freeze(),
        afterwards=errors.EngineDeadError,
        **_DIES,
    ),
    Fault(
        name="the engine is frozen and comes back",
        aborts="ABORT, when it is back",
        effects=_ALWAYS,
        strike=lambda struck: struck.transport.freeze(),
        later=(3.0, lambda struck: struck.transport.thaw()),
        **_DIES,
    ),
    Fault(
        name="the way to the engine is lost for half a second",
        aborts="ABORT, when it is back",
        effects=(GOES_ON, ENDS, ENDS, GOES_ON, GOES_ON, GOES_ON),
        strike=lambda struck: struck.transport.freeze(),
        later=(0.5, lambda struck: struck.transport.thaw()),
        **{**_DIES, "widely": False},
    ),
    Fault(
        name="the way from the engine breaks for a moment",
        aborts="ABORT",
        effects=_ONLY_WITHIN,
        strike=lambda struck: struck.transport.break_outputs(),
        **_DIES,
    ),
    Fault(
        name="its reader is too slow",
        kind=EndingKind.READER_TOO_SLOW,
        error=errors.ReaderTooSlow,
        tells="error",
        status=None,
        code="reader_too_slow",
        aborts="ABORT",
        effects=(NEVER, NEVER, NEVER, ENDS, ENDS, NEVER),
        modes=("stream", "receive"),
        config=lambda _at: LLMConfig(mailbox_max_bytes=2000),
        max_tokens=1000,
        reader_stops=True,
    ),
    Fault(
        name="the client stops reading",
        kind=EndingKind.LEFT,
        error=None,
        tells="nothing",
        status=None,
        aborts="ABORT",
        effects=(NEVER, NEVER, NEVER, ENDS, ENDS, NEVER),
        modes=("stream",),
        needs_connection=True,
    ),
    Fault(
        name="the server shuts down",
        kind=EndingKind.SHUTDOWN,
        error=errors.ServerShutdown,
        tells="error",
        status=503,
        code="server_shutdown",
        aborts="ABORT",
        effects=_NOT_TAKEN,
        strike=lambda struck: struck.llm.shut_down("the server is shutting down"),
        widely=True,
        late=(errors.ServerShutdown, 503, "server_shutdown"),
        afterwards=errors.ServerShutdown,
    ),
)

# ---------------------------------------------------------------------------- docs/endings.md

_DOCUMENT = Path(__file__).parents[1] / "docs" / "endings.md"
_TELLS = {
    "finish": "finish chunks, `[DONE]`",
    "abort": 'finish chunks with "abort", `[DONE]`',
    "error": "error event, `[DONE]`",
    "nothing": "nothing more",
}


def document_tables() -> list[list[str]]:
    """Its tables, line by line: endings, statuses, phases."""
    blocks = _DOCUMENT.read_text().split("\n\n")
    return [block.splitlines() for block in blocks if block.startswith("|")]


def ending_rows() -> list[str]:
    """The table of endings, line by line."""
    heads = ("what ends it", "`receive` raises", "a stream gets", "a plain request gets")
    rows = [(*heads, "the engine gets", "reason"), ("---",) * 6]
    for one in FAULTS:
        error = "its own `Cancelled`" if one.error is None else f"`{one.error.__name__}`"
        tells = _TELLS[one.tells] if "stream" in one.modes else "–"
        rows.append((one.name, error, tells, _plain(one), one.aborts, f"`{one.kind}`"))
    return _lines(rows)


def _plain(one: Fault) -> str:
    if "plain" not in one.modes:
        return "–"
    if one.status is None:
        return "nothing"
    if one.status == 200:
        return "200"
    named = "with the parameter" if one.code is None else f"`{one.code}`"
    return f"{one.status} {named}, `error.partial`"


def phase_rows() -> list[str]:
    """The table of phases, line by line."""
    rows = [("what ends it", *PHASES), ("---",) * (1 + len(PHASES))]
    return _lines([*rows, *((one.name, *one.effects) for one in FAULTS)])


def _lines(rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in rows]
