"""``LLM.embed``: prompts of one call go in together, run at once, come back in order and end together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import trio
from scripted_llm import TOKENIZER, aborted, added, open_scripted, script
from tiny_tokenizers import ids
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg.config import EngineConfig, LLMConfig
from trioleg.errors import (
    DeadlineExceeded,
    EngineDeadError,
    InvalidRequestError,
    OutputError,
    OverloadedError,
)
from trioleg.messages import EngineCoreRequest, EngineCoreRequestType
from trioleg.outputs import EndingKind, PoolingOutput, PoolingRequestOutput
from trioleg.pooling_model import PoolingModel
from trioleg.prompts import TokenizeParams
from trioleg.runtime.llm import LLM
from trioleg.runtime.pooling import check_outputs
from trioleg.sampling_params import PoolingParams
from trioleg.testing import ScriptedTransport, open_scripted_llm
from trioleg.timeouts import Timeouts

A, B, C = (ids("<s>", piece) for piece in "abc")
POOLING = script("a", pooling=[0.5, -0.25, 0.125, 1.0])


def answer_the_last_first(transport: ScriptedTransport) -> None:
    """Each prompt's vector begins with its last token's id; a later one is ready earlier."""
    core, add_request = transport.core, transport.core.add_request

    def add(request: EngineCoreRequest) -> None:
        add_request(request)
        newest = core._waiting[-1]
        newest.pooling = [float(newest.prompt[-1]), *newest.pooling[1:]]
        newest.prefill_left = 9 - newest.number

    core.add_request = add


def sent(transport: ScriptedTransport) -> list[list[Any]]:
    """The ADD messages."""
    return [
        msgspec.msgpack.decode(body)
        for kind, body in transport.sent
        if kind is EngineCoreRequestType.ADD
    ]


async def test_several_at_once_in_order(autojump_clock: MockClock) -> None:
    async with open_scripted(POOLING) as (llm, transport):
        answer_the_last_first(transport)
        started = trio.current_time()
        outputs = await llm.embed([A, "b", C])
        took = trio.current_time() - started
        assert [one.prompt_token_ids for one in outputs] == [A, ids("b"), C]
        firsts = [one.outputs.data[0] for one in outputs]
        assert firsts == [float(prompt[-1]) for prompt in (A, B, C)]
        # Ten steps for the slowest, and the others meanwhile.
        assert took < 1.5
        assert llm.statistics().endings == {EndingKind.STOP: 3}
        assert llm.statistics().num_inflight_requests == 0
        assert aborted(transport) == []


@pytest.mark.parametrize("prompt", ["a", ids("<s>", "a"), tuple(ids("a"))])
async def test_one_without_a_list(autojump_clock: MockClock, prompt: Any) -> None:
    async with open_scripted(POOLING) as (llm, _):
        (output,) = await llm.embed(prompt)
        assert output.outputs.data == POOLING.pooling


async def test_a_prompt_may_take_the_whole_context(autojump_clock: MockClock) -> None:
    """No answer needs room behind it."""
    async with open_scripted(msgspec.structs.replace(POOLING, max_model_len=4)) as (
        llm,
        _transport,
    ):
        whole, cut = ids(*"abca"), ids(*"abcab")
        assert (await llm.embed(whole))[0].prompt_token_ids == whole
        assert (await llm.encode(whole)).prompt_token_ids == whole
        with pytest.raises(InvalidRequestError, match="5 tokens; allowed: 1 to 4, ") as caught:
            await llm.embed([whole, cut])
        assert caught.value.parameter == "prompt[1]"
        for side, kept in ((None, cut[:4]), ("left", cut[1:]), ("right", cut[:4])):
            how = TokenizeParams(truncate_prompt_tokens=-1, truncation_side=side)
            texts = await llm.embed([cut, "abcab"], tokenize=how)
            assert [one.prompt_token_ids for one in texts] == [kept, kept]
        with pytest.raises(InvalidRequestError, match="is 5; allowed: -1, or 1 to 4"):
            await llm.embed("a", tokenize=TokenizeParams(truncate_prompt_tokens=5))


async def test_the_first_failure_ends_all(autojump_clock: MockClock) -> None:
    fault = {"after_steps": 0, "how": "error", "request": 1}
    slow = script("a", pooling=[1.0], faults=[fault], first_token_delay_s=1.0, max_num_seqs=2)
    async with open_scripted(slow) as (llm, _transport):
        with pytest.raises(OutputError, match="the script says"):
            await llm.embed([A, B, C, C])
        assert llm.statistics().num_inflight_requests == 0
        endings = llm.statistics().endings
        assert endings[EndingKind.OUTPUT_ERROR] == 1
        assert sum(endings.values()) == 4
        assert llm.live_requests() == ()


async def test_a_bad_prompt_costs_the_others_nothing_but_the_call(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(POOLING) as (llm, _transport):
        with pytest.raises(InvalidRequestError, match="token id 9999") as caught:
            await llm.embed([A, [9999], B])
        assert caught.value.parameter == "prompt[1]"
        assert llm.statistics().num_inflight_requests == 0
        assert (await llm.embed(A))[0].finished


async def test_leaving_aborts_all(autojump_clock: MockClock) -> None:
    slow = script("a", pooling=[1.0], first_token_delay_s=60.0)
    async with open_scripted(slow) as (llm, transport):
        with trio.move_on_after(1):
            await llm.embed([A, B, C])
        gone = sorted(one for ids_ in aborted(transport) for one in ids_)
        assert gone == sorted(added(transport))
        assert len(gone) == 3
        assert llm.statistics().endings == {EndingKind.LEFT: 3}
        assert llm.statistics().num_inflight_requests == 0


async def test_a_deadline_and_a_death_are_one_error(autojump_clock: MockClock) -> None:
    slow = script("a", pooling=[1.0], first_token_delay_s=60.0)
    async with open_scripted(slow) as (llm, transport):
        with pytest.raises(DeadlineExceeded):
            await llm.embed([A, B, C], timeouts=Timeouts(total=2))
        assert trio.current_time() < 3
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def ask() -> None:
                with pytest.raises(EngineDeadError):
                    await llm.embed([A, B, C])

            await wait_all_tasks_blocked()
            transport.inject_dead()


async def test_all_are_admitted_or_none(autojump_clock: MockClock) -> None:
    slow = script("a", pooling=[1.0], first_token_delay_s=5.0)
    async with open_scripted(slow, LLMConfig(max_inflight_requests=4)) as (llm, transport):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.embed, [A, B])
            await wait_all_tasks_blocked()
            assert llm.statistics().num_inflight_requests == 2
            with pytest.raises(OverloadedError, match="this one counts 3") as caught:
                await llm.embed([A, B, C])
            assert caught.value.code == "too_many_requests"
            assert llm.statistics().num_inflight_requests == 2
            assert len(added(transport)) == 2
            await llm.embed([A, C])
        with pytest.raises(InvalidRequestError, match="prompt has 5; allowed: 1 to 4, ") as refused:
            await llm.embed([A] * 5)
        assert refused.value.parameter == "prompt"


async def test_prompts_count_together_and_only_once(autojump_clock: MockClock) -> None:
    """Guesses admit them; what they turn out to have does not turn some of them away."""
    config = LLMConfig(max_queued_prompt_tokens=8)
    slow = script("a", pooling=[1.0], first_token_delay_s=5.0)
    async with open_scripted(slow, config) as (llm, _transport):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.embed, ["a" * 8] * 4)
            await wait_all_tasks_blocked()
            assert llm.statistics().num_queued_prompt_tokens == 32
            with pytest.raises(OverloadedError) as caught:
                await llm.embed([A])
            assert caught.value.code == "too_many_queued_tokens"
        assert llm.statistics().num_queued_prompt_tokens == 0


async def test_priority_and_salt_reach_the_engine(autojump_clock: MockClock) -> None:
    config = LLMConfig(engine=EngineConfig(scheduling_policy="priority"))
    async with open_scripted(POOLING, config) as (llm, transport):
        await llm.embed([A, B], priority=-3, cache_salt="pepper")
        await llm.encode(A, priority=7)
        assert [(one[13], one[7]) for one in sent(transport)] == [
            (-3, "pepper"),
            (-3, "pepper"),
            (7, None),
        ]
    async with open_scripted(POOLING) as (llm, _):
        with pytest.raises(InvalidRequestError, match="scheduling policy is fcfs"):
            await llm.embed(A, priority=1)


@pytest.mark.parametrize(
    ("prompts", "parameter"),
    [
        ([], "prompt"),
        (b"a", "prompt"),
        (["a", 5], "prompt[1]"),
        (["a", ""], "prompt[1]"),
        ([[]], "prompt[0]"),
    ],
)
async def test_what_is_no_prompt_is_named(
    autojump_clock: MockClock, prompts: Any, parameter: str
) -> None:
    async with open_scripted(POOLING) as (llm, _transport):
        with pytest.raises(InvalidRequestError, match="allowed: ") as caught:
            await llm.embed(prompts)
        assert caught.value.parameter == parameter


async def test_a_model_that_generates_says_so(autojump_clock: MockClock) -> None:
    async with open_scripted(script("a")) as (llm, transport):
        with pytest.raises(InvalidRequestError, match=r"scripted makes no embeddings; .* generate"):
            await llm.embed(A)
        assert added(transport) == []


def open_with(model: PoolingModel) -> Any:
    return open_scripted_llm(POOLING, replace(TOKENIZER, pooling=model))


async def test_dimensions_are_the_models_own(autojump_clock: MockClock) -> None:
    async def lengths(llm: LLM, dimensions: int | None) -> list[int]:
        outputs = await llm.embed([A, B], PoolingParams(dimensions=dimensions))
        return [len(one.outputs.data) for one in outputs]

    async with open_with(PoolingModel()) as (llm, transport):
        assert await lengths(llm, None) == [4, 4]
        with pytest.raises(InvalidRequestError, match="is 2; allowed: null, since the model"):
            await lengths(llm, 2)
        assert len(added(transport)) == 2
    async with open_with(PoolingModel(is_matryoshka=True, matryoshka_dimensions=(2, 3))) as (
        llm,
        _,
    ):
        assert await lengths(llm, 3) == [3, 3]
        with pytest.raises(InvalidRequestError, match="is 1; allowed: 2, 3, or null"):
            await lengths(llm, 1)
    async with open_with(PoolingModel(is_matryoshka=True)) as (llm, _):
        assert await lengths(llm, 1) == [1, 1]
        with pytest.raises(InvalidRequestError, match="is 2; allowed: null for the task classify"):
            await llm.encode(A, PoolingParams(task="classify", dimensions=2))


async def test_the_last_step_is_the_models_own(autojump_clock: MockClock) -> None:
    for model_says in (True, False):
        async with open_with(PoolingModel(use_activation=model_says)) as (llm, transport):
            for asked in (None, True, False):
                await llm.embed(A, PoolingParams(use_activation=asked))
            told = [one[4][0] for one in sent(transport)]
            assert told == [model_says, True, False]


async def test_small_letters_where_the_model_wants_them(autojump_clock: MockClock) -> None:
    async with open_with(PoolingModel(do_lower_case=True)) as (llm, _):
        (upper,), (lower,) = await llm.embed("AB"), await llm.embed("ab")
        assert upper.prompt_token_ids == lower.prompt_token_ids


@pytest.mark.parametrize("shape", [(), (0,), (2, 2)])
def test_an_embedding_is_a_vector(shape: tuple[int, ...]) -> None:
    output = PoolingRequestOutput("r", [1], PoolingOutput([0.5], shape))
    with pytest.raises(OutputError, match="shape"):
        check_outputs([output], PoolingParams(task="embed"))
    check_outputs([output], PoolingParams(task="classify"))


async def test_how_prompts_are_read_is_said_by_tokenize_params(autojump_clock: MockClock) -> None:
    async with open_scripted(POOLING) as (llm, _):
        with pytest.raises(InvalidRequestError, match=r"tokenize is \{\}; allowed: TokenizeParams"):
            await llm.embed(["a"], tokenize={})
