"""``settle_heap``: what is there is not looked at again, and full collections are rare."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trioleg.heap import settle_heap

# A program with a heap of some 60 MiB. Whether a system that offers huge pages has any to give is another thing (it
# may be one for all of a machine's containers), so it asks for a page of its own first, and says what it got.
PROGRAM = """
import ctypes, json, mmap, re
from trioleg.heap import settle_heap

def huge_kb():
    found = re.search(r"AnonHugePages: +([0-9]+) kB", open("/proc/self/smaps_rollup").read())
    return int(found[1])

def is_given():
    own = mmap.mmap(-1, 2**23, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, 2**23, 4096):
        own[start] = 1
    at = ctypes.addressof(ctypes.c_char.from_buffer(own))
    first = -(-at // 2**21) * 2**21
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise(first, 2**21, mmap.MADV_HUGEPAGE) == madvise(first, 2**21, 25) == 0

kept = [str(number) for number in range(10**6)]
given, before = is_given(), huge_kb()
settle_heap()
assert kept == [str(number) for number in range(10**6)]
print(json.dumps({"given": given, "before": before, "after": huge_kb()}))
"""
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture
def settled() -> Iterator[None]:
    """What ``settle_heap`` did is undone after the test."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_was_loaded_is_not_looked_at_again(settled: None) -> None:
    thresholds = gc.get_threshold()
    looked_at = len(gc.get_objects())
    settle_heap()
    assert gc.get_freeze_count() > looked_at / 2
    assert len(gc.get_objects()) < looked_at / 10
    assert gc.get_threshold() == (*thresholds[:2], 100)
    # What comes later is.
    later: list[object] = []
    later.append(later)
    del later
    assert gc.collect() >= 1


def test_the_heap_lies_in_huge_pages_where_the_system_gives_some() -> None:
    """In a process of its own; where there are none to be had, nothing changes and nothing fails."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    told = json.loads(done.stdout)
    is_allowed = SWITCH.exists() and "[never]" not in SWITCH.read_text()
    if is_allowed and told["given"]:
        assert told["after"] > 20_000
    else:
        assert told["after"] >= told["before"]


def _without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_bytes(path: Path) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "read_bytes", read_bytes)


def _without_madvise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())


def _refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without huge pages says EINVAL."""

    def madvise(*_: int) -> int:
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))


@pytest.mark.parametrize("system", [_without_proc, _without_madvise, _refused])
def test_a_system_without_huge_pages_fails_nothing(
    settled: None, monkeypatch: pytest.MonkeyPatch, system: Any
) -> None:
    with monkeypatch.context() as patch:
        system(patch)
        settle_heap()
    assert gc.get_freeze_count() > 0


def test_a_mapped_file_may_have_any_name(settled: None, tmp_path: Path) -> None:
    """Its path stands in /proc/self/maps as the system has it, which need not be UTF-8."""
    path = os.fsencode(tmp_path) + b"/caf\xe9"
    with open(path, "wb+") as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            assert b"caf\xe9" in Path("/proc/self/maps").read_bytes()
            settle_heap()
    assert gc.get_freeze_count() > 0
