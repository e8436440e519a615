"""The program that fetches one model from the Hugging Face hub, for ``hub``: REPO REVISION.

Rules of this file: it alone loads huggingface_hub whole, and imports nothing of trioleg. It takes the
user's settings as that library does (HF_TOKEN, HF_ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE, proxies).

It says on stdout, a JSON object a line: {"done": bytes, "total": bytes} on the way, and at the end
{"directory": path} or {"error": a sentence}. It ends with its stdin, which is its parent's: whom nobody
waits for need not fetch gigabytes.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, snapshot_download
from tqdm.auto import tqdm

# What an engine needs, in two steps: a repository that lacks one of the small files is refused before
# gigabytes of weights are fetched. Other formats (.bin, .gguf), folders (original/) and the second copy of
# the weights that Mistral's repositories carry stay where they are.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
_REQUIRED = ("config.json", "tokenizer.json")
_WEIGHTS = ("*.safetensors",)
_NO_WEIGHTS = ("*/*", "consolidated*")

# Threads of the library count into one bar.
_counting = threading.Lock()


def main(repo: str, revision: str) -> None:
    """Never raises what the user can do something about: that is the last line."""
    try:
        _say(directory=_fetch(repo, revision))
    except Exception as error:  # noqa: BLE001 - the library's HTTP client has errors of its own
        _say(error=sentence(error, repo, revision))


def _fetch(repo: str, revision: str) -> str:
    _say(done=0, total=0)
    small = snapshot_download(repo, revision=revision, allow_patterns=list(_SMALL_FILES))
    for file in _REQUIRED:
        if not (Path(small) / file).is_file():
            raise FileNotFoundError(f"the repository has no {file}, so it cannot be served")
    # By the commit: the branch may have moved on meanwhile.
    return snapshot_download(
        repo,
        revision=Path(small).name,
        allow_patterns=list(_WEIGHTS),
        ignore_patterns=list(_NO_WEIGHTS),
        tqdm_class=_Bar,
    )


def sentence(error: BaseException, repo: str, revision: str) -> str:
    """What went wrong, and what to do about it, in one sentence without the model's name."""
    match error:
        case errors.GatedRepoError():
            return (
                f"access is granted by its owner: ask for it at {constants.ENDPOINT}/{repo}, then set "
                "HF_TOKEN to a token of yours (or run `hf auth login`)"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{constants.ENDPOINT} has no such model, or it is private; check the name, or set "
                "HF_TOKEN to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            return f"{constants.ENDPOINT} has the model, but no revision {revision!r} of it"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return (
                f"it is not (or not whole) in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to "
                "fetch it; unset that, or give a local directory"
            )
        case _ if (status := _status(error)) is not None:
            return f"{constants.ENDPOINT} answers with status {status}; {_advice(status)}"
        case errors.LocalEntryNotFoundError():
            return (
                f"it is not (or not whole) in {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot "
                f"be reached ({_cause(error)}); check the network, or give a local directory"
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return (
                f"no space is left in {constants.HF_HUB_CACHE}; free some, or name another folder in "
                "HF_HUB_CACHE, and fetch again: it goes on where it stopped"
            )
        case errors.HFValidationError():
            return f"no model of the hub has such a name ({_cause(error)})"
        case LookupError() | ValueError() | TypeError() | AttributeError() | RecursionError():
            return (
                f"{constants.ENDPOINT} gives an answer that no Hugging Face hub gives "
                f"({type(error).__name__}: {_cause(error)}); check HF_ENDPOINT, or try again later"
            )
        case _:
            return f"fetching it from {constants.ENDPOINT} failed: {_cause(error)}"


def _status(error: BaseException | None) -> int | None:
    """That of the answer which lies at the root; None if there was no answer, or a good one."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int) and status >= 400:
            return status
        error = error.__cause__
    return None


def _advice(status: int) -> str:
    if status == 429:
        return "it wants fewer requests: wait a while, or set HF_TOKEN to a token of yours"
    if status in {401, 403}:
        return "set HF_TOKEN to a token that may read the model"
    if status >= 500:
        return "the fault is its own: try again later"
    return "check the model's name and HF_ENDPOINT"


def _cause(error: BaseException) -> str:
    """The first line of what lies at the root; the library's own texts run over many."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _say(**line: Any) -> None:
    # In one piece: files are fetched by several threads.
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """Stands in for the library's bars, shows nothing, and says how far the widest bar of bytes is."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"disable": True})
        self.total = settings.get("total")
        self._is_bytes = settings.get("unit") == "B"

    def update(self, n: float | None = 1) -> bool | None:
        with _counting:
            self.n += n or 0
            if self._is_bytes:
                _say(done=int(self.n), total=int(self.total or 0))
        return None


def _leave_with_parent() -> None:
    # Not through sys.stdin, whose lock the interpreter wants when it ends.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    main(*sys.argv[1:])
