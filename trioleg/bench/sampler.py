"""``trioleg bench hops --profile``: where the front end's microseconds go, by function, in the whole leg.

A statistical profile: now and then in the processor time of the front end's thread (and no other's) the kernel sends
a signal, and the function that is running is noted. So nothing is added to a call, as tracing profilers do, which
makes small functions look dear; what a function spends in C (a system call, an encoder) is its own. The share of the
samples times the thread's processor time is what is shown, so the columns add up to the whole. The interpreter looks
for signals when a function begins, when one in C returns, and in loops: what is between these may be charged to the
next function, so of small ones that call each other only the sum says something.

Linux only, and through ctypes: Python's own ``setitimer`` counts the time of all threads, and would charge the
engine's to whatever the front end is waiting in.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import CodeType, FrameType

from ..runtime.unwrap import unwrapped
from .hop_leg import open_leg
from .hops import TEXT, Hops, load_tokenizer, steps_of, work_of
from .machine import read_machine
from .measurement import about_minutes
from .processes import allow_open_files
from .report import Chart, Report, Series

__all__ = ["run_profile", "sampling"]

_UNIT = "µs a token"
_CHART = Chart("profile", "Processor time by function, front end's thread")
# As often as the kernel can: it looks at its own ticks, of 1 to 4 ms.
_INTERVAL_NS = 1_000_000
# A round has some hundred samples then.
_TIMES_TOKENS = 10
_MAX_STEPS = 5000
# What is behind these is less than the spread.
_FUNCTIONS_SHOWN = 30
_OTHERS = "all other functions"


async def run_profile(model: str, hops: Hops, progress: Callable[[str], None]) -> Report:
    """As ``run_hops``, with ten times the tokens; a row for each function, a column for each batch."""
    hops = replace(hops, tokens=hops.tokens * _TIMES_TOKENS)
    allow_open_files(max(hops.batches), f"--batch is {max(hops.batches)}")
    steps = (steps_of(batch, hops.tokens, most_steps=_MAX_STEPS) for batch in hops.batches)
    progress(about_minutes(hops.rounds * sum(one.seconds for one in steps)))
    tokenizer = load_tokenizer(model)
    # By batch, each round's microseconds a token by function.
    rounds: dict[int, list[dict[str, float]]] = {batch: [] for batch in hops.batches}
    num_samples = 0
    with unwrapped():
        async with open_leg(model, max(hops.batches), tokenizer.encode(TEXT)[0]) as leg:
            for number in range(1, hops.rounds + 1):
                for batch in hops.batches:
                    work = work_of(tokenizer, batch, hops.tokens, most_steps=_MAX_STEPS)
                    samples: Counter[CodeType] = Counter()
                    cpu = await leg.cpu(
                        work.token_ids, work.steps.interval, beside=sampling(samples)
                    )
                    num_samples += samples.total()
                    rounds[batch].append(_shares(samples, cpu.front_end / 1000 / work.num_tokens))
                progress(f"round {number} of {hops.rounds}")
    return Report(
        f"trioleg bench hops --profile: {_UNIT} of processor time",
        asdict(hops),
        read_machine(),
        _series(rounds),
        [f"{num_samples} samples of the front end's thread, in the whole leg."],
    )


def _shares(samples: Counter[CodeType], in_all: float) -> dict[str, float]:
    """``in_all`` by function."""
    by_name: Counter[str] = Counter()
    for code, count in samples.items():
        by_name[_name(code)] += count
    total = samples.total() or 1
    return {name: in_all * count / total for name, count in by_name.items()}


def _series(rounds: dict[int, list[dict[str, float]]]) -> list[Series]:
    """The dearest functions first."""
    sums: Counter[str] = Counter()
    for one in rounds.values():
        for shares in one:
            sums.update(shares)
    shown = [name for name, _ in sums.most_common(_FUNCTIONS_SHOWN)]
    series = [Series(name, _UNIT, chart=_CHART) for name in (*shown, _OTHERS)]
    for batch, one in rounds.items():
        for shares in one:
            others = sum(share for name, share in shares.items() if name not in shown)
            for row in series:
                figure = others if row.what == _OTHERS else shares.get(row.what, 0.0)
                row.note(f"{batch} a step", figure)
    return series


# What a file's path begins with and nobody needs to see; libraries may lie in the project's folder.
_ROOTS = (
    Path(sysconfig.get_path("purelib")),
    Path(os.__file__).parent,
    Path(__file__).parents[2],
)


def _name(code: CodeType) -> str:
    """``server/http1.py: Http1.feed``, or ``trio/_core/_run.py: …`` for a library's."""
    path = Path(code.co_filename)
    root = next((root for root in _ROOTS if path.is_relative_to(root)), None)
    shown = path if root is None else path.relative_to(root)
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.11 has it
    return f"{shown.as_posix()}: {name}"


@contextmanager
def sampling(samples: Counter[CodeType]) -> Iterator[None]:
    """Count the functions in which the main thread, which must be the caller, spends its processor time."""

    def note(_number: int, frame: FrameType | None) -> None:
        if frame is not None:
            samples[frame.f_code] += 1

    before = signal.signal(signal.SIGPROF, note)
    # Trio wakes up for every signal of which it is told.
    wakeup = signal.set_wakeup_fd(-1)
    try:
        with _cpu_timer(signal.SIGPROF, _INTERVAL_NS):
            yield
    finally:
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGPROF, before)


class _SigEvent(ctypes.Structure):
    """struct sigevent; SIGEV_SIGNAL is 0."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    )


class _ITimerSpec(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")
    )


@contextmanager
def _cpu_timer(number: signal.Signals, every_ns: int) -> Iterator[None]:
    """Signal ``number`` after so much processor time of the calling thread, again and again: timer_create(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    event = _SigEvent(signo=number)
    _check(
        libc.timer_create(time.CLOCK_THREAD_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer))
    )
    try:
        spec = _ITimerSpec(every_ns=every_ns, first_ns=every_ns)
        _check(libc.timer_settime(timer, 0, ctypes.byref(spec), None))
        yield
    finally:
        libc.timer_delete(timer)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
