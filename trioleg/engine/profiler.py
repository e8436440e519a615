"""torch's profiler, started and stopped by name while the engine runs.

Rules of this file: torch, no trio. The profiler belongs to the thread that starts it, which must be the one
that makes the steps. A trace grows with every step; it is written when the profiler is stopped.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import torch

from ..errors import WireError

__all__ = ["Profiler"]

# A prefix becomes a part of a file's name, and comes from the wire.
_PREFIX = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Profiler:
    """Writes traces into ``folder``; None: profiling is refused."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._profile: torch.profiler.profile | None = None

    def start(self, prefix: str | None) -> None:
        """Raises ``WireError`` if it cannot: no folder, a bad prefix, already on."""
        if self._folder is None:
            raise WireError(
                "profiling is off; the engine's option --torch-profiler-dir turns it on"
            )
        if self._profile is not None:
            raise WireError("the profiler is on already; stop it first")
        prefix = "trioleg" if prefix is None else prefix
        if not _PREFIX.fullmatch(prefix) or prefix.startswith("."):
            raise WireError(
                f"profile_prefix is {prefix!r}; allowed: up to 64 letters, digits, '-', '_' and '.', "
                "not beginning with '.'"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"{prefix}-{os.getpid()}-{time.time_ns()}.json.gz"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self) -> Path:
        """Writes the trace and returns its path. Raises ``WireError`` if the profiler is off."""
        if self._profile is None or self._path is None:
            raise WireError("the profiler is off; start it first")
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(str(self._path))
        return self._path

    def close(self) -> None:
        """Turns the profiler off, if it is on; its trace is dropped."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
