"""Chat templates: rendered as transformers renders them, and unable to do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from trioleg.chat_template import ChatTemplate
from trioleg.errors import InvalidRequestError, ModelStoreError

_CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}],
    [
        {"role": "user", "content": "  spaces\n\nand <b>HTML</b> & 'quotes' \"too\"  "},
        {"role": "assistant", "content": "東京 🦊"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}<|im_end|>"},
    ],
    [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
]

# Idioms of templates in the wild, each on something that renderers get wrong.
_TEMPLATES = {
    "white space": "{% for m in messages %}\n    {% if true %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    "no tools": "{% if tools is not none %}tools{% endif %}{% if not documents %}none{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}",
    "absent keys": "{% for m in messages %}{{ m.name }}{{ m['tool_calls'] }}|{% endfor %}",
    "methods": "{{ messages[-1].content.strip().split(' ')[0] | upper }}",
    "prompt": "{% if add_generation_prompt %}answer:{% endif %}",
}


def _template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, tokens, origin="test")


def _render(source: str, *messages: dict[str, Any]) -> str:
    conversation = messages or ({"role": "user", "content": "Hi"},)
    return _template(source).render(conversation, add_generation_prompt=True)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(smollm2)


@pytest.mark.parametrize("conversation", _CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_default_model_is_rendered_as_by_transformers(
    smollm2: Path,
    reference: PreTrainedTokenizerFast,
    conversation: list[dict[str, Any]],
    prompt: bool,
) -> None:
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    template = ChatTemplate.from_directory(smollm2, config)
    assert template is not None
    expected = reference.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=prompt
    )
    assert template.render(conversation, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("source", _TEMPLATES.values(), ids=_TEMPLATES)
@pytest.mark.parametrize("conversation", _CONVERSATIONS)
def test_idioms_are_rendered_as_by_transformers(
    reference: PreTrainedTokenizerFast, source: str, conversation: list[dict[str, Any]]
) -> None:
    expected = reference.apply_chat_template(
        conversation, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    template = _template(source, **reference.special_tokens_map)
    assert template.render(conversation, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + none }}", "can only concatenate str"),
        ("{{ messages[0].absent.more }}", "has no attribute 'absent'"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages[0]['content'] | int + [] }}", "unsupported operand"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10**9) }}", "range"),
    ],
)
def test_a_template_that_raises_refuses_the_messages(source: str, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"chat template: .*{named}") as caught:
        _render(source)
    assert caught.value.parameter == "messages"


def test_a_content_that_is_not_text_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequestError, match="do not fit"):
        _render("{{ 'user: ' + messages[0].content }}", {"role": "user", "content": None})


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one message"):
        _template("hello").render([], add_generation_prompt=True)


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    def found(**config: Any) -> str | None:
        template = ChatTemplate.from_directory(tmp_path, config)
        messages = [{"role": "user", "content": "Hi"}]
        return template and template.render(messages, add_generation_prompt=True)

    named = [{"name": "rag", "template": "other"}, {"name": "default", "template": "this"}]
    assert found() is None
    assert found(chat_template="plain") == "plain"
    assert found(chat_template=named) == "this"
    assert found(chat_template=named[:1]) is None
    assert found(chat_template="{{ bos_token }}", bos_token={"content": "<s>"}) == "<s>"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }} file")
    assert found(chat_template="plain", eos_token="</s>") == "</s> file"


@pytest.mark.parametrize("content", [b"\xff", b"{% for %}"])
def test_a_broken_template_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ModelStoreError, match=r"chat_template\.jinja"):
        ChatTemplate.from_directory(tmp_path, {})
