"""The lives of tasks, from a little recording to a picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from compare_outcomes import made_study

from trioleg.compare.timeline import Event, choose_lanes, read_lanes
from trioleg.compare.timeline_plot import draw_timeline, write_timelines
from trioleg.errors import TriolegError

# Number, name, parent.
_SERVER, _CONNECTION, _STREAM, _IDLE = (
    (1, "serve", None),
    (2, "connection", 1),
    (3, "stream", 2),
    (4, "idle", 1),
)


def _event(at: float, task: tuple, event: str, detail: str = "") -> Event:
    number, name, parent = task
    return Event(at, number, name, parent, event, detail)  # type: ignore[arg-type]


RECORDED = [
    _event(99.0, _SERVER, "spawned"),
    _event(99.0, _IDLE, "spawned"),
    _event(99.5, _IDLE, "ended"),  # before the picture
    _event(99.9, _CONNECTION, "spawned"),
    _event(99.9, _STREAM, "spawned"),
    _event(100.001, _CONNECTION, "resumed"),
    _event(100.001, _CONNECTION, "cancelled", "the client has left"),
    _event(100.0015, _CONNECTION, "parked"),
    _event(100.002, _STREAM, "resumed"),
    _event(100.002, _STREAM, "cancelled"),
    _event(100.003, _STREAM, "raised", "ValueError('x')"),
    _event(100.004, _CONNECTION, "ended"),
    _event(101.0, _SERVER, "cancelled", "the server's end, a second later"),
]


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({name: getattr(one, name) for name in Event.__struct_fields__})
        for one in RECORDED
    ]
    path.write_text("\n".join(lines) + "\n")


def test_lanes_stand_by_birth_below_their_parents() -> None:
    timeline = choose_lanes(RECORDED, 100.0)
    assert [(one.name, one.depth) for one in timeline.lanes] == [("connection", 0), ("stream", 1)]
    stream = timeline.lanes[1]
    assert stream.end == pytest.approx(0.003)
    assert stream.runs == [(pytest.approx(0.002), pytest.approx(0.003))]


def test_the_picture_ends_when_the_marks_have_come_to_rest() -> None:
    timeline = choose_lanes(RECORDED, 100.0)
    assert timeline.begin < 0
    assert 0.004 < timeline.end < 0.01
    assert [one.event for one in timeline.marks] == ["cancelled", "cancelled", "raised", "ended"]


def test_a_cancel_travels_from_parent_to_child_in_the_order_of_delivery() -> None:
    [(source, target)] = choose_lanes(RECORDED, 100.0).travels
    assert (source.row, source.detail) == (0, "the client has left")
    assert (target.row, target.at) == (1, pytest.approx(0.002))


def test_without_a_cause_the_first_mark_is_0() -> None:
    assert choose_lanes(RECORDED, None).marks[0].at == 0


def test_more_tasks_than_there_is_room_for_are_counted() -> None:
    events = [_event(100.0, (number, "task", None), "resumed") for number in range(1, 50)]
    events.append(_event(100.001, (50, "marked", None), "ended"))
    timeline = choose_lanes(events, 100.0)
    assert len(timeline.lanes) + timeline.left_out == 50
    assert timeline.lanes[-1].name == "marked"


def test_the_picture_is_the_same_for_the_same_events_and_small(tmp_path: Path) -> None:
    for name in ("one", "two"):
        draw_timeline(choose_lanes(RECORDED, 100.0), "A title", tmp_path / f"{name}.svg")
    picture = (tmp_path / "one.svg").read_bytes()
    assert picture == (tmp_path / "two.svg").read_bytes()
    assert len(picture) < 60_000
    said = "".join(ElementTree.fromstring(picture).itertext())
    for word in ("A title", "connection", "stream", "ValueError('x')", "a cancel is delivered"):
        assert word in said
    assert "idle" not in said


def test_each_recording_becomes_a_picture_and_one_that_is_lost_is_told(tmp_path: Path) -> None:
    study = made_study()
    [recording] = study.recordings
    [fault] = write_timelines(study, [tmp_path], tmp_path)
    assert "leaves-trioleg.jsonl holds no lives of tasks" in fault
    _write(tmp_path / recording.lanes)
    assert write_timelines(study, [tmp_path], tmp_path) == []
    assert (tmp_path / "timelines/leaves-trioleg.svg").exists()


@pytest.mark.parametrize("content", ["", "{", '{"at": 1}', "[]"])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(TriolegError, match=r"x\.jsonl holds no lives of tasks"):
        read_lanes(path)
