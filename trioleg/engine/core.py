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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from ..config import EngineConfig
from ..errors import InvalidRequestError, WireError
from ..messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReadyResponse,
    FinishReason,
    PrefillStats,
    SchedulerStats,
)
from .kv_cache import BlockPool
from .logprob_rows import LogprobRows
from .model import LlamaModel
from .model_config import read_model_config
from .request import Request, Stop
from .runner import ModelRunner, Sampled
from .scheduler import Scheduler
from .sizing import DTYPES, count_blocks, find_device, find_max_model_len
from .validation import Limits, check_request
from .weights import load_weights

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)

# The ready response names a version so that a head knows the wire's positions: this is the wire we speak.
_WIRE_VERSION = "0.32.0"


class EngineCore:
    """A model that serves many requests at once. Made by ``load``; ``close`` gives its memory back.

    ``ready`` is what it tells every front end at the start.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        engine_index: int = 0,
    ) -> None:
        pool = BlockPool(num_blocks)
        self._scheduler = Scheduler(
            pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._runner = ModelRunner(model, num_blocks=num_blocks, block_size=pool.block_size)
        cache_tokens = num_blocks * pool.block_size
        self._limits = Limits(model.config.vocab_size, model.max_model_len, cache_tokens)
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
            vllm_version=_WIRE_VERSION,
            data_parallel_rank=engine_index,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            instance_id=f"trioleg-{uuid.uuid4().hex}",
            kv_cache_size_tokens=cache_tokens,
            kv_cache_max_concurrency=cache_tokens / model.max_model_len,
            effective_attention_block_size=pool.block_size,
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
        weights = load_weights(model_dir, model_config, dtype=dtype, device=device)
        num_blocks = count_blocks(config, model_config, weights.embed_tokens.dtype, device)
        max_model_len = find_max_model_len(config, model_config, num_blocks)
        return cls(
            LlamaModel(model_config, weights, max_model_len=max_model_len),
            num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            engine_index=engine_index,
        )

    def add_request(self, wire: EngineCoreRequest) -> None:
        """Queues a request. Never raises: one that cannot be served gets its ERROR with the next step.

        A second request with a live id is logged and dropped: its id belongs to the first.
        """
        if wire.request_id in self._scheduler.requests:
            logger.error(
                "request %s: the id is live already; the second is dropped", wire.request_id
            )
            return
        try:
            check_request(wire, self._limits)
            request = Request.from_wire(wire, vocab_size=self._limits.vocab_size)
        except InvalidRequestError as error:
            self._put(wire.client_index, _error(wire.request_id, str(error)))
        except Exception as error:
            logger.exception("request %s: cannot be taken", wire.request_id)
            self._put(wire.client_index, _error(wire.request_id, f"cannot be taken: {error!r}"))
        else:
            self._last_client = request.client_index
            self._scheduler.add(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forgets requests. No output follows, their blocks are free at once, unknown ids are fine."""
        # The next step makes a message even if nothing is left to run, so that a head sees the blocks return.
        if self._scheduler.remove(request_ids):
            self._stats_due = True
        gone = set(request_ids)
        for client, outputs in list(self._outputs.items()):
            self._outputs[client] = [one for one in outputs if one.request_id not in gone]
            if not self._outputs[client]:
                del self._outputs[client]

    def abort_client(self, client_index: int) -> None:
        """Forgets all requests of one front end, and what was about to be sent to it."""
        self._outputs.pop(client_index, None)
        requests = self._scheduler.requests.values()
        self.abort_requests([r.request_id for r in requests if r.client_index == client_index])

    def finish_all(self) -> None:
        """Ends every request: the next step hands on one output each, finish_reason ABORT, no tokens."""
        for request in list(self._scheduler.requests.values()):
            self._report(request, [], Stop(FinishReason.ABORT))

    def call_utility(self, method: str, args: Sequence[Any]) -> Any:
        """One of the few methods that may be called by name. Raises ``WireError`` for any other.

        There are no prefix cache, no multi-modal cache and no sleep here: resetting is done at once.
        """
        answers = {
            "get_supported_tasks": ["generate"],
            "is_sleeping": False,
            "reset_mm_cache": None,
            "reset_prefix_cache": True,
        }
        if method not in answers:
            raise WireError(f"utility {method!r} is unknown; known: {', '.join(answers)}")
        if any(args):
            raise WireError(
                f"utility {method!r} got {list(args)!r}; allowed: no arguments that are set"
            )
        return answers[method]

    def wait_s(self) -> float | None:
        """Seconds until ``step`` has something to do: 0.0, or None for nothing until a call comes."""
        return 0.0 if self._outputs or self._stats_due or self._scheduler.requests else None

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Computes the next tokens. Returns a message for each client that has outputs, by client_index.

        One message carries the engine's figures; a step without outputs makes one that has nothing else.
        """
        schedule = self._scheduler.schedule()
        sampled = self._runner.run(schedule)
        for chunk in schedule.chunks:
            chunk.request.num_computed_tokens = chunk.end
        for request in schedule.stuck:
            self._fail(request, f"the key/value cache is full: {self._limits.cache_tokens} tokens")
        for one in sampled:
            self._advance(one)
        return self._hand_on(worked=bool(schedule.chunks or schedule.stuck))

    def close(self) -> None:
        """Gives model and cache back. The engine is of no use afterwards."""
        self._scheduler.remove(list(self._scheduler.requests))
        del self._runner

    def _advance(self, sampled: Sampled) -> None:
        request, token_id = sampled.request, sampled.token_id
        try:
            if token_id is None:
                self._fail(request, _NO_TOKEN)
            else:
                stop = request.append(token_id, max_model_len=self._limits.max_model_len)
                self._report(request, [token_id], stop, sampled.logprobs)
        except Exception as error:
            logger.exception("request %s: its step failed", request.request_id)
            self._fail(request, f"its step failed: {error!r}")

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
            self._scheduler.remove([request.request_id])
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
            num_running_reqs=len(self._scheduler.running),
            num_waiting_reqs=len(self._scheduler.waiting),
            step_counter=self._step_counter,
            kv_cache_usage=self._scheduler.pool.usage,
        )


_NO_TOKEN = (
    "no token can be sampled: the logits hold NaN or infinity, or min_tokens forbids every token"
)


def _error(request_id: str, sentence: str) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=sentence)


def _prefill_stats(request: Request) -> PrefillStats:
    return PrefillStats(
        num_prompt_tokens=request.num_prompt_tokens, num_computed_tokens=request.num_prompt_tokens
    )
