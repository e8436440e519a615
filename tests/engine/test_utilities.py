"""Calls by name: what they do to requests, memory and time, and what is refused."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import make_core, only, run_to_the_end, wire_request

from trioleg.config import EngineConfig
from trioleg.engine.core import EngineCore
from trioleg.engine.model import CausalLM
from trioleg.errors import WireError
from trioleg.messages import FinishReason

PROMPT = [1, 2, 3] * 12


@pytest.fixture
def loaded(tiny_dir: Path) -> EngineCore:
    """A core that can load its model again."""
    config = EngineConfig(device="cpu", dtype="float32", num_gpu_blocks_override=32, max_num_seqs=4)
    return EngineCore.load(tiny_dir, config)


def tokens_of(core: EngineCore, request_id: str = "r") -> list[int]:
    core.add_request(wire_request(request_id, PROMPT))
    return run_to_the_end(core)[request_id].token_ids


@pytest.mark.parametrize(
    ("method", "args", "answer"),
    [
        ("get_supported_tasks", [], ["generate"]),
        ("get_weight_version", [], "default"),
        ("is_sleeping", [], False),
        ("is_scheduler_paused", [], False),
        ("reset_mm_cache", [], None),
        ("reset_encoder_cache", [], None),
        ("reset_prefix_cache", [False, False], True),
        ("list_loras", [], []),
        ("list_requests", [], []),
        ("get_request_counts", [], [0, 0]),
        ("get_num_unfinished_requests", [], 0),
        (
            "get_kv_cache_group_metadata",
            [],
            [{"group_idx": 0, "block_size": 16, "num_blocks": 64}],
        ),
    ],
)
def test_at_rest(core: EngineCore, method: str, args: list[Any], answer: Any) -> None:
    assert core.call_utility(method, args) == answer


@pytest.mark.parametrize("method", ["close", "step", "__init__", "call", "_pause", ""])
def test_no_other_method_is_reached_by_name(core: EngineCore, method: str) -> None:
    with pytest.raises(WireError, match=r"is unknown; known: .*get_supported_tasks"):
        core.call_utility(method, [])


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("is_sleeping", [1], r"'is_sleeping' got \[1\]; allowed: \(\)"),
        ("sleep", [1, "abort", 3], "'sleep' got"),
        ("sleep", [3], "level is 3; allowed: 0, 1, 2"),
        ("sleep", [True], "level is True"),
        ("sleep", [[]], r"level is \[\]"),
        ("sleep", [1, "later"], "mode is 'later'; allowed: abort, wait, keep"),
        ("pause_scheduler", [None], "mode is None"),
        ("pause_scheduler", ["abort", 1], "clear_cache is 1; allowed: true or false"),
        ("reset_prefix_cache", ["yes"], "reset_running_requests is 'yes'"),
        ("wake_up", ["weights"], "tags is 'weights'; allowed: a list of"),
        ("wake_up", [["sun"]], "tags is 'sun'; allowed: weights, kv_cache, scheduling"),
        ("profile", [1], "is_start is 1"),
        ("profile", [True], "profiling is off; the engine's option --torch-profiler-dir"),
        ("sleep", [2], "cannot load its weights again; allowed: level 0 or 1"),
    ],
)
def test_what_is_refused_changes_nothing(
    core: EngineCore, method: str, args: list[Any], message: str
) -> None:
    before = tokens_of(core)
    with pytest.raises(WireError, match=message):
        core.call_utility(method, args)
    assert core.call_utility("is_sleeping", []) is False
    assert tokens_of(core) == before


def test_live_requests_are_listed(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model, max_num_seqs=1)
    core.add_request(wire_request("a", PROMPT, client_index=3))
    core.add_request(wire_request("b", [1, 2]))
    core.step()
    assert core.call_utility("get_request_counts", []) == [1, 1]
    assert core.call_utility("get_num_unfinished_requests", []) == 2
    first, second = core.call_utility("list_requests", [])
    assert first == {
        "request_id": "a",
        "client_index": 3,
        "status": "running",
        "priority": 0,
        "num_prompt_tokens": 36,
        "num_output_tokens": 1,
        "num_computed_tokens": 36,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
    }
    assert (second["request_id"], second["status"]) == ("b", "waiting")


def test_a_pause_that_aborts(core: EngineCore) -> None:
    core.add_request(wire_request("a", PROMPT))
    core.step()
    core.add_request(wire_request("b", PROMPT))
    assert core.call_utility("pause_scheduler", []) is None
    assert {one.request_id: one.finish_reason for one in only(core.step()).outputs} == {
        "a": FinishReason.ABORT,
        "b": FinishReason.ABORT,
    }
    core.add_request(wire_request("c", PROMPT))
    assert core.wait_s() is None, "it would spin"
    assert core.call_utility("is_scheduler_paused", []) is True
    core.call_utility("resume_scheduler", [])
    assert len(run_to_the_end(core)["c"].token_ids) == 8


def test_a_pause_that_waits_is_answered_when_nothing_runs_any_more(core: EngineCore) -> None:
    right = tokens_of(core)
    core.add_request(wire_request("a", PROMPT))
    core.step()
    answer = core.call_utility("pause_scheduler", ["wait"])
    assert isinstance(answer, Future)
    core.add_request(wire_request("b", PROMPT))
    assert not answer.done()
    rest = run_to_the_end(core)
    assert answer.result(0) is None
    assert set(rest) == {"a"}
    core.call_utility("resume_scheduler", [])
    assert run_to_the_end(core)["b"].token_ids == right


def test_a_pause_that_waits_lets_preempted_ones_finish(tiny_model: CausalLM) -> None:
    core = make_core(tiny_model, num_blocks=6)
    for name in "ab":
        core.add_request(wire_request(name, [*PROMPT[:20], ord(name) % 90], max_tokens=45))
    core.step()
    assert core.call_utility("get_request_counts", []) == [2, 0]
    answer = core.call_utility("pause_scheduler", ["wait"])
    core.add_request(wire_request("c", [1]))
    results = run_to_the_end(core)
    assert answer.result(0) is None
    assert {k: len(v.token_ids) for k, v in results.items()} == {"a": 44, "b": 44}


def test_resuming_early_ends_the_wait_with_an_error(core: EngineCore) -> None:
    core.add_request(wire_request("a", PROMPT))
    core.step()
    answer = core.call_utility("sleep", [1, "wait"])
    core.call_utility("resume_scheduler", [])
    assert isinstance(answer.exception(0), WireError)
    assert len(run_to_the_end(core)["a"].token_ids) == 7
    assert core._sleeper.memory_away == set()


@pytest.mark.parametrize("method", ["pause_scheduler", "sleep"])
def test_what_is_kept_goes_on_where_it_stood(core: EngineCore, method: str) -> None:
    right = tokens_of(core)
    core.add_request(wire_request("a", PROMPT))
    tokens = list(only(core.step()).outputs[0].new_token_ids)
    args = ["keep"] if method == "pause_scheduler" else [1, "keep"]
    assert core.call_utility(method, args) is None
    assert core.wait_s() is None
    assert core.step() == {}
    if method == "sleep":
        with pytest.raises(WireError, match="sleeps without its kv_cache; allowed: wake_up"):
            core.call_utility("resume_scheduler", [])
        assert core.call_utility("wake_up", []) is True
    else:
        core.call_utility("resume_scheduler", [])
    assert tokens + run_to_the_end(core)["a"].token_ids == right


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_and_wake(loaded: EngineCore, level: int) -> None:
    right = tokens_of(loaded)
    assert loaded.call_utility("sleep", [level]) is None
    assert loaded.call_utility("is_sleeping", []) is True
    assert hasattr(loaded._runner, "_cache") is (level == 0)
    assert hasattr(loaded._runner, "model") is (level < 2)
    loaded.add_request(wire_request("early", PROMPT))
    assert loaded.wait_s() is None
    assert loaded.call_utility("wake_up", []) is True
    assert loaded.call_utility("is_sleeping", []) is False
    assert run_to_the_end(loaded)["early"].token_ids == right


def test_waking_in_parts(loaded: EngineCore) -> None:
    right = tokens_of(loaded)
    loaded.call_utility("sleep", [2])
    assert loaded.call_utility("wake_up", [["kv_cache"]]) is False
    loaded.call_utility("sleep", [2])
    assert loaded.call_utility("wake_up", [["weights"]]) is False
    assert loaded.call_utility("wake_up", [["scheduling"]]) is False
    assert loaded.call_utility("is_sleeping", []) is True
    assert loaded.call_utility("wake_up", [["kv_cache"]]) is True
    assert tokens_of(loaded) == right


def test_weights_that_are_gone_leave_it_asleep(loaded: EngineCore, tiny_dir: Path) -> None:
    loaded.call_utility("sleep", [2])
    weights, away = tiny_dir / "model.safetensors", tiny_dir / "away"
    weights.rename(away)
    try:
        with pytest.raises(Exception, match="there is no such file"):
            loaded.call_utility("wake_up", [])
        assert loaded.call_utility("is_sleeping", []) is True
        loaded.abort_requests(["nobody"])
        assert loaded.wait_s() is None
    finally:
        away.rename(weights)
    assert loaded.call_utility("wake_up", []) is True


def test_a_sleeping_engine_ends_its_requests_when_it_is_told_to_leave(loaded: EngineCore) -> None:
    loaded.call_utility("sleep", [2])
    loaded.add_request(wire_request("a", PROMPT))
    loaded.finish_all()
    assert only(loaded.step()).outputs[0].finish_reason == FinishReason.ABORT
    loaded.close()


def test_a_profile_is_written(tiny_model: CausalLM, tmp_path: Path) -> None:
    core = make_core(tiny_model, torch_profiler_dir=tmp_path / "traces")
    with pytest.raises(WireError, match="the profiler is off"):
        core.call_utility("profile", [False])
    for bad in ("../x", "", "a/b", ".hidden", "x" * 65):
        with pytest.raises(WireError, match="profile_prefix is"):
            core.call_utility("profile", [True, bad])
    assert core.call_utility("profile", [True, "run"]) is None
    with pytest.raises(WireError, match="on already"):
        core.call_utility("profile", [True])
    tokens_of(core)
    path = Path(core.call_utility("profile", [False]))
    assert path.parent == tmp_path / "traces"
    assert path.name.startswith("run-")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert any("scaled_dot_product" in str(event.get("name")) for event in trace["traceEvents"])
