"""The engines under test, ours and vLLM's, set up as alike as their settings make them.

Rules of this file: an engine is a program of its own that is started, and ended, as ``trioleg serve`` does it; what is
known of it comes over the wire and from /proc. Both have the same model, number format, bounds, threads and room for
keys and values, and else their own defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from ..config import EngineConfig, LLMConfig, VLLMConfig
from ..errors import TriolegError
from ..runtime.engines import Engine, start_engine, start_vllm_engine
from ..runtime.unwrap import unwrapped
from .engine_head import EngineHead
from .processes import descendants, until
from .report import OURS

__all__ = ["VLLM", "EngineBench", "Subject", "machine_cpu_seconds", "open_subjects", "opened"]

VLLM = "vllm"

# vLLM's default for a server. Ours is half of it.
_BATCHED_TOKENS = 2048
_OUR_BLOCK, _VLLM_BLOCK = 16, 128
# Steps: requests come one after the other, and an engine begins with what is there. On a machine with much else to do
# the second one of two has been six steps behind.
_HEAD_START = 64
# vLLM compiles for two minutes when it meets a model for the first time.
_START_S = 600.0
# One measurement: 48,000 tokens of prompts, at some hundred a second, and the answers.
_PATIENCE_S = 600.0
# vLLM's processes look for work for a second before they sleep.
_QUIET_S = 30.0
# By share of one processor; a tick of its clock is a twentieth of a look.
_QUIET_SHARE, _QUIET_LOOK_S = 0.15, 0.2

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBench:
    """What is asked for. Every number of ``streams`` is measured at each of ``contexts`` (tokens of each prompt), for
    ``steps`` tokens a stream, ``runs`` times. ``vllm_python``: an interpreter whose environment has vLLM; None: ours
    alone. ``enforce_eager``: vLLM does not compile. ``threads`` of each engine.
    """

    streams: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1500)
    steps: int = 32
    runs: int = 3
    dtype: str = "float32"
    threads: int = 1
    prompt_tokens: int = 512
    prompts: int = 8
    vllm_python: Path | None = None
    enforce_eager: bool = False

    @property
    def max_num_seqs(self) -> int:
        return max(*self.streams, self.prompts)

    @property
    def max_model_len(self) -> int:
        """So that the first stream of many is not at its end before the last has begun and been measured."""
        reading = max(self.streams) * max(self.contexts) // _BATCHED_TOKENS
        return max(*self.contexts, self.prompt_tokens) + self.steps + reading + _HEAD_START

    @property
    def cache_tokens(self) -> int:
        """Room for all streams at their longest, and for the prompts of a run beside them: those of the streams are
        still there in the next run."""
        return self.max_num_seqs * self.max_model_len + 2 * self.prompts * self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine that is ready. ``pids``: its processes, without what only starts it."""

    name: str
    engine: Engine
    head: EngineHead
    pids: list[int]

    async def measure(self, ask: Callable[[EngineHead], Awaitable[T]]) -> T:
        """What ``ask`` returns. Raises ``TriolegError`` if the engine ends, or takes too long."""
        answer: list[T] = []
        assert self.engine.watch is not None
        with trio.move_on_after(_PATIENCE_S), unwrapped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_at_end, nursery.cancel_scope)
                answer.append(await ask(self.head))
                nursery.cancel_scope.cancel(reason="it has been measured")
        if not answer:
            why = self.engine.watch.death or f"it took more than {_PATIENCE_S:g} s"
            raise TriolegError(f"the engine of {self.name} gave no figure: {why}")
        return answer[0]

    async def _cancel_at_end(self, scope: trio.CancelScope) -> None:
        assert self.engine.watch is not None
        await self.engine.watch.wait()
        scope.cancel(reason="the engine has ended")

    def cpu_seconds(self) -> float:
        """Of processor, user and system, that its processes have used."""
        return sum(map(_cpu_seconds, self.pids))

    def peak_mb(self) -> float:
        """The most that its processes have held, in 2**20 bytes; what they share counts once."""
        return sum(map(_peak_kb, self.pids)) / 1024

    async def quiet_down(self) -> None:
        """Wait until it leaves the processor to others. Raises ``TriolegError`` if it does not."""
        used = self.cpu_seconds()

        async def is_quiet() -> bool:
            nonlocal used
            await trio.lowlevel.checkpoint()
            before, used = used, self.cpu_seconds()
            return used - before < _QUIET_SHARE * _QUIET_LOOK_S

        await trio.sleep(_QUIET_LOOK_S)
        if not await until(is_quiet, _QUIET_S, every=_QUIET_LOOK_S):
            raise TriolegError(
                f"the engine of {self.name} has nothing to do, and goes on using the processor"
            )


