"""The busy loop's pace: it goes on while it can, and waits a moment where nobody keeps up."""

from __future__ import annotations

from engine_harness import make_request

from trioleg.engine.busy_loop import BusyLoop
from trioleg.engine.scripted import Script, ScriptedCore
from trioleg.messages import EngineCoreOutputs


def test_it_pauses_after_each_step_where_its_clients_are_behind() -> None:
    made: list[EngineCoreOutputs] = []
    steps_at_pauses: list[int] = []

    def pause_s() -> float:
        steps_at_pauses.append(len(made))
        if len(made) == 5:
            loop.stop()
        return 0.001

    core = ScriptedCore(Script(token_ids=[1], step_interval_s=0.0))
    loop = BusyLoop(core, lambda _, outputs: made.append(outputs), engine_index=0, pause_s=pause_s)
    loop.add(make_request("a", max_tokens=1000))
    loop.run()
    # Each step was followed by one pause.
    assert steps_at_pauses == [1, 2, 3, 4, 5]
