"""Keys between real programs: who is let in, who is not, and that everything else is as it is without them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import TRIOLEG, Program, running
from served import Server, open_client, serving, starting, stopped, write_script

from trioleg.ipc.curve import make_keys

JOINING = r"waiting for an engine to join at (\S+)"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    """The options of a front end and of an engine that belong together."""
    return tuple(str(folder) for folder in make_keys(tmp_path / "keys"))


@pytest.fixture
def other_keys(tmp_path: Path) -> tuple[str, str]:
    return tuple(str(folder) for folder in make_keys(tmp_path / "other"))


@contextmanager
def front_end(*options: str) -> Iterator[tuple[Program, str]]:
    """A server that waits for an engine, and the address where."""
    serve = ("serve", "smollm2-135m", "--port", "0", "--attach", "tcp://127.0.0.1:0", *options)
    with running(*TRIOLEG, *serve) as program:
        yield program, program.wait_for(JOINING)[1]


def join(folder: Path, address: str, *options: str) -> tuple[str, ...]:
    script = str(write_script(folder))
    return (*TRIOLEG, "engine", "--script", script, "--handshake", address, *options)


async def test_with_keys_everything_is_as_without(smollm2, tmp_path, keys) -> None:
    options = {"attached": True, "joining": ("--curve-keys", keys[1])}
    with serving(tmp_path, "--curve-keys", keys[0], **options) as server:
        async with open_client(server) as client:
            assert (await client.answered(stream=True)).is_exact
            assert (await client.answered(stream=False)).is_exact
            running_on = client.ask(max_tokens=1_500)
            await client.until(lambda: running_on.text)
            with stopped(server.engine):
                await client.until_health(503, "frozen")
                await client.until(lambda: running_on.is_done)
                assert running_on.is_told
            await client.until_health(200)
            assert (await client.answered(max_tokens=50)).is_exact
            await client.until_idle()
            last = client.ask(max_tokens=1_500)
            await client.until(lambda: last.text)
            os.kill(server.engine, signal.SIGKILL)
            await client.until(lambda: last.is_done)
            assert last.is_told
            assert "connection is lost" in last.error["message"]
        server.signal(signal.SIGTERM)
        assert await server.wait() == 1
        assert "is not let in" not in server.program.stderr


async def test_a_short_freeze_loses_no_token_with_keys(smollm2, tmp_path, keys) -> None:
    options = {"attached": True, "joining": ("--curve-keys", keys[1])}
    patient = {"unreachable_timeout": 20.0}
    with serving(tmp_path, "--curve-keys", keys[0], llm=patient, **options) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=600)
            await client.until(lambda: answer.text)
            with stopped(server.engine):
                # Until the heartbeats have given the connection up.
                await client.until_health(503, "does not answer")
            await client.until(lambda: answer.is_done)
            assert answer.is_exact, answer


async def test_another_engine_may_join_with_keys(smollm2, tmp_path, keys) -> None:
    with front_end("--curve-keys", keys[0], "--restart-engine") as (program, address):
        server = Server(program)
        argv = join(tmp_path, address, "--curve-keys", keys[1])
        with running(*argv) as engine:
            server.url = program.wait_for(r"ready: .* at (http://\S+)")[1]
            async with open_client(server) as client:
                assert (await client.answered(max_tokens=50)).is_exact
                engine.process.kill()
                await client.until_health(503)
        with running(*argv):
            async with open_client(server) as client:
                await client.until_health(200)
                assert (await client.answered(max_tokens=50)).is_exact


def with_front_end_of(other: str, folder: Path) -> Path:
    """The engine's keys in ``folder``, for the front end that the engine with ``other`` joins."""
    (folder / "frontend.key").write_bytes(Path(other, "frontend.key").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("wrong", "reason", "logged"),
    [
        ("engine", "the key is not known there", "its public key '"),
        ("front end", "the wrong ones", "is not this front end's"),
    ],
)
def test_an_engine_with_a_wrong_key_is_refused_and_told(
    smollm2, tmp_path, keys, other_keys, wrong, reason, logged
) -> None:
    if wrong == "engine":
        mine = with_front_end_of(keys[1], Path(other_keys[1]))
    else:
        mine = with_front_end_of(other_keys[1], Path(keys[1]))
    with front_end("--curve-keys", keys[0]) as (program, address):
        with running(*join(tmp_path, address, "--curve-keys", str(mine))) as engine:
            assert engine.wait() == 1
        (line,) = engine.stderr.splitlines()
        assert line.startswith(f"trioleg: the front end at '{address}' does not let this engine in")
        assert reason in line
        program.wait_for(f"WARNING .*handshake leg: somebody at .* is not let in: .*{logged}")


@pytest.mark.parametrize("with_keys", ["front end", "engine"])
def test_keys_on_one_side_alone(smollm2, tmp_path, keys, with_keys) -> None:
    """Both say so, and the right engine may still join. ZeroMQ may take a while to see which of the two it is that
    has no keys; an engine that has some does not wait for that."""
    options = [("--curve-keys", keys[0]), ()]
    mine = [(), ("--curve-keys", keys[1])]
    if with_keys == "engine":
        options, mine = options[::-1], mine[::-1]
    with front_end(*options[0]) as (program, address):
        with running(*join(tmp_path, address, *mine[0])) as engine:
            engine.wait_for(r"does not let this engine in.*: (one side has CURVE keys|.*no keys)")
            if with_keys == "engine":
                assert engine.wait() == 1
        if with_keys == "front end":
            program.wait_for("handshake leg: somebody at .* is not let in: .*no(ne| keys)")
        with running(*join(tmp_path, address, *mine[1])):
            program.wait_for("ready: ")


def test_a_secret_that_others_can_read_is_refused(smollm2, tmp_path, keys) -> None:
    for folder in keys:
        (secret,) = Path(folder).glob("*.key_secret")
        secret.chmod(0o640)
    serve = ("serve", "smollm2-135m", "--port", "0", "--attach", "tcp://127.0.0.1:0")
    engine = join(tmp_path, "tcp://127.0.0.1:9")
    for folder, command in zip(keys, [(*TRIOLEG, *serve), engine], strict=True):
        with running(*command, "--curve-keys", folder) as program:
            assert program.wait() == 1
        (line,) = [one for one in program.stderr.splitlines() if "curve_keys is" in one]
        assert "has mode 0640, so others can use it; allowed: 0600" in line


async def test_strangers_by_the_hundred_disturb_nobody(smollm2, tmp_path, keys) -> None:
    options = {"attached": True, "joining": ("--curve-keys", keys[1])}
    with starting(tmp_path, "--curve-keys", keys[0], **options) as server:
        host, _, port = server.program.wait_for(JOINING)[1][len("tcp://") :].rpartition(":")
        server.url = server.program.wait_for(r"ready: .* at (\S+)")[1]
        async with open_client(server) as client:
            answer = client.ask(max_tokens=600)
            await client.until(lambda: answer.text)
            for number in range(600):
                with socket.create_connection((host, int(port))) as stranger:
                    # A whole greeting of ZeroMQ's for a peer without keys, or nothing at all.
                    greeting = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48)
                    stranger.sendall(greeting if number % 2 else b"")
            await client.until(lambda: answer.is_done)
            assert answer.is_exact
        server.program.wait_for("handshake leg: somebody at .* is not let in")
        server.signal(signal.SIGTERM)
        assert await server.wait() == 0
        # A few at once, then a few in ten seconds.
        assert server.program.stderr.count("is not let in") <= 15
