"""What the programs of the twins share: the options that they know, and the other work of a consumer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["check_options", "until_file"]

_NO_SUCH_THING = 64
_LOOK_EVERY_S = 0.01


def check_options(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Leaves with 64 for what the leg does not have."""
    for name in options:
        if name not in known:
            print(f"no such thing: {name}; allowed: {', '.join(known)}", file=sys.stderr)  # noqa: T201 - a program's
            sys.exit(_NO_SUCH_THING)


async def until_file(path: str) -> None:
    """Other work, until somebody has made the file."""
    while not Path(path).exists():  # noqa: ASYNC110, ASYNC240 - a file has no event, and a look is microseconds
        await asyncio.sleep(_LOOK_EVERY_S)
