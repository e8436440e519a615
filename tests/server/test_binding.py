"""Where a server listens: all addresses or none, and files of Unix sockets that belong to whoever made them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from trioleg.config import ServerConfig
from trioleg.errors import InvalidRequestError, TriolegError
from trioleg.server.binding import Binding, bind_all
from trioleg.server.hypercorn_config import HypercornSettings, host_and_port

CONFIG = ServerConfig(port=0)


def descriptors() -> set[str]:
    return set(os.listdir("/dev/fd"))


@contextmanager
def closed_in_the_end(bindings: list[Binding]) -> Iterator[list[Binding]]:
    try:
        yield bindings
    finally:
        for one in bindings:
            one.close()


async def bound(*addresses: str, **more: int) -> list[Binding]:
    return await bind_all(CONFIG, HypercornSettings(bind=addresses, **more))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("example.org", ("example.org", 8000)),
        ("[::1]:80", ("::1", 80)),
        ("[::]", ("::", 8000)),
        (":80", ("0.0.0.0", 80)),
    ],
)
def test_an_address(address: str, expected: tuple[str, int]) -> None:
    assert host_and_port(address) == expected


@pytest.mark.parametrize(
    "address", ["", "::1", "[::1", "::1]:80", "[::1]80", "a:b", "a:", "a:65536", "a:-1", "a:1:2"]
)
def test_no_address(address: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"allowed: HOST:PORT"):
        host_and_port(address)


async def test_several_addresses_have_ports_of_their_own(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    with closed_in_the_end(await bound("127.0.0.1:0", "127.0.0.1:0", f"unix:{path}")) as bindings:
        first, second, unix = bindings
        assert 0 != first.port != second.port != 0
        assert (unix.port, unix.path) == (None, path)


async def test_all_or_none(tmp_path: Path) -> None:
    before = descriptors()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TriolegError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            await bound(f"unix:{tmp_path}/a", "127.0.0.1:0", f"127.0.0.1:{port}", "[::1]:0")
    assert os.listdir(tmp_path) == []
    assert descriptors() == before


async def test_without_a_bind_it_is_the_servers_own() -> None:
    with closed_in_the_end(await bind_all(CONFIG, HypercornSettings())) as (one,):
        assert (one.host, one.is_tls) == ("127.0.0.1", False)


async def test_a_unix_socket_goes_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with closed_in_the_end(await bound(f"unix:{path}", umask=0o117)):
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o660
    assert not path.exists()


async def test_the_umask_is_for_that_moment(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with closed_in_the_end(await bound(f"unix:{tmp_path}/s", umask=0o177)):
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


async def test_a_unix_socket_has_the_owner_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with closed_in_the_end(await bound(f"unix:{path}", user=os.getuid(), group=os.getgid())):
        assert (path.stat().st_uid, path.stat().st_gid) == (os.getuid(), os.getgid())

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    before = descriptors()
    with pytest.raises(TriolegError, match=r"cannot listen on unix:.*: Operation not permitted"):
        await bound(f"unix:{path}", user=1)
    assert not path.exists()
    assert descriptors() == before


async def test_a_file_that_was_left_behind_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    assert path.exists()
    with closed_in_the_end(await bound(f"unix:{path}")):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


async def test_a_file_behind_which_somebody_answers_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with closed_in_the_end(await bound(f"unix:{path}")):
        with pytest.raises(TriolegError, match=r"cannot listen on unix:.*: it is in use"):
            await bound(f"unix:{path}")
        assert path.exists()


async def test_a_datagram_socket_is_somebodys(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(TriolegError, match="it is in use"):
            await bound(f"unix:{path}")


async def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(TriolegError, match="a file that is no socket"):
        await bound(f"unix:{path}")
    assert path.read_text() == "precious"


async def test_a_file_that_another_server_has_made_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    (first,) = await bound(f"unix:{path}")
    path.unlink()
    with closed_in_the_end(await bound(f"unix:{path}")):
        first.close()
        assert path.exists()
    assert not path.exists()


async def test_a_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(TriolegError, match=r"cannot listen on unix:.*too long"):
        await bound(f"unix:{tmp_path}/{'x' * 200}")


async def test_a_socket_of_whoever_started_us() -> None:
    with socket.socket() as theirs:
        theirs.bind(("127.0.0.1", 0))
        number = os.dup(theirs.fileno())
        with closed_in_the_end(await bound(f"fd://{number}")) as (one,):
            assert one.port == theirs.getsockname()[1]
            assert not os.get_inheritable(number)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


async def test_a_unix_socket_of_whoever_started_us_stays_theirs(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        with closed_in_the_end(await bound(f"fd://{os.dup(theirs.fileno())}")) as (one,):
            assert one.path == str(path)
    assert path.exists()


async def test_a_descriptor_that_is_none_or_no_stream() -> None:
    with pytest.raises(TriolegError, match=r"cannot listen on fd://9999: Bad file descriptor"):
        await bound("fd://9999")
    read, write = os.pipe()
    with pytest.raises(TriolegError, match=r"cannot listen on fd://\d+: Socket operation on non-s"):
        await bound(f"fd://{read}")
    os.close(read)
    os.close(write)
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        with pytest.raises(TriolegError, match="it is no stream socket"):
            await bound(f"fd://{os.dup(other.fileno())}")


async def test_a_cancel_leaves_nothing_open() -> None:
    before = descriptors()
    with trio.CancelScope() as scope:
        scope.cancel()
        await bound("127.0.0.1:0", "127.0.0.1:0")
    assert scope.cancelled_caught
    assert descriptors() == before


async def test_a_descriptor_that_is_somebody_elses() -> None:
    one, other = socket.socketpair()
    with one, other:
        with pytest.raises(TriolegError, match="it is neither listening nor bound"):
            await bound(f"fd://{one.fileno()}")
        # It has not been taken, nor closed.
        one.send(b"x")
        assert other.recv(1) == b"x"


@pytest.mark.parametrize("address", ["fd://99999999999999999999", "unix:/tmp/a\0b", "unix:/\ud800"])
async def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(TriolegError, match="cannot listen on "):
        await bound(address)


async def test_the_second_of_two_hears_that_the_address_is_taken() -> None:
    with closed_in_the_end(await bound("127.0.0.1:0")) as (one,):
        with pytest.raises(TriolegError, match="Address already in use"):
            await bound(f"127.0.0.1:{one.port}")
