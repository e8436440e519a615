"""How a model's directory comes to be: once, by one process at a time, and only ever whole.

Rules of this file: synchronous; imports only ``errors``. It knows nothing of where a model comes from.

The plan: under a lock, in a temporary folder beside the final one, let somebody fill a directory, then
rename it into place. The rename is the only step that another process can see, so a directory that is
there is whole. Builds of one source share a lock and the beginning of their folders' names, whatever state
of it they are made of: what a killed build left behind is removed by the next one, which knows by the lock
that nobody uses it. The lock's file stays, one for each source: who unlinks a lock may unlink one that
another process has just opened.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ..errors import ModelStoreError

__all__ = ["CONVERTED_FILES", "Progress", "converter", "ended_on_exit", "is_whole", "make_once"]

CONVERTED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


class Progress(Protocol):
    """What a pull tells a waiting person; called in its thread, some times a second.

    ``stage`` is "wait" (another pull of the same model is at work), "download" or "convert"; ``done``
    and ``total`` are bytes of that stage. An exception raised here ends the pull, which cleans up.
    """

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


def is_whole(directory: Path) -> bool:
    """Whether a converted model is there. Raises ``ModelStoreError`` if one cannot even look."""
    try:
        return all((directory / file).is_file() for file in CONVERTED_FILES)
    except OSError as error:
        raise ModelStoreError(f"cannot look into {directory}: {error.strerror}") from error


def make_once(
    directory: Path, source: str, fill: Callable[[Path, Path, int], None], report: Progress
) -> None:
    """Makes ``directory`` unless it is whole. ``fill(made, folder, lock)`` writes the files into
    ``made``, may use ``folder`` for what it needs meanwhile, and may hand on the lock's descriptor.
    ``source`` names what it is made of: a part of file names, the same for every state of it.

    Safe to run several times at once, and to kill at any moment. Raises ``ModelStoreError``, what
    ``fill`` and ``report`` raise; nothing half made is left then.
    """
    if is_whole(directory):
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory.parent / f".{source}.lock", report) as lock:
            # Whoever held the lock before us may have done the work.
            if not is_whole(directory):
                _build(directory, f".{source}.partial-", fill, lock)
    except OSError as error:
        raise ModelStoreError(f"cannot make {directory}: {error}") from error


@contextmanager
def _lock(path: Path, report: Progress) -> Iterator[int]:
    """Only one process (or thread) builds of one source; yields the lock's descriptor.

    The kernel frees the lock when the last process that has the descriptor is gone.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build(
    directory: Path, marker: str, fill: Callable[[Path, Path, int], None], lock: int
) -> None:
    for leftover in directory.parent.glob(f"{glob.escape(marker)}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=marker, dir=directory.parent) as name:
        folder = Path(name)
        made = folder / "made"
        made.mkdir()
        fill(made, folder, lock)
        _write_through(made)
        if directory.exists():
            # It lacks a file, or we would not be here. A rename cannot replace a folder in use.
            directory.rename(folder / "damaged")
        made.rename(directory)


def _write_through(directory: Path) -> None:
    """Makes the files safe against a power cut before the rename says that they are there."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file)


def converter() -> Callable[[list[Path], Path, Callable[[int, int], None]], None]:
    """Asked for before a download: whoever lacks the extra learns it at once."""
    try:
        from ..gguf_convert import convert
    except ModuleNotFoundError as error:
        raise ModelStoreError(
            f"converting a model needs {error.name}: pip install 'trioleg[engine]'"
        ) from error
    return convert


@contextmanager
def ended_on_exit(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Does nothing to a process that has ended; kills one that an exception leaves behind."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()
