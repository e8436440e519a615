"""An engine process with a scripted core: ``python scripted_engine.py SCRIPT HANDSHAKE [PARENT_PID]``."""

import functools
import sys

import trio

from trioleg.engine.process import run_engine
from trioleg.engine.scripted import load_script, start_scripted_core

make_core = functools.partial(start_scripted_core, load_script(sys.argv[1]))
parent_pid = int(sys.argv[3]) if len(sys.argv) > 3 else None
sys.exit(trio.run(functools.partial(run_engine, make_core, sys.argv[2], parent_pid=parent_pid)))
