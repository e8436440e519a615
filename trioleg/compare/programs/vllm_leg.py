"""A program: the leg of vLLM, run by its path with an interpreter that has vLLM; ``legs.py`` says what it takes.

Rules of this file: that interpreter has nothing of ours, and need not: the parts are the standard library and vLLM. Our
package's own front door, which imports Trio, stays shut. What a scenario asks for is looked at before vLLM is imported,
which takes seconds.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path


def main() -> None:
    """Leaves as vLLM does; with 64 if a scenario asks for what vLLM does not have."""
    _lend_package()
    from trioleg.compare.programs.arguments import read_arguments
    from trioleg.compare.vllm_parts import consumers, faults, options
    from trioleg.compare.vllm_parts.engine import end_words, take_engine
    from trioleg.compare.vllm_parts.server import serve
    from trioleg.compare.vllm_parts.watching import Watching

    arguments = read_arguments()
    for name in arguments.options:
        options.refuse_unless(name, options.OPTIONS)
    if arguments.fault is not None:
        options.refuse_unless(arguments.fault, faults.FAULTS)
    if arguments.consume is not None:
        options.refuse_unless(arguments.consume, consumers.CONSUMERS)
    options.set_environment(arguments.options)
    watching = Watching(arguments)
    take_engine([*arguments.engine, *end_words(options.shutdown_timeout(arguments.options))])
    if arguments.fault is not None:
        faults.put_in(arguments.fault)
    if arguments.consume is None:
        serve(arguments, watching)
    else:
        consumers.consume(arguments, watching)


def _lend_package() -> None:
    package = types.ModuleType("trioleg")
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["trioleg"] = package


if __name__ == "__main__":
    main()
