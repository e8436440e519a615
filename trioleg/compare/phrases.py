"""What was said, in words that can be compared across legs and runs.

Pure. A phrase is one line, without ids, addresses, process numbers and times, and not long: what a cell of a table holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["error_phrase", "exception_lines", "exit_phrase", "plain"]

_SHOWN_CHARS = 160
_OWN_TO_A_RUN = (
    (re.compile(r"\brequest [0-9a-f]{8,}-\d+"), "request ID"),
    (re.compile(r"\b(?:chatcmpl|cmpl|req|request)-[\w-]*\d[\w-]*"), "ID"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{16,}\b"), "ID"),
    (re.compile(r"\b0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"\b(?:ipc|tcp)://[^\s'\",;)]+"), "ADDRESS"),
    (re.compile(r"\b127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"\bpid[= ]\d+"), "pid N"),
    (re.compile(r"\b\d+(?:\.\d+)? ?m?s\b"), "N s"),
)
_CODE = r"(?:ended with |(?:exit(?:ed with)?[ _]?(?:code|status)|returncode)[:= ]+)"
# How it ended, in the words of the legs and of Python's libraries.
_EXITS = (
    (re.compile(r"killed by (SIG\w+)|\b(SIG(?:KILL|TERM|STOP|ABRT|SEGV))\b"), "killed by {}"),
    # Not "status" alone: HTTP has that word, too.
    (re.compile(rf"{_CODE}-9\b"), "killed by SIGKILL"),
    (re.compile(rf"{_CODE}(\d+)"), "status {}"),
    (re.compile(r"Failed core proc\(s\): \{'\w+': (\d+)"), "status {}"),
)
# "ValueError: …", behind a prefix such as vLLM's "(APIServer pid=7) ERROR 12-01 00:00:00 [file.py:1] ".
_EXCEPTION = re.compile(
    r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Group)\b(?:: .*)?)$"
)


def plain(text: str) -> str:
    """The first line of it that is not blank, without what is one run's own."""
    line = next((one.strip() for one in text.splitlines() if one.strip()), "")
    for pattern, word in _OWN_TO_A_RUN:
        line = pattern.sub(word, line)
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 3]}..."


def error_phrase(body: bytes | str | Any) -> str:
    """Of an answer or an event that tells of an error: its code or type, and its message; "" if it tells of none."""
    if isinstance(body, bytes | str):
        try:
            body = json.loads(body)
        except ValueError:
            return plain(body if isinstance(body, str) else body.decode(errors="replace"))
    error = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return plain(str(error)) if error else ""
    kind = error.get("code")
    # OpenAI's word is a string; vLLM puts the status there, which says less than its type.
    kind = kind if isinstance(kind, str) else error.get("type")
    return plain(f"{kind}: {error.get('message', '')}" if kind else str(error.get("message", "")))


def exit_phrase(texts: Iterable[str]) -> str:
    """How a process ended, if one of ``texts`` says so: "killed by SIGKILL", "status 3"; else ""."""
    for text in texts:
        for pattern, words in _EXITS:
            if match := pattern.search(text):
                return words.format(next(filter(None, match.groups()), ""))
    return ""


def exception_lines(lines: Sequence[str]) -> list[str]:
    """The last lines of tracebacks ("ValueError: the body"), each once, in order."""
    found = [plain(match[1]) for line in lines if (match := _EXCEPTION.search(line.rstrip()))]
    return list(dict.fromkeys(found))
