"""Batch use: many prompts through a model in this process, without an event loop.

``generate`` is the front door, ``open_engine`` the same for several calls with one loaded model.

Rules of this file: synchronous, no Trio, and torch only once an engine is loaded. It joins the two ends of
the return leg directly: the engine's core makes a step, the output processor takes it in, and what is
finished comes back in the processor's list, since no request here has a sink.

The plan: ``as_completed`` keeps as many requests in the engine as it runs at once and takes the next
from the caller's iterable when one has ended, between two steps, so a batch never waits for input
and a million prompts are never in memory. ``generate`` puts its results into the order of the prompts.

A request that fails ends no other: its result stands in its place, with ``error`` set and no outputs.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from . import model_store
from .config import EngineConfig, LLMConfig
from .errors import EngineDeadError, InvalidRequestError, RequestEnded, TriolegError
from .messages import EngineCoreOutputs
from .output.processor import OutputProcessor
from .output.request_state import RequestState
from .output.submission import default_sampling_params, make_submission
from .outputs import RequestOutput
from .prompts import Prompt, read_prompt
from .sampling_params import RequestOutputKind, SamplingParams
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .engine.interface import Core

__all__ = ["OfflineEngine", "Progress", "generate", "open_engine"]

_Key = TypeVar("_Key")

# One for all prompts, or one for each.
ParamsOfAll: TypeAlias = SamplingParams | Iterable[SamplingParams | None] | None

# Called with the number of results so far, and of all if that is known.
Progress: TypeAlias = Callable[[int, int | None], None]

# Results that wait for an earlier prompt's, for each request that runs at once. A result is a few
# kilobytes; an answer 16 times as long as the others around it does not leave the batch half empty.
_LOOK_AHEAD = 16


def generate(
    model: str | Path,
    prompts: Iterable[Prompt],
    params: ParamsOfAll = None,
    *,
    config: LLMConfig | None = None,
    progress: Progress | None = None,
) -> Generator[RequestOutput]:
    """The answers to ``prompts``, in their order, each as soon as it and those before it are there.

    ``model``: what ``model_store.resolve`` finds: a model or GGUF file that was pulled, or a directory. For the
    rest, and what a failed request looks like, see ``OfflineEngine.generate``.

    The model is loaded at the first ``next`` and let go of after the last result. Who leaves earlier
    calls the iterator's ``close`` (``contextlib.closing`` does), which aborts what still runs.

    Raises at once ``ModelStoreError`` and ``InvalidRequestError``; while it loads ``ModelStoreError``,
    and ``TriolegError`` where torch is not installed.
    """
    directory = model_store.resolve(str(model))
    requests = _requests(prompts, params)
    total = _length(prompts)

    def results() -> Generator[RequestOutput]:
        with open_engine(directory, config) as engine:
            yield from engine._in_order(requests, progress, total)

    return results()


@contextmanager
def open_engine(model: str | Path, config: LLMConfig | None = None) -> Iterator[OfflineEngine]:
    """Load ``model`` and yield an ``OfflineEngine``. Leaving the block frees the model and its cache.

    Raises ``ModelStoreError`` for a model that is not there or cannot be read, ``InvalidRequestError``
    for a setting that model or machine does not allow, ``TriolegError`` where torch is not installed.
    """
    config = config or LLMConfig()
    directory = model_store.resolve(str(model))
    tokenizer = Tokenizer.from_directory(directory)
    engine = OfflineEngine(_load_core(directory, config.engine), tokenizer, config)
    with closing(engine):
        yield engine


def _load_core(directory: Path, config: EngineConfig) -> Core:
    try:
        from .engine.core import EngineCore
    except ModuleNotFoundError as error:
        raise TriolegError(
            f"our engine needs {error.name}: pip install 'trioleg[engine]'"
        ) from error
    return EngineCore.load(directory, config)


class OfflineEngine:
    """An engine's core and an output processor, stepped by whoever wants results. For one thread.

    Made by ``open_engine``, which also closes it. Several iterators may be in use at once: each step
    advances the requests of all of them.
    """

    def __init__(self, core: Core, tokenizer: Tokenizer, config: LLMConfig) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = core.ready.max_model_len
        self._max_num_seqs = core.ready.max_num_seqs
        self._config = config
        self._core: Core | None = core
        self._why_gone = ""
        self._processor = OutputProcessor()
        self._id_prefix = f"{secrets.token_hex(6)}-"
        self._numbers = itertools.count()
        self._live: dict[str, RequestState] = {}
        # Finished or refused, and not yet fetched by the iterator that asked.
        self._finished: dict[str, RequestOutput] = {}

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that the engine has."""
        return len(self._live)

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: ParamsOfAll = None,
        *,
        progress: Progress | None = None,
    ) -> Generator[RequestOutput]:
        """The answers to ``prompts``, in their order, each as soon as it and those before it are there.

        ``prompts``: any iterable, read as far ahead as the batch needs; each a text, token ids or chat
        messages. ``params``: one for all, or an iterable with one for each; None: the model's defaults.
        ``output_kind`` has no effect: results are final. ``progress`` is called after each answer.

        A request that cannot be served (a bad prompt, one that is too long), or that the engine reports
        an error for, ends no other. Its result has no ``outputs``; ``error`` says why, and
        ``error.partial``, if the engine had begun, holds what had been generated.

        Raises at once ``InvalidRequestError``: one prompt in place of several, or not as many ``params``
        as prompts where both have a length (else it is raised where the shorter one ends). Raises
        ``EngineDeadError`` if the engine fails as a whole or its block has been left. Closing the iterator
        aborts what it still has in the engine; so does any exception that leaves it.
        """
        return self._in_order(_requests(prompts, params), progress, _length(prompts))

    def as_completed(
        self, requests: Iterable[tuple[_Key, Prompt, SamplingParams | None]]
    ) -> Generator[tuple[_Key, RequestOutput]]:
        """The answers as they are finished, each with the key that came with its prompt.

        In all else as ``generate``. No answer waits for another, and at most ``max_num_seqs`` requests
        have been taken from the iterable whose answers have not been given out.
        """
        return self._run(requests, lambda: self._max_num_seqs)

    def default_sampling_params(self, **asked: Any) -> SamplingParams:
        """The model's own defaults, overridden by what is asked for. Raises ``InvalidRequestError``."""
        return default_sampling_params(self.tokenizer, **asked)

    def close(self) -> None:
        """Free the model and its cache; every later use raises ``EngineDeadError``. Idempotent."""
        self._let_go("its block has been left")

    # ------------------------------------------------------------------ the two loops

    def _in_order(
        self,
        requests: Iterable[tuple[int, Prompt, SamplingParams | None]],
        progress: Progress | None,
        total: int | None,
    ) -> Generator[RequestOutput]:
        ready: dict[int, RequestOutput] = {}
        bound = _LOOK_AHEAD * self._max_num_seqs
        first = 0
        with closing(self._run(requests, lambda: bound - len(ready))) as completed:
            for done, (number, output) in enumerate(completed, 1):
                if progress is not None:
                    progress(done, total)
                ready[number] = output
                while first in ready:
                    yield ready.pop(first)
                    first += 1

    def _run(
        self,
        requests: Iterable[tuple[_Key, Prompt, SamplingParams | None]],
        room: Callable[[], int],
    ) -> Generator[tuple[_Key, RequestOutput]]:
        """``room()``: how many more requests the caller would take results of."""
        source = iter(requests)
        keys: dict[str, _Key] = {}
        try:
            while True:
                # As many as the engine runs at once: it is filled up again before every step.
                count = min(self._max_num_seqs - len(keys), room())
                for key, prompt, params in itertools.islice(source, max(count, 0)):
                    keys[self._add(prompt, params)] = key
                if not keys:
                    return
                for request_id in [one for one in keys if one in self._finished]:
                    yield keys.pop(request_id), self._finished.pop(request_id)
                if keys:
                    self._step()
        finally:
            self._abort(keys)

    # ------------------------------------------------------------------ the engine

    def _add(self, prompt: Prompt, params: SamplingParams | None) -> str:
        """Send one request; one that cannot be sent is finished at once. Returns its id."""
        request_id = f"{self._id_prefix}{next(self._numbers)}"
        ids: list[int] = []
        try:
            ids = read_prompt(prompt, self.tokenizer, self.max_model_len)
            checked = _checked(params) or self.default_sampling_params()
            self._send(request_id, ids, checked)
        except InvalidRequestError as error:
            self._finished[request_id] = _failed(request_id, ids, error)
        return request_id

    def _send(self, request_id: str, ids: list[int], params: SamplingParams) -> None:
        core = self._engine()
        submission = make_submission(
            request_id,
            ids,
            params.with_output_kind(RequestOutputKind.FINAL_ONLY),
            self.tokenizer,
            max_model_len=self.max_model_len,
            max_logprobs=self._config.engine.max_logprobs,
            detokenizer=self._config.detokenizer,
            arrival=time.monotonic(),
        )
        assert isinstance(submission.state, RequestState)
        self._processor.add_request(submission.state)
        self._live[request_id] = submission.state
        try:
            for request in submission.engine_requests:
                core.add_request(request)
        except InvalidRequestError:
            self._abort([request_id])
            raise

    def _step(self) -> None:
        """One step of the engine; what it finished is in ``_finished`` then."""
        core = self._engine()
        try:
            for message in core.step().values():
                self._take(core, message)
        # A step that was not finished leaves an engine that cannot go on.
        except Exception as error:
            self._let_go(f"a step failed: {error!r}")
            raise EngineDeadError(self._why_gone) from error
        except BaseException:
            self._let_go("a step was interrupted")
            raise

    def _take(self, core: Core, message: EngineCoreOutputs) -> None:
        processed = self._processor.process(
            message.outputs, timestamp=message.timestamp, now=time.monotonic()
        )
        core.abort_requests(processed.aborts)
        for output in processed.request_outputs:
            assert isinstance(output, RequestOutput)
            self._finished[output.request_id] = output
        for request_id, ending in processed.endings:
            state = self._live.pop(request_id)
            error = ending.error()
            if error is not None:
                error.partial = state.release()
                core.abort_requests(self._processor.end_request(request_id))
                self._finished[request_id] = _failed(request_id, state.prompt_token_ids, error)

    def _abort(self, request_ids: Iterable[str]) -> None:
        """Nobody wants these any more. Also after the engine is gone."""
        for request_id in request_ids:
            self._finished.pop(request_id, None)
            if self._live.pop(request_id, None) is not None and self._core is not None:
                self._core.abort_requests(self._processor.end_request(request_id))

    def _engine(self) -> Core:
        if self._core is None:
            raise EngineDeadError(f"the engine is gone: {self._why_gone}")
        return self._core

    def _let_go(self, why: str) -> None:
        core, self._core = self._core, None
        if core is not None:
            self._why_gone = why
            self._live.clear()
            core.close()


