"""Tracking servers that misbehave: one that never answers or always fails, and one that stands before a real one."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Misbehaving(ThreadingHTTPServer):
    """On loopback. `delay` seconds before each answer; then `status` if it is set, else what the server behind it says."""

    daemon_threads = True

    def __init__(self, delay: float = 0.0, status: int | None = None, behind: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.delay, self.status, self.behind = delay, status, behind
        self.requests = self.refused = 0
        self.uri = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Misbehaving

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests += 1
        time.sleep(self.server.delay)
        status, kind, content = (
            self.server.status,
            "application/json",
            b'{"error_code": "INTERNAL_ERROR", "message": "out of order"}',
        )
        if status is None:
            behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=30)
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in ("host", "connection", "accept-encoding")
            }
            behind.request(self.command, self.path, body, headers)
            answer = behind.getresponse()
            status, kind, content = answer.status, answer.getheader("Content-Type", kind), answer.read()
            behind.close()
        else:
            self.server.refused += 1
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer  # noqa: N815

    def log_message(self, *arguments) -> None:
        pass
