"""A GGUF file of one's own: converted once for each state that it is in, and found by its path."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from programs import TRIOLEG, running
from tiny_gguf import write_gguf

from trioleg.errors import ModelStoreError
from trioleg.model_store import build, is_missing, known_models, pull, resolve
from trioleg.model_store.gguf_file import find_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIOLEG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/gguf-1"


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    """The brackets are for whoever looks for files by a pattern."""
    file = tmp_path / "tiny[1].GGUF"
    write_gguf(file)
    return file


def _conversions(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_a_file_is_converted_once_and_found_by_any_path(file: Path, cache: Path) -> None:
    name = str(file)
    assert is_missing(name)
    with pytest.raises(ModelStoreError, match=r"not been converted yet.*trioleg pull .*tiny\[1\]"):
        resolve(name)
    stages: list[str] = []
    directory = pull(name, progress=lambda stage, *_: stages.append(stage))
    assert set(stages) == {"convert"}
    assert {path.name for path in directory.iterdir()} == set(build.CONVERTED_FILES)
    assert _conversions(cache) == [directory]
    assert not is_missing(name)
    link = file.with_name("link.gguf")
    link.symlink_to(file)
    # The name is for people; what counts is where the file is.
    assert resolve(name) == directory
    assert pull(name, progress=lambda *_: pytest.fail("nothing to do")) == directory
    assert resolve(str(link)) == directory
    assert str(file) not in [model.name for model in known_models()]


def test_a_file_that_changed_is_converted_again_and_leaves_nothing(file: Path, cache: Path) -> None:
    first = pull(str(file))
    write_gguf(file, tied=False)
    os.utime(file, ns=(0, 0))
    assert is_missing(str(file))
    with pytest.raises(ModelStoreError, match="as it is now"):
        resolve(str(file))
    second = pull(str(file))
    assert json.loads((second / "config.json").read_text())["tie_word_embeddings"] is False
    assert first != second
    assert _conversions(cache) == [second]


def test_a_file_that_cannot_be_converted_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelStoreError, match=r"bad\.gguf"):
        pull(str(file))
    assert _conversions(cache) == []


def test_what_a_killed_conversion_left_goes_though_the_file_has_changed(
    file: Path, cache: Path
) -> None:
    code = (
        "import os, signal, sys; from trioleg import model_store\n"
        "model_store.pull(sys.argv[1], progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    with running(sys.executable, "-c", code, str(file)) as program:
        assert program.wait() == -signal.SIGKILL
    (left,) = _conversions(cache)
    assert ".partial-" in left.name
    write_gguf(file, tied=False)
    assert _conversions(cache) == [left]
    assert [pull(str(file))] == _conversions(cache)


def test_one_lock_stays_whatever_fails(file: Path, cache: Path) -> None:
    for size in (4, 5, 6):
        file.write_bytes(b"GGUF!!!"[:size])
        with pytest.raises(ModelStoreError, match=r"tiny\[1\]\.GGUF"):
            pull(str(file))
    assert len(list(cache.iterdir())) == 1


def test_sigterm_ends_a_conversion_in_order(file: Path, cache: Path) -> None:
    # The pull waits for the lock: as good a place as any, and one where it stays.
    cache.mkdir(parents=True)
    source = find_gguf(file, cache).directory.name.partition("-")[0]
    with (cache / f".{source}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with running(*TRIOLEG, "pull", str(file)) as program:
            program.wait_for("waiting for another pull")
            program.process.send_signal(signal.SIGTERM)
            assert program.wait() == 143
    assert "Traceback" not in program.stderr


@pytest.mark.parametrize("name", ["漢" * 80, "é" * 120, "x" * 250])
def test_a_long_name_is_no_hindrance(file: Path, name: str) -> None:
    long = file.with_name(f"{name}.gguf")
    file.rename(long)
    directory = pull(str(long))
    assert resolve(str(long)) == directory
    assert directory.name.partition("-")[2].partition("-")[2] == name[: len(directory.name) - 34]


def test_a_name_that_is_no_text(file: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(file.parent) + b"/caf\xe9.gguf"))
    file.rename(odd)
    assert pull(str(odd)).name.endswith("-caf")


def test_a_file_that_shrinks_leaves_nothing(file: Path, cache: Path) -> None:
    with pytest.raises(ModelStoreError, match=r"^tiny\[1\]\.GGUF is cut off or damaged"):
        pull(str(file), progress=lambda *_: os.truncate(file, 100))
    assert _conversions(cache) == []


def test_a_program_converts_and_runs_it(file: Path, tmp_path: Path) -> None:
    environment = {"TRIOLEG_CACHE": os.environ["TRIOLEG_CACHE"]}
    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}
    questions.write_text(
        json.dumps(
            {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
        )
        + "\n"
    )
    command = ("batch", str(questions), str(answers), "--model", str(file))
    with running(*TRIOLEG, *command, env=environment) as program:
        code = program.wait(60)
    assert code == 0, program.said()
    assert f"converting {file}\n" in program.stderr
    answer = json.loads(answers.read_text())
    assert answer["error"] is None, answer
