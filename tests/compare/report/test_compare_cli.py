"""``trioleg compare`` from end to end, small, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
from click.testing import CliRunner, Result
from compare_outcomes import made_study

from trioleg import cli
from trioleg.bench.client import CHAT, ask, chat_body, is_healthy
from trioleg.bench.leg_control import open_remote
from trioleg.bench.leg_subjects import free_port
from trioleg.bench.processes import until
from trioleg.cli.compare import _LEGS
from trioleg.compare.legs import LEGS, READY_S, Case, started
from trioleg.compare.outcome import Outcome
from trioleg.compare.puppet import Puppet
from trioleg.compare.runner import AskedStudy, play_once
from trioleg.compare.scenario import SCENARIOS, Scenario, Scene
from trioleg.compare.study import Recording, load, write_json
from trioleg.errors import TriolegError


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands, ["compare", *arguments])


async def _answers(scene: Scene) -> None:
    """A throw-away scenario: a stream of two tokens comes whole; every second run fails."""
    if scene.outcome.run == 2:
        raise TriolegError("every second run fails")
    body = chat_body(stream=True, max_tokens=2)
    port = free_port()
    async with started(scene.leg, scene.case(), port) as (_, folder):
        assert await until(partial(is_healthy, port), READY_S, every=0.02)
        async with open_remote(folder / "engine") as remote, ask(port, CHAT, body) as exchange:
            await Puppet(remote).wait_requests(1)
            await Puppet(remote).say(steps=2, finish="length")
            await exchange.receive_all()
    scene.outcome.client = str(exchange.status)
    scene.outcome.figures["bytes"] = len(exchange.body)


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    one = Scenario("answers", "Tried", "Does it answer?", _answers)
    monkeypatch.setitem(SCENARIOS, one.name, one)
    return one


@pytest.mark.usefixtures("scenario", "smollm2")
def test_a_study_is_played_kept_and_shown_again(tmp_path: Path) -> None:
    arguments = ("--only", "answers", "--legs", "trioleg", "--out", str(tmp_path))
    played = _invoke(*arguments, "--runs", "2")
    assert isinstance(played.exception, TriolegError)
    assert "runs that failed: answers against trioleg, run 2: TriolegError: every second" in str(
        played.exception
    )
    assert "1 of 2: answers, trioleg, run 1" in played.stderr
    study = load(tmp_path / "study.json")
    [outcome] = study.outcomes
    assert outcome.client == "200"
    assert "! failed (1 of 2 runs)" in (tmp_path / "results.md").read_text()
    study.failed.clear()
    write_json(study, tmp_path / "whole.json")
    shown = _invoke("--from", str(tmp_path / "whole.json"), "--out", str(tmp_path / "again"))
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "again/results.md").exists()
    assert "answers" in shown.stdout


@pytest.mark.usefixtures("smollm2")
def test_a_recording_is_a_run_that_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(scene: Scene) -> None:
        scene.outcome.cause_at = 5.0
        if (lanes := scene.case().lanes) is not None:
            event = {"at": 5.0, "task": 1, "name": "a", "parent": None, "event": "cancelled"}
            await trio.Path(lanes).write_text(json.dumps(event) + "\n")

    monkeypatch.setitem(SCENARIOS, "r", Scenario("r", "g", "?", play, has_lanes=True))
    arguments = ("--only", "r", "--legs", "trioleg", "--runs", "2", "--out", str(tmp_path))
    played = _invoke(*arguments)
    assert played.exit_code == 0, played.output
    study = load(tmp_path / "study.json")
    assert [one.run for one in study.outcomes] == [1, 2]
    assert study.recordings == [Recording("r", "trioleg", 5.0)]
    assert (tmp_path / "timelines/r-trioleg.svg").exists()
    assert "timelines/r-trioleg.svg" in (tmp_path / "results.md").read_text()


async def test_a_run_that_does_not_end_is_ended(autojump_clock: trio.abc.Clock) -> None:
    async def play(_: Scene) -> None:
        await trio.sleep_forever()

    scenario = Scenario("s", "g", "?", play, seconds=1.0)
    scene = Scene(Outcome("s", "trioleg", 1), Case(Path(), ()), 0)
    _, error = await play_once(scenario, scene)
    assert error == "it was not over within 310 s"


@pytest.mark.usefixtures("scenario")
def test_the_list_names_the_scenarios() -> None:
    assert "answers  (Tried)\n    Does it answer?" in _invoke("--list").stdout


def test_an_earlier_study_is_shown_in_part_and_as_json(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    study = made_study()
    study.failed.clear()
    write_json(study, path)
    shown = _invoke("--from", str(path), "--json", "--only", "leaves", "--legs", "trioleg,vllm")
    told = msgspec.json.decode(shown.stdout)
    assert told["settings"]["legs"] == ["trioleg", "vllm"]
    assert {one["scenario"] for one in told["outcomes"]} == {"leaves"}
    assert "Worse: trioleg" in _invoke("--from", str(path), "--details").stdout


def test_sources_alone() -> None:
    [first, *_] = msgspec.json.decode(_invoke("--sources", "--legs", "trioleg", "--json").stdout)
    assert first["leg"] == "trioleg"
    assert first["counts"]["lines"] > 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--only", "nothing", "--legs", "trioleg"], "--only is 'nothing'; allowed: "),
        (["--legs", "trioleg,quart"], "--legs is 'quart'; allowed: trioleg, asyncio, taskgroup"),
        (["--legs", ","], "--legs is ''; allowed: trioleg, asyncio, taskgroup"),
        (["--legs", "vllm"], "--legs is vllm, but --vllm-python is not given; allowed: an"),
        (["--legs", "trioleg", "--vllm-python", "x"], "--vllm-python is for --legs vllm"),
        (["--sources", "--vllm-python", "/nowhere"], "--vllm-python is '/nowhere', but it cannot"),
        (["--from", "/nowhere"], "--from is '/nowhere', but it cannot be read"),
        (["--from", "x", "--runs", "2"], "--runs is for a study that is played"),
        (["--from", "x", "--vllm-python", "y"], "--vllm-python is for a study that is played"),
        (["--list", "--sources"], "--list and --sources exclude each other"),
        (["--runs", "0"], "0 is not in the range x>=1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], why: str) -> None:
    result = _invoke(*arguments)
    assert result.exit_code
    assert why in f"{result.output} {result.exception}"


def test_another_leg_than_the_study_has_is_refused(tmp_path: Path) -> None:
    write_json(made_study(), tmp_path / "s.json")
    result = _invoke("--from", str(tmp_path / "s.json"), "--legs", "taskgroup")
    assert "--legs is 'taskgroup'; allowed: trioleg, asyncio, vllm" in str(result.exception)


def test_the_order_is_the_seeds_and_everybody_has_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Scenario("a", "g", "?", _answers)
    for name in list(SCENARIOS):
        monkeypatch.delitem(SCENARIOS, name)
    for name in "abcdef":
        monkeypatch.setitem(
            SCENARIOS, name, replace(one, name=name, legs=LEGS[: 1 + (name != "f")])
        )
    asked = AskedStudy(LEGS[:2], runs=2, seed=1)
    turns = [(scenario.name, leg, run) for scenario, leg, run in asked.turns()]
    assert turns == [(one.name, leg, run) for one, leg, run in asked.turns()]
    assert len(turns) == len(set(turns)) == 2 * (5 * 2 + 1)
    assert [run for *_, run in turns] == [1] * 11 + [2] * 11
    assert turns != [(a.name, b, c) for a, b, c in replace(asked, seed=2).turns()]


def test_the_command_line_knows_the_legs() -> None:
    assert _LEGS == LEGS


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from trioleg import cli; cli.commands(['compare', '--help'], standalone_mode=False); "
        "print([name for name in ('trio', 'rich', 'zmq', 'quart', 'matplotlib') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.stdout.splitlines()[-1] == "[]", told.stderr
