"""The two files of a batch: the questions, and the answers so far.

The questions are checked whole before anything is loaded: an answer is found by its custom_id, so a line
without one of its own (or that is no JSON object at all) spoils the file, and is named by its number.
The answers are the only state of a run. A line is written as soon as it is there, so
whatever ends a run (Ctrl-C, SIGKILL, a power cut) leaves whole lines and at most one torn one at the
end; the next run cuts that off, and answers what has no line yet.

Rules of this file: files and JSON; it knows no engine and no model. Memory: 16 bytes (about 85 with
Python's own) for each line that is not answered yet, and one line.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from .config import ServerConfig
from .errors import TriolegError

__all__ = ["ID_PREFIX", "Answers", "Questions", "open_answers", "open_questions"]

# Begins the id of an answer, as OpenAI's does.
ID_PREFIX = "batch_req_"
_LINE_BEGINS = f'{{"id":"{ID_PREFIX}'.encode()

# What the server takes as one body, and some room for what stands round it in a line.
_MAX_LINE_BYTES = ServerConfig().max_body_bytes + 64 * 2**10


class _Question(msgspec.Struct):
    custom_id: str


class _Answer(msgspec.Struct):
    id: str
    custom_id: str
    response: msgspec.Raw
    error: msgspec.Raw


class Questions:
    """The file of questions, checked. ``num_lines``: those that are not blank.

    ``num_pending`` of them have no answer yet.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        # Digests of the custom_ids that have no answer: an id may be as long as its writer likes.
        self._pending: set[bytes] = set()
        for number, raw in self._lines():
            custom_id = self._custom_id(number, raw)
            digest = _digest(custom_id)
            if digest in self._pending:
                raise self._fault(number, f"custom_id {custom_id!r} stands in an earlier line, too")
            self._pending.add(digest)
        self.num_lines = len(self._pending)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def mark_answered(self, custom_id: str) -> bool:
        """False: there is no such question, or it had its answer already."""
        digest = _digest(custom_id)
        if digest not in self._pending:
            return False
        self._pending.remove(digest)
        return True

    def pending(self) -> Iterator[tuple[str, bytes]]:
        """The custom_id and the line of each question without an answer, in the file's order."""
        for number, raw in self._lines():
            custom_id = self._custom_id(number, raw)
            if _digest(custom_id) in self._pending:
                yield custom_id, raw

    def is_same_file(self, file: BinaryIO) -> bool:
        return os.path.sameopenfile(self._file.fileno(), file.fileno())

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        number = 0
        while raw := self._file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > _MAX_LINE_BYTES:
                raise self._fault(
                    number, f"the line is too long; allowed: at most {_MAX_LINE_BYTES} bytes"
                )
            if raw.strip():
                yield number, raw

    def _custom_id(self, number: int, raw: bytes) -> str:
        try:
            return msgspec.json.decode(raw, type=_Question).custom_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._fault(
                number, f"{error}; allowed: a JSON object with a custom_id, which is a string"
            ) from None

    def _fault(self, number: int, what: str) -> TriolegError:
        return TriolegError(f"{self.path}, line {number}: {what}")


@contextmanager
def open_questions(path: Path) -> Iterator[Questions]:
    """Open and check the file of questions. Raises ``TriolegError`` naming the line that spoils it."""
    with _open_regular(path, os.O_RDONLY, "rb", "read") as file:
        yield Questions(path, file)


class Answers:
    """The file of answers, locked, and at its end. ``num_kept`` were there before; ``num_torn_bytes``
    of a line that had not been finished were cut off."""

    def __init__(self, path: Path, file: BinaryIO, questions: Questions) -> None:
        self.path = path
        self._file = file
        self._questions = questions
        self.num_kept = 0
        whole = 0
        for number, raw in enumerate(iter(file.readline, b""), 1):
            if not raw.endswith(b"\n"):
                self._check_torn(number, raw)
                break
            self._check_kept(number, raw)
            self.num_kept = number
            whole += len(raw)
        self.num_torn_bytes = os.fstat(file.fileno()).st_size - whole
        file.seek(whole)
        file.truncate()

    def write(self, custom_id: str, line: bytes) -> None:
        """Append one answer, a JSON object without its line end. Raises ``TriolegError``."""
        rest = memoryview(line + b"\n")
        try:
            # Past the file object's buffer, which would try again, when it is closed, what has failed.
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError as error:
            raise TriolegError(f"{self.path} cannot be written: {error.strerror}") from error
        self._questions.mark_answered(custom_id)

    def _check_kept(self, number: int, raw: bytes) -> None:
        try:
            answer = msgspec.json.decode(raw, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._stranger(number) from None
        if not answer.id.startswith(ID_PREFIX):
            raise self._stranger(number)
        if not self._questions.mark_answered(answer.custom_id):
            raise TriolegError(
                f"{self.path}, line {number}: custom_id {answer.custom_id!r} is in no line of "
                f"{self._questions.path}, or is answered twice; allowed: answers to that file"
            )

    def _check_torn(self, number: int, raw: bytes) -> None:
        """It must be the beginning of a line of ours: some other file may have been named by mistake."""
        # After a power cut, some file systems have zeros where data had not been written yet.
        begin = raw[: len(_LINE_BEGINS)].rstrip(b"\0")
        if not _LINE_BEGINS.startswith(begin):
            raise self._stranger(number)

    def _stranger(self, number: int) -> TriolegError:
        return TriolegError(
            f"{self.path}, line {number}: this is no answer of an earlier run; "
            "allowed: a new file, or one that a run has begun"
        )


@contextmanager
def open_answers(path: Path, questions: Questions) -> Iterator[Answers]:
    """Open the file of answers, make it if it is not there, and mark what it answers.

    Raises ``TriolegError``, with the file as it was, if it is the file of questions, holds anything but
    answers to them, or is in use by another run.
    """
    # Not truncated: what is in it decides.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    with _open_regular(path, flags, "r+b", "written") as file:
        if questions.is_same_file(file):
            raise TriolegError(f"{path} is the file of questions, too; allowed: another one")
        try:
            # Belongs to the open file: it is gone with the process, however that ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TriolegError(f"{path} is in use: another run is writing it") from None
        yield Answers(path, file, questions)


def _open_regular(path: Path, flags: int, mode: str, use: str) -> BinaryIO:
    try:
        # Not blocking: to open a named pipe would wait for its other end.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise TriolegError(f"{path} cannot be {use}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TriolegError(f"{path} is a pipe, a device or the like; allowed: a regular file")
    return cast(BinaryIO, os.fdopen(descriptor, mode))


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
