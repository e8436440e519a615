"""Hostile constraints: small texts that crash, hang or outgrow whoever compiles them. Here they end a child."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deep_constraints import LENGTHS, deep_constraints
from programs import ROOT, alive, descendants, running, wait_until

from trioleg import grammar_gate
from trioleg.errors import InvalidRequestError, TriolegError
from trioleg.grammar_gate import GrammarGate
from trioleg.structured_outputs import StructuredOutputsParams
from trioleg.tokenizer import Tokenizer

GOOD = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"regex": r"\d{4}-\d{2}"},
    {"choice": ["yes", "no", "日本"]},
    {"grammar": 'start: "a"+'},
    {"grammar": 'root ::= "yes" | "no"'},
    {"json_object": True},
]

# Each ended, or stopped for minutes, a process that compiled it.
HOSTILE: dict[str, dict[str, Any]] = {
    "a chain of rules": {
        "grammar": "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(8000)), 'a8000: "x"'])
    },
    "a chain of terminals": {
        "grammar": "\n".join(["start: A0", *(f"A{i}: A{i + 1}" for i in range(8000)), 'A8000: "x"'])
    },
    "a chain of references": {
        "json": {
            "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2999)}
            | {"a2999": {"type": "string"}},
            "$ref": "#/$defs/a0",
        }
    },
}
# Only a tokenizer shows what they cost.
SLOW: dict[str, dict[str, Any]] = {
    "a remainder": {"json": {"type": "integer", "multipleOf": 9_999_991}},
    "two remainders": {"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}},
    "optional characters": {"regex": "(ab?)?" * 20_000},
}
REFUSED: dict[str, dict[str, Any]] = {
    "a bad expression": {"regex": "("},
    "131,000 empty lines": {"grammar": "\n" * 131_000},
    "GBNF that ends early": {"grammar": 'root ::= "'},
    "a schema of no type": {"json": {"type": "nothing"}},
}


def constraint(fields: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


@pytest.fixture
def gate() -> Iterator[GrammarGate]:
    """As a front end has it."""
    gate = GrammarGate()
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def engine_gate(smollm2: Path) -> Iterator[GrammarGate]:
    gate = GrammarGate(smollm2, Tokenizer.from_directory(smollm2).vocab_size)
    yield gate
    gate.close()


def child(gate: GrammarGate) -> int:
    assert gate._child is not None
    return gate._child.pid


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_good_ones_pass(
    gate: GrammarGate, engine_gate: GrammarGate, fields: dict[str, Any]
) -> None:
    for one in (gate, engine_gate):
        one.check(constraint(fields))


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_overflow_a_stack_is_refused(
    gate: GrammarGate, engine_gate: GrammarGate, name: str
) -> None:
    for one in (gate, engine_gate):
        with pytest.raises(InvalidRequestError, match="allowed: what compiles within 5 s of"):
            one.check(constraint(HOSTILE[name]))
        one.check(constraint(GOOD[0]))


def test_what_passes_can_be_used(smollm2: Path) -> None:
    """Where the engine compiles and steps there is more room than where it was tried."""
    program = ROOT / "tests" / "deep_constraints.py"
    with running(sys.executable, str(program), str(smollm2)) as run:
        assert run.wait(600) == 0, run.said()
    *outcomes, last = run.stdout.splitlines()
    assert last == "alive"
    assert len(outcomes) == len(LENGTHS) * len(deep_constraints(1000))
    assert {line.rpartition(": ")[2] for line in outcomes} == {"refused", "used"}


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_for_ever_is_refused(engine_gate: GrammarGate, name: str) -> None:
    process = child(engine_gate) if engine_gate._child else None
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.(json|regex) is") as caught:
        engine_gate.check(constraint(SLOW[name]))
    assert caught.value.parameter in ("structured_outputs.json", "structured_outputs.regex")
    assert process in (None, child(engine_gate)), "only the trial was to end"
    assert not descendants(child(engine_gate))


@pytest.mark.parametrize("name", REFUSED)
def test_reasons_are_the_librarys_and_the_name_is_the_callers(gate: GrammarGate, name: str) -> None:
    params = StructuredOutputsParams(**REFUSED[name], where="response_format")
    with pytest.raises(
        InvalidRequestError, match="what llguidance can enforce, and it says: "
    ) as caught:
        gate.check(params)
    assert caught.value.parameter == "response_format"


def test_what_has_passed_is_not_tried_again(gate: GrammarGate) -> None:
    gate.check(constraint(GOOD[0]))
    first = child(gate)
    assert gate._child is not None
    gate._child.kill()
    gate._child.wait()
    gate.check(constraint(GOOD[0]))
    gate.check(constraint(GOOD[1]))
    assert child(gate) != first


def test_closing_waits_for_nobody(engine_gate: GrammarGate, smollm2: Path) -> None:
    gate = GrammarGate(smollm2, 49152)
    gate.check(constraint(GOOD[0]))
    process, errors = child(gate), []

    def check() -> None:
        try:
            gate.check(constraint(SLOW["a remainder"]))
        except TriolegError as error:
            errors.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    wait_until(lambda: bool(descendants(process)))
    start = time.thread_time()
    gate.close()
    gate.close()
    thread.join(60)
    assert not thread.is_alive()
    assert time.thread_time() - start < 1
    assert "has ended" in str(errors)
    assert not alive(process)
    with pytest.raises(TriolegError, match="not tried any more"):
        gate.check(constraint(GOOD[1]))


def test_a_lower_limit_of_the_system_holds(smollm2: Path) -> None:
    """Only in a process of its own: such a limit cannot be raised again."""
    program = (
        "import resource, sys; from pathlib import Path; "
        "from trioleg.grammar_gate import GrammarGate; "
        "from trioleg.structured_outputs import StructuredOutputsParams as S; "
        "resource.setrlimit(resource.RLIMIT_STACK, (2**22, 2**22)); "
        "resource.setrlimit(resource.RLIMIT_CPU, (100, 100)); "
        "gate = GrammarGate(); gate.check(S(choice=['a'])); gate.close()"
    )
    with running(sys.executable, "-c", program) as run:
        assert run.wait(60) == 0, run.said()


def test_a_process_with_many_open_files_can_ask() -> None:
    program = (
        "import os, resource; "
        "from trioleg.grammar_gate import GrammarGate; "
        "from trioleg.structured_outputs import StructuredOutputsParams as S; "
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE); "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard)); "
        "files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]; "
        "gate = GrammarGate(); gate.check(S(choice=['a'])); "
        "assert gate._child.stdout.fileno() > 1024; gate.close()"
    )
    with running(sys.executable, "-c", program) as run:
        assert run.wait(60) == 0, run.said()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_child_that_stands_still_or_is_killed_is_replaced(
    gate: GrammarGate, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    # To start a child takes as long as it takes.
    gate.check(constraint(GOOD[0]))
    monkeypatch.setattr(grammar_gate, "_ANSWER_S", 0.2)
    process = child(gate)
    os.kill(process, how)
    if how is signal.SIGSTOP:
        with pytest.raises(TriolegError, match="the process that tries grammars has ended"):
            gate.check(constraint(GOOD[1]))
    else:
        assert gate._child is not None
        gate._child.wait()
    assert not alive(process)
    monkeypatch.setattr(grammar_gate, "_ANSWER_S", 60.0)
    gate.check(constraint(GOOD[1]))
    assert child(gate) != process


def test_what_has_passed_is_known_to_all_who_share_the_memory(gate: GrammarGate) -> None:
    passed: OrderedDict[str, None] = OrderedDict()
    one, other = GrammarGate(passed=passed), GrammarGate(passed=passed)
    assert not other.has_passed(constraint(GOOD[0]))
    one.check(constraint(GOOD[0]))
    assert other.has_passed(constraint(GOOD[0]))
    other.check(constraint(GOOD[0]))
    assert other._child is None
    one.close()


def test_a_child_outlives_nobody(gate: GrammarGate, tmp_path: Path) -> None:
    gate.check(constraint(GOOD[0]))
    assert gate._child is not None
    process = child(gate)
    assert gate._child.stdin is not None
    gate._child.stdin.close()
    wait_until(lambda: gate._child is None or gate._child.poll() is not None)
    assert not alive(process) or gate._child.poll() is not None


def test_a_lark_grammar_is_told_from_gbnf() -> None:
    make: Callable[[str], str] = lambda text: StructuredOutputsParams(grammar=text).to_grammar()  # noqa: E731
    lark = ('start: "root"', '  start : "a"', '%llguidance {}\nstart: "a"')
    assert [make(one) for one in lark] == [one.lstrip() for one in lark]
    assert make('root ::= "start: x"').endswith('start: "start: x"\n')
