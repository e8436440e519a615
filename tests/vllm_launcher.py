"""What `vllm serve` does for a front end that is not its own, without vLLM.

    python vllm_launcher.py '{"script": "s.json", "version": "0.32", "args": {…}, "flags": […]}'

It binds HTTP's socket and the two legs, starts the front end with their descriptors (version 0.32) or with the
legs' addresses (0.30), starts a scripted engine, plays the handshake's other side, and then waits: for SIGTERM, for
the engine's end, for the front end's. It ends both, the front end first, which gets five seconds. On stdout it says
what it does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

_FRONTEND = (sys.executable, "-m", "trioleg.cli.frontend")
_PATIENCE_S = 5.0


class _Asked(Exception):
    pass


def main() -> None:
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, _on_sigterm)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(_Launcher(settings, Path(folder)).run())


def _on_sigterm(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Asked


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class _Launcher:
    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self._settings = settings
        self._legs = [f"ipc://{folder}/{name}" for name in ("input", "output")]
        self._handshake = f"ipc://{folder}/handshake"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> int:
        try:
            self._start_front_end()
            if "script" in self._settings:
                self._start_engine()
            return self._wait()
        except _Asked:
            return 0
        finally:
            for name in list(self._processes):
                self._end(name)

    def _start_front_end(self) -> None:
        http = socket.socket()
        http.bind(("127.0.0.1", 0))
        descriptors = [http.fileno()]
        argv = [*_FRONTEND, "frontend", "--listen-fd", str(http.fileno())]
        listeners = []
        for name, address in zip(("input", "output"), self._legs, strict=True):
            if self._settings["version"] == "0.30":
                argv += [f"--{name}-address", address]
                continue
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address.removeprefix("ipc://"))
            listener.listen()
            listeners.append(listener)
            descriptors.append(listener.fileno())
            argv += [f"--{name}-listener-fd", str(listener.fileno())]
        argv += ["--engine-start-index", "0", "--engine-count", "1", "--data-parallel-size", "1"]
        argv += [
            *self._settings.get("flags", []),
            "--args-json",
            json.dumps(self._settings["args"]),
        ]
        _say(f"port {http.getsockname()[1]}")
        self._processes["front end"] = subprocess.Popen(argv, pass_fds=descriptors)
        _say(f"front end is process {self._processes['front end'].pid}")
        for listener in listeners:
            listener.close()

    def _start_engine(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(self._handshake)
            argv = [sys.executable, "-m", "trioleg", "engine", "--handshake", self._handshake]
            # A scripted engine ends with its parent. vLLM's does not.
            env = {**os.environ, "TRIOLEG_GUARDIAN_PIDS": f"{os.getpid()},"}
            argv += ["--script", self._settings["script"]]
            self._processes["engine"] = subprocess.Popen(argv, env=env)
            _say(f"engine is process {self._processes['engine'].pid}")
            while True:
                # As vLLM has it: a front end that leaves ends the start.
                while not router.poll(50):
                    if any(one.poll() is not None for one in self._processes.values()):
                        return
                identity, body = router.recv_multipart()
                if msgspec.msgpack.decode(body)["status"] == "READY":
                    return
                addresses = {"inputs": self._legs[:1], "outputs": self._legs[1:]}
                init = {"addresses": addresses, "parallel_config": {}}
                router.send_multipart([identity, msgspec.msgpack.encode(init)])

    def _wait(self) -> int:
        """As vLLM: an exit code of 0 of the front end is not taken for an end."""
        while True:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            for name, process in self._processes.items():
                code = process.poll()
                if code is not None and (code != 0 or name == "engine"):
                    _say(f"{name} ended with {code}")
                    return 1
            assert self._processes["front end"].poll() is None, "it left with 0: nobody answers"

    def _end(self, name: str) -> None:
        process = self._processes[name]
        started = time.monotonic()
        process.terminate()
        try:
            code = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        took = time.monotonic() - started
        _say(f"{name} ended with {code} after {took:.2f} s")


if __name__ == "__main__":
    main()
