"""Batch use: order, look-ahead, endings and closing on the scripted core; then the real model."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import running
from tiny_tokenizers import byte_fallback_tokenizer, ids

import trioleg
from trioleg import LLMConfig, RequestOutput, SamplingParams
from trioleg.config import EngineConfig
from trioleg.engine.core import EngineCore
from trioleg.engine.scripted import Fault, Script, ScriptedCore
from trioleg.errors import EngineDeadError, InvalidRequestError, ModelStoreError, OutputError
from trioleg.messages import EngineCoreOutputs, FinishReason
from trioleg.offline import OfflineEngine, generate, open_engine
from trioleg.tokenizer import Tokenizer

PROMPT = ids("<s>", "a")
ABC = ids("a", "b", "c")


class Core(ScriptedCore):
    """The scripted core; ``num_steps``, ``aborted`` and ``closed`` tell what was asked of it.

    ``error_at``: (arrival, step) of a request that ends with an ERROR of the engine's, as our own
    engine reports what goes wrong with one request.
    """

    def __init__(self, error_at: tuple[int, int] | None = None, **script: Any) -> None:
        super().__init__(Script(**({"token_ids": ABC} | script)), on_fault=self._fail)
        self.num_steps = 0
        self.num_added = 0
        self.aborted: list[str] = []
        self.closed = False
        self._error_at = error_at
        self._bad_id = ""

    def _fail(self, how: str) -> None:
        raise KeyboardInterrupt if how == "exit" else RuntimeError("no memory")

    def add_request(self, request: Any) -> None:
        if self._error_at is not None and self.num_added == self._error_at[0]:
            self._bad_id = request.request_id
        self.num_added += 1
        super().add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        super().abort_requests(request_ids)

    def step(self) -> dict[int, EngineCoreOutputs]:
        self.num_steps += 1
        messages = super().step()
        if self._error_at is not None and self.num_steps == self._error_at[1]:
            for output in messages[0].outputs:
                if output.request_id == self._bad_id:
                    output.new_token_ids = []
                    output.finish_reason, output.stop_reason = FinishReason.ERROR, "it went wrong"
            super().abort_requests([self._bad_id])
        return messages

    def close(self) -> None:
        self.closed = True
        super().close()


def open_scripted(core: Core) -> OfflineEngine:
    return OfflineEngine(core, byte_fallback_tokenizer(), LLMConfig())


def tokens(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, **more)


def texts(outputs: Iterator[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def at_rest(core: Core) -> bool:
    core.step()
    return core.wait_s() is None


def test_results_come_in_the_order_of_the_prompts() -> None:
    engine = open_scripted(Core(max_num_seqs=2))
    prompts = (PROMPT for _ in range(4))
    outputs = list(engine.generate(prompts, [tokens(7), tokens(1), tokens(3), tokens(2)]))
    assert [one.outputs[0].text for one in outputs] == ["abcabca", "a", "abc", "ab"]
    assert all(one.finished and one.error is None for one in outputs)
    assert outputs[0].prompt_token_ids == PROMPT
    assert outputs[0].metrics is not None
    assert engine.num_unfinished_requests == 0


def test_as_completed_gives_the_shorter_one_first() -> None:
    engine = open_scripted(Core())
    requests = [("long", PROMPT, tokens(9)), ("short", PROMPT, tokens(2))]
    assert [key for key, _ in engine.as_completed(requests)] == ["short", "long"]


def test_the_batch_is_full_before_every_step() -> None:
    core = Core(max_num_seqs=2)
    assert texts(open_scripted(core).generate([PROMPT] * 6, tokens(3))) == ["abc"] * 6
    assert core.num_steps == 9


def test_prompts_are_read_no_further_ahead_than_the_batch_needs() -> None:
    core = Core(max_num_seqs=2)
    engine = open_scripted(core)
    taken = itertools.count()
    endless = (PROMPT for _ in taken)
    # The first answer is longer than all that may be finished before it.
    params = itertools.chain([tokens(200)], itertools.repeat(tokens(1)))
    results = engine.generate(endless, params)
    assert next(results).outputs[0].token_ids == (ABC * 67)[:200]
    assert next(taken) <= 1 + 16 * 2 + 2
    results.close()
    assert at_rest(core)


def test_progress_is_told_of_each_answer() -> None:
    engine = open_scripted(Core())
    seen: list[tuple[int, int | None]] = []
    list(engine.generate([PROMPT] * 3, tokens(1), progress=lambda *one: seen.append(one)))
    list(engine.generate(iter([PROMPT]), tokens(1), progress=lambda *one: seen.append(one)))
    assert seen == [(1, 3), (2, 3), (3, 3), (1, None)]


def test_a_bad_request_stands_in_its_place_and_harms_no_other() -> None:
    engine = open_scripted(Core(max_model_len=64))
    prompts: list[Any] = [PROMPT, [99999], "a" * 500, 5, PROMPT, [{"role": "user"}]]
    params: list[Any] = [tokens(3)] * 4 + [tokens(100)] + [None]
    outputs = list(engine.generate([*prompts, PROMPT], [*params, "greedy"]))
    assert outputs[0].outputs[0].text == "abc"
    assert [one.outputs for one in outputs[1:]] == [[]] * 6
    assert all(isinstance(one.error, InvalidRequestError) for one in outputs[1:])
    assert [one.error.parameter for one in outputs[1:]] == [
        "prompt",
        "prompt",
        "prompt",
        "max_tokens",
        "messages[0]",
        "params",
    ]


def test_what_the_engine_refuses_stands_in_its_place() -> None:
    core = Core(num_gpu_blocks=2)
    engine = open_scripted(core)
    params = [tokens(3), tokens(100, n=2), tokens(2)]
    outputs = list(engine.generate([PROMPT] * 3, params))
    assert isinstance(outputs[1].error, InvalidRequestError)
    assert texts(iter((outputs[0], outputs[2]))) == ["abc", "ab"]
    assert engine.num_unfinished_requests == 0
    assert at_rest(core)


def test_an_error_of_the_engine_keeps_what_there_was() -> None:
    core = Core(error_at=(1, 3))
    first, failed, last = open_scripted(core).generate([PROMPT] * 3, tokens(5))
    assert texts(iter((first, last))) == ["abcab"] * 2
    assert isinstance(failed.error, OutputError)
    assert str(failed.error) == "it went wrong"
    assert failed.outputs == []
    assert failed.error.partial.outputs[0].text == "ab"
    assert failed.prompt_token_ids == PROMPT


def test_a_bad_token_id_is_its_requests_alone_and_the_engine_is_told() -> None:
    core = Core(faults=[Fault(after_steps=2, how="bad_token_id", request=0, token_id=2**40)])
    failed, good = open_scripted(core).generate([PROMPT] * 2, tokens(5))
    assert isinstance(failed.error, OutputError)
    assert core.aborted == [failed.request_id]
    assert good.outputs[0].text == "abcab"


def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    core = Core()
    params = [tokens(1000, stop=["ca"]), tokens(4)]
    stopped, other = open_scripted(core).generate([PROMPT] * 2, params)
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("ab", "ca")
    assert other.outputs[0].text == "abca"
    assert core.aborted == [stopped.request_id]
    assert core.num_steps == 4


def test_several_answers_to_a_prompt_are_one_result() -> None:
    core = Core(max_num_seqs=3)
    (output,) = open_scripted(core).generate([PROMPT], tokens(2, n=3))
    assert [(one.index, one.text) for one in output.outputs] == [(0, "ab"), (1, "ab"), (2, "ab")]
    assert core.num_steps == 2


def test_two_iterators_share_the_steps() -> None:
    core = Core()
    engine = open_scripted(core)
    one, other = engine.generate([PROMPT] * 2, tokens(3)), engine.generate([PROMPT], tokens(2))
    assert texts(itertools.chain([next(one)], [next(other)], one, other)) == ["abc", "ab", "abc"]
    assert core.num_steps == 5


@pytest.mark.parametrize("end", ["close", "raise"])
def test_leaving_early_aborts_what_runs(end: str) -> None:
    core = Core(max_num_seqs=4)
    engine = open_scripted(core)

    def prompts() -> Iterator[list[int]]:
        yield from [PROMPT] * 5
        raise ValueError("the caller's own")

    results = engine.generate(prompts(), [tokens(1)] + [tokens(9)] * 4)
    assert next(results).outputs[0].text == "a"
    if end == "close":
        results.close()
    else:
        with pytest.raises(ValueError, match="own"):
            list(engine.generate(prompts(), tokens(1)))
        results.close()
    assert engine.num_unfinished_requests == 0
    assert at_rest(core)
    assert texts(engine.generate([PROMPT], tokens(2))) == ["ab"]


@pytest.mark.parametrize(
    ("how", "raised", "why"),
    [("raise", EngineDeadError, "no memory"), ("exit", KeyboardInterrupt, "interrupted")],
)
def test_after_half_a_step_the_engine_is_gone(how: Any, raised: Any, why: str) -> None:
    core = Core(faults=[Fault(after_steps=2, how=how)])
    engine = open_scripted(core)
    results = engine.generate([PROMPT] * 3, [tokens(1), tokens(9), tokens(9)])
    assert next(results).outputs[0].text == "a"
    with pytest.raises(raised):
        next(results)
    assert core.closed
    with pytest.raises(EngineDeadError, match=why):
        list(engine.generate([PROMPT], tokens(1)))


def test_a_closed_engine_says_so() -> None:
    core = Core()
    engine = open_scripted(core)
    results = engine.generate([PROMPT] * 2, [tokens(1), tokens(5)])
    next(results)
    engine.close()
    engine.close()
    assert core.closed
    with pytest.raises(EngineDeadError, match="left"):
        next(results)
    assert engine.num_unfinished_requests == 0


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        ("a text", None, "prompts is 'a text'; allowed: an iterable of prompts"),
        ({"role": "user"}, None, "prompts is"),
        (5, None, "prompts is 5"),
        ([PROMPT], 5, "params is 5"),
        ([PROMPT] * 3, [tokens(1)] * 2, "params has 2 entries, prompts 3"),
    ],
)
def test_a_wrong_call_raises_at_once(prompts: Any, params: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        open_scripted(Core()).generate(prompts, params)


@pytest.mark.parametrize(("num_prompts", "ended"), [(3, "prompts"), (5, "params")])
def test_iterables_of_different_length_raise_where_the_shorter_ends(
    num_prompts: int, ended: str
) -> None:
    core = Core(max_num_seqs=1)
    params = (tokens(1) for _ in range(min(num_prompts + 1, 4)))
    results = open_scripted(core).generate((PROMPT for _ in range(num_prompts)), params)
    with pytest.raises(InvalidRequestError, match=f"{ended} ended after"):
        list(results)
    assert at_rest(core)


def test_an_unknown_model_raises_at_once() -> None:
    with pytest.raises(ModelStoreError, match="no model 'nowhere'"):
        generate("nowhere", [])


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    """What ``open_engine`` loaded, in place of the model's."""
    loaded: list[Core] = []

    def load(*_: object) -> Core:
        loaded.append(Core())
        return loaded[-1]

    monkeypatch.setattr(trioleg.offline, "_load_core", load)
    return loaded


