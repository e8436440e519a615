"""The scripted core, on a clock of the test's own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from engine_harness import make_request
from wire_arrays import read_array, read_rows

from trioleg.engine.scripted import Fault, Script, ScriptedCore, load_script, start_scripted_core
from trioleg.errors import InvalidRequestError
from trioleg.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EnginePoolingParams,
    FinishReason,
)


class Bench:
    """A core with its clock and the faults that struck."""

    def __init__(self, **script: object) -> None:
        self.now = 100.0
        self.faults: list[str] = []
        self.core = ScriptedCore(
            Script(**({"token_ids": [1, 2, 3]} | script)),  # type: ignore[arg-type]
            clock=lambda: self.now,
            on_fault=self.faults.append,
        )

    def add(self, request_id: str, **params: object) -> None:
        self.core.add_request(make_request(request_id, **params))

    def step(self) -> EngineCoreOutputs:
        assert self.core.wait_s() == 0.0
        return self.core.step()[0]

    def run(self, request_id: str) -> list[EngineCoreOutput]:
        """The outputs of a request, to its end."""
        outputs: list[EngineCoreOutput] = []
        while not outputs or outputs[-1].finish_reason is None:
            outputs += [o for o in self.step().outputs if o.request_id == request_id]
        return outputs


def test_ids_go_round_until_max_tokens() -> None:
    bench = Bench(tokens_per_step=2)
    bench.add("r", max_tokens=5)
    outputs = bench.run("r")
    assert [output.new_token_ids for output in outputs] == [[1, 2], [3, 1], [2]]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert bench.core.wait_s() is None


@pytest.mark.parametrize(("finish", "reason"), [("stop", 0), ("length", 1)])
def test_exact_steps_and_how_they_end(finish: str, reason: int) -> None:
    bench = Bench(token_ids=[], steps=[[7], [], [8, 9]], finish=finish)
    bench.add("r", max_tokens=100)
    outputs = bench.run("r")
    assert [output.new_token_ids for output in outputs] == [[7], [], [8, 9]]
    assert outputs[-1].finish_reason == reason


def test_silences_behind_a_requests_own_steps() -> None:
    """They hold up that request alone."""
    bench = Bench(token_ids=[], steps=[[7], [8], [9]], delays_s={2: 30.0})
    bench.add("early")
    assert [one.request_id for one in bench.step().outputs] == ["early"]
    bench.add("late")
    assert [one.request_id for one in bench.step().outputs] == ["early", "late"]
    assert [one.request_id for one in bench.step().outputs] == ["late"]
    assert bench.core.wait_s() == 30.0
    bench.now += 30
    assert [one.finish_reason for one in bench.step().outputs] == [FinishReason.STOP] * 2


def test_a_script_for_each_request() -> None:
    """Its faults count the request's own steps."""
    faults: list[str] = []
    scripts = {
        "bad": Script(steps=[[4], [5]], faults=[Fault(after_steps=1, how="bad_token_id")]),
        "last": Script(steps=[[6], [7], [8]], faults=[Fault(after_steps=2, how="raise")]),
    }

    class Chooser(ScriptedCore):
        def script_for(self, request: EngineCoreRequest) -> Script:
            return scripts[request.request_id]

    core = Chooser(Script(token_ids=[1]), on_fault=faults.append)
    for request_id in scripts:
        core.add_request(make_request(request_id))
    said = [[one.new_token_ids for one in core.step()[0].outputs] for _ in range(2)]
    assert (said, faults) == ([[[4], [6]], [[-1], [7]]], [])
    assert [one.new_token_ids for one in core.step()[0].outputs] == [[8]]
    assert faults == ["raise"]


def test_constraints_are_refused_unless_the_script_takes_them() -> None:
    constraint = {"structured_outputs": {"regex": "a"}}
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        Bench().add("r", **constraint)
    bench = Bench(takes_constraints=True)
    bench.add("r", **constraint)
    assert len(bench.run("r")) == 5


def test_a_requests_own_stop_ids() -> None:
    bench = Bench(tokens_per_step=10)
    bench.add("stop", stop_token_ids=[2])
    bench.add("eos", eos_token_id=3)
    bench.add("ignored", eos_token_id=3, ignore_eos=True)
    bench.add("later", stop_token_ids=[2], min_tokens=4)
    by_id = {output.request_id: output for output in bench.step().outputs}
    assert (by_id["stop"].new_token_ids, by_id["stop"].stop_reason) == ([1, 2], 2)
    assert by_id["stop"].finish_reason is FinishReason.STOP
    assert (by_id["eos"].new_token_ids, by_id["eos"].stop_reason) == ([1, 2, 3], None)
    assert by_id["ignored"].finish_reason is FinishReason.LENGTH
    assert by_id["later"].new_token_ids == [1, 2, 3, 1, 2]


def test_the_first_token_says_what_the_prompt_cost() -> None:
    bench = Bench()
    bench.add("r", prompt=[5] * 7)
    first, second, *_ = bench.run("r")
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_prompt_tokens == 7
    assert [event.type for event in first.events or []] == [1, 2]
    assert (second.prefill_stats, second.events) == (None, None)


