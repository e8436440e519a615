"""The chat in the terminal, against a small server that answers as each test says."""

from __future__ import annotations

import http.server
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from programs import TRIOLEG, running

from trioleg import chat
from trioleg.chat_server import chat_server, find_models, open_client
from trioleg.errors import InvalidRequestError, TriolegError

WAIT_S = 30.0

Reply = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """One model named "tiny", and for each chat the next of the server's replies."""

    server: Server

    def do_GET(self) -> None:
        self._answer(*(self.server.models if self.path == "/v1/models" else (404, {})))

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.bodies.append(json.loads(self.rfile.read(length)))
        self.server.replies.pop(0)(self)

    def _answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})

    def text(self, *pieces: str) -> None:
        for piece in pieces:
            self.event({"choices": [{"index": 0, "delta": {"content": piece}}]})

    def log_message(self, *_: object) -> None:
        """The tests' output is no access log."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: tuple[int, object] = (200, {"object": "list", "data": [{"id": "tiny"}]})
        self.bodies: list[dict[str, object]] = []
        self.replies: list[Reply] = []
        self.client_left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def leave(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.leave()
        thread.join()


@pytest.fixture
def conversation(server: Server) -> Iterator[chat.Conversation]:
    with open_client(server.url) as client:
        yield chat.Conversation(client, "tiny", {"temperature": 0})


def whole(*pieces: str) -> Reply:
    def reply(handler: Handler) -> None:
        handler.begin()
        handler.text(*pieces)
        handler.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        handler.event({"choices": [], "usage": {"total_tokens": 3}})
        handler.event("[DONE]")

    return reply


def broken(*events: object) -> Reply:
    """Text "Half", then these events, then the connection's end."""

    def reply(handler: Handler) -> None:
        handler.begin()
        handler.text("Half")
        for event in events:
            handler.event(event)

    return reply


def refusal(status: int, body: object) -> Reply:
    return lambda handler: handler._answer(status, body)


def endless(handler: Handler) -> None:
    """Two words, then silence until the client leaves."""
    handler.begin()
    handler.text("Once", " upon")
    handler.rfile.read(1)
    handler.server.client_left.set()


def test_an_answer_is_written_and_remembered(server, conversation, capsys) -> None:
    server.replies += [whole("Par", "is."), whole("France.")]
    assert conversation.ask("Capital?")
    assert conversation.ask("Of what?")
    assert capsys.readouterr() == ("Paris.\nFrance.\n", "")
    assert server.bodies[1] == {
        "model": "tiny",
        "stream": True,
        "temperature": 0,
        "messages": [
            {"role": "user", "content": "Capital?"},
            {"role": "assistant", "content": "Paris."},
            {"role": "user", "content": "Of what?"},
        ],
    }


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (broken({"error": {"message": "the engine died"}}, "[DONE]"), "the engine died"),
        (broken(), "the answer was cut off: the connection ended before it did"),
        (broken("{nonsense"), "the server sent an event that is no chunk of a chat: {nonsense"),
        (broken({"choices": [7]}), "the server sent an event that is no chunk of a chat"),
    ],
)
def test_an_answer_that_breaks_keeps_what_came(server, conversation, capsys, reply, said) -> None:
    server.replies.append(reply)
    assert not conversation.ask("Well?")
    output, errors = capsys.readouterr()
    assert (output, errors.startswith(said)) == ("Half\n", True)
    assert conversation.messages[-1] == {"role": "assistant", "content": "Half"}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            refusal(400, {"error": {"message": "temperature is 3; allowed: 0 to 2"}}),
            "temperature is",
        ),
        (refusal(502, "a proxy's page"), "the server answers with status 502"),
        (
            refusal(200, {"object": "list"}),
            "the answer was cut off: Expected response with content type",
        ),
    ],
)
def test_a_turn_that_fails_is_taken_back(server, conversation, capsys, reply, said) -> None:
    server.replies.append(reply)
    assert not conversation.ask("Well?")
    output, errors = capsys.readouterr()
    assert (output, errors.startswith(said)) == ("", True)
    assert conversation.messages == []


def test_an_answer_without_text_is_an_empty_line_and_not_remembered(
    server, conversation, capsys
) -> None:
    server.replies.append(whole())
    assert conversation.ask("Well?")
    assert capsys.readouterr() == ("\n", "")
    assert conversation.messages == []