def test_an_open_engine_serves_one_call_after_another(smollm2: Path, cores: list[Core]) -> None:
    with open_engine(smollm2) as engine:
        for _ in range(2):
            (output,) = engine.generate([PROMPT], tokens(3))
            assert output.outputs[0].token_ids == ABC
        (core,) = cores
        assert not core.closed
    assert core.closed


@pytest.mark.parametrize("how_many", [1, 2])
def test_generate_loads_at_the_first_result_and_closes(
    smollm2: Path, cores: list[Core], how_many: int
) -> None:
    results = generate(smollm2, [PROMPT] * 2, [tokens(1), tokens(5)])
    assert cores == []
    assert len(list(itertools.islice(results, how_many))) == how_many
    results.close()
    assert cores[0].closed


def test_nothing_heavy_is_loaded_before_a_model() -> None:
    code = (
        "import sys, trioleg; trioleg.offline.generate\n"
        "print(*{'trio', 'zmq', 'torch', 'numpy', 'quart'} & set(sys.modules), sep=':')"
    )
    with running(sys.executable, "-c", code) as program:
        assert program.wait() == 0, program.said()
    assert program.stdout == "\n"


# ---------------------------------------------------------------------------- the real model

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]
SMALL_MARGIN = 0.02


@pytest.fixture(scope="module")
def real_core(smollm2: Path) -> EngineCore:
    return EngineCore.load(smollm2, EngineConfig(dtype="float32", device="cpu", max_num_seqs=3))


