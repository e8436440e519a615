"""The file of a Unix socket: out of the way before it is bound, and removed behind it.

Rules of this file: synchronous. A file is nobody's only if it is a socket behind which nobody answers.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

__all__ = ["make_way", "remove_socket_file"]

# What a Unix socket says whose server has gone, or has just taken the file with it.
_NOBODY = (errno.ECONNREFUSED, errno.ENOENT)


def make_way(path: str) -> None:
    """Remove a Unix socket's file that was left behind. Raises ``OSError`` if it is anything else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(0, "there is a file that is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        if asking.connect_ex(path) not in _NOBODY:
            raise OSError(0, "it is in use")
    Path(path).unlink(missing_ok=True)


def remove_socket_file(address: str) -> None:
    """Removes what binding ``ipc://PATH`` left in the file system, which ZeroMQ does not. Linux's own names, which
    begin with "@", leave nothing."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc" and not path.startswith("@"):
        Path(path).unlink(missing_ok=True)
