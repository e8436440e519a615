"""Hypercorn's settings, as this server takes them: each is honoured, or refused by name with the reason.

Rules of this file: it reads files and certificates, and opens nothing that listens. ``hypercorn_settings.py`` lists
all that Hypercorn 0.18 knows; a name that is not there is refused, so that a typo is no wish that is silently dropped.
Only what somebody set counts: a default of Hypercorn's never replaces one of ours.

    settings = HypercornSettings.of(read_hypercorn_config(Path("server.toml")))
"""

from __future__ import annotations
import __future__

import difflib
import logging
import os
import ssl
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypercorn.config import Config

from ..errors import InvalidRequestError
from .hypercorn_settings import HONOURED, SETTINGS
from .tls import tls_context

__all__ = ["FD", "UNIX", "HypercornSettings", "host_and_port", "read_hypercorn_config"]

# How Hypercorn writes addresses that are no host and port.
UNIX, FD = "unix:", "fd://"
# As Hypercorn has it, for an address that names none.
_PORT = 8000
_LAST_PORT = 65535

# Without both of these there is no TLS.
_CERTIFICATE = ("certfile", "keyfile")
# What is about TLS alone, and would have no effect without it.
_OF_TLS = (
    "insecure_bind",
    "keyfile_password",
    "ca_certs",
    "ciphers",
    "verify_mode",
    "verify_flags",
    "alpn_protocols",
    "ssl_handshake_timeout",
)
# What Hypercorn's own code reads, under the same names.
_OF_THE_PROTOCOL = (
    "include_date_header",
    "include_server_header",
    "alt_svc_headers",
    "server_names",
    "root_path",
    "accesslog",
    "errorlog",
    "access_log_format",
    "loglevel",
    "logconfig",
    "logconfig_dict",
    "logger_class",
    "startup_timeout",
    "shutdown_timeout",
    "max_app_queue_size",
)
_OF_THE_LOG = frozenset(
    {"accesslog", "errorlog", "loglevel", "logconfig", "logconfig_dict", "logger_class"}
)
# Their names in ``ConnectionLimits``.
_LIMITS = {
    "graceful_timeout": "graceful_timeout",
    "keep_alive_timeout": "keep_alive_timeout",
    "ssl_handshake_timeout": "handshake_timeout",
    "h11_max_incomplete_size": "max_head_bytes",
}


def read_hypercorn_config(path: Path) -> Config:
    """What a file of Hypercorn's says: TOML, or Python, which is executed.

    Raises ``InvalidRequestError`` for a file that cannot be read, and for a key that Hypercorn does not know.
    """
    readers = {".toml": _read_toml, ".py": _run_python}
    if path.suffix not in readers:
        raise InvalidRequestError(f"config is {path}; allowed: a file that ends in .toml or .py")
    try:
        found = readers[path.suffix](path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"config {path} cannot be read: {why}") from None
    config = Config()
    for name, value in found.items():
        _check(name, value)
        setattr(config, name, value)
    return config


def _read_toml(text: str, path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"config {path} is no TOML: {error}") from None


def _run_python(text: str, path: Path) -> Mapping[str, Any]:
    names: dict[str, Any] = {"__file__": str(path), "__name__": path.stem}
    try:
        exec(compile(text, path, "exec", dont_inherit=True), names)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is the file's
        raise InvalidRequestError(
            f"config {path} does not run: {type(error).__name__}: {error}"
        ) from None
    return {name: value for name, value in names.items() if _is_setting(name, value)}


def _is_setting(name: str, value: Any) -> bool:
    """Whether a name of a Python file is meant to be one; of what it imports and defines, no."""
    if name in SETTINGS:
        return True
    tools = (types.ModuleType, types.FunctionType, type, __future__._Feature)
    return not name.startswith("_") and not isinstance(value, tools)


def host_and_port(address: str) -> tuple[str, int]:
    """Of ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ``InvalidRequestError``."""
    host, colon, port = address.partition(":")
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        colon, port = rest[:1], rest[1:]
    is_number = port.isascii() and port.isdigit() and int(port) <= _LAST_PORT
    # As the socket itself takes it: no host is every one.
    is_closed = address.startswith("[") == ("]" in address)
    if (
        not address
        or not is_closed
        or colon not in ("", ":")
        or not (is_number or (not colon and not port))
    ):
        raise _bad_address(address)
    return host or "0.0.0.0", int(port) if port else _PORT


def _bad_address(address: str) -> InvalidRequestError:
    allowed = f"HOST:PORT, [IPV6]:PORT, unix:PATH or fd://NUMBER; a port from 0 to {_LAST_PORT}"
    return InvalidRequestError(f"bind is {address!r}; allowed: {allowed}", parameter="bind")


def _check_address(address: str) -> None:
    if address.startswith(FD):
        number = address.removeprefix(FD)
        if not (number.isascii() and number.isdigit()):
            raise _bad_address(address)
    elif not address.startswith(UNIX):
        host_and_port(address)


