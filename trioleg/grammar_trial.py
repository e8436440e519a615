"""The program behind ``GrammarGate``: tries one constraint a line, each in a fork with bounds of its own.

    python -m trioleg.grammar_trial [MODEL_DIR VOCAB_SIZE]

A line of standard input is a constraint (``StructuredOutputsParams.to_mapping``), a line of
standard output its answer: {}, {"reason": …} (llguidance's), {"beyond": …} (the bounds that it did not keep to), or
{"failed": …} (a trial that could not be made). Ends with its input. It has one thread, so that it may fork.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ll_tokenizer import read_ll_tokenizer
from .structured_outputs import StructuredOutputsParams, parser_limits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["main"]

# Of a trial. Ordinary constraints take milliseconds; a schema of 100,000 characters took 1.5 s and 60 MB.
_CPU_S = 5
_MEMORY_BYTES = 512 * 2**20
# Less than a thread has where the constraint is used: what fits here fits there. Some 1,500 references deep.
_STACK_BYTES = 6 * 2**20
# A stopped or starved machine must not keep the asker for ever.
_WALL_S = 30

_BOUNDS = {
    "beyond": f"{_CPU_S} s of processor time and {_MEMORY_BYTES >> 20} MiB, and is not nested too deeply"
}


def main() -> None:
    """Answers until standard input ends."""
    # Loaded once, here: a fork has it already.
    import llguidance  # noqa: F401

    tokenizer = None
    if len(sys.argv) > 1:
        tokenizer = read_ll_tokenizer(Path(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin.buffer:
        answer = _try_in_fork(line, tokenizer)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _try_in_fork(line: bytes, tokenizer: LLTokenizer | None) -> dict[str, str]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.write(writing, json.dumps(_try_within_bounds(line, tokenizer)).encode())
        # Without the interpreter's own end, which is the parent's.
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) or not said:
        return _BOUNDS
    found: dict[str, str] = json.loads(said)
    return found


def _try_within_bounds(line: bytes, tokenizer: LLTokenizer | None) -> dict[str, str]:
    try:
        _set_bounds()
        return _try(line, tokenizer)
    except Exception as error:  # noqa: BLE001 (told to whoever waits for the answer)
        return {"failed": repr(error)}


def _set_bounds() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, now + _MEMORY_BYTES)
    _limit(resource.RLIMIT_CPU, _CPU_S)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    signal.alarm(_WALL_S)
    # What is said when a trial crashes is said by the signal; and whoever waits for the parent's output is to
    # see its end, though a trial goes on.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _limit(kind: int, bound: int) -> None:
    """A bound of ours, or the system's if that is lower."""
    _, hard = resource.getrlimit(kind)
    bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
    resource.setrlimit(kind, (bound, hard))


def _try(line: bytes, tokenizer: LLTokenizer | None) -> dict[str, str]:
    try:
        reason = _reason(StructuredOutputsParams.from_mapping(json.loads(line)), tokenizer)
    except ValueError as error:
        reason = str(error)
    except (MemoryError, RecursionError):
        return _BOUNDS
    return {"reason": reason} if reason else {}


def _reason(params: StructuredOutputsParams, tokenizer: Any) -> str:
    """Why llguidance cannot enforce it; "" if it can."""
    from llguidance import LLMatcher

    if tokenizer is None:
        return params.reason_against()
    matcher = LLMatcher(tokenizer, params.to_grammar(), log_level=0, limits=parser_limits())
    # The lexer is built when the first mask is asked for.
    matcher.compute_bitmask()
    return str(matcher.get_error()) if matcher.is_error() else ""


if __name__ == "__main__":
    main()
