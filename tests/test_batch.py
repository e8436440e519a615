"""``trioleg batch``: what is refused, what is answered, and that an interrupted run goes on."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from programs import TRIOLEG, running, wait_until
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg import batch
from trioleg.chat_template import ChatTemplate
from trioleg.config import LLMConfig
from trioleg.engine.scripted import Fault, Script, ScriptedCore
from trioleg.errors import EngineDeadError, TriolegError
from trioleg.offline import OfflineEngine

URL = "/v1/chat/completions"


def question(custom_id: str, text: str = "ab", **body: Any) -> str:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 3, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body})


class Files:
    """IN and OUT, and ``run`` on a scripted engine, whose script is ``script``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.questions, self.answers = folder / "in.jsonl", folder / "out.jsonl"
        self.script: dict[str, Any] = {"token_ids": ids("a", "b", "c")}
        self.num_loaded = 0
        monkeypatch.setattr(batch, "open_engine", self._open_engine)

    @contextmanager
    def _open_engine(self, model: str, config: LLMConfig) -> Iterator[OfflineEngine]:
        self.num_loaded += 1
        core = ScriptedCore(Script(**self.script), on_fault=_fail)
        template = ChatTemplate("{{ messages[0].content }}", {}, origin="test")
        tokenizer = dataclasses.replace(byte_fallback_tokenizer(), chat_template=template)
        with closing(OfflineEngine(core, tokenizer, config)) as engine:
            yield engine

    def ask(self, *lines: str) -> None:
        self.questions.write_text("".join(f"{line}\n" for line in lines))

    def run(self, name: str | None = None) -> None:
        batch.run("tiny", self.questions, self.answers, LLMConfig(), name)

    def read(self) -> dict[str, Any]:
        """The responses by custom_id; every answer is whole, and there is one for each."""
        answers = [json.loads(line) for line in self.answers.read_bytes().splitlines()]
        assert all(list(one) == ["id", "custom_id", "response", "error"] for one in answers)
        assert all(one["error"] is None for one in answers)
        assert set(Counter(one["custom_id"] for one in answers).values()) <= {1}
        assert len({one["id"] for one in answers}) == len(answers)
        return {one["custom_id"]: one["response"] for one in answers}

    def texts(self) -> dict[str, str]:
        return {
            key: one["body"]["choices"][0]["message"]["content"] for key, one in self.read().items()
        }


def _fail(how: str) -> None:
    raise KeyboardInterrupt if how == "hang" else RuntimeError("no memory")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(tmp_path, monkeypatch)


