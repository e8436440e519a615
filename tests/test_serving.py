"""``trioleg serve`` as a program: what it prints, how it ends, and what is left of it: nothing.

Most of it runs with the scripted engine, started on its own as somebody else's would be, so that no
test waits for a model that it does not need.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from programs import ROOT, TRIOLEG, Program, alive, descendants, running, wait_until

from trioleg import serving
from trioleg.chat_server import find_models, own_server
from trioleg.config import LLMConfig
from trioleg.server.serve import Address


@pytest.fixture
def copy_of_model(smollm2: Path, tmp_path: Path) -> str:
    """The model under a path that no server on this machine can have already: a chat starts one."""
    folder = tmp_path / "copy"
    folder.symlink_to(smollm2)
    return str(folder)


# "The capital of France is Paris." in the tokens of SmolLM2, and its end token.
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]


@contextmanager
def serve_scripted(tmp_path: Path, *options: str, **script: object) -> Iterator[tuple]:
    """A server that is ready, and the engine that has joined it."""
    file = tmp_path / "script.json"
    file.write_text(json.dumps({"steps": [[token] for token in PARIS], **script}))
    attach = ("--attach", "tcp://127.0.0.1:0")
    with running(*TRIOLEG, "serve", "smollm2-135m", "--port", "0", *attach, *options) as server:
        address = server.wait_for(r"waiting for an engine to join at (\S+)")[1]
        engine_command = ("engine", "--script", str(file), "--handshake", address)
        with running(*TRIOLEG, *engine_command) as engine:
            server.wait_for("curl .*\n")
            yield server, engine


def run_curl(line: str) -> str:
    """What the printed curl line brings: its arguments are taken apart as a shell does."""
    _, _, url, _, header, _, body = shlex.split(line)
    name, _, value = header.partition(": ")
    answer = httpx2.post(url, headers={name: value}, content=body, trust_env=False)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    deltas = (json.loads(event)["choices"][0]["delta"] for event in events)
    return "".join(delta.get("content", "") for delta in deltas)


def url_of(server: Program) -> str:
    return server.wait_for(r"ready: .* at (http://\S+)")[1]


def test_ready_answer_and_a_signal(smollm2, tmp_path) -> None:
    with serve_scripted(tmp_path, "--served-model-name", "it's mine") as (server, engine):
        ready, curl, rest = server.stdout.split("\n")
        assert ready == f"ready: it's mine at {url_of(server)}"
        assert rest == ""
        assert run_curl(curl) == "The capital of France is Paris."
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
        # It is not ours: an engine that joined goes on without us.
        assert alive(engine.process.pid)
    assert "ended: stop" in server.stderr
    assert "Traceback" not in server.stderr


def test_a_signal_ends_streams_in_order(smollm2, tmp_path) -> None:
    endless = {"steps": [], "token_ids": PARIS, "step_interval_s": 0.02}
    with serve_scripted(tmp_path, "--drain-timeout", "0.2", **endless) as (server, _):
        body = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Go on"}],
            "stream": True,
            "ignore_eos": True,
        }
        url = f"{url_of(server)}/v1/chat/completions"
        with httpx2.stream("POST", url, json=body, trust_env=False) as answer:
            events = (line for line in answer.iter_lines() if line)
            for _ in range(3):
                next(events)
            server.process.send_signal(signal.SIGTERM)
            *_, error, done = events
        assert done == "data: [DONE]"
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert server.wait() == 0


def test_keep_alive_comments_are_an_option(smollm2, tmp_path) -> None:
    slow = {"first_token_delay_s": 0.5}
    with serve_scripted(tmp_path, "--sse-keep-alive", "0.1", **slow) as (server, _):
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        url = f"{url_of(server)}/v1/chat/completions"
        answer = httpx2.post(url, json=body, trust_env=False)
    assert answer.text.count(": keep-alive\n\n") >= 2
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_engines_death_is_no_success(smollm2, tmp_path) -> None:
    with serve_scripted(tmp_path) as (server, engine):
        url = url_of(server)
        engine.process.kill()
        wait_until(lambda: httpx2.get(f"{url}/live", trust_env=False).status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 1
    assert server.stderr.splitlines()[-1].startswith("trioleg: engine 0 is dead: ")


def test_a_signal_while_loading_ends_it_at_once(smollm2) -> None:
    with running(*TRIOLEG, "serve", "--port", "0") as server:
        wait_until(lambda: len(descendants(server.process.pid)) == 2)
        family = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        # Less than the time after which an engine that does not listen is killed.
        assert server.wait(LLMConfig().engine_stop_timeout) == 0
        wait_until(lambda: not any(map(alive, family)))
    assert server.stdout == ""
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["loading", "ready"])
def test_impatient_signals_change_nothing_of_the_exit_code(smollm2, when, number) -> None:
    with running(*TRIOLEG, "serve", "--port", "0") as server:
        server.wait_for("starting the engine" if when == "loading" else "ready: ")
        family = descendants(server.process.pid)
        for _ in range(5):
            server.process.send_signal(number)
            # Several at once are one to the system, so each gets a chance to be heard.
            os.sched_yield()
        assert server.wait() == 0
        wait_until(lambda: not any(alive(pid) for pid in family))
    assert "Traceback" not in server.stderr
    assert "Aborted" not in server.stderr


def test_a_killed_front_end_with_a_stopped_guardian_leaves_no_engine(smollm2) -> None:
    with running(*TRIOLEG, "serve", "--port", "0") as server:
        server.wait_for("ready: ")
        guardian, engine = descendants(server.process.pid)
        os.kill(guardian, signal.SIGSTOP)
        try:
            server.process.kill()
            wait_until(lambda: not alive(engine))
        finally:
            os.kill(guardian, signal.SIGCONT)
        wait_until(lambda: not alive(guardian))


def test_a_taken_port_is_found_before_an_engine_starts(smollm2) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(*TRIOLEG, "serve", "--port", str(port)) as server:
            assert server.wait() == 1
    said = f"trioleg: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert (server.stdout, server.stderr) == ("", said)


def test_a_setting_that_the_model_does_not_allow_is_one_sentence(smollm2) -> None:
    with running(*TRIOLEG, "serve", "--port", "0", "--max-model-len", "99999") as server:
        assert server.wait() == 1
    assert "max_model_len is 99999; allowed: 2 to 8192" in server.stderr.splitlines()[-1]
    assert server.stderr.count("max_model_len is 99999") == 1
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "MODEL", "--port", "0"),
        ("engine", "MODEL", "--handshake", "tcp://127.0.0.1:1"),
        ("batch", "none.jsonl", "out.jsonl", "--model", "MODEL"),
        ("trace", "Hi", "--model", "MODEL"),
    ],
)
def test_a_model_that_our_engine_cannot_compute_is_told_before_torch_loads(
    smollm2, tmp_path, command
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in smollm2.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((smollm2 / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["GptForever"]}))
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = [str(model) if word == "MODEL" else word for word in command]
    with running(*TRIOLEG, *words, env={"PYTHONPATH": path}) as program:
        assert program.wait() == 1
    (line,) = program.stderr.splitlines()
    assert line.startswith(f"trioleg: {model / 'config.json'}: architectures is ['GptForever']; ")
    assert line.endswith(
        "vLLM's engine serves many others, behind the same front end: trioleg "
        "serve MODEL --attach ADDRESS"
    )


def test_a_front_end_without_torch_says_what_its_engine_needs(smollm2, tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with running(*TRIOLEG, "serve", "--port", "0", env={"PYTHONPATH": path}) as server:
        assert server.wait() == 1
    assert server.stderr.rstrip().endswith("our engine needs torch: pip install 'trioleg[engine]'")
    assert "Traceback" not in server.stderr


def test_an_engine_that_does_not_start_says_why(smollm2, tmp_path) -> None:
    for file in smollm2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    options = ("--port", "0", "--log-level", "error")
    with running(*TRIOLEG, "serve", str(tmp_path), *options) as server:
        assert server.wait() == 1
    assert server.stdout == ""
    assert server.stderr.startswith("trioleg: the engine did not start: it exited with status 1: ")
    assert "model.safetensors" in server.stderr
    assert server.stderr.count("\n") == 1


def test_a_chats_own_server_answers_and_ends_with_the_talk(smollm2, capfd) -> None:
    with own_server("smollm2-135m") as server:
        assert server.models == ["smollm2-135m"]
        family = descendants(os.getpid())
        line = serving.curl_line(server.url, "smollm2-135m")
        assert run_curl(line) == "The capital of France is Paris."
        assert not server.ended()
    assert server.ended()
    assert not any(map(alive, family))
    assert capfd.readouterr().err == "starting a server with smollm2-135m for this talk\n"


def test_a_chats_own_server_ends_with_a_killed_chat(smollm2) -> None:
    code = (
        "import sys\n"
        "from trioleg.chat_server import own_server\n"
        "with own_server('smollm2-135m') as server:\n"
        "    print('at', server.url, flush=True)\n"
        "    sys.stdin.read()"
    )
    with running(TRIOLEG[0], "-c", code) as chat:
        url = chat.wait_for(r"at (http\S+)")[1]
        family = descendants(chat.process.pid)
        assert find_models(url)
        chat.process.kill()
        wait_until(lambda: not any(map(alive, family)))
    assert len(family) == 4  # guardian, server, the engine's guardian, engine


def test_a_talk_ends_with_the_server_that_was_started_for_it(smollm2, copy_of_model) -> None:
    with running(*TRIOLEG, "chat", copy_of_model, "--max-tokens", "8") as chat:
        chat.type("What is the capital of France?")
        chat.wait_for("Paris")
        server = descendants(chat.process.pid)[1]
        os.kill(server, signal.SIGKILL)
        chat.type("And of Spain?")
        assert chat.wait() == 1
    assert chat.stdout.count("\n") == 1
    said = "trioleg: the server that was started for this talk has ended"
    assert chat.stderr.splitlines()[-1] == said


def test_ctrl_c_while_a_chats_server_starts_leaves_quietly(copy_of_model) -> None:
    with running(*TRIOLEG, "chat", copy_of_model) as chat:
        wait_until(lambda: len(descendants(chat.process.pid)) >= 2)
        family = descendants(chat.process.pid)
        chat.process.send_signal(signal.SIGINT)
        assert chat.wait() == 130
        wait_until(lambda: not any(map(alive, family)))
    assert chat.stdout == ""
    assert chat.stderr == f"starting a server with {copy_of_model} for this talk\n"


def test_a_chats_server_that_does_not_start_leaves_its_words() -> None:
    code = "from trioleg.chat_server import own_server\nwith own_server('nowhere'): pass"
    with running(TRIOLEG[0], "-c", code) as chat:
        assert chat.wait() == 1
    assert "trioleg: no model 'nowhere'" in chat.stderr
    assert "EngineStartError: the server ended before it was ready" in chat.stderr


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("localhost", "http://localhost:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
    ],
)
def test_the_url_is_one_that_a_client_can_use(host: str, url: str) -> None:
    assert serving.visible_url(Address(host, 80)) == url
    assert serving.READY_LINE.match(serving.ready_line(url, "a model"))["url"] == url


def test_the_curl_line_survives_the_shell() -> None:
    program, flags, url, _, header, _, body = shlex.split(
        serving.curl_line("http://127.0.0.1:9", 'it\'s a "model"')
    )
    assert (program, flags, url) == ("curl", "-sSN", "http://127.0.0.1:9/v1/chat/completions")
    assert header == "Content-Type: application/json"
    assert json.loads(body) == {
        "model": 'it\'s a "model"',
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }


def test_the_curl_line_of_a_model_that_embeds() -> None:
    *_, url, _, _, _, body = shlex.split(serving.curl_line("http://127.0.0.1:9", "m", embeds=True))
    assert url == "http://127.0.0.1:9/v1/embeddings"
    assert json.loads(body) == {"model": "m", "input": "What is the capital of France?"}