def _failed(
    request_id: str, prompt_token_ids: list[int], error: InvalidRequestError | RequestEnded
) -> RequestOutput:
    return RequestOutput(request_id, prompt_token_ids, [], finished=True, error=error)


def _checked(params: object) -> SamplingParams | None:
    if params is None or isinstance(params, SamplingParams):
        return params
    raise InvalidRequestError(
        f"params is {params!r}; allowed: SamplingParams or None", parameter="params"
    )


def _requests(
    prompts: Iterable[Prompt], params: ParamsOfAll
) -> Iterator[tuple[int, Prompt, SamplingParams | None]]:
    """Prompts with their numbers and parameters; raises what can be told before the first is read."""
    is_one = isinstance(prompts, str | bytes | Mapping) or (
        isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int | Mapping)
    )
    if is_one or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts is {prompts!r}; allowed: an iterable of prompts (for one, a list of one)",
            parameter="prompts",
        )
    if params is None or isinstance(params, SamplingParams):
        return ((number, prompt, params) for number, prompt in enumerate(prompts))
    if isinstance(params, str | bytes) or not isinstance(params, Iterable):
        raise InvalidRequestError(
            f"params is {params!r}; allowed: SamplingParams, an iterable of them, or None",
            parameter="params",
        )
    count, wanted = _length(params), _length(prompts)
    if count is not None and wanted is not None and count != wanted:
        raise _different_numbers(f"params has {count} entries, prompts {wanted}")
    return _paired(prompts, params)


def _paired(
    prompts: Iterable[Prompt], params: Iterable[SamplingParams | None]
) -> Iterator[tuple[int, Prompt, SamplingParams | None]]:
    # A sentinel, not ``strict``, whose ValueError could also be one of the caller's iterables' own.
    missing: Any = object()
    pairs = itertools.zip_longest(prompts, params, fillvalue=missing)
    for number, (prompt, one) in enumerate(pairs):
        if prompt is missing or one is missing:
            shorter = "prompts" if prompt is missing else "params"
            raise _different_numbers(f"{shorter} ended after {number} entries")
        yield number, prompt, one


def _different_numbers(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what}; allowed: SamplingParams for all prompts, or one for each", parameter="params"
    )


def _length(iterable: object) -> int | None:
    return len(iterable) if isinstance(iterable, Sized) else None
