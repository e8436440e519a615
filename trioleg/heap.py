"""The memory of a program that serves streams: what its garbage collector and its page tables cost.

A full collection looks at every object, with the whole process standing still: at 1,000 open streams 150 to 300 ms,
where a token's whole way takes less than one. Reference counts free nearly everything here, so it is rarely worth
that. vLLM freezes its heap for the same reason.

Between two steps of the engine a server sleeps, and wakes with cold caches: then a token costs what it takes to find
its objects again. In pages of 2 MiB there is less to look for, above all in a virtual machine, where every address is
looked up in two sets of page tables: 16 streams at 50 steps a second took 70 to 116 µs a token in pages of 4 KiB, and
mostly 47 to 58 in these, for no more memory, since they replace what is in use.

Both are the process's, not ours: so this is for programs (``trioleg serve``, ``trioleg engine``), never for a library.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["settle_heap"]

# A full collection comes after so many middle ones, each of which comes after ten small ones, of 700 objects more.
# Python's 10 are reached by 300 new streams. With 100 it is 700,000 objects, 70 MB at the very most, if every
# one of them were garbage in circles.
_MIDDLE_PER_FULL = 100

_HUGE_PAGE = 2**21
# Linux 6.1: move what is there into huge pages now. Before that the kernel does it when it comes to it.
_MADV_COLLAPSE = 25
# Private, writable, and of no file: Python's arenas, and malloc's.
_HEAP = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 +(?:\[heap\])?$", re.MULTILINE)


def settle_heap() -> None:
    """What there is now (modules, the model's tokenizer) is there to stay and is not looked at again; full
    collections become rare, and the pages big where the system has such. For the moment between loading and
    serving; takes 0.1 to 0.3 s."""
    gc.collect()
    gc.freeze()
    small, middle, _ = gc.get_threshold()
    gc.set_threshold(small, middle, _MIDDLE_PER_FULL)
    with suppress(OSError, AttributeError):  # without /proc, or a libc's madvise: it is only slower
        _use_huge_pages()


def _use_huge_pages() -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in _heap():
        for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(start, end - start, advice)  # refused by a system that is not to have them


def _heap() -> Iterator[tuple[int, int]]:
    """The stretches of the heap that huge pages fit into."""
    for start, end in _HEAP.findall(Path("/proc/self/maps").read_bytes()):
        first, last = -(-int(start, 16) // _HUGE_PAGE), int(end, 16) // _HUGE_PAGE
        if first < last:
            yield first * _HUGE_PAGE, last * _HUGE_PAGE
