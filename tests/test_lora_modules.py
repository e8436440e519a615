"""``serve --lora-modules``: how it is written, and adapters in a whole program, whose engine dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner
from programs import wait_until
from served import counting_ids, serving, starting, wait_gone

from trioleg import cli
from trioleg.cli.lora_modules import _spelled_out
from trioleg.errors import InvalidRequestError
from trioleg.lora import LoRAModulePath, read_lora_module


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("sql=/sql", LoRAModulePath("sql", "/sql")),
        ("sql=/a=b,c", LoRAModulePath("sql", "/a=b,c")),
        ('{"name": "a=b", "path": "/sql"}', LoRAModulePath("a=b", "/sql")),
        (
            '{"name": "sql", "path": "/sql", "base_model_name": "m", "is_3d_lora_weight": true}',
            LoRAModulePath("sql", "/sql", "m", True),
        ),
    ],
)
def test_one_module(text: str, module: LoRAModulePath) -> None:
    assert read_lora_module(text) == module


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sql", "lora_modules is 'sql'; allowed: name=path"),
        ("=/sql", "lora_name is ''; allowed: a text"),
        ("sql=", "lora_path is ''; allowed: a text"),
        ('{"name": "sql"}', "missing 1 required positional argument: 'path'"),
        ('{"name": "sql", "path": 5}', "lora_path is 5; allowed: a text"),
        ('{"name": "sql", "path": "/sql", "rank": 8}', "unexpected keyword argument 'rank'"),
        ('{"name": "sql", ', "allowed: name=path"),
        ("[1, 2]", "allowed: name=path"),
    ],
)
def test_what_is_no_module(text: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_lora_module(text)
    assert words in str(caught.value)
    result = CliRunner().invoke(cli.commands, ["serve", "--lora-modules", text])
    assert result.exit_code == 2


def test_several_behind_one_option() -> None:
    given = ["--lora-modules", "a=/a", '{"name": "b"}', "m", "--port", "1", "x=y", "--", "c=/c"]
    option = "--lora-modules"
    assert _spelled_out(given) == [option, "a=/a", option, '{"name": "b"}', *given[3:]]
    behind = ["m", option, "a=/a", "--", "--lora-modules", "b=/b", "c=/c"]
    assert _spelled_out(behind) == behind
    assert _spelled_out([option, "a=/a", option, "b=/b"]) == [option, "a=/a", option, "b=/b"]


def test_adapters_outlive_the_engine(smollm2: Path, tmp_path: Path) -> None:
    """One of the command line and one of HTTP; in the next engine both are there, with its first answer."""
    ids = counting_ids()
    modules = ("--lora-modules", "ones=/ones", '{"name": "twos", "path": "/twos"}')
    options = (*modules, "--enable-engine-controls", "--restart-engine")
    loras = {"/ones": ids[:1], "/twos": ids[:3], "/threes": ids[:5]}
    with (
        serving(tmp_path, *options, loras=loras, max_loras=4) as server,
        httpx2.Client(base_url=server.url, timeout=30) as http,
    ):

        def texts() -> list[str]:
            asked = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 5}
            names = ("ones", "twos", "threes")
            answers = [
                http.post("/v1/chat/completions", json={"model": name, **asked}) for name in names
            ]
            return [one.json()["choices"][0]["message"]["content"] for one in answers]

        fields = {"lora_name": "threes", "lora_path": "/threes"}
        assert http.post("/v1/load_lora_adapter", json=fields).status_code == 200
        before, family = texts(), server.family
        assert len(set(before)) == 3
        os.kill(server.engine, signal.SIGKILL)
        wait_gone(*family)
        wait_until(lambda: http.get("/health").status_code == 503)
        wait_until(lambda: http.get("/health").status_code == 200)
        assert texts() == before


def test_an_adapter_that_is_not_there_ends_the_start(smollm2: Path, tmp_path: Path) -> None:
    loras = {"/ones": counting_ids()[:1]}
    with starting(tmp_path, "--lora-modules", "ones=/none", loras=loras) as server:
        assert server.program.wait() == 1
    assert "lora_modules: lora_path is '/none'" in server.last_line
    assert "No adapter found for /none" in server.last_line
