"""Models of the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION, in that library's own cache.

Rules of this file: synchronous; imports ``errors``, ``build``, and of huggingface_hub only where its cache
is. The rest of that library is loaded where it is used, in a process of its own (``hub_fetch``): it costs
22 MB and 0.2 s (version 2.4), and its threads cannot be stopped, a process can.

What is in the cache is found by its documented layout
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache), without network: refs/REVISION holds a
commit, snapshots/COMMIT its files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import ModelStoreError
from .build import Progress, ended_on_exit

__all__ = ["HubModel", "find_hub_model"]

# As the hub names models; "./NAME" and "../NAME" are paths. A revision is a branch, a tag or a commit.
_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
_LONGEST = 96
_DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True)
class HubModel:
    """``name`` is as the user gave it."""

    name: str
    repo: str
    revision: str

    @property
    def folder(self) -> Path:
        """Where the library keeps all that it has of this repository."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"models--{self.repo.replace('/', '--')}"

    def find(self) -> Path | None:
        """The snapshot's directory, be it whole or not; None if there is none. No network."""
        try:
            ref = self.folder / "refs" / self.revision
            commit = ref.read_text().strip() if ref.is_file() else self.revision
            snapshot = self.folder / "snapshots" / commit
            return snapshot if snapshot.is_dir() else None
        except OSError as error:
            raise ModelStoreError(f"cannot look into {self.folder}: {error.strerror}") from error

    def fetch(self, report: Progress) -> Path:
        """Fetches what is new; returns the snapshot's directory. Raises ``ModelStoreError``.

        Safe to run several times at once, and to kill at any moment: the library locks each file, goes
        on with a part of it, and renames it into place.
        """
        command = [sys.executable, "-m", "trioleg.model_store.hub_fetch", self.repo, self.revision]
        # The child must find this very package, wherever we were started.
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with (
            tempfile.TemporaryFile() as last_words,
            ended_on_exit(
                subprocess.Popen(
                    command,
                    env=os.environ | {"PYTHONPATH": paths},
                    # Never written to: its end tells the child that we are gone, however we went.
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=last_words,
                )
            ) as child,
        ):
            assert child.stdin is not None
            with child.stdin:
                return self._listen(child, last_words, report)

    def _listen(
        self, child: subprocess.Popen[bytes], last_words: IO[bytes], report: Progress
    ) -> Path:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                said = json.loads(line)
                if "directory" in said:
                    return Path(said["directory"])
                if "error" in said:
                    raise ModelStoreError(f"{self.name}: {said['error']}")
                report("download", said["done"], said["total"])
        last_words.seek(0)
        reason = last_words.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelStoreError(
            f"{self.name}: the download ended early (exit code {child.wait()}): {reason}"
        )


def find_hub_model(name: str) -> HubModel | None:
    """None if ``name`` is not one that the hub could have."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name or name.endswith(".gguf"):
        return None
    if len(match["repo"]) > _LONGEST:
        return None
    return HubModel(name, match["repo"], match["revision"] or _DEFAULT_REVISION)
