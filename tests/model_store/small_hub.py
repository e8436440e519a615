"""A Hugging Face hub of a few kilobytes on the loopback address: as much of its API as a download uses.

It runs in a thread, and is told what to refuse. Real clients talk to it by HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub(ThreadingHTTPServer):
    """``files`` by repository and name. ``asked``: every path that was asked for. A repository in
    ``gated`` is refused to whoever has not ``token``. ``broken``: a status and a body for every question.
    ``slow``: large files never end."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.token = "hf_token_of_somebody_who_may"
        self.asked: list[str] = []
        self.broken: tuple[int, bytes] | None = None
        self.slow = threading.Event()
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    with SmallHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.ended.set()
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SmallHub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """The test's output is not the place."""

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        status, headers, body = self._find(path.strip("/").split("/"))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and self.server.slow.is_set() and len(body) > 10_000:
            self.wfile.write(body[:1000])
            self.server.ended.wait()
        elif with_body:
            self.wfile.write(body)

    def _find(self, parts: list[str]) -> tuple[int, dict[str, str], bytes]:
        if self.server.broken is not None:
            status, body = self.server.broken
            return status, {"Content-Type": "application/json"}, body
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if repo not in self.server.files:
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}, b"{}"
        authorized = self.headers.get("Authorization") == f"Bearer {self.server.token}"
        # The hub shows what there is to everybody, and gives the files to those who may have them.
        if repo in self.server.gated and not is_api and not authorized:
            return (
                403,
                {"X-Error-Code": "GatedRepo", "X-Error-Message": "access is restricted"},
                b"",
            )
        if is_api:
            return self._describe(repo, parts[4:])
        # OWNER/NAME/resolve/COMMIT/FILE
        return self._file(repo, "/".join(parts[4:]))

    def _describe(self, repo: str, rest: list[str]) -> tuple[int, dict[str, str], bytes]:
        files = self.server.files[repo]
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in {"main", COMMIT, "v1"}:
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such"}, b"{}"
        tree = [
            {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
            for name, content in files.items()
        ]
        info = {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "private": False,
            "tags": [],
            "siblings": [{"rfilename": name} for name in files],
        }
        body = tree if rest[:1] == ["tree"] else info
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

    def _file(self, repo: str, name: str) -> tuple[int, dict[str, str], bytes]:
        content = self.server.files[repo].get(name)
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no such file"}, b""
        return 200, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT}, content


def _etag(content: bytes) -> str:
    """As git names a file's content, which is what the hub does for small files."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
