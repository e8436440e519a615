"""Grammars in the engine: what each kind lets out, who pays for it, and who ends with a bad one.

The model is random and its vocabulary SmolLM2's: it has no wish to answer well, so only the mask makes it.
Every answer must keep to its constraint, or have been cut by max_tokens.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch
from engine_helpers import (
    Result,
    load_tiny_llama,
    make_core,
    only,
    run_to_the_end,
    save_tiny_llama,
    wire_request,
)
from real_tokenizers import real_tokenizer, tokenizer_directory

from trioleg.engine import grammar as grammar_module
from trioleg.engine import structured_output
from trioleg.engine.core import EngineCore
from trioleg.engine.model import CausalLM
from trioleg.engine.request import Request
from trioleg.engine.structured_output import GrammarCompiler, apply_grammars
from trioleg.messages import FinishReason
from trioleg.structured_outputs import StructuredOutputsParams
from trioleg.tokenizer import Tokenizer

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["é", "日本", "😀"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["of"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
OPTIONS = ["yes", "yes please", "nein", "日本", "日本語", "😀", 'a "quote"\\', " leading"]
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "maximum": 99, "minimum": 0},
    "maxItems": 4,
}
REGEX = r"(\d{1,3}\.){3}\d{1,3} [äöü]{2,5} \p{Han}{1,3}"
LARK = 'start: "<" word ("," word)* ">"\nword: "ab" | "cd" | "é"'
GBNF = 'root ::= "<" word ("," word)* ">"\nword ::= "ab" | "cd" | "é"'


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150
    return len(value["tags"]) <= 3 and set(value["tags"]) <= {"é", "日本", "😀"}


def is_tree(text: str) -> bool:
    def check(node: Any) -> bool:
        return set(node) == {"of"} and all(check(one) for one in node["of"])

    return check(json.loads(text))


def is_address(text: str) -> bool:
    # Python's re has no \p{Han}; these are the blocks that the library draws it from, and more.
    pattern = REGEX.replace(r"\p{Han}", "[^\\x00-\\u2e7f]")
    return re.fullmatch(pattern, text) is not None


def is_list_of_words(text: str) -> bool:
    return re.fullmatch("<(ab|cd|é)(,(ab|cd|é))*>", text) is not None


def has_no_spaces(text: str) -> bool:
    return isinstance(json.loads(text), list) and re.search(r"\s", text) is None


# The kinds, and what judges them: nothing of the library's.
KINDS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": ({"json": PERSON}, is_person),
    "compact person": ({"json": PERSON, "disable_any_whitespace": True}, is_person),
    "recursive json": ({"json": TREE, "disable_any_whitespace": True}, is_tree),
    "compact json": (
        {"json": NUMBERS, "disable_any_whitespace": True},
        has_no_spaces,
    ),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": REGEX}, is_address),
    "choice": ({"choice": OPTIONS}, OPTIONS.__contains__),
    "huge choice": (
        {"choice": [f"option {i}" for i in range(5000)]},
        lambda text: text[:7] == "option ",
    ),
    "lark": ({"grammar": LARK}, is_list_of_words),
    "gbnf": ({"grammar": GBNF}, is_list_of_words),
}


@pytest.fixture(scope="module")
def random_dir(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    path = tmp_path_factory.mktemp("random-llama")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    save_tiny_llama(path, vocab_size=49152, **sizes, eos_token_id=EOS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((smollm2 / name).read_bytes())
    return path


@pytest.fixture(scope="module")
def model(random_dir: Path) -> CausalLM:
    return load_tiny_llama(random_dir)


@pytest.fixture(scope="module")
def tokenizer(random_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(random_dir)


@pytest.fixture
def make(model: CausalLM, random_dir: Path) -> Iterator[Callable[..., EngineCore]]:
    cores = []

    def make_one(**changes: Any) -> EngineCore:
        cores.append(make_core(model, **{"model_dir": random_dir, **changes}))
        return cores[-1]

    yield make_one
    for core in cores:
        core.close()


def ask(request_id: str, constraint: dict[str, Any] | None = None, **more: Any) -> Any:
    params = {"temperature": 1.0, "max_tokens": 60, "eos_token_id": EOS, "seed": 1, **more}
    if constraint is not None:
        params["structured_outputs"] = StructuredOutputsParams(**constraint).for_engine()
    return wire_request(request_id, [400, 500, 600], **params)


def text_of(result: Result, tokenizer: Tokenizer) -> str:
    """What a head shows: without the last token, where the engine says that it stopped."""
    stopped = result.finish_reason == FinishReason.STOP
    return tokenizer.decode(result.token_ids[:-1] if stopped else result.token_ids)


def test_every_kind_keeps_to_its_constraint(
    make: Callable[..., EngineCore], tokenizer: Tokenizer
) -> None:
    core = make(num_blocks=512, max_num_seqs=32)
    for name, (constraint, _) in KINDS.items():
        for seed in range(4):
            more = {} if seed % 2 else {"temperature": 2.0}
            core.add_request(ask(f"{name}/{seed}", constraint, seed=seed, max_tokens=80, **more))
    finished = dict.fromkeys(KINDS, 0)
    for request_id, result in run_to_the_end(core).items():
        name = request_id.partition("/")[0]
        text = text_of(result, tokenizer)
        if result.finish_reason == FinishReason.STOP:
            assert result.token_ids[-1] == EOS
            assert KINDS[name][1](text), (request_id, text)
            finished[name] += 1
        else:
            assert result.finish_reason == FinishReason.LENGTH, (request_id, result.stop_reason)
            assert len(result.token_ids) == 80
    # White space and lists may go on for ever; the others have an end, and a random model finds it.
    endless = {"json", "json_object", "recursive json"}
    assert [name for name in KINDS if not finished[name] and name not in endless] == []


@pytest.mark.parametrize("name", ["smollm2", "llama2", "qwen3"])
def test_every_family_of_vocabularies_can_be_bound(name: str) -> None:
    """Byte-level, metaspace with bytes to fall back on, more rows than tokens: dice in place of a model."""
    tokenizer = real_tokenizer(name)
    compiler = GrammarCompiler(tokenizer_directory(name), tokenizer.vocab_size)
    pattern = "(é|日本|😀| two  words|\\n){6}x"
    dice = torch.Generator().manual_seed(5)
    for seed in range(3):
        wire = ask(f"{seed}", {"regex": pattern}, eos_token_id=tokenizer.eos_token_id)
        compiler.add(Request.from_wire(wire, vocab_size=tokenizer.vocab_size))
    while compiler.requests:
        for request, error in compiler.take_done(wait_s=30.0):
            assert error is None
            stop = None
            while stop is None:
                logits = torch.zeros(1, tokenizer.vocab_size)
                apply_grammars(logits, [request])
                token_id = int(logits.softmax(-1).multinomial(1, generator=dice))
                stop = request.append(token_id, max_model_len=1000)
            assert stop.reason == FinishReason.STOP
            text = tokenizer.decode([*tokenizer.encode("x"), *request.token_ids[3:-1]])
            assert re.fullmatch(pattern, text[1:]), text
    compiler.close()


def test_free_rows_say_the_same_beside_constrained_ones(make: Callable[..., EngineCore]) -> None:
    core = make()
    free = [ask(f"free{i}", seed=i, logprobs=2) for i in range(3)]
    for request in free:
        core.add_request(request)
    alone = run_to_the_end(core)
    for request in free:
        core.add_request(request)
    core.add_request(ask("bound", {"regex": "[ab]{40}"}))
    core.add_request(ask("bad", {"regex": "("}))
    together = run_to_the_end(core)
    for request in free:
        name = request.request_id
        assert together[name].token_ids == alone[name].token_ids
    assert together["bound"].finish_reason == FinishReason.STOP
    assert together["bad"].finish_reason == FinishReason.ERROR


def test_preemption_changes_nothing(make: Callable[..., EngineCore], tokenizer: Tokenizer) -> None:
    constraint = {"regex": "([a-z]+ ){8}"}

    def run(num_blocks: int) -> tuple[dict[str, Result], int]:
        core = make(num_blocks=num_blocks)
        for seed in range(4):
            core.add_request(ask(f"r{seed}", constraint, seed=seed, max_tokens=40))
        results = run_to_the_end(core)
        events = [e.type for r in results.values() for o in r.outputs for e in o.events or ()]
        return results, events.count(3)

    roomy, none = run(64)
    tight, several = run(6)
    assert none == 0
    assert several > 0
    for name, result in roomy.items():
        assert tight[name].token_ids == result.token_ids
        assert re.fullmatch("([a-z]+ ){0,8}[a-z]*", text_of(result, tokenizer))


def test_the_grammar_wins_over_min_tokens_and_ignore_eos(
    make: Callable[..., EngineCore], tokenizer: Tokenizer
) -> None:
    core = make()
    word = {"choice": ["yes"]}
    core.add_request(ask("min", word, min_tokens=30))
    core.add_request(ask("min, stop ids", word, min_tokens=30, stop_token_ids=[0, EOS]))
    core.add_request(ask("ignore", word, ignore_eos=True, eos_token_id=None))
    core.add_request(ask("nothing", {"choice": [""]}, min_tokens=30))
    core.add_request(ask("long", {"regex": "a*"}, min_tokens=30))
    results = run_to_the_end(core)
    texts = {name: text_of(one, tokenizer) for name, one in results.items()}
    assert {one.finish_reason for one in results.values()} <= {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    assert [texts[n] for n in ("min", "min, stop ids", "ignore", "nothing")] == ["yes"] * 3 + [""]
    # Where the grammar may go on, min_tokens holds.
    assert len(results["long"].token_ids) > 30
    assert set(texts["long"]) == {"a"}


def test_every_end_token_of_the_model_may_end_it(
    random_dir: Path, model: CausalLM, tmp_path: Path
) -> None:
    for file in random_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    core = make_core(model, model_dir=tmp_path)
    # The bias of a random model is beaten by asking often.
    for seed in range(40):
        core.add_request(ask(f"r{seed}", {"choice": ["a"]}, seed=seed, stop_token_ids=[7]))
    last = {result.token_ids[-1] for result in run_to_the_end(core).values()}
    core.close()
    assert last == {2, 7}


def test_a_model_without_end_tokens_ends_all_the_same(
    random_dir: Path, model: CausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = json.loads((random_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (tmp_path / "tokenizer.json").symlink_to(random_dir / "tokenizer.json")
    assert Tokenizer.from_directory(tmp_path).eos_token_id is None
    core = make_core(model, model_dir=tmp_path)
    core.add_request(ask("a", {"choice": ["yes"]}, eos_token_id=None))
    result = run_to_the_end(core)["a"]
    core.close()
    assert (result.finish_reason, text_of(result, tokenizer)) == (FinishReason.STOP, "yes")


def test_a_cut_in_the_middle_is_length(make: Callable[..., EngineCore]) -> None:
    core = make()
    core.add_request(ask("a", {"regex": "[a-z]{100,}"}, max_tokens=5))
    result = run_to_the_end(core)["a"]
    assert (result.finish_reason, len(result.token_ids)) == (FinishReason.LENGTH, 5)


def test_logprobs_are_of_what_could_be_said(make: Callable[..., EngineCore]) -> None:
    """Before the temperature and behind the mask, as vLLM's: what is ruled out has none."""
    core = make()
    core.add_request(ask("a", {"choice": ["a", "b"]}, logprobs=3, temperature=0.0))
    first = run_to_the_end(core)["a"].outputs[0].new_logprobs
    assert first is not None
    data = first.logprobs.data
    figures = torch.frombuffer(bytearray(getattr(data, "buffer", data)), dtype=torch.float32)
    assert figures[1:3].exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert figures[3].item() == -torch.inf


