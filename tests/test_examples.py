"""The documents hold: examples run, what they show is the file that runs, and links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from programs import ROOT, running

EXAMPLES = ROOT / "docs" / "examples"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PRINTED = {
    "embed.py": r"The capital of France is Paris\.\n\d+ tokens, (stop|length)\ncut short: True\n",
    "endings.py": (
        r"state: ready\ndeadline: the request was not complete after 1 s, .*; some words had come\n"
        r"aborted: True\nreader: the request was aborted by its id\ntokens: 5\n"
    ),
    "offline_batch.py": r"The capital of France is Paris\.\n.*\nfailed: prompt has 0 tokens; .*\n",
    "structured.py": r"\['capital', 'city'\]\n(Paris|Rome)\nrefused: structured_outputs.regex\n",
    "plain_hypercorn.py": r"The capital of France is Paris\.\n",
    "own_server.py": r"serving smollm2-135m with up to \d+ tokens\nThe capital of France is Paris\.\n",
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_prints_what_it_should(path: Path, smollm2: Path) -> None:
    with running(sys.executable, str(path)) as program:
        assert program.wait(300) == 0, program.said()
    assert re.fullmatch(PRINTED[path.name], program.stdout), program.said()


# A local link and its text: [text](path), without an anchor.
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = _LINK.findall(document.read_text(encoding="utf-8"))
    assert [one for one in targets if not (document.parent / one).exists()] == []


def test_links_are_seen() -> None:
    assert _LINK.findall("[a](b.md), [c](d/e.py#f) and [g](https://h.example)") == [
        "b.md",
        "d/e.py",
    ]
    architecture = ROOT / "docs" / "architecture.md"
    assert len(_LINK.findall(architecture.read_text(encoding="utf-8"))) > 20


def test_the_readme_shows_the_example_that_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"```python\n(async with.*?)```", readme, re.DOTALL)[1]
    whole = (EXAMPLES / "embed.py").read_text(encoding="utf-8")
    rest = iter(line.strip() for line in whole.splitlines())
    # Left out lines are fine; other ones, or another order, are not.
    assert [line for line in shown.splitlines() if line.strip() not in rest] == []