def test_steps_keep_their_interval_and_the_first_token_its_delay() -> None:
    bench = Bench(step_interval_s=0.5, first_token_delay_s=2.0, prefill_chunks=1)
    bench.add("r")
    assert bench.core.wait_s() == 2.0
    bench.now += 2.0
    prefill = bench.step()
    assert prefill.outputs == []
    assert prefill.scheduler_stats is not None
    assert bench.core.wait_s() == pytest.approx(0.5)
    bench.now += 0.6
    assert bench.step().outputs[0].new_token_ids == [1]
    assert bench.core.wait_s() == pytest.approx(0.4)


def test_a_crowd_waits_its_turn_and_blocks_come_back() -> None:
    bench = Bench(max_num_seqs=2, num_gpu_blocks=10, block_size=4)
    for name in "abc":
        bench.add(name, max_tokens=5)
    stats = bench.step().scheduler_stats
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (2, 1, 0.4)
    bench.core.abort_requests(["c", "a", "unknown"])
    stats = bench.step().scheduler_stats
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 0)
    assert stats.kv_cache_usage == pytest.approx(0.2)
    bench.core.abort_client(1)
    bench.core.abort_client(0)
    stats = bench.step().scheduler_stats
    assert stats is not None
    assert stats.kv_cache_usage == 0.0
    assert bench.core.wait_s() is None


def test_a_request_that_does_not_fit_now_holds_up_those_behind_it() -> None:
    bench = Bench(num_gpu_blocks=4, block_size=4, max_model_len=16)
    bench.add("half", max_tokens=5)
    bench.add("all", max_tokens=13)
    bench.add("small", max_tokens=1)
    assert [output.request_id for output in bench.step().outputs] == ["half"]


def test_finish_all_reports_abort_for_everybody() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("running")
    bench.step()
    bench.add("waiting", client_index=1)
    bench.core.finish_all()
    by_client = bench.core.step()
    outputs = [output for client in by_client.values() for output in client.outputs]
    assert {output.request_id: output.finish_reason for output in outputs} == {
        "running": FinishReason.ABORT,
        "waiting": FinishReason.ABORT,
    }
    assert by_client[1].outputs[0].request_id == "waiting"
    # Statistics go out once a step, to one client.
    assert [client.scheduler_stats is None for client in by_client.values()] == [False, True]
    assert bench.core.wait_s() is None


def test_faults_strike_at_their_step() -> None:
    bench = Bench(
        faults=[
            Fault(after_steps=2, how="raise"),
            Fault(after_steps=1, how="bad_token_id", request=1, token_id=2**40),
        ]
    )
    bench.add("a")
    bench.add("b")
    assert [output.new_token_ids for output in bench.step().outputs] == [[1], [1]]
    assert [output.new_token_ids for output in bench.step().outputs] == [[2], [2**40]]
    assert bench.faults == []
    assert [output.new_token_ids for output in bench.step().outputs] == [[3], [3]]
    assert bench.faults == ["raise"]


