"""A head with nothing in front of it: it hands token ids to an engine over the wire, and notes when tokens come.

Rules of this file: no tokenizer, no text, no client, so that what is timed is the engine, whoever's it is. One task
asks and reads. Times are of arrival, by the monotonic clock. A measurement ends with an answer that an engine gives
only when it has done what it was told before, so nothing of one is in the next.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import TriolegError
from ..ipc.codec import (
    encode_abort,
    encode_request,
    encode_utility,
    is_engine_dead,
    make_output_decoder,
)
from ..messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineSamplingParams,
    FinishReason,
)
from ..runtime.engines import Engine

__all__ = ["EngineHead", "Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
    """``tokens`` came, or were read, in ``seconds``. ``first``: each request's first token, in the order asked."""

    tokens: int
    seconds: float
    first: list[int]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class EngineHead:
    """Asks ``engine``, which nobody else may read from meanwhile.

    Every call raises ``TriolegError`` if the engine refuses a request, ends it too early, or says that it is dead.
    None has a bound of its own. One that is cancelled leaves its requests with the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._transport = engine.transport
        self._decode = make_output_decoder(engine.ready.vllm_version)
        self._longest = engine.ready.max_model_len
        self._numbers = itertools.count()

    async def prefill(self, prompts: Sequence[list[int]]) -> Measured:
        """Ask for one token behind each of ``prompts``, all at once. The tokens are the prompts', the time lasts until
        the last answer has come."""
        started = time.monotonic()
        first = await self._first([self._add(prompt, max_tokens=1) for prompt in prompts])
        seconds = time.monotonic() - started
        await self._catch_up()
        return Measured(sum(map(len, prompts)), seconds, first)

    async def decode(self, prompts: Sequence[list[int]], steps: int) -> Measured:
        """Let all ``prompts`` be answered at once. What is measured begins when the last of them has its first token,
        and goes on for ``steps`` tokens of each."""
        room = self._longest - max(map(len, prompts))
        requests = [self._add(prompt, max_tokens=room) for prompt in prompts]
        first = await self._first(requests)
        started = ended = time.monotonic()
        tokens = 0
        while tokens < steps * len(prompts):
            outputs = await self._outputs()
            ended = time.monotonic()
            tokens += sum(len(one.new_token_ids) for one in outputs)
            if any(one.finish_reason is not None for one in outputs):
                raise TriolegError("an answer was complete before all had been measured")
        self._transport.send(EngineCoreRequestType.ABORT, encode_abort(requests))
        await self._catch_up()
        return Measured(tokens, ended - started, first)

    def _add(self, prompt: list[int], *, max_tokens: int) -> str:
        request_id = f"bench-{next(self._numbers)}"
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=EngineSamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._transport.send(EngineCoreRequestType.ADD, encode_request(request))
        return request_id

    async def _first(self, requests: Sequence[str]) -> list[int]:
        """The first token of each; waits for all."""
        tokens: dict[str, int] = {}
        while len(tokens) < len(requests):
            for output in await self._outputs():
                tokens.setdefault(output.request_id, output.new_token_ids[0])
        return [tokens[request] for request in requests]

    async def _catch_up(self) -> None:
        """Wait until the engine has done all that it was told: questions are answered between two steps."""
        call = next(self._numbers)
        question = encode_utility(0, call, "is_sleeping", [])
        self._transport.send(EngineCoreRequestType.UTILITY, question)
        while True:
            answer = (await self._receive()).utility_output
            if answer is not None and answer.call_id == call:
                return

    async def _outputs(self) -> list[EngineCoreOutput]:
        """What the next step made; empty for one that only read prompts."""
        outputs = (await self._receive()).outputs
        for one in outputs:
            if one.finish_reason not in (None, FinishReason.LENGTH):
                raise TriolegError(
                    f"the engine under test ended a request with {one.finish_reason}: "
                    f"{one.stop_reason or one.error}"
                )
        return outputs

    async def _receive(self) -> EngineCoreOutputs:
        frames = await self._transport.receive()
        if is_engine_dead(frames):
            raise TriolegError("the engine under test says that it is dead")
        return self._decode(frames)
