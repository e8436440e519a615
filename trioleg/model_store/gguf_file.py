"""A GGUF file of the user's own: the directory that its conversion goes to.

Rules of this file: synchronous; imports only ``errors`` and ``build``. It looks at names, sizes and times,
never into a file; that is ``gguf_convert``'s, which needs the engine's extra.

A conversion belongs to one state of one file: its directory's name is made of the file's real path, its
size and the time of its last change. A file that has changed is converted again, and what its older states
came to is removed then.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelStoreError
from .build import Progress, converter, make_once

__all__ = ["GgufFile", "find_gguf"]

# NAME-00001-of-00003.gguf, as llama.cpp's gguf-split names the parts of a model.
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")

# Of each hash in a directory's name: far too many for two files of one user to meet.
_HASH_DIGITS = 16
# Bytes of the file's own name there, which only people read; a whole one may be too long with the rest.
_NAME_BYTES = 80


@dataclass(frozen=True, slots=True)
class GgufFile:
    """``parts``: the file, or all that the model is split into. ``directory``: its conversion's."""

    parts: list[Path]
    directory: Path

    def convert(self, report: Progress) -> None:
        """Unless it is there already. See ``build.make_once``."""
        path, _, _ = self.directory.name.partition("-")

        def fill(made: Path, *_: object) -> None:
            converter()(self.parts, made, lambda done, total: report("convert", done, total))
            for older in self.directory.parent.glob(f"{path}-*"):
                shutil.rmtree(older)

        make_once(self.directory, path, fill, report)


def find_gguf(path: Path, root: Path) -> GgufFile | None:
    """None if ``path`` is no GGUF file by its name. ``root`` is the folder of all conversions.

    Raises ``ModelStoreError`` for a part of a model that is not the first, or whose others are not there,
    ``OSError`` for a path that cannot be looked at.
    """
    if path.suffix.lower() != ".gguf" or not path.is_file():
        return None
    parts = _parts(path)
    states = [part.stat() for part in parts]
    real = path.resolve(strict=True)
    state = repr([(one.st_size, one.st_mtime_ns) for one in states])
    name = f"{_hash(str(real))}-{_hash(state)}-{_shortened(real.stem)}"
    return GgufFile(parts, root / name)


def _shortened(stem: str) -> str:
    """Whole characters; bytes that are none, as old file systems have them in names, go."""
    return stem.encode(errors="ignore")[:_NAME_BYTES].decode(errors="ignore")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_HASH_DIGITS]


def _parts(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.stem)
    if match is None:
        return [path]
    names = [
        f"{match['stem']}-{number:05}-of-{match['count']}{path.suffix}"
        for number in range(1, int(match["count"]) + 1)
    ] or [path.name]
    if path.name != names[0]:
        raise ModelStoreError(f"{path} is a later part of a model; give the first, {names[0]}")
    parts = [path.with_name(name) for name in names]
    for part in parts:
        if not part.is_file():
            raise ModelStoreError(f"{part} is missing: {path.name} is the first of {len(parts)}")
    return parts
