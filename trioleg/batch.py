"""``trioleg batch``: a file of requests in, a file of answers out, in OpenAI's batch format.

A request is ``{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}``, its body
what the server takes. An answer is ``{"id": …, "custom_id": …, "response": {"status_code": …,
"request_id": …, "body": {…}}, "error": null}``, with the status and the body that the server would answer:
a request that fails has its error object there, and harms no other. (``error`` is OpenAI's place for what
never got a status, such as a request that expired; here every one gets one.)

Answers come in the order in which they are finished, as OpenAI's: so none waits for a longer one before
it, and none that is finished is lost when a run is interrupted. Running again goes on from there
(``batch_files.py``).

Rules of this file: it is the program, so it writes to stderr.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeAlias

import click
import msgspec

from .batch_files import ID_PREFIX, Answers, Questions, open_answers, open_questions
from .config import LLMConfig
from .errors import InvalidRequestError, RequestEnded
from .offline import OfflineEngine, open_engine
from .outputs import RequestOutput
from .prompts import Prompt
from .sampling_params import SamplingParams
from .server.model_names import check_model
from .server.protocol import (
    ChatCompletionRequest,
    error_of,
    full_response,
    parse_chat_completion,
)

__all__ = ["run"]

_URL = "/v1/chat/completions"
# What tells requests of one server apart from each other, and the value that asks for nothing.
_OF_A_SERVER = (("priority", 0), ("cache_salt", None))
_FIELDS = ("custom_id", "method", "url", "body")

# What an answer is written by: the line's custom_id, and what it asked for.
_Key: TypeAlias = tuple[str, ChatCompletionRequest]


def run(
    model: str, questions_path: Path, answers_path: Path, config: LLMConfig, name: str | None = None
) -> None:
    """Answer what has no answer yet, and say so on stderr. ``name``: the model's, in the requests.

    Raises ``TriolegError``: a file that cannot be used (nothing has been written then), a model that
    cannot be loaded, an engine that fails as a whole.
    """
    with (
        open_questions(questions_path) as questions,
        open_answers(answers_path, questions) as answers,
    ):
        _say_what_was_there(questions, answers)
        if not questions.num_pending:
            return
        with _Report(questions, answers) as report:
            with open_engine(model, config) as engine:
                report.engine_is_ready()
                _Batch(engine, name or model, questions, answers, report).run()


def _say_what_was_there(questions: Questions, answers: Answers) -> None:
    if answers.num_torn_bytes:
        _say(f"{answers.path}: cut off {answers.num_torn_bytes} bytes of an unfinished line")
    if not questions.num_pending:
        _say(f"nothing to do: {answers.path} has all {questions.num_lines} answers")
    elif answers.num_kept:
        _say(f"going on: {answers.num_kept} of {questions.num_lines} answers are there")


def _say(text: str) -> None:
    click.echo(text, err=True)


class _Batch:
    """One run: questions through an engine, into answers."""

    def __init__(
        self,
        engine: OfflineEngine,
        name: str,
        questions: Questions,
        answers: Answers,
        report: _Report,
    ) -> None:
        self._engine = engine
        self._name = name
        self._questions = questions
        self._answers = answers
        self._report = report

    def run(self) -> None:
        for (custom_id, chat), output in self._engine.as_completed(self._requests()):
            if output.error is None:
                self._write(custom_id, 200, output.request_id, self._body(output, chat))
                tokens = sum(len(one.token_ids) for one in output.outputs)
                self._report.count(tokens=tokens)
            else:
                self._write_error(custom_id, output.error, output.request_id, chat)

    def _requests(self) -> Iterator[tuple[_Key, Prompt, SamplingParams]]:
        """What the engine gets. A request that is refused is answered here, in passing."""
        for custom_id, line in self._questions.pending():
            try:
                chat = self._parse(line)
            except InvalidRequestError as error:
                self._write_error(custom_id, error, uuid.uuid4().hex)
            else:
                yield (custom_id, chat), chat.messages, chat.params

    def _parse(self, line: bytes) -> ChatCompletionRequest:
        try:
            fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"the line is not valid JSON: {error}") from None
        for name in fields:
            if name not in _FIELDS:
                raise InvalidRequestError(f"unknown field: {name!r}", parameter=name)
        _check_field(fields, "method", "POST")
        _check_field(fields, "url", _URL)
        if "body" not in fields:
            raise InvalidRequestError(f"body is missing; allowed: {_URL}'s", parameter="body")
        chat = parse_chat_completion(bytes(fields["body"]), self._engine.default_sampling_params)
        for name, neutral in _OF_A_SERVER:
            value = getattr(chat, name)
            if value != neutral:
                raise InvalidRequestError(
                    f"{name} is {value!r}; allowed: {neutral!r}, since a batch is alone with its engine",
                    parameter=name,
                )
        if chat.stream:
            raise InvalidRequestError(
                "stream is true; allowed in a batch: false or null", parameter="stream"
            )
        check_model(chat, self._name)
        return chat

    def _body(self, output: RequestOutput, chat: ChatCompletionRequest) -> bytes:
        return full_response(output, chat, created=int(time.time()), model=self._name)

    def _write_error(
        self,
        custom_id: str,
        error: InvalidRequestError | RequestEnded,
        request_id: str,
        chat: ChatCompletionRequest | None = None,
    ) -> None:
        status, fields = error_of(error)
        if chat is not None and isinstance(error, RequestEnded) and error.partial is not None:
            fields["partial"] = msgspec.Raw(self._body(error.partial, chat))
        self._write(custom_id, status, request_id, msgspec.json.encode({"error": fields}))
        self._report.count(error=True)

    def _write(self, custom_id: str, status: int, request_id: str, body: bytes) -> None:
        # The id comes first: what a line of ours begins with.
        line = {
            "id": f"{ID_PREFIX}{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": {
                "status_code": status,
                "request_id": request_id,
                "body": msgspec.Raw(body),
            },
            "error": None,
        }
        self._answers.write(custom_id, msgspec.json.encode(line))


def _check_field(fields: dict[str, msgspec.Raw], name: str, allowed: str) -> None:
    try:
        value: Any = msgspec.json.decode(fields[name]) if name in fields else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"{name} cannot be read: {error}; allowed: {allowed!r}", parameter=name
        ) from None
    if value != allowed:
        raise InvalidRequestError(f"{name} is {value!r}; allowed: {allowed!r}", parameter=name)


class _Report:
    """What a person sees on stderr: a bar on a terminal, and one line at the end, also at a bad one."""

    def __init__(self, questions: Questions, answers: Answers) -> None:
        self._questions = questions
        self._answers = answers
        self._num_done = 0
        self._num_errors = 0
        self._num_tokens = 0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as TimeRemaining

        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._progress = Progress(
            *columns, TimeRemaining(), console=console, disable=not console.is_terminal
        )
        self._task = self._progress.add_task(
            "loading", total=self._questions.num_lines, completed=self._answers.num_kept
        )
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if not self._num_done:
            return
        seconds = time.monotonic() - self._began
        _say(
            f"answered {self._num_done} requests ({self._num_errors} with an error), "
            f"{self._num_tokens} tokens in {seconds:.1f} s: {self._answers.path}"
        )
        left = self._questions.num_pending
        if left:
            _say(f"stopped with {left} requests to go: the same command goes on from here")

    def engine_is_ready(self) -> None:
        self._began = time.monotonic()
        self._progress.reset(self._task, description="answering", completed=self._answers.num_kept)

    def count(self, *, tokens: int = 0, error: bool = False) -> None:
        self._num_done += 1
        self._num_errors += error
        self._num_tokens += tokens
        self._progress.advance(self._task)