def test_an_answer_is_the_servers(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.ask(question("x", max_tokens=2), "", question("y", model="tiny"))
    files.run()
    response = files.read()["x"]
    assert response["status_code"] == 200
    body = response["body"]
    assert body["id"] == f"chatcmpl-{response['request_id']}"
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2
    assert files.texts() == {"x": "ab", "y": "abc"}
    said = capsys.readouterr()
    assert said.out == ""
    assert "answered 2 requests (0 with an error), 5 tokens in" in said.err


def test_answers_come_as_they_are_finished(files: Files) -> None:
    files.ask(question("long", max_tokens=9), question("short", max_tokens=1))
    files.run()
    assert list(files.read()) == ["short", "long"]


@pytest.mark.parametrize(
    ("line", "status", "parameter", "said"),
    [
        (question("bad", max_tokens=0), 400, "max_tokens", "max_tokens is 0"),
        (question("bad", temprature=1), 400, "temprature", "unknown parameter"),
        (question("bad", stream=True), 400, "stream", "stream is true; allowed in a batch"),
        (question("bad", model="gpt-9"), 404, "model", "'gpt-9' is not served here"),
        (question("bad", "a" * 5000), 400, "messages", "tokens; allowed: 1 to"),
        (question("bad", max_tokens=5000), 400, "max_tokens", "max_tokens is 5000"),
        (question("bad").replace("POST", "GET"), 400, "method", "method is 'GET'"),
        (question("bad").replace('"POST"', "1e999"), 400, "method", "method cannot be read"),
        (question("bad").replace(URL, "/v1/x"), 400, "url", "url is '/v1/x'"),
        (question("bad").replace('"body"', '"boby"'), 400, "boby", "unknown field"),
        ('{"custom_id": "bad"}', 400, "method", "method is None; allowed: 'POST'"),
        (question("bad").partition(', "body"')[0] + "}", 400, "body", "body is missing"),
    ],
)
def test_a_bad_request_has_its_error_and_harms_no_other(
    files: Files, line: str, status: int, parameter: str, said: str
) -> None:
    files.ask(question("before"), line, question("after"))
    files.run()
    response = files.read().pop("bad")
    assert response["status_code"] == status
    error = response["body"]["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", parameter)
    assert said in error["message"]
    assert files.read()["before"]["status_code"] == files.read()["after"]["status_code"] == 200


def test_an_error_of_the_engine_keeps_what_there_was(files: Files) -> None:
    bad_id = Fault(after_steps=2, how="bad_token_id", request=0, token_id=-7)
    files.script["faults"] = [bad_id]
    files.ask(question("x", max_tokens=9), question("y"))
    files.run()
    response = files.read()["x"]
    assert response["status_code"] == 500
    error = response["body"]["error"]
    assert "token id -7" in error["message"]
    assert error["partial"]["choices"][0]["message"]["content"] == "ab"
    assert files.read()["y"]["status_code"] == 200


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no JSON", "JSON is malformed"),
        ('{"custom_id": "x"', "truncated"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"method": "POST"}', "missing required field `custom_id`"),
        ('{"custom_id": 5}', "Expected `str`, got `int`"),
        (question("a"), "custom_id 'a' stands in an earlier line"),
        ("[" * 5000, "allowed: a JSON object"),
        (question("x", "a" * 17_000_000), "the line is too long"),
    ],
)
def test_a_line_without_an_id_of_its_own_spoils_the_file(
    files: Files, line: str, said: str
) -> None:
    files.ask(question("a"), "", line, question("b"))
    with pytest.raises(TriolegError) as caught:
        files.run()
    assert str(caught.value).startswith(f"{files.questions}, line 3: ")
    assert said in str(caught.value)
    assert not files.answers.exists()
    assert files.num_loaded == 0


def test_a_run_that_ended_badly_is_gone_on_with(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {f"q{i}": ("abc" * 3)[: i + 1] for i in range(8)}
    files.ask(*(question(key, max_tokens=len(text)) for key, text in wanted.items()))
    files.script |= {"max_num_seqs": 3, "faults": [Fault(after_steps=6, how="raise")]}
    with pytest.raises(EngineDeadError, match="no memory"):
        files.run()
    kept = files.answers.read_bytes()
    assert 0 < len(files.texts()) < 8
    assert "the same command goes on from here" in capsys.readouterr().err

    files.script["faults"] = []
    files.run()
    assert files.answers.read_bytes().startswith(kept)
    assert files.texts() == wanted
    assert f"going on: {kept.count(b'custom_id')} of 8" in capsys.readouterr().err

    done = files.answers.read_bytes()
    files.run()
    assert files.num_loaded == 2
    assert files.answers.read_bytes() == done
    assert "nothing to do" in capsys.readouterr().err


TORN = b'{"id":"batch_req_0123", "custom_id":"y", "respon'


@pytest.mark.parametrize(
    "tail", [TORN, TORN[:1], b"\0" * 5000, TORN + b"\0" * 100, TORN[:9] + b"\0"]
)
def test_a_torn_line_is_cut_off(files: Files, tail: bytes) -> None:
    files.ask(question("x"), question("y"))
    files.script["max_num_seqs"] = 1
    files.run()
    first, _ = files.answers.read_bytes().splitlines(keepends=True)
    files.answers.write_bytes(first + tail)
    files.run()
    assert files.answers.read_bytes().startswith(first)
    assert files.texts() == {"x": "abc", "y": "abc"}


def test_an_interrupt_says_how_to_go_on(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.script["faults"] = [Fault(after_steps=2, how="hang")]
    files.ask(question("x", max_tokens=1), question("y", max_tokens=9))
    with pytest.raises(KeyboardInterrupt):
        files.run()
    assert files.texts() == {"x": "a"}
    said = capsys.readouterr().err
    assert "answered 1 requests" in said
    assert "stopped with 1 requests to go: the same command goes on from here" in said


def test_a_file_of_no_questions_is_done(files: Files) -> None:
    files.ask()
    files.run()
    assert files.num_loaded == 0
    assert files.answers.read_bytes() == b""


def _a_stranger(files: Files) -> None:
    files.answers.write_bytes(b"Dear diary,\nno line end")


def _a_stranger_without_a_line_end(files: Files) -> None:
    files.answers.write_bytes(b"Dear diary")


def _answers_of_others(files: Files) -> None:
    files.answers.write_bytes(b'{"id":"batch_5","custom_id":"x","response":{},"error":null}\n')


def _answers_to_other_questions(files: Files) -> None:
    files.run()
    files.ask(question("z"))


def _an_answer_twice(files: Files) -> None:
    files.run()
    files.answers.write_bytes(files.answers.read_bytes() * 2)


def _the_questions(files: Files) -> None:
    files.answers.hardlink_to(files.questions)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (_a_stranger, "line 1: this is no answer of an earlier run"),
        (_a_stranger_without_a_line_end, "line 1: this is no answer of an earlier run"),
        (_answers_of_others, "line 1: this is no answer of an earlier run"),
        (_answers_to_other_questions, "line 1: custom_id 'x' is in no line of"),
        (_an_answer_twice, "line 2: custom_id 'x' is in no line of"),
        (_the_questions, "is the file of questions, too"),
    ],
)
def test_a_file_that_holds_something_else_is_left_as_it_is(
    files: Files, prepare: Callable[[Files], None], said: str
) -> None:
    files.ask(question("x"))
    prepare(files)
    before = files.answers.read_bytes()
    with pytest.raises(TriolegError, match=said):
        files.run()
    assert files.answers.read_bytes() == before


