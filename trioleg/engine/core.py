"""The engine: ``step()`` is the architecture. Schedule, run, sample, hand on.

Rules of this file: synchronous and single-threaded, no trio, no zmq: the process shell calls it from one
worker thread. ``add_request``, ``abort_requests``, ``abort_client``, ``finish_all`` and ``call_utility``
come between steps. A fault that belongs to one request ends that request with an output of its own
(finish_reason ERROR, the sentence in stop_reason); a fault of the model itself leaves ``step`` as it is.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from ..config import EngineConfig
from ..errors import InvalidRequestError
from ..messages import (
    WIRE_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReadyResponse,
    FinishReason,
    PrefillStats,
    SchedulerStats,
    refusal_reason,
)
from .kv_cache import BlockPool
from .loading_log import LoadingLog
from .logprob_rows import LogprobRows
from .model import CausalLM
from .model_config import read_model_config
from .profiler import Profiler
from .request import Request, Stop
from .runner import ModelRunner, Sampled
from .sampler import NoToken
from .scheduler import Schedule, Scheduler
from .sizing import DTYPES, count_blocks, find_device, find_max_model_len
from .sleeper import Sleeper
from .structured_output import GrammarCompiler
from .utilities import Utilities
from .validation import Limits, check_request
from .weights import load_weights

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)

# How long a step waits for a grammar when there is nothing else to do: what comes in meanwhile waits as well.
_COMPILE_WAIT_S = 0.005


class EngineCore:
    """A model that serves many requests at once. Made by ``load``; ``close`` gives its memory back.

    ``ready`` is what it tells every front end at the start. ``config`` holds what is not given by itself;
    ``load_model`` makes the model anew, after a sleep that has dropped it.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int,
        config: EngineConfig,
        engine_index: int = 0,
        load_model: Callable[[], CausalLM] | None = None,
        model_dir: Path | None = None,
    ) -> None:
        pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            by_priority=config.scheduling_policy == "priority",
            prefix_caching=config.enable_prefix_caching,
        )
        self._runner = ModelRunner(model, num_blocks=num_blocks, block_size=pool.block_size)
        cache_tokens = num_blocks * pool.block_size
        self._limits = Limits(
            model.config.vocab_size,
            model.max_model_len,
            cache_tokens,
            max_logprobs=config.max_logprobs,
            takes_priority=config.scheduling_policy == "priority",
        )
        self._profiler = Profiler(config.torch_profiler_dir)
        self._sleeper = Sleeper(self.scheduler, self._runner, load_model)
        self._compiler = GrammarCompiler(model_dir, model.config.vocab_size)
        self._engine_index = engine_index
        self._step_counter = 0
        # What the next step hands on, by client, and the client that gets the figures if none has outputs.
        self._outputs: dict[int, list[EngineCoreOutput]] = {}
        self._stats_due = False
        self._last_client = 0
        self.ready = EngineReadyResponse(
            max_model_len=model.max_model_len,
            num_gpu_blocks=num_blocks,
            block_size=pool.block_size,
            dtype=str(model.dtype).removeprefix("torch."),
            vllm_version=WIRE_VERSION,
            validates_requests=True,
            supports_lora=False,
            data_parallel_rank=engine_index,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            instance_id=f"trioleg-{uuid.uuid4().hex}",
            kv_cache_size_tokens=cache_tokens,
            kv_cache_max_concurrency=cache_tokens / model.max_model_len,
            enable_sleep_mode=True,
            effective_attention_block_size=pool.block_size,
        )
        self._utilities = Utilities(
            self.scheduler,
            self._sleeper,
            self._profiler,
            live_requests=self.live_requests,
            finish_all=self.finish_all,
        )

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig, *, engine_index: int = 0) -> Self:
        """Reads a model directory and sizes the key/value cache by the memory that is left.

        ``max_model_len`` None: the model's own context, or what the cache holds if that is less. Raises
        ``ModelStoreError`` for a model that cannot be read or computed, ``InvalidRequestError`` for a
        setting that this model or machine does not allow.
        """
        device = find_device(config.device)
        model_config = read_model_config(model_dir)
        dtype = DTYPES[config.dtype]
        weights = load_weights(
            model_dir, model_config, dtype=dtype, device=device, report=LoadingLog(model_dir.name)
        )
        num_blocks = count_blocks(config, model_config, weights.embed_tokens.dtype, device)
        max_model_len = find_max_model_len(config, model_config, num_blocks)

        def load_model() -> CausalLM:
            anew = load_weights(model_dir, model_config, dtype=dtype, device=device)
            return CausalLM(model_config, anew, max_model_len=max_model_len)

        return cls(
            CausalLM(model_config, weights, max_model_len=max_model_len),
            num_blocks=num_blocks,
            config=config,
            engine_index=engine_index,
            load_model=load_model,
            model_dir=model_dir,
        )

    def add_request(self, wire: EngineCoreRequest) -> None:
        """Queues a request. Never raises: one that cannot be served gets its ERROR with the next step.

        A second request with a live id is logged and dropped: its id belongs to the first.
        """
        queues = (self.scheduler.requests, self._compiler.requests)
        if any(wire.request_id in one for one in queues):
            logger.error(
                "request %s: the id is live already; the second is dropped", wire.request_id
            )
            return
        try:
            check_request(wire, self._limits)
            request = Request.from_wire(wire, vocab_size=self._limits.vocab_size)
        except InvalidRequestError as error:
            self._put(wire.client_index, _error(wire.request_id, _reason(error)))
        except Exception as error:
            logger.exception("request %s: cannot be taken", wire.request_id)
            self._put(wire.client_index, _error(wire.request_id, f"cannot be taken: {error!r}"))
        else:
            self._last_client = request.client_index
            # A request with a grammar is queued when that is compiled.
            held = request.params.structured_outputs is not None
            (self._compiler if held else self.scheduler).add(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forgets requests. No output follows, their blocks are free at once, unknown ids are fine."""
        # The next step makes a message even if nothing is left to run, so that a head sees the blocks return.
        was_held = self._compiler.remove(request_ids)
        if self.scheduler.remove(request_ids) or was_held:
            self._stats_due = True
        gone = set(request_ids)
        for client, outputs in list(self._outputs.items()):
            self._outputs[client] = [one for one in outputs if one.request_id not in gone]
            if not self._outputs[client]:
                del self._outputs[client]

    def abort_client(self, client_index: int) -> None:
        """Forgets all requests of one front end, and what was about to be sent to it."""
        self._outputs.pop(client_index, None)
        requests = self.live_requests().values()
        self.abort_requests([r.request_id for r in requests if r.client_index == client_index])

    def finish_all(self, stop_reason: str | None = None) -> None:
        """Ends every request: the next step hands on one output each, finish_reason ABORT, no tokens."""
        for request in self.live_requests().values():
            self._report(request, [], Stop(FinishReason.ABORT, stop_reason))
        self._compiler.remove(list(self._compiler.requests))

    def live_requests(self) -> dict[str, Request]:
        """Every request by its id, those that wait for their grammars included."""
        return self.scheduler.requests | self._compiler.requests

    def call_utility(self, method: str, args: Sequence[Any]) -> Any:
        """One of the methods of ``Utilities``, by name. Raises ``WireError``, or what loading raises."""
        return self._utilities.call(method, args)

    def wait_s(self) -> float | None:
        """Seconds until ``step`` has something to do: 0.0, or None for nothing until a call comes."""
        return 0.0 if self._compiler.requests or not self._is_idle else None

    @property
    def _is_idle(self) -> bool:
        """True if a step would neither compute nor say anything."""
        if self._outputs or self._stats_due:
            return False
        return not (self._sleeper.moves and self.scheduler.has_work)

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Computes the next tokens. Returns a message for each client that has outputs, by client_index.

        One message carries the engine's figures; a step without outputs makes one that has nothing else.
        """
        self._queue_compiled()
        schedule = self.scheduler.schedule() if self._sleeper.moves else Schedule([], [], [])
        sampled = self._runner.run(schedule)
        for chunk in schedule.chunks:
            chunk.request.num_computed_tokens = chunk.end
        for request in schedule.stuck:
            self._fail(request, f"the key/value cache is full: {self._limits.cache_tokens} tokens")
        for one in sampled:
            self._advance(one)
        self._utilities.after_step()
        return self._hand_on(worked=bool(schedule.chunks or schedule.stuck))

    def close(self) -> None:
        """Gives model and cache back. The engine is of no use afterwards."""
        self.scheduler.remove(list(self.scheduler.requests))
        self._profiler.close()
        self._compiler.close()
        del self._runner

    def _queue_compiled(self) -> None:
        wait_s = _COMPILE_WAIT_S if self._is_idle else 0.0
        for request, error in self._compiler.take_done(wait_s=wait_s):
            if error is None:
                self.scheduler.add(request)
            elif isinstance(error, InvalidRequestError):
                self._refuse(request, error)
            else:
                self._fail(request, f"its grammar cannot be compiled: {error}")

    def _advance(self, sampled: Sampled) -> None:
        request, token_id = sampled.request, sampled.token_id
        try:
            if token_id is NoToken.NOT_FINITE:
                self._fail(request, "no token can be sampled: the logits hold NaN or infinity")
            elif token_id is NoToken.ALL_FORBIDDEN:
                self._refuse(request, request.refusal_of_all_tokens())
            else:
                stop = request.append(token_id, max_model_len=self._limits.max_model_len)
                self._report(request, [token_id], stop, sampled.logprobs)
        except InvalidRequestError as error:
            self._refuse(request, error)
        except Exception as error:
            logger.exception("request %s: its step failed", request.request_id)
            self._fail(request, f"its step failed: {error!r}")

    def _refuse(self, request: Request, error: InvalidRequestError) -> None:
        """Ends a request by its own fault."""
        self._fail(request, _reason(error))

    def _fail(self, request: Request, sentence: str) -> None:
        self._report(request, [], Stop(FinishReason.ERROR, sentence))

    def _report(
        self,
        request: Request,
        token_ids: list[int],
        stop: Stop | None,
        logprobs: LogprobRows | None = None,
    ) -> None:
        """Notes an output for the next message. A stopped request leaves, and its blocks are free."""
        if stop is not None:
            self.scheduler.remove([request.request_id])
        first = bool(token_ids) and request.num_output_tokens == 1
        output = EngineCoreOutput(
            request.request_id,
            token_ids,
            new_logprobs=None if logprobs is None else logprobs.lists(),
            new_prompt_logprobs_tensors=request.take_prompt_logprobs() if first else None,
            finish_reason=None if stop is None else stop.reason,
            stop_reason=None if stop is None else stop.stop_reason,
            events=request.take_events(),
            prefill_stats=_prefill_stats(request) if first else None,
        )
        self._put(request.client_index, output)

    def _put(self, client_index: int, output: EngineCoreOutput) -> None:
        self._outputs.setdefault(client_index, []).append(output)

    def _hand_on(self, *, worked: bool) -> dict[int, EngineCoreOutputs]:
        if not (worked or self._outputs or self._stats_due):
            return {}
        self._step_counter += 1
        outputs, self._outputs, self._stats_due = self._outputs, {}, False
        stats_client = next(iter(outputs), self._last_client)
        return {
            client: EngineCoreOutputs(
                engine_index=self._engine_index,
                outputs=outputs.get(client, []),
                scheduler_stats=self._stats() if client == stats_client else None,
                timestamp=time.monotonic(),
            )
            for client in outputs or (stats_client,)
        }

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running_reqs=len(self.scheduler.running),
            num_waiting_reqs=len(self.scheduler.waiting) + len(self._compiler.requests),
            step_counter=self._step_counter,
            kv_cache_usage=self.scheduler.pool.usage,
            prefix_cache_stats=self.scheduler.take_prefix_stats(),
        )


def _reason(error: InvalidRequestError) -> str:
    return refusal_reason(error.parameter, str(error))


def _error(request_id: str, sentence: str) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=sentence)


def _prefill_stats(request: Request) -> PrefillStats:
    cached = request.num_cached_tokens or 0
    return PrefillStats(
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_prompt_tokens - cached,
        num_cached_tokens=cached,
        num_local_cached_tokens=cached,
    )
