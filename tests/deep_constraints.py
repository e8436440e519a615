"""Constraints that refer as deep as their length allows.

At the greatest length most of them overflow a stack of 8 MB. As a program, with a model's directory: those that the gate lets pass are
compiled in a thread with the engine's own stack, and make some steps in another. What overflows there ends the
process, behind the name of what did it.
"""

from __future__ import annotations

import itertools
import json
import string
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trioleg.errors import InvalidRequestError
from trioleg.grammar_gate import GrammarGate
from trioleg.structured_outputs import StructuredOutputsParams

# Characters. Up to the greatest that is looked at, with some that come close to a trial's stack from below.
LENGTHS = (8_000, 16_000, 24_000, 32_000, 48_000, 130_900)


def _names(letters: str) -> list[str]:
    lengths = range(1, 5)
    every = ("".join(one) for n in lengths for one in itertools.product(letters, repeat=n))
    return list(itertools.islice(every, 30_000))


def _rules(size: int, letters: str, body: str, last: str = '"x"') -> dict[str, Any]:
    """``body`` has one or more ``%`` for the name of the next rule."""
    names = _names(letters)
    lines, length = [f"start:{names[0]}"], 0
    for name, following in itertools.pairwise(names):
        lines.append(f"{name}:{body.replace('%', following)}")
        length += len(lines[-1]) + 1
        if length > size - 20:
            return {"grammar": "\n".join([*lines, f"{following}:{last}"])}
    raise AssertionError("not enough names")


def _schemas(size: int, make: Callable[[dict[str, str]], Any], last: Any) -> dict[str, Any]:
    names = _names(string.ascii_lowercase)
    schemas, length = {}, 100
    for name, following in itertools.pairwise(names):
        schemas[name] = make({"$ref": f"#/$defs/{following}"})
        length += len(json.dumps({name: schemas[name]}, separators=(",", ":"))) - 1
        if length > size - 100:
            text = {"$defs": {**schemas, following: last}, "$ref": "#/$defs/a"}
            return {"json": json.dumps(text, separators=(",", ":"))}
    raise AssertionError("not enough names")


def deep_constraints(size: int) -> dict[str, dict[str, Any]]:
    """By name; each the keywords of ``StructuredOutputsParams``."""
    low, up = string.ascii_lowercase, string.ascii_uppercase
    deep = size // 2 - 100
    return {
        "rules": _rules(size, low, "%"),
        "rules in a circle": _rules(size, low, "%", last="a"),
        "pairs of rules": _rules(size, low, "% %"),
        "repeated rules": _rules(size, low, "%{2,3}"),
        "terminals": _rules(size, up, "%"),
        "terminals in a circle": _rules(size, up, "%", last="A"),
        "negated terminals": _rules(size, up, '~("a"%)'),
        "repeated terminals": _rules(size, up, '("a"%)*'),
        "references": _schemas(size, lambda ref: ref, {}),
        "references in a circle": _schemas(size, lambda ref: ref, {"$ref": "#/$defs/a"}),
        "anyOf": _schemas(size, lambda ref: {"anyOf": [ref]}, {}),
        "allOf": _schemas(size, lambda ref: {"allOf": [ref, {}]}, {}),
        "items": _schemas(size, lambda ref: {"prefixItems": [ref]}, {}),
        "properties": _schemas(size, lambda ref: {"properties": {"a": ref}}, {}),
        "parentheses": {"grammar": f'start:{"(" * deep}"a"{")" * deep}'},
        "brackets": {"grammar": f'start:{"[" * deep}"a"{"]" * deep}'},
        "tildes": {"grammar": f'start:A\nA:{"~(" * (deep // 2)}"a"{")" * (deep // 2)}'},
        "GBNF": {"grammar": f'root ::= {"(" * deep}"a"{")" * deep}'},
        "empty lines": {"grammar": "\n" * size},
        "regex": {"regex": f"{'(' * deep}a{')' * deep}"},
        "regex of repeats": {"regex": "a" + "*" * deep},
        "arrays": {"json": f'{{"const":{"[" * min(deep, 900)}{"]" * min(deep, 900)}}}'},
    }


def main() -> None:
    from trioleg.engine.process import _STACK_BYTES
    from trioleg.ll_tokenizer import read_ll_tokenizer

    model_dir = Path(sys.argv[1])
    tokenizer, gate = read_ll_tokenizer(model_dir, 0), GrammarGate(model_dir)
    threading.stack_size(_STACK_BYTES)
    cases = ((size, *case) for size in LENGTHS for case in deep_constraints(size).items())
    for size, name, constraint in cases:
        sys.stdout.write(f"{name}, {size}: ")
        sys.stdout.flush()
        params = StructuredOutputsParams(**constraint)
        try:
            gate.check(params)
        except InvalidRequestError:
            sys.stdout.write("refused\n")
        else:
            _in_a_thread(lambda params=params: _use(params, tokenizer))
            sys.stdout.write("used\n")
    gate.close()
    sys.stdout.write("alive\n")


def _in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _use(params: StructuredOutputsParams, tokenizer: Any) -> None:
    from trioleg.engine.grammar import Grammar

    grammar = Grammar(params, tokenizer)
    _in_a_thread(lambda: _take_steps(grammar))


def _take_steps(grammar: Any) -> None:
    import numpy as np

    mask = np.zeros(grammar.num_words, dtype=np.int32)
    for _ in range(20):
        grammar.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        try:
            if grammar.error is not None or grammar.accept(int(allowed[len(allowed) // 2])):
                return
        except InvalidRequestError:
            return


if __name__ == "__main__":
    main()
