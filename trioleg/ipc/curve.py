"""Keys for ZeroMQ's CURVE: files, and what they make of a socket.

Rules of this file: knows no Trio; a secret is never shown. The format of the files is pyzmq's own
(``zmq.auth``), the security is libzmq's: both sides prove that they have their secret, and everything
behind that is encrypted. One pair of keys belongs to the front end, one to each engine:

    DIR/frontend/frontend.key_secret    the front end's pair
    DIR/frontend/engines/NAME.key       the public key of each engine that may come in
    DIR/NAME/NAME.key_secret            an engine's pair
    DIR/NAME/frontend.key               the public key of the front end that it may trust

So each side is given one folder, ``DIR/frontend`` or ``DIR/NAME``. To shut an engine out, remove its
file from ``engines`` and start the front end anew.
"""

from __future__ import annotations

import re
import shutil
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from ..errors import InvalidRequestError
from .private_folder import why_not_private
from .sockets import Socket

__all__ = ["EngineKeys", "FrontEndKeys", "make_keys", "read_engine_keys", "read_front_end_keys"]

_FRONT_END = "frontend"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A handshake takes four messages and one answer of the event loop. Whoever connects and says nothing is
# noticed as a connection until then, so it is not the 30 s of ZeroMQ's default.
_HANDSHAKE_TIMEOUT_MS = 5000


@dataclass(frozen=True, slots=True)
class FrontEndKeys:
    """``engines``: the public keys that may come in."""

    secret: bytes = field(repr=False)
    engines: frozenset[bytes]

    def set_up(self, socket: Socket, leg: str) -> None:
        """Before it is bound. ``leg`` is what the question about a peer's key will name."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.ZAP_DOMAIN, leg.encode())
        # Without it libzmq lets every key in while nobody answers the question.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """``front_end``: the public key of the one that this engine joins."""

    public: bytes
    secret: bytes = field(repr=False)
    front_end: bytes

    def set_up(self, socket: Socket) -> None:
        """Before it is connected."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.front_end)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def make_keys(folder: Path, engine: str = "engine") -> tuple[Path, Path]:
    """Makes keys for ``engine``, and for the front end if it has none; returns the folders of both, which only
    this user can enter. Raises ``InvalidRequestError`` for a name that cannot be or is taken, and ``OSError``."""
    if not _NAME.fullmatch(engine) or engine == _FRONT_END:
        raise InvalidRequestError(
            f"engine is {engine!r}; allowed: letters, digits, '.', '_' and '-', and not {_FRONT_END!r}",
            parameter="engine",
        )
    front_end_folder, engine_folder = folder / _FRONT_END, folder / engine
    if engine_folder.exists():
        raise InvalidRequestError(
            f"engine is {engine!r}, and {engine_folder} exists; allowed: the name of a new one",
            parameter="engine",
        )
    engines = front_end_folder / "engines"
    if not _secret_file(front_end_folder, _FRONT_END).exists():
        front_end_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_pair(front_end_folder, _FRONT_END)
    engines.mkdir(mode=0o700, exist_ok=True)
    engine_folder.mkdir(mode=0o700)
    _make_pair(engine_folder, engine)
    shutil.copy(_public_file(front_end_folder, _FRONT_END), engine_folder)
    shutil.copy(_public_file(engine_folder, engine), engines)
    return front_end_folder, engine_folder


def _make_pair(folder: Path, name: str) -> None:
    # It must never be readable by others, not even before the chmod: a folder may have been there already.
    folder.chmod(0o700)
    _, secret = create_certificates(folder, name)
    Path(secret).chmod(0o600)


def read_front_end_keys(folder: Path) -> FrontEndKeys:
    """What ``make_keys`` put there for a front end. Raises ``InvalidRequestError``, also for a secret that others
    can read, and for folders that others can write to."""
    _, secret = _read_pair(folder, _FRONT_END)
    _check_private(folder / "engines", folder)
    engines = frozenset(_load(path, folder)[0] for path in (folder / "engines").glob("*.key"))
    if not engines:
        raise _unusable(folder, "its folder engines has no file *.key, so nobody could come in")
    return FrontEndKeys(secret, engines)


def read_engine_keys(folder: Path) -> EngineKeys:
    """What ``make_keys`` put there for an engine. Raises as ``read_front_end_keys`` does."""
    names = [path.stem for path in folder.glob("*.key_secret")]
    if len(names) != 1 or names == [_FRONT_END]:
        raise _unusable(folder, f"an engine's folder has one NAME.key_secret, here are {names}")
    public, secret = _read_pair(folder, names[0])
    front_end, _ = _load(_public_file(folder, _FRONT_END), folder)
    return EngineKeys(public, secret, front_end)


def _read_pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = _secret_file(folder, name)
    _check_private(folder, folder)
    public, secret = _load(path, folder)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise _unusable(
            folder, f"{path.name} has mode {mode:04o}, so others can use it; allowed: 0600"
        )
    if secret is None or not _is_key(secret) or zmq.curve_public(secret) != public:
        raise _unusable(folder, f"{path.name} does not hold a secret key and the public one of it")
    return public, secret


def _check_private(part: Path, folder: Path) -> None:
    """``part`` of ``folder``: who can write there can put their own keys in."""
    try:
        why = why_not_private(part)
    except (OSError, ValueError) as error:
        raise _unusable(folder, str(error)) from error
    if why is not None:
        raise _unusable(folder, f"{why}, and so could put keys of their own there")


def _load(path: Path, folder: Path) -> tuple[bytes, bytes | None]:
    try:
        # A pipe would be waited for, and a link's other end may be anybody's.
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _unusable(folder, f"{path} is no regular file")
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise _unusable(folder, str(error)) from error
    if not _is_key(public):
        raise _unusable(
            folder, f"{path} holds a public key that is not {_KEY_LENGTH} characters of Z85"
        )
    return public, secret


# 32 bytes in Z85, ZeroMQ's printable form.
_KEY_LENGTH = 40


def _is_key(key: bytes) -> bool:
    try:
        return len(key) == _KEY_LENGTH and bool(z85.decode(key))
    except (KeyError, struct.error):
        return False


def _secret_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.key_secret"


def _public_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.key"


def _unusable(folder: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"curve_keys is {str(folder)!r}: {why}; allowed: a folder that `trioleg keys` made, DIR/frontend for "
        "a front end and DIR/NAME for an engine",
        parameter="curve_keys",
    )
