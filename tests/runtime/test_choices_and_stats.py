"""n > 1 as one stream, a reader that sleeps, and the stats logger: through the whole link."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import trio
from scripted_llm import PROMPT, aborted, added, open_scripted
from scripted_llm import script as any_script
from tiny_tokenizers import ids
from trio.testing import MockClock

from trioleg.config import LLMConfig
from trioleg.errors import InvalidRequestError, OutputError
from trioleg.messages import PrefixCacheStats, SchedulerStats
from trioleg.output.stats import IterationStats
from trioleg.outputs import EndingKind
from trioleg.runtime.stats_logger import LoggingStatsLogger
from trioleg.sampling_params import PoolingParams, SamplingParams

# Ended by length, so that the last token is no hidden stop token.
script = partial(any_script, finish="length")
CAFE = ("caf", "C3", "A9")


# ---------------------------------------------------------------------------- n > 1


async def test_choices_share_a_stream_and_all_of_them_arrive(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        texts = {0: "", 1: "", 2: ""}
        async with llm.open_stream(PROMPT, SamplingParams(n=3)) as stream:
            async for output in stream:
                for one in output.outputs:
                    texts[one.index] += one.text
        assert texts == {0: "café", 1: "café", 2: "café"}
        assert added(transport) == [f"{stream.request_id}-{i}" for i in range(3)]
        assert aborted(transport) == []
        assert llm.statistics().endings == {EndingKind.LENGTH: 1}


async def test_generate_returns_all_choices_in_order(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, _):
        output = await llm.generate(PROMPT, SamplingParams(n=2))
        assert [(one.index, one.text, one.finish_reason) for one in output.outputs] == [
            (0, "café", "length"),
            (1, "café", "length"),
        ]


async def test_leaving_aborts_every_choice_in_one_message(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE * 100)) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams(n=3)) as stream:
            await stream.receive()
        assert aborted(transport) == [[f"{stream.request_id}-{i}" for i in range(3)]]
        assert llm.statistics().engines[0].processor.requests == 0


async def test_one_bad_choice_ends_all_and_one_message_aborts_the_rest(
    autojump_clock: MockClock,
) -> None:
    fault = {"after_steps": 2, "how": "bad_token_id", "request": 1, "token_id": -1}
    async with open_scripted(script(*CAFE * 100, faults=[fault])) as (llm, transport):
        async with llm.open_stream(PROMPT, SamplingParams(n=3)) as stream:
            with pytest.raises(OutputError, match="token id -1"):
                async for _ in stream:
                    pass
        # The one at fault is still running in the engine, too.
        assert [sorted(one) for one in aborted(transport)] == [
            [f"{stream.request_id}-{i}" for i in range(3)]
        ]


async def test_a_matched_choice_is_aborted_at_once_and_alone(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE * 100)) as (llm, transport):
        params = SamplingParams(n=2, stop="fé")
        output = await llm.generate(PROMPT, params)
        assert [one.text for one in output.outputs] == ["ca", "ca"]
        assert [one.stop_reason for one in output.outputs] == ["fé", "fé"]
        # Both matched in the same step, so one message does.
        assert aborted(transport) == [added(transport)]


# ---------------------------------------------------------------------------- a reader that sleeps


async def test_ten_thousand_steps_while_the_reader_sleeps_are_one_output(
    autojump_clock: MockClock,
) -> None:
    """Exact text, and merge work that is linear: one append a step, one join at the end."""
    steps = 10_000
    script_ = script(*["a"] * steps, max_model_len=steps + 10)
    async with open_scripted(script_) as (llm, _):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            await trio.sleep(0.1 * steps + 1)
            statistics = stream.statistics()
            output = await stream.receive()
            assert output.outputs[0].text == "a" * steps
            assert output.outputs[0].token_ids == ids("a") * steps
            assert output.finished
            assert statistics.num_merges == steps - 1
            assert statistics.num_bytes <= statistics.max_num_bytes < 8 * steps
            with pytest.raises(trio.EndOfChannel):
                await stream.receive()


# ---------------------------------------------------------------------------- intervals, detokenizers


@pytest.mark.parametrize("detokenizer", ["fast", "readable"])
async def test_the_configured_detokenizer_and_interval_hold(
    detokenizer: str, autojump_clock: MockClock
) -> None:
    config = LLMConfig(detokenizer=detokenizer, stream_interval=2)
    async with open_scripted(script(*CAFE, "a"), config) as (llm, _):
        async with llm.open_stream(PROMPT, SamplingParams()) as stream:
            outputs = [output async for output in stream]
    assert [one.outputs[0].text for one in outputs] == ["caf", "é", "a"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"detokenizer": "slow"}, "detokenizer is 'slow'; allowed: fast, readable"),
        ({"stream_interval": 0}, "stream_interval is 0; allowed: an integer from 1 to 2147483647"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LLMConfig(**settings)  # type: ignore[arg-type]


async def test_a_pooling_request_to_a_model_that_generates_is_refused(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(script(*CAFE)) as (llm, transport):
        with pytest.raises(InvalidRequestError, match=r"'embed', .* allowed: generate"):
            await llm.encode(PROMPT, PoolingParams())
        assert added(transport) == []


# ---------------------------------------------------------------------------- statistics


class Recorder:
    def __init__(self) -> None:
        self.records: list[tuple[int, SchedulerStats | None, IterationStats]] = []

    def record(
        self, engine: int, scheduler: SchedulerStats | None, iteration: IterationStats
    ) -> None:
        self.records.append((engine, scheduler, iteration))


async def test_a_logger_hears_of_every_step_and_may_be_swapped(autojump_clock: MockClock) -> None:
    first, second = Recorder(), Recorder()
    async with open_scripted(script(*["a"] * 6)) as (llm, _):
        async with llm.open_stream(PROMPT, SamplingParams(n=2)) as stream:
            llm.stats_logger = first
            await trio.sleep(0.25)
            llm.stats_logger = second
            async for _ in stream:
                pass
    steps = [iteration for _, _, iteration in first.records + second.records]
    assert len(first.records) == 3
    assert [one.num_generation_tokens for one in steps if one.batch_size] == [2] * 6
    assert steps[0].num_prompt_tokens == len(PROMPT)
    assert len(steps[0].times_to_first_token) == 2
    (finished,) = [one for step in steps for one in step.finished_requests]
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (len(PROMPT), 12)
    running = [stats.num_running_reqs for _, stats, _ in first.records if stats is not None]
    assert running == [2, 2, 2]


async def test_a_logger_that_fails_is_dropped_and_the_tokens_go_on(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def record(self, *_: object) -> None:
            raise RuntimeError("disk full")

    async with open_scripted(script(*CAFE)) as (llm, _):
        llm.stats_logger = Broken()
        output = await llm.generate(PROMPT, SamplingParams())
        assert output.outputs[0].text == "café"
        assert llm.stats_logger is None
    assert "the stats logger failed and is dropped" in caplog.text


def test_the_logging_logger_writes_a_line_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    logger = LoggingStatsLogger(10.0, clock=lambda: now)
    scheduler = SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_stats=PrefixCacheStats(requests=3, queries=80, hits=20),
    )
    with caplog.at_level(logging.INFO, "trioleg.stats"):
        logger.record(0, scheduler, IterationStats(3, 3, 50, [0.2, 0.4, 0.6]))
        now = 5.0
        logger.record(0, None, IterationStats(3, 3, 0, [], [0.02, 0.04]))
        assert caplog.messages == []
        now = 12.0
        logger.record(0, None, IterationStats(3, 3, 0))
        # A burst behind a silence is not watered down by it, and its end is told.
        now = 100.0
        logger.record(0, scheduler, IterationStats(1, 1, 0))
        now = 102.0
        logger.record(0, SchedulerStats(), IterationStats(1, 7, 0))
    assert caplog.messages == [
        "prompt 4.2 tokens/s, generation 0.8 tokens/s, running 3, waiting 1, finished 0, "
        "cache 25.0%, prefix hits 25.0%, first token after 400 ms, 30.0 ms between tokens",
        "prompt 0.0 tokens/s, generation 4.0 tokens/s, running 0, waiting 0, finished 0, cache 0.0%, "
        "prefix hits 25.0%",
    ]


async def test_a_finished_request_says_where_its_time_went(autojump_clock: MockClock) -> None:
    async with open_scripted(script("a", "b", first_token_delay_s=1.0)) as (llm, _):
        output = await llm.generate(PROMPT, SamplingParams())
        assert output.metrics is not None
        # By the virtual clock, engine and front end alike.
        assert output.metrics.time_to_first_token == pytest.approx(1.0)
        assert output.metrics.prefill == pytest.approx(1.0)
        assert output.metrics.inter_token == pytest.approx(0.1)
        assert output.metrics.end_to_end == pytest.approx(1.1)


# ---------------------------------------------------------------------------- what arrays bring


async def test_logprobs_come_through_the_whole_link(autojump_clock: MockClock) -> None:
    async with open_scripted(script(*CAFE)) as (llm, _):
        params = SamplingParams(logprobs=2, prompt_logprobs=1, n=2)
        output = await llm.generate(PROMPT, params)
    for one in output.outputs:
        assert [next(iter(entry)) for entry in one.logprobs or ()] == one.token_ids
        assert {len(entry) for entry in one.logprobs or ()} <= {2, 3}
        assert one.cumulative_logprob == sum(
            entry[i].logprob for entry, i in zip(one.logprobs or (), one.token_ids, strict=True)
        )
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    assert [next(iter(entry or ())) for entry in rest] == PROMPT[1:]


async def test_nan_ends_its_request_and_no_other(autojump_clock: MockClock) -> None:
    (b,) = ids("b")
    odd = {"odd_logprobs": {b: "nan"}}
    async with open_scripted(script("a", "b", "c", **odd)) as (llm, transport):
        with pytest.raises(OutputError, match=f"NaN for token id {b}") as caught:
            await llm.generate(PROMPT, SamplingParams(logprobs=0))
        assert caught.value.partial.outputs[0].token_ids == ids("a")
        assert len(aborted(transport)) == 1
        output = await llm.generate(PROMPT, SamplingParams())
        assert output.outputs[0].text == "abc"


async def test_a_pooled_vector_of_a_prompt(autojump_clock: MockClock) -> None:
    async with open_scripted(script("a", pooling=[0.5, -0.25])) as (llm, _):
        output = await llm.encode(PROMPT, PoolingParams())
        assert output.outputs.data == [0.5, -0.25]
        assert output.prompt_token_ids == PROMPT
        assert llm.statistics().endings == {EndingKind.STOP: 1}
        with pytest.raises(InvalidRequestError, match=r"'classify', .* allowed: embed, generate"):
            await llm.encode(PROMPT, PoolingParams(task="classify"))
