"""The safetensors files of one model directory: what they hold, and one tensor at a time.

Rules of this file: safetensors and torch, no trio; it knows files, and no model. A file is mapped only
while one tensor of it is read: what stays mapped counts as this process's memory, which would come to
twice the model at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelStoreError
from ..model_files import read_json_object

__all__ = ["Checkpoint", "TensorEntry"]

# NAME_MAX of every file system in use.
_FILE_NAME_BYTES = 255


class TensorEntry(NamedTuple):
    """Where a tensor is, and what its file's header says of it; ``dtype`` in the file's words ("BF16")."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of ``model.safetensors``, or of the shards of ``model.safetensors.index.json``.

    A mapping from names to entries; making one reads headers alone. Nothing stays open. Raises
    ``ModelStoreError``, also in ``read``, naming the file that is missing, corrupt, truncated, or holds
    not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, TensorEntry] = {}
        index = folder / "model.safetensors.index.json"
        homes = _read_index(index)
        for path in sorted(set(homes.values())) or [folder / "model.safetensors"]:
            self._read_header(path)
        for name, path in homes.items():
            if name not in self._entries or self._entries[name].path != path:
                raise ModelStoreError(f"{path}: holds no tensor {name}, which {index.name} names")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def read(self, name: str) -> Tensor:
        """The tensor, backed by the mapped file for as long as it lives: copy it."""
        with _opened(self._entries[name].path) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def _read_header(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                if name in self._entries:
                    raise ModelStoreError(
                        f"{path}: holds {name}, and so does {self._entries[name].path.name}"
                    )
                header = file.get_slice(name)
                self._entries[name] = TensorEntry(
                    path, tuple(header.get_shape()), header.get_dtype()
                )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        if not path.is_file():
            raise ModelStoreError(f"{path}: there is no such file")
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelStoreError(f"{path}: cannot be read as safetensors: {error}") from error


def _read_index(index: Path) -> dict[str, Path]:
    """Which shard holds which tensor; nothing, if there is no index."""
    fields = read_json_object(index, optional=True)
    if not fields and not index.is_file():
        return {}
    names = fields.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelStoreError(f"{index}: holds no weight_map of file names, but {names!r:.60}")
    for name in names.values():
        if not _is_file_name(name):
            raise ModelStoreError(f"{index}: {name!r:.60} is not the name of a file beside it")
    return {tensor: index.parent / name for tensor, name in names.items()}


def _is_file_name(name: Any) -> bool:
    """A shard is a file beside its index; a path could lead anywhere."""
    if not isinstance(name, str) or name in {"", ".", ".."} or Path(name).name != name:
        return False
    try:
        return len(os.fsencode(name)) <= _FILE_NAME_BYTES and "\0" not in name
    except UnicodeEncodeError:
        return False