@pytest.fixture
def real(real_core: EngineCore, smollm2: Path) -> OfflineEngine:
    return OfflineEngine(real_core, Tokenizer.from_directory(smollm2), LLMConfig())


def test_the_real_model_gives_the_recorded_answers(real: OfflineEngine) -> None:
    """Text, token ids and messages as prompts, more of them than run at once, bad ones between."""
    params: list[SamplingParams] = []
    prompts: list[Any] = []
    for number, case in enumerate(GOLDEN):
        messages = [{"role": "user", "content": case["user"]}]
        prompts += [messages if number % 2 else case["prompt_token_ids"], [-1]]
        params += [tokens(len(case["greedy_token_ids"])), tokens(1)]
    outputs = list(real.generate(iter(prompts), iter(params)))
    assert len(outputs) == 2 * len(GOLDEN)
    for case, output, bad in zip(GOLDEN, outputs[::2], outputs[1::2], strict=True):
        assert "token id -1" in str(bad.error)
        check(case, output.outputs[0].token_ids)
        if output.outputs[0].token_ids == case["greedy_token_ids"]:
            assert output.outputs[0].text == case["text"]


def check(case: dict[str, Any], token_ids: list[int]) -> None:
    """As recorded, up to a step at which two tokens were about as probable."""
    for step, (ours, right) in enumerate(zip(token_ids, case["greedy_token_ids"], strict=False)):
        if ours != right:
            assert case["margin_per_step"][step] < SMALL_MARGIN, f"{case['user']!r}, step {step}"
            return
    assert len(token_ids) == len(case["greedy_token_ids"])


def test_after_a_stop_string_and_an_early_close_the_real_cache_is_free(
    real: OfflineEngine, real_core: EngineCore
) -> None:
    sea = [{"role": "user", "content": GOLDEN[1]["user"]}]
    params = [tokens(30, stop=["sea"]), tokens(500, ignore_eos=True), tokens(500, ignore_eos=True)]
    results = real.generate([sea, "Once", "Twice"], params)
    first = next(results).outputs[0]
    assert first.text == GOLDEN[1]["text"].partition("sea")[0]
    assert (first.finish_reason, first.stop_reason) == ("stop", "sea")
    (message,) = real_core.step().values()
    assert message.scheduler_stats.num_running_reqs == 2
    results.close()
    (message,) = real_core.step().values()
    assert message.outputs == []
    assert message.scheduler_stats.num_running_reqs == 0
    assert message.scheduler_stats.kv_cache_usage == 0
    assert real_core.wait_s() is None
