"""Where a server listens: addresses in, open sockets out, all of them or none.

An address is as Hypercorn writes it: ``HOST:PORT``, ``[IPV6]:PORT``, ``unix:PATH``, or ``fd://NUMBER`` for a
socket that whoever started us has opened. The file of a Unix socket is ours from here on, and is removed with it;
one that is there already is taken over only if nobody answers behind it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import trio
from trio.socket import SocketType

from ..config import ServerConfig
from ..errors import TriolegError
from ..ipc.socket_file import make_way
from .hypercorn_config import FD, UNIX, HypercornSettings, host_and_port

__all__ = ["BACKLOG", "Binding", "bind_all", "bind_sockets"]

# Linux takes less if net.core.somaxconn says so. A burst of clients should wait, not be refused.
BACKLOG = 1024


@dataclass(slots=True)
class Binding:
    """One socket to listen on. ``host``: as it was asked for; of a Unix socket, its ``path``.

    ``close`` is idempotent. Who has one closes it, also if somebody else has closed the socket.
    """

    socket: SocketType
    host: str = ""
    is_tls: bool = False
    path: str | None = None
    _file: tuple[int, ...] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, one: SocketType) -> Binding:
        """Of a socket that somebody else has bound. A Unix socket's file stays theirs."""
        name = one.getsockname()
        if one.family == socket.AF_UNIX:
            return cls(one, path=str(name))
        return cls(one, str(name[0]))

    @property
    def port(self) -> int | None:
        """None for a Unix socket."""
        return None if self.path is not None else int(self.socket.getsockname()[1])

    def close(self) -> None:
        if self.path is not None and self._file is not None:
            # Another server may have its own there by now.
            with suppress(OSError):
                if _identity(self.path) == self._file:
                    os.unlink(self.path)
            self._file = None
        self.socket.close()


async def bind_sockets(config: ServerConfig) -> list[SocketType]:
    """Take the address before anything slow starts. Connections wait in its queue until ``serve`` has it. The caller
    closes the sockets, unless ``serve`` has got them.

    Raises ``TriolegError`` if the address cannot be had. Cancel-safe: nothing is left open then.
    """
    return [one.socket for one in await _bind_tcp(config.host, config.port)]


async def bind_all(config: ServerConfig, settings: HypercornSettings) -> list[Binding]:
    """As ``bind_sockets``, for all addresses of ``settings``, or that of ``config`` where it names none.

    Raises ``TriolegError``: then nothing is left open, and no file of ours.
    """
    with ExitStack() as unless_all_are_bound:
        bindings: list[Binding] = []
        for address in settings.bind or ():
            bindings += await _bind(address, settings)
            _close_with(unless_all_are_bound, bindings)
        if settings.bind is None:
            bindings = await _bind_tcp(config.host, config.port)
            _close_with(unless_all_are_bound, bindings)
        for one in bindings:
            one.is_tls = settings.tls is not None
        for address in settings.insecure_bind:
            bindings += await _bind(address, settings)
            _close_with(unless_all_are_bound, bindings)
        unless_all_are_bound.pop_all()
    return bindings


def _close_with(stack: ExitStack, bindings: Sequence[Binding]) -> None:
    for one in bindings:
        stack.callback(one.close)


async def _bind(address: str, settings: HypercornSettings) -> list[Binding]:
    if address.startswith(UNIX):
        with _told(address):
            return [_bind_unix(address.removeprefix(UNIX), settings)]
    if address.startswith(FD):
        with _told(address):
            return [_adopt(address)]
    return await _bind_tcp(*host_and_port(address))


@contextmanager
def _told(address: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        # A path with a NUL byte is a ValueError, a number that is no descriptor's an OverflowError.
        why = getattr(error, "strerror", None) or error
        shown = address if address.isascii() and address.isprintable() else ascii(address)
        raise TriolegError(f"cannot listen on {shown}: {why}") from None


async def _bind_tcp(host: str, port: int) -> list[Binding]:
    bindings: list[Binding] = []
    asked = port
    with ExitStack() as unless_all_are_bound:
        try:
            found = await trio.socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind, proto, _, address in found:
                one = unless_all_are_bound.enter_context(trio.socket.socket(family, kind, proto))
                bindings.append(Binding(one, host))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                await one.bind((address[0], port, *address[2:]))
                # At once: two may bind one address, and only the second listen fails.
                one.listen(BACKLOG)
                # A name with several addresses gets one port on all of them.
                port = one.getsockname()[1]
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise TriolegError(f"cannot listen on {host}:{asked}: {why}") from None
        unless_all_are_bound.pop_all()
    return bindings


def _bind_unix(path: str, settings: HypercornSettings) -> Binding:
    make_way(path)
    with ExitStack() as unless_bound:
        one = unless_bound.enter_context(socket.socket(socket.AF_UNIX))
        # The process's own, for this moment: no other way gives the file its mode from its beginning on.
        before = None if settings.umask is None else os.umask(settings.umask)
        try:
            one.bind(path)
        finally:
            if before is not None:
                os.umask(before)
        unless_bound.callback(os.unlink, path)
        if settings.user is not None or settings.group is not None:
            user, group = settings.user, settings.group
            os.chown(path, -1 if user is None else user, -1 if group is None else group)
        # At once: who finds the file, and nobody behind it, takes it over.
        one.listen()
        binding = Binding(trio.socket.from_stdlib_socket(one), path=path, _file=_identity(path))
        unless_bound.pop_all()
    return binding


def _identity(path: str) -> tuple[int, ...]:
    """Inode numbers are used again, and soon; with the time this one is not."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _is_bound(one: socket.socket) -> bool:
    """To an address of its own, and not connected to another."""
    with suppress(OSError):
        one.getpeername()
        return False
    name = one.getsockname()
    return bool(name if one.family == socket.AF_UNIX else name[1])


def _adopt(address: str) -> Binding:
    """A socket of whoever started us. Before it is ours to close, a look at it: the number may be another's."""
    descriptor = int(address.removeprefix(FD))
    with socket.socket(fileno=os.dup(descriptor)) as seen:
        if seen.type != socket.SOCK_STREAM:
            raise OSError(0, "it is no stream socket")
        if not seen.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and not _is_bound(seen):
            raise OSError(0, "it is neither listening nor bound")
    one = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    return Binding.of(trio.socket.from_stdlib_socket(one))
