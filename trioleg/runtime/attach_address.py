"""Where engines join: which addresses can be, and which of them others can reach.

Rules of this file: synchronous, opens nothing. By itself the wire authenticates nobody, so an address that
is not private has to be asked for, or be guarded with keys (``ipc/curve.py``).
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import NoReturn

from ..errors import InvalidRequestError
from ..ipc.private_folder import why_not_private

__all__ = ["EXPOSED", "is_private", "refuse_exposed"]

_ALLOWED = "tcp://127.0.0.1:PORT (any loopback address), or ipc://PATH in a folder that others cannot write to"
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
EXPOSED = (
    "the engine-core wire has no authentication and no encryption of its own, so whoever reaches the address, or "
    "the ports of an engine's two legs, can pose as an engine, read prompts and answers, and disturb the server"
)


def is_private(address: str) -> bool:
    """True if this machine's users alone can reach it. Raises ``InvalidRequestError`` for one that an engine could
    not be told."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest not in ("", "*"):
        return not _others_can_write(rest)
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not _is_port(port):
        raise _refused(address, f"allowed: tcp://IP:PORT, or {_ALLOWED}")
    try:
        # An IPv6 address in brackets, an IPv4 one without.
        is_v6 = host.startswith("[") and host.endswith("]")
        ip = _read_v6(host[1:-1]) if is_v6 else ipaddress.IPv4Address(host)
    except ValueError:
        ip = None
    if ip is None or ip.is_unspecified or ip.is_multicast or ip == _BROADCAST:
        why = "engines are told this address, so it must be the one IP that they reach this machine by"
        raise _refused(address, f"{why}; allowed: tcp://IP:PORT, [IP] for IPv6")
    return ip.is_loopback


def _read_v6(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address for one that is written as IPv6, such as ::ffff:127.0.0.1."""
    ip = ipaddress.IPv6Address(host)
    return ip.ipv4_mapped or ip


def _others_can_write(path: str) -> bool:
    """Then others can put a socket of their own there. "@" is Linux's own name space, which has no owners."""
    try:
        return path.startswith("@") or why_not_private(Path(path).parent) is not None
    except (OSError, ValueError):
        # Binding says what is wrong with it.
        return False


def refuse_exposed(address: str) -> NoReturn:
    """Raises ``InvalidRequestError`` for one that is not private, and was not asked for."""
    raise _refused(
        address,
        f"allowed without curve_keys (serve --curve-keys) or allow_unauthenticated: {_ALLOWED}, since {EXPOSED}",
    )


def _refused(address: str, sentence: str) -> InvalidRequestError:
    return InvalidRequestError(f"attach is {address!r}; {sentence}", parameter="attach")


def _is_port(text: str) -> bool:
    """ZeroMQ itself would take a larger number modulo 65536. "*" is any free port, as 0 is."""
    return text == "*" or (bool(re.fullmatch(r"[0-9]{1,5}", text)) and int(text) <= 65535)