@dataclass(frozen=True, kw_only=True, slots=True)
class HypercornSettings:
    """What a configuration of Hypercorn's asks of this server. Made by ``of``.

    ``bind``: addresses as Hypercorn writes them; None: it names none. ``insecure_bind``: those without TLS, where
    ``tls`` is one. ``limits``: fields of ``ConnectionLimits``. ``protocol``: what Hypercorn's own code reads.
    """

    bind: tuple[str, ...] | None = None
    insecure_bind: tuple[str, ...] = ()
    backlog: int | None = None
    umask: int | None = None
    user: int | None = None
    group: int | None = None
    tls: ssl.SSLContext | None = None
    certfile: str | None = None
    limits: dict[str, Any] = field(default_factory=dict)
    protocol: Config = field(default_factory=Config)

    @classmethod
    def of(cls, config: Config | None) -> HypercornSettings:
        """Check all that was set in ``config``; None: nothing. Loads certificates, opens log files.

        Raises ``InvalidRequestError``, which names the setting.
        """
        named = _named(config)
        for name, value in named.items():
            _check(name, value)
        for name in ("bind", "insecure_bind"):
            for address in _listed(named.get(name, ())):
                _check_address(address)
        _check_pairs(named)
        _check_once([*_listed(named.get("bind", ())), *_listed(named.get("insecure_bind", ()))])
        return cls(
            bind=_listed(named["bind"]) if "bind" in named else None,
            insecure_bind=_listed(named.get("insecure_bind", ())),
            **{name: named.get(name) for name in ("backlog", "umask", "user", "group")},
            tls=tls_context(named) if "certfile" in named else None,
            certfile=os.fspath(named["certfile"]) if "certfile" in named else None,
            limits={ours: named[name] for name, ours in _LIMITS.items() if name in named},
            protocol=_protocol(named),
        )

    @contextmanager
    def logging(self) -> Iterator[None]:
        """While the block runs, our own lines go to ``errorlog``, too, if that is a file; behind it, log files are
        closed."""
        ours, files = logging.getLogger("trioleg"), _log_files(self.protocol)
        errors = [handler for logger, handler in files if logger.name == "hypercorn.error"]
        for handler in errors:
            ours.addHandler(handler)
        try:
            yield
        finally:
            for handler in errors:
                ours.removeHandler(handler)
            for logger, handler in files:
                logger.removeHandler(handler)
                handler.close()


def _named(config: Config | None) -> dict[str, Any]:
    """What was set. Hypercorn keeps some of it, and some state of its own, behind an underscore."""
    own = {"_log", "_quic_addresses"}
    items = {} if config is None else vars(config)
    return {name.removeprefix("_"): value for name, value in items.items() if name not in own}


def _check(name: str, value: Any) -> None:
    if name not in SETTINGS:
        meant = difflib.get_close_matches(name, SETTINGS, 1)
        guess = f" (is {meant[0]} meant?)" if meant else ""
        raise InvalidRequestError(
            f"{name} is no setting of Hypercorn's{guess}; allowed: {', '.join(HONOURED)}",
            parameter=name,
        )
    is_allowed, allowed = SETTINGS[name]
    if not is_allowed(value):
        raise InvalidRequestError(f"{name} is {value!r:.60}; allowed: {allowed}", parameter=name)


def _check_pairs(named: Mapping[str, Any]) -> None:
    """What would have no effect, or half of one, without another setting."""
    for name, other in (_CERTIFICATE, _CERTIFICATE[::-1]):
        if name in named and other not in named:
            raise InvalidRequestError(
                f"{name} is {named[name]!r} without {other}; allowed: both, which may be one file",
                parameter=name,
            )
    for name in _OF_TLS:
        if name in named and "certfile" not in named:
            raise InvalidRequestError(
                f"{name} is {named[name]!r:.60} without TLS; allowed: with certfile and keyfile",
                parameter=name,
            )


def _check_once(addresses: Sequence[str]) -> None:
    for address in addresses:
        # Port 0 is another one each time.
        if addresses.count(address) > 1 and not address.endswith(":0"):
            raise InvalidRequestError(
                f"bind is {address!r} twice; allowed: each address once", parameter="bind"
            )


def _listed(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _protocol(named: dict[str, Any]) -> Config:
    config = Config()
    for name in _OF_THE_PROTOCOL:
        if name in named:
            setattr(config, name, named[name])
    if _OF_THE_LOG & named.keys():
        try:
            config.log  # noqa: B018 - made on first use, which would be the first request
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a logging configuration can be wrong in
            which = next(name for name in _OF_THE_PROTOCOL if name in _OF_THE_LOG & named.keys())
            raise InvalidRequestError(
                f"{which} is {named[which]!r:.60}, which cannot be logged to: {error}",
                parameter=which,
            ) from None
    return config


def _log_files(config: Config) -> list[tuple[logging.Logger, logging.Handler]]:
    """The handlers that Hypercorn made for a path."""
    if config._log is None:
        return []
    targets = (
        (config.accesslog, getattr(config._log, "access_logger", None)),
        (config.errorlog, getattr(config._log, "error_logger", None)),
    )
    return [
        (logger, handler)
        for target, logger in targets
        if isinstance(target, str) and logger is not None
        for handler in logger.handlers
        if isinstance(handler, logging.FileHandler)
    ]
