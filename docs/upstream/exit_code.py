"""``hypercorn`` ends with exit code 0 although its worker failed."""

import subprocess
import sys
import tempfile
from pathlib import Path

APP = """
async def app(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.failed", "message": "no"})
"""


def main():
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "failing.py").write_text(APP)
        codes = {}
        for workers in ("0", "1", "2"):
            argv = ["hypercorn", "-k", "trio", "-w", workers, "-b", "127.0.0.1:0", "failing:app"]
            run = subprocess.run([sys.executable, "-m", *argv], cwd=folder, capture_output=True)
            codes[workers] = run.returncode
    print("the lifespan's start fails; exit code by --workers:", codes)
    return 0 if codes["0"] and not codes["1"] else 1


sys.exit(main())