def machine_cpu_seconds() -> float:
    """Of all processors, user and system, that have been used since the machine's start."""
    first_line = Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, _idle, _waiting, irq, softirq = map(int, first_line.split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_kb(pid: int) -> int:
    """The high-water mark, less what others have mapped as well."""
    (peak,) = _kilobytes(pid, "status", "VmHWM")
    resident, share = _kilobytes(pid, "smaps_rollup", "Rss", "Pss")
    return peak - (resident - share)


def _kilobytes(pid: int, file: str, *names: str) -> list[int]:
    text = Path(f"/proc/{pid}/{file}").read_text()
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    return [int(found[name]) for name in names]


@asynccontextmanager
async def open_subjects(directory: Path, asked: EngineBench) -> AsyncIterator[list[Subject]]:
    """Start the engines, one after the other; leaving the block ends them. Raises ``EngineStartError``."""
    starts = [opened(OURS, _start_ours(directory, asked))]
    if asked.vllm_python is not None:
        starts.append(opened(VLLM, _start_vllm(directory, asked, asked.vllm_python), launchers=1))
    async with AsyncExitStack() as stack:
        with _inherited(_environment(asked.threads)):
            subjects = [await stack.enter_async_context(start) for start in starts]
        yield subjects


@asynccontextmanager
async def opened(
    name: str, starting: AbstractAsyncContextManager[Engine], launchers: int = 0
) -> AsyncIterator[Subject]:
    """The engine of ``starting``, which nothing else is started beside. ``launchers``: processes that only start it."""
    before = descendants(os.getpid())
    async with starting as engine:
        family = [pid for pid in descendants(os.getpid()) if pid not in before]
        # The guardian is ours, whoever's the engine; a launcher is the process that a front end would be in.
        yield Subject(name, engine, EngineHead(engine), family[1 + launchers :])


def _environment(threads: int) -> dict[str, str]:
    """By which each engine learns of its threads: ours as any program with OpenMP, vLLM's by processors. (Left alone,
    vLLM keeps a processor free for its scheduler: one of two.)"""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        # GiB. Without it vLLM wants most of the machine's memory; how much it takes is said by its blocks.
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


@contextmanager
def _inherited(variables: dict[str, str]) -> Iterator[None]:
    """For what is started within. Whoever has set one of them for vLLM has a reason."""
    before = dict(os.environ)
    os.environ.update({name: before.get(name, value) for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start_ours(directory: Path, asked: EngineBench) -> AbstractAsyncContextManager[Engine]:
    engine = EngineConfig(
        dtype=asked.dtype,
        device="cpu",
        max_model_len=asked.max_model_len,
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=_BATCHED_TOKENS,
        num_gpu_blocks_override=-(-asked.cache_tokens // _OUR_BLOCK),
    )
    return start_engine(directory, LLMConfig(engine=engine, start_timeout=_START_S))


def _start_vllm(
    directory: Path, asked: EngineBench, python: Path
) -> AbstractAsyncContextManager[Engine]:
    blocks = -(-asked.cache_tokens // _VLLM_BLOCK) + asked.max_num_seqs
    arguments = [
        f"--dtype={asked.dtype}",
        f"--max-model-len={asked.max_model_len}",
        f"--max-num-seqs={asked.max_num_seqs}",
        f"--max-num-batched-tokens={_BATCHED_TOKENS}",
        f"--num-gpu-blocks-override={blocks}",
        *(["--enforce-eager"] if asked.enforce_eager else []),
    ]
    vllm = VLLMConfig(python=python, arguments=arguments)
    return start_vllm_engine(directory, LLMConfig(vllm=vllm, start_timeout=_START_S))
