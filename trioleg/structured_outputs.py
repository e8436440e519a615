"""``StructuredOutputsParams``: what an answer must look like, and whether that can be had.

Names and meanings are vLLM's. The shape of a constraint is checked where it is made; whether the schema,
the expression or the grammar itself is right, only the library can say that will enforce it (llguidance):
``check`` asks it. The head does so before anything is sent, the engine compiles the very same text.

Rules of this file: pure and synchronous; imports only ``errors``, and llguidance on first use. What llguidance
does with a hostile text may take hours, or end the process: strangers' texts go through ``grammar_gate`` first.
"""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from .errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

__all__ = ["StructuredOutputsParams", "parser_limits", "reason_of"]

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OPTIONS = ("disable_any_whitespace",)

# Further fields of vLLM's, each with the value that asks for nothing.
_NEUTRAL: dict[str, Any] = {
    "structural_tag": None,
    "whitespace_pattern": None,
    "disable_additional_properties": False,
}

# Compiling takes more than linear time: a schema of 100,000 characters (4,000 properties) was checked in
# 0.4 s and compiled in 1.5 s, and a choice of 5,000 options has about as many.
_CHARACTERS_MAX = 2**17

_REASON_MAX = 500

# What a schema may hold for llguidance itself: its defaults for these options, unless it says otherwise.
_OWN_OPTIONS = "x-guidance"

# A line that only Lark has.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)

# Lines without anything on them, in a row.
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")

# Of the last grammars, what they are in Lark: up to 20 MB.
_CONVERTED = 64

_ANY_OBJECT = '{"type": "object"}'


