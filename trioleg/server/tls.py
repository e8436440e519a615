"""The TLS context that a configuration of Hypercorn's describes, and sentences for what is wrong with it.

HTTP/2 is not offered to clients (ALPN), so that those who can do both speak HTTP/1.1. TLS 1.2 is the least, and
nobody may agree anew on a session's keys by a renegotiation, which costs a server more than a client.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from enum import IntEnum, IntFlag
from functools import reduce
from operator import or_
from typing import Any

from hypercorn.config import Config

from ..errors import InvalidRequestError

__all__ = ["tls_context"]


class _PasswordWanted(Exception):
    pass


def tls_context(named: Mapping[str, Any]) -> ssl.SSLContext:
    """A server's context. ``named``: Hypercorn's settings, ``certfile`` and ``keyfile`` among them.

    Raises ``InvalidRequestError``, which names the setting.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _set_ciphers(context, named.get("ciphers", Config.ciphers))
    for name in ("certfile", "keyfile", "ca_certs"):
        if name in named:
            _check_readable(name, named[name])
    _load_certificate(context, named)
    if "ca_certs" in named:
        try:
            context.load_verify_locations(named["ca_certs"])
        except ssl.SSLError:
            raise _wrong("ca_certs", named["ca_certs"], "a PEM file with certificates") from None
    _set_verification(context, named)
    return context


def _wrong(name: str, value: Any, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {str(value)!r:.200}; allowed: {allowed}", parameter=name)


def _set_ciphers(context: ssl.SSLContext, ciphers: str) -> None:
    try:
        context.set_ciphers(ciphers)
    except (ssl.SSLError, ValueError):
        raise _wrong("ciphers", ciphers, "a list that OpenSSL knows (`openssl ciphers`)") from None


def _check_readable(name: str, path: str | os.PathLike[str]) -> None:
    try:
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise _wrong(name, path, f"a file that can be read ({why})") from None


def _load_certificate(context: ssl.SSLContext, named: Mapping[str, Any]) -> None:
    certfile, keyfile = named["certfile"], named["keyfile"]
    password = named.get("keyfile_password")
    is_locked = False

    def ask() -> str:
        nonlocal is_locked
        is_locked = True
        # Without a function OpenSSL would ask whoever sits at the terminal.
        if password is None:
            raise _PasswordWanted
        return str(password)

    try:
        context.load_cert_chain(certfile, keyfile, password=ask)
    except _PasswordWanted:
        raise InvalidRequestError(
            f"keyfile {keyfile} is encrypted; it needs keyfile_password",
            parameter="keyfile_password",
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key of the certificate in {certfile}"
            raise _wrong("keyfile", keyfile, why) from None
        if is_locked:
            raise InvalidRequestError(
                f"keyfile_password does not open {keyfile}; allowed: its password",
                parameter="keyfile_password",
            ) from None
        raise InvalidRequestError(
            f"certfile {certfile} and keyfile {keyfile} cannot be used ({error.reason or error}); "
            "allowed: a PEM certificate, or chain, and its PEM key",
            parameter="certfile",
        ) from None
    except ValueError as error:
        raise InvalidRequestError(
            f"keyfile_password cannot be used: {error}", parameter="keyfile_password"
        ) from None


def _set_verification(context: ssl.SSLContext, named: Mapping[str, Any]) -> None:
    mode = ssl.CERT_NONE
    if "verify_mode" in named:
        mode = _member("verify_mode", ssl.VerifyMode, named["verify_mode"])
    if mode != ssl.CERT_NONE and "ca_certs" not in named:
        raise InvalidRequestError(
            f"verify_mode is {mode.name} without ca_certs, so that no client would be believed; "
            "allowed: with ca_certs",
            parameter="verify_mode",
        )
    context.verify_mode = mode
    if "verify_flags" in named:
        flags = named["verify_flags"]
        listed = flags if isinstance(flags, list | tuple) else [flags]
        members = [_member("verify_flags", ssl.VerifyFlags, one) for one in listed]
        context.verify_flags = reduce(or_, members, ssl.VerifyFlags.VERIFY_DEFAULT)


def _member(name: str, kind: type[IntEnum] | type[IntFlag], value: Any) -> Any:
    """By its name in Python's ``ssl``, or its number."""
    try:
        return kind[value] if isinstance(value, str) else kind(value)
    except (KeyError, ValueError):
        raise _wrong(name, value, ", ".join(kind.__members__)) from None
