"""Shipped fakes: the scripted engine in process, for tests of programs that embed trioleg.

``open_scripted_llm`` is the way in; ``ScriptedTransport`` and ``Script`` are what it is made of.
"""

from ..engine.script import Fault, Script
from .llm import open_scripted_llm
from .transport import ScriptedTransport

__all__ = ["Fault", "Script", "ScriptedTransport", "open_scripted_llm"]
