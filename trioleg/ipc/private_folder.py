"""``why_not_private``: whether other users could put something into a folder, or put another folder in its place.

Rules of this file: synchronous, changes nothing. It looks at owners and modes, as ssh does at its keys' folders;
whoever has root's rights can do anything anyway.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["why_not_private"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def why_not_private(folder: Path) -> str | None:
    """A clause that says why not; None if only this user and root can. Raises ``OSError`` if there is no such folder,
    and ``ValueError`` for what cannot be a path.

    ``folder`` itself must be closed to others' writing. The folders above it may have the sticky bit instead, as /tmp
    has: then nobody renames what is ours. The path counts as it is written and as its links resolve.
    """
    real = folder.resolve(strict=True)
    written = folder.absolute()
    for one in dict.fromkeys((real, *real.parents, written, *written.parents)):
        found = one.lstat()
        if found.st_uid not in (os.geteuid(), 0):
            return f"{one} belongs to user {found.st_uid}"
        if stat.S_ISLNK(found.st_mode) or not found.st_mode & _OTHERS_WRITE:
            continue
        if one == real or not found.st_mode & stat.S_ISVTX:
            return f"others can write to {one} (mode {stat.S_IMODE(found.st_mode):04o})"
    return None
