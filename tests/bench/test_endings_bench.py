"""``trioleg bench endings`` with one try: every figure is there, and no process is."""

from __future__ import annotations

import json
import signal

import pytest
from click.testing import CliRunner
from programs import END_S, TRIOLEG, alive, descendants, running, wait_until

from trioleg import cli
from trioleg.bench.endings import ENDINGS
from trioleg.bench.measurement import Measurement, percentile

FIGURES = {
    "disconnect": ["client leaves"] * 6,
    "kill-engine": ["engine SIGKILL", "joined engine SIGKILL"],
    "stop-engine": ["engine SIGSTOP"] * 2,
    "kill-front-end": ["front end SIGKILL"] * 2,
}


@pytest.mark.parametrize("only", FIGURES)
def test_every_figure_is_measured_and_no_process_is_left(smollm2, only: str) -> None:
    arguments = ("bench", "endings", "--tries", "1", "--json", "--only", only)
    with running(*TRIOLEG, *arguments) as program:
        code = program.wait(10 * END_S)
        wait_until(lambda: not descendants(program.process.pid))
    assert code == 0, program.said()
    figures = json.loads(program.stdout)
    assert len(figures) == len(FIGURES[only])
    for figure, beginning in zip(figures, FIGURES[only], strict=True):
        assert figure["what"].startswith(beginning)
        assert figure["missing"] == 0, figure
        assert 0 < figure["median_ms"] <= figure["p99_ms"] <= figure["worst_ms"]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_process_is_left_of_one_that_is_interrupted(smollm2, number, code) -> None:
    with running(*TRIOLEG, "bench", "endings", "--only", "kill-engine") as program:
        # The guardian, the server, its engine's guardian, the engine.
        wait_until(lambda: len(descendants(program.process.pid)) == 4)
        family = descendants(program.process.pid)
        program.process.send_signal(number)
        assert program.wait() == code
        wait_until(lambda: not any(map(alive, family)))
    assert "Traceback" not in program.stderr


def test_the_options_name_every_measurement() -> None:
    for name in ENDINGS:
        assert name in CliRunner().invoke(cli.commands, ["bench", "endings", "--help"]).output
    wrong = CliRunner().invoke(cli.commands, ["bench", "endings", "--only", "all"])
    assert wrong.exit_code == 2
    assert all(f"'{name}'" in wrong.output for name in ENDINGS)


def test_percentile_is_a_value_that_was_measured() -> None:
    assert percentile([3.0], 0.99) == 3.0
    hundred = [float(number) for number in range(100, 0, -1)]
    assert percentile(hundred, 0.5) == 50.0
    assert percentile(hundred, 0.99) == 99.0
    assert percentile([*hundred, 101.0], 0.99) == 100.0


def test_a_try_without_an_end_is_missing() -> None:
    one = Measurement("a → b", "1 s")
    one.note(None)
    assert one.summary()["median_ms"] is None
    one.note(0.25)
    assert (one.summary()["median_ms"], one.summary()["missing"]) == (250.0, 1)