def test_a_server_that_is_gone_is_said_so(conversation, server, capsys) -> None:
    server.replies.append(whole("Here."))
    assert conversation.ask("Anyone?")
    server.leave()
    said = "the server is gone ([Errno 111] Connection refused); Ctrl-D leaves\n"
    for _ in range(2):
        capsys.readouterr()
        assert not conversation.ask("And now?")
        assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("reply", "output"),
    [(lambda handler: None, ""), (broken(), "Half\n")],
)
def test_a_talk_ends_with_its_own_server(server, conversation, capsys, reply, output) -> None:
    """Whether it is asked about the server's end, by how the connection fails."""
    server.replies.append(reply)
    conversation.ended = lambda: True
    with pytest.raises(
        TriolegError, match=r"^the server that was started for this talk has ended$"
    ):
        conversation.ask("Anyone?")
    assert capsys.readouterr() == (output, "")


def test_a_refusal_is_no_reason_to_look_for_an_end(server, conversation) -> None:
    server.replies.append(refusal(400, {"error": {"message": "no"}}))
    conversation.ended = lambda: pytest.fail("asked")
    assert not conversation.ask("Well?")


def test_a_model_cannot_steer_the_terminal(server, conversation, capsys) -> None:
    server.replies.append(whole("a\x1b[2Jb\tc\nd\x9b1me\r"))
    conversation.ask("Clear!")
    assert capsys.readouterr().out == "a[2Jb\tc\nd1me\n"
    assert conversation.messages[-1]["content"] == "a\x1b[2Jb\tc\nd\x9b1me\r"


def test_who_serves_what(server) -> None:
    assert find_models(server.url) == ["tiny"]
    server.leave()
    with pytest.raises(TriolegError, match=r"^the server at \S+ cannot be reached: .*refused"):
        find_models(server.url)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_base_url_may_end_as_the_openai_client_wants_it(server, end) -> None:
    with chat_server(None, server.url + end, "none") as found:
        assert (found.url, found.models) == (server.url, ["tiny"])


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://localhost", "http://", "http://h:port/v1", "http://h/?a=b"]
)
def test_what_is_no_url_is_refused(url) -> None:
    with (
        pytest.raises(InvalidRequestError, match=f"^--url is '{re.escape(url)}', .*; allowed: "),
        chat_server(None, url, "none"),
    ):
        pass


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {}), "GET /v1/models has status 404"),
        ((200, {"object": "list"}), "GET /v1/models brings no list of models"),
        ((200, []), "GET /v1/models brings no list of models"),
    ],
)
def test_an_answer_of_something_else_is_told(server, answer, said) -> None:
    server.models = answer
    with pytest.raises(TriolegError, match=f"answers, but not as the OpenAI API does: {said}$"):
        find_models(server.url)


def test_a_server_without_models_is_told(server) -> None:
    server.models = (200, {"data": []})
    with (
        pytest.raises(TriolegError, match=f"^the server at {server.url} serves no model$"),
        chat_server(None, server.url, "none"),
    ):
        pass


def test_the_command_asks_what_it_reads(server) -> None:
    server.replies += [whole("Paris."), whole("42")]
    options = ("--url", server.url, "--system", "Be brief.", "--max-tokens", "5")
    with running(*TRIOLEG, "chat", *options) as program:
        program.type("Capital?\n\nAnswer?")
        program.process.stdin.close()
        assert program.wait() == 0
    assert program.stdout == "Paris.\n42\n"
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital?"},
    ]
    assert server.bodies[0]["max_tokens"] == 5
    assert server.bodies[0]["temperature"] == 0


def test_ctrl_c_ends_the_answer_and_a_second_one_leaves(server) -> None:
    server.replies += [endless, whole("Still here.")]
    with running(*TRIOLEG, "chat", "--url", server.url) as program:
        program.type("Tell me a story")
        program.wait_for("Once upon")
        program.process.send_signal(signal.SIGINT)
        assert server.client_left.wait(WAIT_S)
        program.wait_for(r"\(stopped\)")
        program.type("And now?")
        program.wait_for("Still here\\.\n")
        program.process.send_signal(signal.SIGINT)
        assert program.wait() == 0
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "Once upon"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--url", "http://127.0.0.1:1"], "the server at http://127.0.0.1:1 cannot be reached: "),
        # Without a look at any server, and long before one is started.
        (["--temperature", "7"], "temperature is 7.0; allowed: a number from 0 to 2"),
        (["--url", "{url}", "--model", "big"], "--model is 'big'; allowed at {url}: tiny"),
    ],
)
def test_what_cannot_be_asked_is_one_line(server, options, said) -> None:
    options = [option.format(url=server.url) for option in options]
    with running(*TRIOLEG, "chat", *options) as program:
        assert program.wait() == 1
    assert said.format(url=server.url) in program.stderr
    assert program.stderr.count("\n") == 1
    assert program.stdout == ""