BAD = [
    ({"regex": "("}, "unclosed group"),
    ({"json": {"type": "object", "uniqueItems": True}}, "Unimplemented keys"),
    ({"grammar": "start: nothing"}, 'unknown name: "nothing"'),
    # Passes every check, and becomes too much while it runs.
    ({"regex": "((a{1000}){1000}){1000}"}, "too many expressions"),
]


def test_a_bad_grammar_ends_its_own_request(make: Callable[..., EngineCore]) -> None:
    core = make()
    core.add_request(ask("good", {"regex": "[ab]{30}"}))
    for index, (constraint, _) in enumerate(BAD):
        core.add_request(ask(f"bad{index}", constraint, client_index=1))
    results = run_to_the_end(core)
    assert results.pop("good").finish_reason == FinishReason.STOP
    for index, (_, reason) in enumerate(BAD):
        result = results[f"bad{index}"]
        assert result.finish_reason == FinishReason.ERROR
        assert reason in str(result.stop_reason)
        assert "structured_outputs" in str(result.stop_reason)


def test_a_grammar_that_takes_too_long_ends_its_own_request(
    make: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this one leaves to be read grows with the square of the text, and no limit of the library stops it."""
    monkeypatch.setattr(grammar_module, "_STEP_S", 0.0005)
    monkeypatch.setattr(grammar_module, "_PATIENCE_S", 0.01)
    core = make()
    core.add_request(
        ask("slow", {"grammar": 'start: start start | "a" | ""'}, max_tokens=200, min_tokens=200)
    )
    core.add_request(ask("good", {"regex": "[ab]{20}"}))
    results = run_to_the_end(core)
    assert results["slow"].finish_reason == FinishReason.ERROR
    assert "the grammar takes too long" in str(results["slow"].stop_reason)
    assert results["good"].finish_reason == FinishReason.STOP


@pytest.mark.parametrize("case", ["no directory", "no file", "no tokenizer"])
def test_without_a_tokenizer_only_those_who_need_one_fail(
    model: CausalLM, random_dir: Path, tmp_path: Path, case: str
) -> None:
    if case == "no tokenizer":
        (tmp_path / "config.json").symlink_to(random_dir / "config.json")
        (tmp_path / "tokenizer.json").write_text("{}")
    core = make_core(model, model_dir=None if case == "no directory" else tmp_path)
    core.add_request(ask("a", {"regex": "a"}))
    core.add_request(ask("b", max_tokens=3))
    results = run_to_the_end(core)
    core.close()
    assert results["a"].finish_reason == FinishReason.ERROR
    assert "tokenizer" in str(results["a"].stop_reason)
    assert results["b"].finish_reason == FinishReason.LENGTH


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no grammar is compiled."""
    release = threading.Event()

    def slow(*args: Any, **more: Any) -> Any:
        assert release.wait(60)
        return llguidance.LLMatcher(*args, **more)

    monkeypatch.setattr(grammar_module, "LLMatcher", slow)
    yield release
    release.set()


def test_a_slow_grammar_holds_up_nobody_else(
    make: Callable[..., EngineCore], held: threading.Event
) -> None:
    core = make()
    core.add_request(ask("slow", {"regex": "[ab]{5}"}))
    core.add_request(ask("free", max_tokens=4))
    ids = []
    for _ in range(4):
        message = only(core.step())
        ids += [one.request_id for one in message.outputs]
        assert message.scheduler_stats.num_waiting_reqs == 1
    assert ids == ["free"] * 4
    # Nothing else to do: a step waits a little for the grammar, and says nothing.
    assert core.wait_s() == 0.0
    assert core.step() == {}
    held.set()
    assert run_to_the_end(core)["slow"].finish_reason == FinishReason.STOP
    assert core.wait_s() is None


def test_held_requests_are_aborted_like_others(
    make: Callable[..., EngineCore], held: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    core = make()
    for index in range(6):
        request = ask(f"r{index}", {"regex": "[ab]{5}"})
        request.client_index = index % 2
        core.add_request(request)
    core.add_request(ask("r0"))
    assert "request r0: the id is live already" in caplog.text
    core.abort_requests(["r0"])
    core.abort_client(1)
    assert only(core.step()).outputs == []
    core.finish_all()
    outputs = only(core.step()).outputs
    assert [(one.request_id, one.finish_reason) for one in outputs] == [
        ("r2", FinishReason.ABORT),
        ("r4", FinishReason.ABORT),
    ]
    assert core.wait_s() is None
    held.set()
    core.add_request(ask("r0", {"choice": ["a"]}))
    assert set(run_to_the_end(core)) == {"r0"}


def test_a_batch_without_grammars_does_no_work_for_them(
    make: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **more: Any) -> None:
        raise AssertionError("nobody asked for this")

    for name in ("read_ll_tokenizer", "Grammar", "_forbidden"):
        monkeypatch.setattr(structured_output, name, never)
    threads = threading.active_count()
    core = make()
    core.add_request(ask("a", max_tokens=3))
    assert run_to_the_end(core)["a"].finish_reason == FinishReason.LENGTH
    assert threading.active_count() <= threads
    assert core._compiler._gate._child is None
