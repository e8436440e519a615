"""The command line: help, refusals, what is printed, and ``serve`` as a program with its signals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from programs import TRIOLEG, running

from trioleg import cli, model_store

COMMANDS = sorted(cli.commands.commands)


def invoke(*arguments: str):
    return CliRunner().invoke(cli.commands, arguments)


def test_the_commands() -> None:
    assert COMMANDS == [
        "batch",
        "bench",
        "chat",
        "compare",
        "engine",
        "keys",
        "models",
        "pull",
        "serve",
        "trace",
    ]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_help_has_an_example(command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert re.search(r"Example:\n +trioleg ", result.output)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, trioleg.cli\n"
        "try: trioleg.cli.commands(['serve', '--help'])\n"
        "except SystemExit: print(*{'trio', 'zmq', 'rich', 'httpx2'} & set(sys.modules), sep=':')"
    )
    with running(TRIOLEG[0], "-c", code) as program:
        program.wait()
    assert program.stdout.endswith("\n\n"), program.said()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["engine", "--handshake", "tcp://127.0.0.1:1"], "give either MODEL or --script"),
        (["engine", "m", "--script", "s", "--handshake", "x"], "give either MODEL or --script"),
        (["engine", "smollm2-135m"], "--handshake"),
        (
            ["serve", "--attach", "tcp://127.0.0.1:1", "--dtype", "float32"],
            "--dtype is for an engine",
        ),
        (
            ["serve", "--attach", "tcp://127.0.0.1:1", "--max-num-seqs", "64"],
            "--max-num-seqs is for",
        ),
        (["serve", "--curve-keys", "keys"], "give --attach"),
        (["serve", "--allow-unauthenticated"], "give --attach"),
        (["serve", "--engine", "vllm", "--curve-keys", "keys"], "give --attach"),
        (["serve", "--engine", "vllm", "--attach", "tcp://127.0.0.1:1"], "somebody else does"),
        (["serve", "--vllm-python", "python"], "--vllm-python is for --engine vllm"),
        (["serve", "m", "--", "--enforce-eager"], "what stands behind -- is for --engine vllm"),
        (["serve", "--engine", "vllm", "--", "--enforce-eager"], "a model, before the `--`"),
        (
            ["serve", "m", "--engine", "vllm", "--", "--headless"],
            "'--headless', which is always given",
        ),
        (["serve", "m", "--engine", "vllm", "--", "--max_logprobs=5"], "an option of this server"),
        (["serve", "m", "--engine", "vllm", "--enforce-eager"], "vLLM's own stand behind `--`"),
        (["serve", "--engine", "vllm", "--device", "cpu"], "--device is for our own engine"),
        (["serve", "--dtype", "int4"], "'int4' is not one of 'auto', 'float32'"),
        (["serve", "--port", "65536"], "65536 is not in the range"),
        (["chat", "smollm2-135m", "--url", "http://127.0.0.1:1"], "with --url use --model"),
    ],
)
def test_wrong_usage_says_what_is_right(arguments: list[str], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull", "gpt-9"], "no model 'gpt-9'"),
        (["models", "--path", "nowhere"], "no model 'nowhere'"),
        (["serve", "nowhere"], "no model 'nowhere'"),
        (["engine", "nowhere", "--handshake", "tcp://127.0.0.1:1"], "no model 'nowhere'"),
        (["engine", "--script", "none.json", "--handshake", "tcp://127.0.0.1:1"], "none.json"),
        (["serve", "--max-num-seqs", "0"], "max_num_seqs is 0; allowed: an integer from 1 to"),
        (["engine", "m", "--handshake", "x", "--max-num-seqs", "9" * 23], "max_num_seqs is 9999"),
    ],
)
def test_an_error_of_ours_is_one_line(arguments: list[str], said: str) -> None:
    with running(*TRIOLEG, *arguments) as program:
        assert program.wait() == 1
    assert said in program.stderr
    assert program.stderr.startswith("trioleg: ")
    assert program.stderr.count("\n") == 1
    assert program.stdout == ""


def test_vllms_command_line(smollm2, tmp_path: Path) -> None:
    """An interpreter that only says what it was asked for, and how it fails."""
    vllm = tmp_path / "python"
    vllm.write_text('#!/bin/sh\necho "asked for: $*" >&2\necho "no GPU here" >&2\n')
    vllm.chmod(0o755)
    before = ("--max-num-seqs", "7", "--no-enable-prefix-caching", "--max-logprobs", "5")
    argv = ("serve", "smollm2-135m", "--port", "0", "--engine", "vllm", "--vllm-python", str(vllm))
    with running(*TRIOLEG, *argv, *before, "--", "--enforce-eager", "-x", "1") as program:
        assert program.wait() == 1
    joins = r"--headless --data-parallel-address 127\.0\.0\.1 --data-parallel-rpc-port \d+"
    agreed = "--max-logprobs=5 --scheduling-policy=fcfs"
    given = "--max-num-seqs 7 --no-enable-prefix-caching --enforce-eager -x 1"
    asked = rf"-m vllm\.entrypoints\.cli\.main serve {smollm2} {joins} {agreed} {given}\n"
    assert re.search(f"asked for: {asked}", program.stderr), program.stderr
    last = program.stderr.splitlines()[-1]
    assert last.startswith("trioleg: the engine did not start")
    assert "no GPU here" in last


def test_models_are_listed_for_people_and_for_programs(smollm2) -> None:
    name, state, path = invoke("models").output.rstrip("\n").split("\t")
    assert (name, path) == (model_store.DEFAULT_MODEL, str(smollm2))
    assert state.startswith("here, ")
    assert invoke("models", "--path", name).output == f"{smollm2}\n"


def test_a_pull_with_nothing_to_do_is_quiet(smollm2) -> None:
    result = invoke("pull", model_store.DEFAULT_MODEL)
    assert (result.exit_code, result.stderr) == (0, f"smollm2-135m is in {smollm2}\n")


def test_a_pull_says_its_stages_once(monkeypatch) -> None:
    def pull(name, *, progress):
        for stage in ("wait", "download", "download", "convert"):
            progress(stage, 1, 2)

    monkeypatch.setattr(model_store, "pull", pull)
    result = invoke("pull", "tiny")
    assert result.stderr.splitlines()[:3] == [
        "waiting for another pull of tiny",
        "downloading tiny",
        "converting tiny",
    ]


def test_a_batch_for_no_model_makes_no_file(tmp_path: Path) -> None:
    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    questions.write_text("{}\n")
    result = invoke("batch", str(questions), str(answers), "--model", "nonesuch")
    assert result.exit_code != 0
    assert not answers.exists()
