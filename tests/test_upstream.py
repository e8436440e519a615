"""The faults that docs/upstream.md reports are still there: each reproduction runs, and says what it saw.

One that is gone is good news, and a failure here: a new version has mended it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from programs import ROOT, running

REPRODUCTIONS = sorted(
    path for path in (ROOT / "docs" / "upstream").glob("*.py") if path.stem != "harness"
)
REPORTS = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", REPRODUCTIONS, ids=lambda path: path.stem)
def test_the_fault_is_still_there(path: Path) -> None:
    with running(sys.executable, str(path)) as program:
        code = program.wait(60)
    assert code in (0, 1), f"{path.name} does not run any more:\n{program.said()}"
    assert code == 0, (
        f"a new version has mended what {path.name} shows ({program.stdout.strip()}): take its report out of "
        "docs/upstream.md, its row out of docs/plain-hypercorn.md, and see what of ours can go"
    )


def test_every_reproduction_has_its_report_and_every_report_its_reproduction() -> None:
    reported = re.findall(
        r"^Reproduction: \[\w+\.py\]\(upstream/(\w+)\.py\)", REPORTS, re.MULTILINE
    )
    assert sorted(reported) == [path.stem for path in REPRODUCTIONS]
    assert len(reported) == len(re.findall(r"^## ", REPORTS, re.MULTILINE))