def test_two_runs_on_one_file_are_refused(files: Files, smollm2: Path) -> None:
    files.ask(question("x"))
    with files.answers.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TriolegError, match="is in use: another run"):
            files.run()
        with running(*TRIOLEG, "batch", str(files.questions), str(files.answers)) as program:
            assert program.wait() == 1
    assert program.stderr == f"trioleg: {files.answers} is in use: another run is writing it\n"
    files.run()
    assert files.texts() == {"x": "abc"}


@pytest.mark.parametrize("which", ["questions", "answers"])
def test_what_is_no_regular_file_is_refused(files: Files, which: str) -> None:
    files.ask(question("x"))
    path = getattr(files, which)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(TriolegError, match=r"\.jsonl is a pipe, a device or the like"):
        files.run()


def test_files_that_cannot_be_opened_are_named(files: Files) -> None:
    with pytest.raises(TriolegError, match=r"in\.jsonl cannot be read: No such file"):
        files.run()
    files.ask(question("x"))
    files.answers = files.answers / "below" / "nothing"
    with pytest.raises(TriolegError, match=r"nothing cannot be written: No such file"):
        files.run()


def test_a_disk_that_is_full_tears_a_line_that_the_next_run_cuts_off(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.ask(question("x"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(TriolegError, match=r"out\.jsonl cannot be written: File too large"):
            files.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(files.answers.read_bytes()) == 100
    files.run()
    assert files.texts() == {"x": "abc"}
    assert "cut off 100 bytes" in capsys.readouterr().err


# ---------------------------------------------------------------------------- the real program

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]
# One has a step at which two tokens are about as probable, one is longer than it need be here.
CASES = [one for one in GOLDEN if one["smallest_top1_margin"] > 0.02 and len(one["text"]) < 130]


def test_killed_and_run_again_it_answers_every_question_once(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path, monkeypatch)
    files.ask(
        *(
            question(str(i), case["user"], max_tokens=len(case["greedy_token_ids"]))
            for i, case in enumerate(CASES)
        )
    )
    command = (*TRIOLEG, "batch", str(files.questions), str(files.answers))
    command = (*command, "--dtype", "float32", "--max-num-seqs", "1")

    with running(*command) as program:
        wait_until(lambda: files.answers.exists() and files.answers.stat().st_size, 120)
        program.process.kill()
        program.wait()
    kept = files.answers.read_bytes().count(b"\n")
    assert 1 <= kept < len(CASES)
    with files.answers.open("ab") as file:
        file.write(TORN)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with running(*command) as program:
            program.wait_for(f"going on: {kept} of {len(CASES)} answers are there")
            program.process.send_signal(number)
            assert program.wait() == code, program.said()
            assert ("cut off" in program.stderr) == (number == signal.SIGINT)
            assert "Traceback" not in program.stderr
    with running(*command) as program:
        assert program.wait(120) == 0, program.said()
        assert program.stdout == ""
    assert files.texts() == {str(i): case["text"] for i, case in enumerate(CASES)}
