"""A model's chat template: conversation in, the prompt's text out.

Rules of this file: pure; imports only ``errors``. Templates are Jinja programs that come with a model's
files, written for the environment that transformers offers, so the same names, filters and white-space
rules are offered here.

The sandbox keeps a template from anything but its arguments. It does not bound its time: a template that
loops for long holds its caller's thread for as long. That is the model's own code, never a request's,
which only supplies values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import InvalidRequestError, ModelStoreError

__all__ = ["ChatTemplate"]

# The special tokens that transformers hands to a template by name.
_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)

# What a template can raise when the messages are not as it expects: its own complaint, or Python's
# about an operation on the values.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One compiled template with the model's special tokens; safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str) -> None:
        """``origin`` is the file's name, for errors. Raises ``ModelStoreError`` if it does not parse."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelStoreError(
                f"the chat template in {origin} does not parse: line {error.lineno}: {error.message}"
            ) from error

    @classmethod
    def from_directory(cls, path: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """The model's default template; None if it has none.

        As in transformers, the file chat_template.jinja wins over tokenizer_config.json, where a list
        of named templates may stand in place of the one.
        """
        tokens = _special_tokens(tokenizer_config)
        file = path / "chat_template.jinja"
        if file.is_file():
            try:
                return cls(file.read_text(encoding="utf-8"), tokens, origin=str(file))
            except (OSError, UnicodeDecodeError) as error:
                raise ModelStoreError(f"cannot read {file}: {error}") from error
        origin = str(path / "tokenizer_config.json")
        source = _default_template(tokenizer_config.get("chat_template"), origin)
        return None if source is None else cls(source, tokens, origin=origin)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The conversation as the model was trained to read it.

        ``add_generation_prompt`` ends it with the beginning of an answer. Raises
        ``InvalidRequestError`` for an empty conversation and for one that the template rejects.
        """
        if not messages:
            raise InvalidRequestError(
                "messages is []; allowed: at least one message", parameter="messages"
            )
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", parameter="messages"
            ) from error


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Each is a string, or a map that describes an added token."""
    found = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _default_template(value: Any, origin: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return {str(one["name"]): str(one["template"]) for one in value}.get("default")
    except (KeyError, TypeError) as error:
        raise ModelStoreError(
            f"chat_template in {origin} is neither a string nor a list of name and template"
        ) from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here only its content counts."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a model has not been trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