def parser_limits() -> LLParserLimits:
    """The bounds under which a grammar is checked and run: llguidance's defaults. Its messages leave out
    the parser's state, which is as long as the grammar and means nothing to whom it is sent."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def reason_of(message: str) -> str:
    """llguidance's message as our errors quote it: it can repeat the line at fault, which can be long."""
    text = message.replace("<non-verbose/>", "").strip()
    return text if len(text) <= _REASON_MAX else f"{text[: _REASON_MAX - 3]}..."


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """Exactly one of five constraints on the whole text of an answer. Raises ``InvalidRequestError``.

    json: a JSON Schema, as an object or its text (it is kept as text). json_object: True for any JSON object.
    regex: the whole text matches it (Rust's syntax, so no look-around and no back-references).
    choice: the text is one of these strings. grammar: Lark as llguidance has it, or GBNF/EBNF.
    disable_any_whitespace: JSON without optional white space; only with json and json_object.
    where: by which name the caller knows the constraint, for errors; None: "structured_outputs." and its kind.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    where: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "json_object" and value is None):
                raise _refusal(f"structured_outputs.{name}", value, "true or false")
        given = [name for name in _KINDS if _is_given(getattr(self, name))]
        if len(given) != 1:
            allowed = f"exactly one of {', '.join(_KINDS)}"
            shown = " and ".join(given) or "empty"
            raise _refusal("structured_outputs", shown, allowed)
        if self.disable_any_whitespace and self.kind not in ("json", "json_object"):
            name = "structured_outputs.disable_any_whitespace"
            raise _refusal(name, True, f"false with {self.kind}: it is about JSON")
        self._normalize()

    def _normalize(self) -> None:
        value = getattr(self, self.kind)
        if self.kind == "json":
            object.__setattr__(self, "json", self._schema_text(value))
        elif self.kind == "choice":
            object.__setattr__(self, "choice", self._options(value))
        elif self.kind in ("regex", "grammar"):
            self._check_text(value, "a string")

    @classmethod
    def from_mapping(cls, fields: Any) -> Self:
        """The parameters that a JSON object (or a map of the wire) holds; null is accepted everywhere.

        An unknown field is refused by name, and so is one that is not honoured and asks for something.
        """
        if not isinstance(fields, Mapping):
            raise _refusal("structured_outputs", fields, "an object")
        asked = {}
        for name, value in fields.items():
            if name in _KINDS or name in _OPTIONS:
                asked[name] = value
            elif name not in _NEUTRAL:
                allowed = f"only {', '.join((*_KINDS, *_OPTIONS))}"
                raise _refusal(f"structured_outputs.{name}", value, allowed)
            elif value not in (None, _NEUTRAL[name]):
                allowed = f"{json_module.dumps(_NEUTRAL[name])}, since it is not supported"
                raise _refusal(f"structured_outputs.{name}", value, allowed)
        return cls(**{name: value for name, value in asked.items() if value is not None})

    @classmethod
    def from_engine(cls, fields: Any) -> Self:
        """The parameters of a request on the wire: ``for_engine``'s map, or that of vLLM's head, which
        notes there which library it means. Ours takes the same constraints."""
        if not isinstance(fields, Mapping):
            raise _refusal("structured_outputs", fields, "a map")
        own = ("_backend", "_backend_was_auto")
        return cls.from_mapping({name: one for name, one in fields.items() if name not in own})

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(name for name in _KINDS if _is_given(getattr(self, name)))

    @property
    def parameter(self) -> str:
        """The name that errors give the constraint."""
        return self.where or f"structured_outputs.{self.kind}"

    def to_mapping(self) -> dict[str, Any]:
        """What ``from_mapping`` makes the same constraint of."""
        if self.kind == "json" or self.disable_any_whitespace:
            return {"json": self._schema()}
        value = getattr(self, self.kind)
        return {self.kind: list(value) if self.kind == "choice" else value}

    def for_engine(self) -> dict[str, Any]:
        """The map that travels to an engine, ours or vLLM's. A schema goes as text: it may hold numbers
        that the wire has no form for. Options go inside it, where vLLM's engine finds them as well. A choice and a
        grammar go as Lark that vLLM's engine recognizes at once: its own way to it takes minutes for some texts, and
        fails for a choice of two thousand. Raises ``ValueError`` with the reason if a grammar has no such form;
        converting 100,000 characters for the first time takes 0.1 s."""
        forms: dict[str, Callable[[], dict[str, Any]]] = {
            "choice": lambda: {"grammar": _one_of(self.choice or ())},
            "grammar": lambda: {"grammar": _to_lark(str(self.grammar))},
        }
        return {**forms.get(self.kind, self.to_mapping)(), "_backend": "guidance"}

    def to_grammar(self) -> str:
        """The constraint as llguidance reads it. Raises ``ValueError`` with the reason if it has no such form."""
        from llguidance import LLMatcher

        forms: dict[str, Callable[[], str]] = {
            "json": lambda: LLMatcher.grammar_from_json_schema(self._schema()),
            "json_object": lambda: LLMatcher.grammar_from_json_schema(self._schema()),
            "regex": lambda: LLMatcher.grammar_from_regex(str(self.regex)),
            "choice": lambda: LLMatcher.grammar_from_lark(_one_of(self.choice or ())),
            "grammar": lambda: LLMatcher.grammar_from_lark(_to_lark(str(self.grammar))),
        }
        return forms[self.kind]()

    def check(self) -> None:
        """Raises ``InvalidRequestError``, with llguidance's reason, if it cannot enforce this. In this process,
        and without bounds: for texts of one's own."""
        try:
            reason = self.reason_against()
        except ValueError as error:
            raise self.refusal(str(error)) from None
        if reason:
            raise self.refusal(reason)

    def reason_against(self) -> str:
        """llguidance's reason why it cannot enforce this; "" if it can. Raises as ``to_grammar``."""
        from llguidance import LLMatcher

        said = LLMatcher.validate_grammar(self.to_grammar(), limits=parser_limits())
        return "" if said.startswith("WARNING") else str(said)

    def refusal(self, reason: str) -> InvalidRequestError:
        """What to raise for a constraint that llguidance refuses for ``reason``."""
        allowed = f"what llguidance can enforce, and it says: {reason_of(reason)}"
        return _refusal(self.parameter, getattr(self, self.kind), allowed)

    def refusal_beyond_bounds(self, bounds: str) -> InvalidRequestError:
        """What to raise for a constraint that takes too much to find out about."""
        return _refusal(self.parameter, getattr(self, self.kind), f"what compiles within {bounds}")

    def _schema(self) -> str:
        text = _ANY_OBJECT if self.json is None else str(self.json)
        if not self.disable_any_whitespace:
            return text
        schema = json_module.loads(text)
        return json_module.dumps(
            {**schema, _OWN_OPTIONS: {**schema.get(_OWN_OPTIONS, {}), "whitespace_flexible": False}}
        )

    def _schema_text(self, value: Any) -> str:
        allowed = "a JSON Schema: an object, or its text"
        try:
            text = value if isinstance(value, str) else json_module.dumps(value, allow_nan=False)
            self._check_text(text, allowed)
            schema = json_module.loads(text)
        except RecursionError:
            # Nor can such a value be shown.
            raise _refusal(self.parameter, "nested too deeply", allowed) from None
        except (TypeError, ValueError) as error:
            raise _refusal(self.parameter, value, f"{allowed} ({error})") from None
        if not isinstance(schema, dict) or not isinstance(schema.get(_OWN_OPTIONS, {}), dict):
            raise _refusal(self.parameter, value, allowed)
        return text

    def _options(self, value: Any) -> tuple[str, ...]:
        allowed = "a list of at least one string"
        is_list = isinstance(value, list | tuple) and value
        if not is_list or not all(isinstance(one, str) for one in value):
            raise _refusal(self.parameter, value, allowed)
        self._check_text("".join(value), allowed)
        return tuple(value)

    def _check_text(self, value: Any, allowed: str) -> None:
        if not isinstance(value, str):
            raise _refusal(self.parameter, value, allowed)
        if len(value) > _CHARACTERS_MAX:
            length = f"{len(value)} characters long"
            raise _refusal(self.parameter, length, f"at most {_CHARACTERS_MAX} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _refusal(self.parameter, value, "Unicode, without lone surrogates") from None


@lru_cache(maxsize=_CONVERTED)
def _to_lark(text: str) -> str:
    """Lark as it is, or from GBNF, without blank lines. llguidance's own way to tell them apart takes minutes for
    131,072 of those, with the interpreter's lock held; this one is linear."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = _BLANK_LINES.sub("\n", text.lstrip())
    if _LARK.search(text):
        return text
    try:
        return _BLANK_LINES.sub("\n", gbnf_to_lark(text))
    except Exception as error:  # noqa: BLE001 (also IndexError, where a text ends early)
        raise ValueError(f"this is not Lark, and as GBNF: {error}") from None


def _one_of(options: Sequence[str]) -> str:
    """A grammar of one terminal. As alternatives of a rule, each would be a lexeme of its own: with 5,000 of
    them a mask took 7.8 ms, so it takes 0.14 ms."""
    return "start: OPTION\nOPTION: " + " | ".join(json_module.dumps(one) for one in options)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _refusal(name: str, value: Any, allowed: str) -> InvalidRequestError:
    shown = value if isinstance(value, str) else repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidRequestError(f"{name} is {shown}; allowed: {allowed}", parameter=name)
