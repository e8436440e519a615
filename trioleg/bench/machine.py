"""What a figure was measured on: the machine and the versions, and nothing that names whose it is."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["FRONT_END_PACKAGES", "Machine", "read_machine"]

FRONT_END_PACKAGES = ("trio", "hypercorn", "pyzmq", "msgspec", "tokenizers")


@dataclass(frozen=True, slots=True)
class Machine:
    """``cores``: those that this process may use. ``memory_gb``: of 2**30 bytes."""

    cpu: str
    cores: int
    memory_gb: float
    kernel: str
    python: str
    versions: dict[str, str]

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line, for people."""
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gb:g} GB, {self.kernel}, "
            f"Python {self.python}, {packages}"
        )


def read_machine(
    packages: Iterable[str] = FRONT_END_PACKAGES, elsewhere: Mapping[str, str] | None = None
) -> Machine:
    """This machine. ``packages``: whose versions matter; those that are not installed are left out.
    ``elsewhere``: versions of what runs in another environment."""
    versions = {}
    for name in ("trioleg", *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions=versions | dict(elsewhere or {}),
    )


def _cpu() -> str:
    """The model's name; on machines whose kernel tells none (ARM), the architecture."""
    named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return " ".join(named[1].split()) if named else platform.machine()