def test_an_error_ends_one_request() -> None:
    bench = Bench(faults=[Fault(after_steps=1, how="error", request=1)])
    bench.add("a")
    bench.add("b")
    bench.step()
    _, failed = bench.step().outputs
    assert (failed.request_id, failed.finish_reason) == ("b", FinishReason.ERROR)
    assert failed.stop_reason == "the script says that this request fails"
    assert [output.request_id for output in bench.step().outputs] == ["a"]
    assert bench.faults == []


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": [1] * 2048}, "prompt_token_ids"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_it_cannot_serve_is_named(params: dict[str, object], parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Bench().add("r", **params)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "one of token_ids and steps"),
        ('{"token_ids": [1], "steps": [[1]]}', "not both"),
        ('{"token_ids": [1], "speed": 3}', "unknown field `speed`"),
        ('{"token_ids": [1], "step_interval_s": -1}', "step_interval_s is -1"),
        ('{"token_ids": [1], "faults": [{"after_steps": 1, "how": "melt"}]}', "melt"),
        ('{"token_ids": ["a"]}', "Expected `int`"),
        ('{"token_ids": [1], "odd_logprobs": {"1": "odd"}}', "odd"),
        ("{", "truncated"),
    ],
)
def test_a_bad_script_names_the_file_and_the_field(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        load_script(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        load_script(tmp_path / "none.json")


def test_a_script_is_read_and_started(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"token_ids": [4], "max_model_len": 64, "block_size": 8, "max_num_seqs": 2}')
    ready = start_scripted_core(load_script(path)).ready
    assert (ready.max_model_len, ready.block_size, ready.num_gpu_blocks) == (64, 8, 16)
    with pytest.raises(RuntimeError, match="broken"):
        start_scripted_core(Script(token_ids=[1], load_error="broken"))


def test_logprobs_are_made_of_the_ids() -> None:
    bench = Bench(token_ids=[7, 0, 2], tokens_per_step=2)
    bench.add("r", max_tokens=3, logprobs=3)
    first, last = bench.run("r")
    assert read_rows(first.new_logprobs) == [
        ([7, 6, 7, 5], [-2.0, -1.0, -2.0, -3.0], 2),
        ([0, 0, 1, 2], [-1.0, -1.0, -2.0, -3.0], 1),
    ]
    assert read_rows(last.new_logprobs) == [([2, 1, 0, 2], [-3.0, -1.0, -2.0, -3.0], 3)]


def test_prompt_logprobs_come_once_with_the_first_token() -> None:
    bench = Bench(token_ids=[], steps=[[], [4], [5]])
    bench.add("r", prompt=[9, 8, 7], prompt_logprobs=0)
    bench.add("one", prompt=[9], prompt_logprobs=4, logprobs=0)
    bench.add("silent")
    by_step = [{o.request_id: o for o in bench.step().outputs} for _ in range(3)]
    prompts = [step["r"].new_prompt_logprobs_tensors for step in by_step]
    assert [one is None for one in prompts] == [True, False, True]
    assert read_rows(prompts[1]) == [([8], [-3.0], 3), ([7], [-2.0], 2)]
    assert by_step[1]["one"].new_prompt_logprobs_tensors.logprobs.shape == [0, 5]
    assert [step["one"].new_logprobs is None for step in by_step] == [True, False, False]
    assert [step["r"].new_logprobs for step in by_step] == [None] * 3
    assert [step["silent"].new_prompt_logprobs_tensors for step in by_step] == [None] * 3


def test_odd_logprobs() -> None:
    bench = Bench(token_ids=[7, 3], odd_logprobs={7: "nan", 6: "-inf", 3: "inf"})
    bench.add("r", max_tokens=2, logprobs=2)
    first, last = (read_rows(output.new_logprobs)[0] for output in bench.run("r"))
    assert first[0] == [7, 6, 7]
    assert math.isnan(first[1][0])
    assert first[1][1] == -math.inf
    assert math.isnan(first[1][2])
    assert last == ([3, 3, 2], [math.inf, math.inf, -2.0], 1)


@pytest.mark.parametrize("token_id", [2**40, -(2**40), -1])
def test_an_absurd_token_has_logprobs_all_the_same(token_id: int) -> None:
    bench = Bench(faults=[Fault(after_steps=0, how="bad_token_id", token_id=token_id)])
    bench.add("r", max_tokens=1, logprobs=20)
    (output,) = bench.run("r")
    assert output.new_token_ids == [token_id]
    assert len(read_rows(output.new_logprobs)[0][0]) == 21


def add_pooling(bench: Bench, request_id: str, prompt: list[int], **params: object) -> None:
    request = make_request(request_id, prompt=prompt)
    request.sampling_params = None
    request.pooling_params = EnginePoolingParams(**({"task": "embed"} | params))  # type: ignore[arg-type]
    bench.core.add_request(request)


def test_a_pooling_request_has_one_output() -> None:
    bench = Bench(pooling=[0.5, -1.0, 2.0], max_model_len=16, prefill_chunks=1)
    assert bench.core.call_utility("get_supported_tasks", []) == ["generate", "embed"]
    add_pooling(bench, "whole", [5] * 16)
    add_pooling(bench, "short", [5], dimensions=2, use_activation=False)
    bench.add("text", max_tokens=1)
    assert bench.step().outputs == []
    message = bench.step()
    by_id = {output.request_id: output for output in message.outputs}
    whole = by_id["whole"]
    assert (whole.new_token_ids, whole.finish_reason) == ([], FinishReason.STOP)
    assert whole.pooling_output.dtype == "float32"
    assert read_array(whole.pooling_output) == [0.5, -1.0, 2.0]
    assert read_array(by_id["short"].pooling_output) == [0.5, -1.0]
    assert whole.prefill_stats is not None
    assert whole.prefill_stats.num_prompt_tokens == 16
    assert (by_id["text"].new_token_ids, by_id["text"].pooling_output) == ([1], None)
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.kv_cache_usage == 0.0
    assert bench.core.wait_s() is None


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"prompt": [5] * 17}, "prompt_token_ids"),
        ({"task": "classify"}, "task"),
        ({"dimensions": 3}, "dimensions"),
    ],
)
def test_a_pooling_request_that_cannot_be_served(params: dict[str, object], parameter: str) -> None:
    bench = Bench(pooling=[0.5, 1.0], max_model_len=16)
    with pytest.raises(InvalidRequestError) as caught:
        add_pooling(bench, "r", **({"prompt": [5]} | params))  # type: ignore[arg-type]
    assert caught.value.parameter == parameter


def test_without_a_vector_no_pooling() -> None:
    bench = Bench()
    assert bench.core.call_utility("get_supported_tasks", []) == ["generate"]
    with pytest.raises(InvalidRequestError, match=r"pooling_params is .*; allowed: None"):
        add_pooling(bench, "r", [5])
    both = make_request("both")
    both.pooling_params = EnginePoolingParams(task="embed")
    with pytest.raises(InvalidRequestError, match="one of sampling_params and pooling_params"):
        bench.core.add_request(both)
