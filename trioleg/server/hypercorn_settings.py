"""All settings that Hypercorn 0.18 knows, and which of their values this server takes.

Rules of this file: a table, and what it is written with. What is honoured is honoured in ``hypercorn_config.py`` and
``tls.py``; what is refused has its reason here, in words that end the sentence "NAME is VALUE; allowed: …".
"""

from __future__ import annotations

import logging
import os
import types
from collections.abc import Callable
from typing import Any

__all__ = ["HONOURED", "SETTINGS"]

_Check = Callable[[Any], bool]


def _number(least: float, *, whole: bool = False) -> _Check:
    kinds = int if whole else (int, float)
    return lambda value: isinstance(value, kinds) and value is not True and least <= value < 2**31


def _one_of(*values: Any) -> _Check:
    return lambda value: value in values


def _strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) and one for one in value)


def _addresses(value: Any) -> bool:
    return isinstance(value, str) or (_strings(value) and len(value) > 0)


def _path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))


def _log(value: Any) -> bool:
    return value is None or isinstance(value, str | logging.Logger)


def _kind(*kinds: type) -> _Check:
    return lambda value: isinstance(value, kinds)


def _level(value: Any) -> bool:
    return isinstance(value, str) and value.upper() in logging.getLevelNamesMapping()


def _ssl_names(value: Any) -> bool:
    """``tls_context`` says which of them there are."""
    return isinstance(value, int | str) or _strings(value)


def _header_values(value: Any) -> bool:
    return _strings(value) and all(one.isascii() and one.isprintable() for one in value)


def _root_path(value: Any) -> bool:
    return isinstance(value, str) and (not value or value.startswith("/"))


def _never(_value: Any) -> bool:
    return False


_SECONDS = (_number(0), "seconds, 0 or more")
_TIMEOUT = (
    lambda value: _number(0)(value) and value > 0,
    "seconds, more than 0",
)
_COUNT = (_number(1, whole=True), "an integer from 1 on")
_ID = (_number(0, whole=True), "a number, as `id` shows it")
_BOOL = (_kind(bool), "true or false")
_TEXT = (_kind(str), "a string")
_FILE = (_path, "a path")
_LIST = (_strings, "a list of strings")
_BIND = (_addresses, "HOST:PORT, [IPV6]:PORT, unix:PATH, fd://NUMBER, or a list of such")
_SSL = (_ssl_names, "a name of Python's ssl module, or its number")

_ONE_PROCESS = "one process owns the engine and serves everybody"
_NO_H2 = "HTTP/2 is not spoken here (a proxy in front can)"
_NO_QUIC = "HTTP/3 is not spoken here (a proxy in front can)"
_NO_WS = "there are no WebSockets here"
_METRICS = "figures are at /metrics, for Prometheus"
_SUPERVISED = "what starts this program knows its process, and starts it again"

# Which values, and what is allowed in words; of what is refused whatever its value, the reason.
SETTINGS: dict[str, tuple[_Check, str]] = {
    "bind": _BIND,
    "insecure_bind": _BIND,
    "quic_bind": (_one_of([], None), f"none, for {_NO_QUIC}"),
    "backlog": _COUNT,
    "umask": (
        lambda value: _number(0, whole=True)(value) and value <= 0o777,
        "permission bits, 0 to 0o777",
    ),
    "user": _ID,
    "group": _ID,
    "certfile": _FILE,
    "keyfile": _FILE,
    "keyfile_password": _TEXT,
    "ca_certs": _FILE,
    "ciphers": _TEXT,
    "verify_mode": _SSL,
    "verify_flags": _SSL,
    "cert_reqs": (_never, "verify_mode in its place, as Hypercorn itself says"),
    "alpn_protocols": (_one_of(["http/1.1"], ("http/1.1",)), f'["http/1.1"], for {_NO_H2}'),
    "ssl_handshake_timeout": _TIMEOUT,
    "graceful_timeout": _SECONDS,
    "keep_alive_timeout": _SECONDS,
    "read_timeout": (
        _one_of(None),
        "none, for keep_alive_timeout bounds a request's head, and a client that waits for tokens sends nothing",
    ),
    "keep_alive_max_requests": (_never, "nothing, for nothing piles up on a connection"),
    "h11_max_incomplete_size": _COUNT,
    "h11_pass_raw_headers": (
        _one_of(False),
        "false, for the app reads header names as ASGI has them",
    ),
    "include_date_header": _BOOL,
    "include_server_header": _BOOL,
    "alt_svc_headers": (_header_values, "a list of strings that are printable ASCII"),
    "server_names": _LIST,
    "root_path": (_root_path, '"", or a path that begins with /'),
    "accesslog": (_log, 'a path, or "-" for stdout'),
    "errorlog": (_log, 'a path, or "-" for stderr'),
    "access_log_format": _TEXT,
    "loglevel": (_level, "debug, info, warning, error or critical"),
    "logconfig": (lambda value: value is None or _path(value), "a path"),
    "logconfig_dict": (_kind(dict, types.NoneType), "a dictionary"),
    "logger_class": (_kind(type), "a class, like hypercorn.logging.Logger"),
    "startup_timeout": _TIMEOUT,
    "shutdown_timeout": _TIMEOUT,
    "max_app_queue_size": _COUNT,
    "workers": (_one_of(1), f"1, for {_ONE_PROCESS}"),
    "worker_class": (_one_of("trio"), "trio, which everything here runs on"),
    "application_path": (_never, "nothing, for the application is this program's own"),
    "daemon": (_never, f"nothing, for {_ONE_PROCESS}"),
    "debug": (_one_of(False), "false, for it is about asyncio"),
    "pid_path": (_one_of(None), f"none, for {_SUPERVISED}"),
    "use_reloader": (_one_of(False), f"false, for {_SUPERVISED}"),
    "max_requests": (_one_of(None), f"none, for {_ONE_PROCESS}, and need not be replaced"),
    "max_requests_jitter": (_one_of(0), f"0, for {_ONE_PROCESS}, and need not be replaced"),
    "statsd_host": (_one_of(None), f"none, for {_METRICS}"),
    "statsd_prefix": (_one_of(""), f"none, for {_METRICS}"),
    "dogstatsd_tags": (_one_of(""), f"none, for {_METRICS}"),
    "h2_max_concurrent_streams": (_never, f"nothing, for {_NO_H2}"),
    "h2_max_header_list_size": (_never, f"nothing, for {_NO_H2}"),
    "h2_max_inbound_frame_size": (_never, f"nothing, for {_NO_H2}"),
    "websocket_max_message_size": (_never, f"nothing, for {_NO_WS}"),
    "websocket_ping_interval": (_one_of(None), f"none, for {_NO_WS}"),
    "wsgi_max_body_size": (_never, "nothing, for the application is no WSGI one"),
}

# Those of which some value is taken.
HONOURED = tuple(
    sorted(name for name, (is_allowed, _) in SETTINGS.items() if is_allowed is not _never)
)
