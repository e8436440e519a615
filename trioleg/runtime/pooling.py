"""Prompts of one call to a pooling model: they go in together, run at once, and end together.

Each of them is a request of its own, with its place, its deadline and its ending. The first that fails ends the
others, and so does whoever leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import trio

from ..config import LLMConfig
from ..errors import InvalidRequestError, OutputError
from ..output.submission import make_pooling_submission
from ..outputs import PoolingRequestOutput
from ..pooling_model import PoolingModel
from ..prompts import Prompt, TokenizeParams
from ..sampling_params import PoolingParams
from ..timeouts import Timeouts
from .admission import Slot
from .arrival import Arrival
from .requests import MakeSubmission, Requests
from .unwrap import unwrapped

__all__ = ["Pooling", "Prompts", "check_outputs", "prompts_of"]

# One prompt, or several.
Prompts = Prompt | Sequence[Prompt]

# The tasks whose vectors can be shortened, as vLLM has them.
_OF_VECTORS = ("embed", "token_embed")


def prompts_of(prompts: Prompts, tokenize: TokenizeParams) -> list[tuple[Prompt, TokenizeParams]]:
    """Each prompt, with how it is read: in an error, one of several is called by its place."""
    # Whatever else is wrong with a prompt is found where it is read.
    is_one = (
        not isinstance(prompts, list | tuple)
        or not prompts
        or isinstance(prompts[0], int | Mapping)
    )
    if is_one:
        one: Prompt = prompts  # type: ignore[assignment]  # that is what was looked at
        return [(one, tokenize)]
    name = tokenize.parameter
    several: Sequence[Prompt] = prompts  # type: ignore[assignment]
    return [
        (one, replace(tokenize, parameter=f"{name}[{place}]")) for place, one in enumerate(several)
    ]


class Pooling:
    """What an ``LLM`` makes of prompts for ``model``."""

    def __init__(self, requests: Requests, model: PoolingModel, config: LLMConfig) -> None:
        self._requests = requests
        self._model = model
        self._config = config

    def completed(self, params: PoolingParams | None) -> PoolingParams:
        """The parameters, with the model's own where nothing is asked for. Raises ``InvalidRequestError``."""
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"params is {params!r}; allowed: PoolingParams or None", parameter="params"
            )
        if params.dimensions is not None and params.task not in _OF_VECTORS:
            raise InvalidRequestError(
                f"dimensions is {params.dimensions}; allowed: null for the task {params.task}",
                parameter="dimensions",
            )
        self._model.check_dimensions(params.dimensions)
        if params.use_activation is None:
            params = replace(params, use_activation=self._model.use_activation)
        return params

    def tokenize_params(self, asked: TokenizeParams | None) -> TokenizeParams:
        """How prompts are read: as the model wants it, and with no room for an answer behind them."""
        asked = TokenizeParams() if asked is None else asked
        if not isinstance(asked, TokenizeParams):
            raise InvalidRequestError(
                f"tokenize is {asked!r:.60}; allowed: TokenizeParams or None", parameter="tokenize"
            )
        lower = asked.do_lower_case or self._model.do_lower_case
        return replace(asked, room=0, do_lower_case=lower)

    async def run(
        self,
        prompts: Sequence[tuple[Prompt, TokenizeParams]],
        parameter: str,
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeouts: Timeouts | None = None,
        arrived_at: float | None = None,
        external_req_id: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """The output of each prompt, in order. ``parameter``: what an error calls all of them. The others: see
        ``LLM.open_stream``.

        Raises as ``LLM.open_stream`` and ``RequestStream.receive`` do: of several errors, one. Cancel-safe.
        """
        make = partial(
            make_pooling_submission,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            scheduling_policy=self._config.engine.scheduling_policy,
        )
        arrival = self._requests.arrival(timeouts, arrived_at, external_req_id)
        outputs = await _run_together(self._requests, prompts, parameter, make, arrival)
        check_outputs(outputs, params)
        return outputs


async def _run_together(
    requests: Requests,
    prompts: Sequence[tuple[Prompt, TokenizeParams]],
    parameter: str,
    make_submission: MakeSubmission,
    arrival: Arrival,
) -> list[PoolingRequestOutput]:
    outputs: dict[int, PoolingRequestOutput] = {}

    async def one(place: int, slot: Slot) -> None:
        prompt, tokenize = prompts[place]
        async with requests.open(
            prompt, make_submission, aggregate=False, arrival=arrival, tokenize=tokenize, slot=slot
        ) as stream:
            output: object = await stream.receive()
        assert isinstance(output, PoolingRequestOutput), "a pooling request has no other output"
        outputs[place] = output

    slots = requests.admit_all([prompt for prompt, _ in prompts], parameter, arrival)
    try:
        with unwrapped():
            async with trio.open_nursery() as nursery:
                for place, slot in enumerate(slots):
                    nursery.start_soon(one, place, slot)
                    # One after the other: two thousand at once would stop everybody's streams for 0.2 s.
                    await trio.lowlevel.checkpoint()
    finally:
        # Of those that a cancel or an error has kept from beginning.
        for slot in slots:
            slot.release()
    return [outputs[place] for place in range(len(prompts))]


def check_outputs(outputs: Sequence[PoolingRequestOutput], params: PoolingParams) -> None:
    """Only the engine knows how long the model's vectors are; it gives as much as there is. Raises
    ``InvalidRequestError`` if that is less than was asked for, ``OutputError`` for an embedding that is no vector."""
    for output in outputs:
        shape = output.outputs.shape
        if params.task == "embed" and (len(shape) != 1 or not shape[0]):
            raise OutputError(
                f"the engine's embedding has the shape {list(shape)}; allowed: one dimension"
            )
        length = shape[-1] if shape else 1
        if params.dimensions is not None and length < params.dimensions:
            raise InvalidRequestError(
                f"dimensions is {params.dimensions}; allowed: 1 to {length}, or null",
                parameter="dimensions",
            )
