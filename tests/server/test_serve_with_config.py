"""``trioleg serve --config FILE``, the program whole: its lines, its clients over TLS and Unix sockets, its end."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from certificates import Certificates
from click.testing import CliRunner
from programs import ROOT, TRIOLEG, Program, running
from served import COUNTED, Server, serving, write_script

from trioleg import cli
from trioleg.server.hypercorn_settings import SETTINGS

ASKED = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 50}
# The engine goes on until it is stopped: with a context that is as long.
ENDLESS = {**ASKED, "max_tokens": 100_000, "stream": True}
LONG = {"max_model_len": 200_000}


def write_config(folder: Path, certificates: Certificates | None = None, **named: Any) -> str:
    if certificates is not None:
        named |= {"certfile": certificates.pem("server"), "keyfile": certificates.key("server")}
    file = folder / "server.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in named.items()))
    return str(file)


def text_of(answer: httpx2.Response) -> str:
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


@dataclass
class Everywhere:
    """A server with TLS, plain HTTP and two Unix sockets."""

    program: Program
    secure: str
    plain: str
    secure_path: Path
    path: Path


@pytest.fixture(scope="module")
def everywhere(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Everywhere]:
    folder = tmp_path_factory.mktemp("everywhere")
    secure_path, path = folder / "tls", folder / "plain"
    config = write_config(
        folder,
        certificates,
        bind=["127.0.0.1:0", f"unix:{secure_path}"],
        insecure_bind=["127.0.0.1:0", f"unix:{path}"],
    )
    with serving(folder, "--config", config) as server:
        program = server.program
        program.wait_for(r"(?m)^curl ")
        also = re.findall(r"(?m)^also at (.*)$", program.stdout)
        assert also[0] == f"unix:{secure_path}"
        assert also[2] == f"unix:{path}"
        yield Everywhere(program, server.url, also[1], secure_path, path)


def client(certificates: Certificates, path: Path | None = None, **more: Any) -> httpx2.Client:
    transport = httpx2.HTTPTransport(
        verify=certificates.context(), uds=None if path is None else str(path), **more
    )
    return httpx2.Client(transport=transport, timeout=30)


def test_answers_and_streams_at_every_address(
    everywhere: Everywhere, certificates: Certificates
) -> None:
    assert everywhere.secure.startswith("https://127.0.0.1:")
    for url, path in (
        (everywhere.secure, None),
        (everywhere.plain, None),
        ("https://localhost", everywhere.secure_path),
        ("http://localhost", everywhere.path),
    ):
        with client(certificates, path) as http:
            endpoint = f"{url}/v1/chat/completions"
            assert COUNTED.startswith(text_of(http.post(endpoint, json=ASKED)))
            with http.stream("POST", endpoint, json={**ASKED, "stream": True}) as answer:
                lines = [line for line in answer.iter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            assert len(lines) > 40


def test_the_printed_curl_line_works(everywhere: Everywhere) -> None:
    (line,) = re.findall(r"(?m)^curl .*$", everywhere.program.stdout)
    # The scripted engine goes on for longer than an answer to look at.
    argv = shlex.split(line.replace('"stream": true', '"stream": true, "max_tokens": 9'))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("version", ["--http1.0", "--http1.1", "--http2"])
def test_curl_over_tls(version: str, everywhere: Everywhere, certificates: Certificates) -> None:
    url = f"{everywhere.secure}/v1/models"
    command = ["curl", "-sS", version, "--cacert", certificates.pem("ca"), url]
    done = subprocess.run(
        [*command, "-o", "-", "-w", "\n%{http_version}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    body, _, spoken = done.stdout.rpartition("\n")
    assert json.loads(body)["data"][0]["id"] == "smollm2-135m"
    assert spoken == "1.1"


def test_curl_over_a_unix_socket(everywhere: Everywhere) -> None:
    command = ["curl", "-sS", "--unix-socket", str(everywhere.path), "http://localhost/health"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(done.stdout)["status"] == "ready"


def test_a_client_that_does_not_know_the_authority_is_an_info_line(everywhere: Everywhere) -> None:
    with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx2.get(f"{everywhere.secure}/health", trust_env=False)
    everywhere.program.wait_for("INFO .* a TLS handshake failed: .*unknown ca")
    assert "ERROR" not in everywhere.program.stderr


def test_an_orderly_end(certificates: Certificates, tmp_path: Path) -> None:
    """Idle clients are closed, a running stream is told, and the file of the Unix socket goes."""
    path = tmp_path / "s"
    config = write_config(
        tmp_path, certificates, bind=["127.0.0.1:0"], insecure_bind=[f"unix:{path}"]
    )
    options = ("--config", config, "--drain-timeout", "0.2")
    with serving(tmp_path, *options, **LONG) as server, ExitStack() as stack:
        http = stack.enter_context(client(certificates))
        silent = _connect(server)
        stack.callback(silent.close)
        endpoint = f"{server.url}/v1/chat/completions"
        with http.stream("POST", endpoint, json=ENDLESS) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            server.program.process.terminate()
            told = [line for line in lines if line][-2:]
        assert '"error"' in told[0]
        assert told[1] == "data: [DONE]"
        assert silent.recv(1) == b""
        assert server.program.wait() == 0, server.program.said()
    assert not path.exists()
    assert "Traceback" not in server.program.stderr


def _connect(server: Server) -> socket.socket:
    host, _, port = server.url.removeprefix("https://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(
    certificates: Certificates, tmp_path: Path
) -> None:
    config = write_config(tmp_path, certificates, bind=["127.0.0.1:0"], graceful_timeout=0.5)
    options = ("--config", config, "--drain-timeout", "0.2")
    body = json.dumps(ENDLESS).encode()
    with (
        serving(tmp_path, *options, step_interval_s=0.0, **LONG) as server,
        _connect(server) as raw,
    ):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with certificates.context().wrap_socket(raw, server_hostname="localhost") as stream:
            stream.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            assert stream.recv(12) == b"HTTP/1.1 200"
            server.program.process.terminate()
            assert server.program.wait(20) == 0, server.program.said()


def test_a_socket_of_whoever_started_it(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    launcher = (
        "import os, socket, sys\n"
        "one = socket.socket(); one.bind(('127.0.0.1', 0)); os.set_inheritable(one.fileno(), True)\n"
        f"open({str(tmp_path / 'fd.toml')!r}, 'w').write(f'bind = \"fd://{{one.fileno()}}\"')\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    serve = [
        str(ROOT / "tests" / "scripted_serve.py"),
        json.dumps({"script": str(script)}),
        *("serve", "smollm2-135m", "--config", str(tmp_path / "fd.toml")),
    ]
    with running(sys.executable, "-c", launcher, *serve) as program:
        url = program.wait_for(r"ready: .* at (http://127\.0\.0\.1:\d+)")[1]
        assert httpx2.get(f"{url}/health", trust_env=False).status_code == 200


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(cli.commands, ["serve", *arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.partition("Error: ")[2].split())


def test_what_is_wrong_with_the_file_is_a_usage_error(
    certificates: Certificates, tmp_path: Path
) -> None:
    def with_config(*more: str, **named: Any) -> str:
        return refused("--config", write_config(tmp_path, **named), *more)

    assert "none.toml cannot be read: No such file" in refused("--config", f"{tmp_path}/none.toml")
    assert "workers is 2; allowed: 1" in with_config(workers=2)
    assert "bind is 'a:b'; allowed: HOST:PORT" in with_config(bind="a:b")
    both = "both say where to listen"
    assert both in with_config("--port", "1", bind=":1")
    assert both in with_config("--host", "::", bind=":1")
    key = certificates.key("client")
    said = with_config(certfile=certificates.pem("server"), keyfile=key)
    allowed = f"the key of the certificate in {certificates.pem('server')}"
    assert said == f"{tmp_path}/server.toml: keyfile is {key!r}; allowed: {allowed}"


def test_an_address_in_use_is_told_before_an_engine_starts(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        config = write_config(tmp_path, bind=["127.0.0.1:0", f"unix:{path}"])
        with running(*TRIOLEG, "serve", "smollm2-135m", "--config", config) as program:
            assert program.wait() == 1
    assert program.stderr == f"trioleg: cannot listen on unix:{path}: it is in use\n"


# The document's own files.

_SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
_TOML = re.findall(r"```toml\n(.*?)```", _SERVING, re.DOTALL)


@pytest.mark.parametrize("number", range(len(_TOML)))
def test_the_documents_files_are_served(
    number: int, certificates: Certificates, tmp_path: Path
) -> None:
    """As they are, but for where files and ports are."""
    text = re.sub(r":(8443|8080)", ":0", _TOML[number]).replace("0.0.0.0", "127.0.0.1")
    text = text.replace("unix:", f"unix:{tmp_path}/")
    for name, path in (
        ("server.pem", certificates.pem("server")),
        ("server.key", certificates.key("server")),
        ("clients-ca.pem", certificates.pem("ca")),
    ):
        text = text.replace(name, path)
    file = tmp_path / "server.toml"
    file.write_text(text)
    context = certificates.context("client")
    with serving(tmp_path, "--config", str(file)) as server:
        found = re.findall(r"(?m)^(?:ready: .*|also) at (\S+)$", server.program.stdout)
        assert len(found) == len(re.findall(r'"(?:unix:)?[^"]*(?::0|\.sock)"', text))
        root = "/llm" if "root_path" in text else ""
        for one in found:
            path = one.removeprefix("unix:") if one.startswith("unix:") else None
            url = f"http://localhost{root}" if path else one
            transport = httpx2.HTTPTransport(verify=context, uds=path)
            with httpx2.Client(transport=transport, timeout=30) as http:
                headers = {"Host": "example.org", "Connection": ""} if path else {}
                answer = http.post(f"{url}/v1/chat/completions", json=ASKED, headers=headers)
                assert COUNTED.startswith(text_of(answer))


def test_the_document_has_files() -> None:
    assert len(_TOML) == 4


def test_the_documents_tables_name_every_setting() -> None:
    tables = _SERVING[_SERVING.index("## What is refused") :]
    patterns = [
        re.escape(one).replace(r"\*", ".*") for one in re.findall(r"`([a-z0-9_*]+)`", tables)
    ]
    assert [name for name in SETTINGS if not any(re.fullmatch(one, name) for one in patterns)] == []
