"""A model's JSON files, and how large a number in a model's settings may be.

Rules of this file: imports only ``errors``. Whoever reads a model's settings (``tokenizer``,
``model_store``, ``gguf_convert``, ``engine``) shares it, so that what one of them writes another takes, and
a bad file is refused by all in the same words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from .errors import ModelStoreError

__all__ = [
    "LARGEST_INTEGER",
    "LARGEST_NUMBER",
    "MOST_LAYERS",
    "SMALLEST_NUMBER",
    "read_json_array",
    "read_json_object",
]

# Of a size, a count or an id: int32, in which torch and the wire hold token ids and positions.
LARGEST_INTEGER = 2**31 - 1
# The largest open models have 126. Lists of all layers are made before anything is known of the weights.
MOST_LAYERS = 4096
# Of an eps, a base or a factor. The engine computes in float32, which ends at 3e38: two of them and a
# position multiplied stay below that.
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-14, 1e14

# Real files nest about five deep. Python's own functions give up at about a thousand, each in its own way.
_MOST_NESTED = 64


def read_json_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in ``path``; an empty one if it is ``optional`` and missing. Raises ``ModelStoreError``
    naming the file for one that cannot be read, or that holds anything else."""
    return cast("dict[str, Any]", _read(path, dict, "object", optional=optional))


def read_json_array(path: Path, *, optional: bool = False) -> list[Any]:
    """The same, of a file that holds an array."""
    return cast("list[Any]", _read(path, list, "array", optional=optional))


def _read(path: Path, kind: type, named: str, *, optional: bool) -> object:
    try:
        if path.exists() and not path.is_file():
            raise ModelStoreError(f"{path}: cannot be read: it is no file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return kind()
        raise ModelStoreError(f"{path} is missing") from None
    except OSError as error:
        raise ModelStoreError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ModelStoreError(
            f"{path}: is not JSON that can be read: it is nested too deep"
        ) from error
    except ValueError as error:
        raise ModelStoreError(f"{path}: is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise ModelStoreError(f"{path}: holds no JSON {named}")
    if _is_deep(value):
        raise ModelStoreError(f"{path}: is not JSON that can be read: it is nested too deep")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_NESTED):
        lists = (one.values() if isinstance(one, dict) else one for one in level)
        level = [inner for one in lists for inner in one if isinstance(inner, dict | list)]
    return bool(level)
