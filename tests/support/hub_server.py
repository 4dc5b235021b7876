"""A local server with the endpoints of the Hugging Face hub that its client and the `datasets` library use.

with HubServer({"team/tiny": folder}) as hub:      # set HF_ENDPOINT=hub.url in a new process
    ...
    hub.downloads                                  # [("team/tiny", "config.json"), ...]

Like the hub, it redirects to another address for large files, which supports range requests.
"""

import hashlib
import json
import re
import shutil
import socket
import struct
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".parquet")
"""Suffixes of the files that are served after a redirect."""


class HubServer(ThreadingHTTPServer):
    """A hub with one commit of every model and data set, which it serves from folders."""

    def __init__(
        self,
        models: Mapping[str, Path],
        datasets: Mapping[str, Path] | None = None,
        gated: tuple[str, ...] = (),
        cut: Mapping[str, int] | None = None,
        resets: bool = False,
    ):
        """`gated` lists repositories that nobody may read. The first `cut[file]` downloads of a file end half-way:
        the connection is closed, or with `resets`, reset.
        """
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {"models": dict(models), "datasets": dict(datasets or {})}
        self.gated, self.cuts, self.resets = gated, dict(cut or {}), resets
        self.requests: list[str] = []
        """Methods and paths of all requests."""
        self.downloads: list[tuple[str, str]] = []
        """Repository and name of each file that was sent completely."""
        self.ranges: list[tuple[str, int]] = []
        """Name and first byte of each range that was requested."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Repository(NamedTuple):
    kind: str
    name: str
    folder: Path

    def entries(self, below: str = "", recursive: bool = True) -> list[dict[str, Any]]:
        """Describe the files in a folder, and without `recursive` its folders, as the API does."""
        folder = self.folder / below
        paths = sorted(folder.rglob("*") if recursive else folder.iterdir()) if folder.is_dir() else []
        return [self.entry(str(path.relative_to(self.folder))) for path in paths if path.is_file() or not recursive]

    def entry(self, name: str) -> dict[str, Any]:
        if (self.folder / name).is_dir():
            return {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
        content = (self.folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self._answer(body.get("paths", []))

    def _answer(self, paths: list[str] | None = None) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0].strip("/")
        if match := re.fullmatch(r"api/(models|datasets)/([^/]+/[^/]+)(?:/(\w[\w-]*)/?(.*))?", path):
            kind, name, action, rest = match.groups()
            repository = self._find(kind, name)
            if repository is None:
                self._refuse(404, "RepoNotFound")
            elif action in (None, "revision"):
                siblings = [{"rfilename": entry["path"]} for entry in repository.entries()]
                gated = "manual" if name in self.server.gated else False
                facts = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "gated": gated}
                self._send_json(facts | {"tags": [], "lastModified": "2026-01-01T00:00:00.000Z"})
            elif action == "paths-info":
                known = [path for path in paths or [] if (repository.folder / path).is_file()]
                self._send_json([repository.entry(path) for path in known])
            elif action == "tree":
                self._send_json(repository.entries(rest.partition("/")[2], "recursive=true" in self.path.lower()))
            else:
                self._refuse(404, "EntryNotFound")
        elif match := re.fullmatch(r"(cdn/)?(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._send_file(match[2] or "models", match[3], match[4], match[1] is not None)
        else:
            self._refuse(404, "EntryNotFound")

    def _find(self, kind: str, name: str) -> _Repository | None:
        folder = self.server.repositories[kind].get(name)
        return None if folder is None else _Repository(kind, name, folder)

    def _send_file(self, kind: str, repository: str, name: str, is_redirected: bool) -> None:
        found = self._find(kind.strip("/"), repository)
        if found is None or not (found.folder / name).is_file():
            self._refuse(404, "RepoNotFound" if found is None else "EntryNotFound")
            return
        if repository in self.server.gated:
            self._refuse(403, "GatedRepo")
            return
        content = (found.folder / name).read_bytes()
        checksum = f'"{hashlib.sha1(content).hexdigest()}"'
        if name.endswith(LARGE) and not is_redirected:
            self.send_response(302)
            self.send_header("Location", f"{self.server.url}/cdn{self.path}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-ETag", checksum)
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = 0
        if range_header := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start = int(range_header[1])
            end = int(range_header[2] or len(content) - 1)
            self.server.ranges.append((name, start))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
            content = content[: end + 1]
        else:
            self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", checksum)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            self._send_content(repository, name, content[start:])

    def _send_content(self, repository: str, name: str, content: bytes) -> None:
        if self.server.cuts.get(name, 0):
            self.server.cuts[name] -= 1
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
            if self.server.resets:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            else:
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.server.downloads.append((repository, name))
        self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def write_cache(cache: Path, name: str, folder: Path, leave_out: tuple[str, ...] = ()) -> Path:
    """Write a model to a Hugging Face cache folder in the layout of `huggingface_hub`, and return the snapshot."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    for part in (repo / "blobs", repo / "refs", snapshot):
        part.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    for path in folder.iterdir():
        if path.is_file() and path.name not in leave_out:
            blob = repo / "blobs" / hashlib.sha1(path.read_bytes()).hexdigest()
            shutil.copyfile(path, blob)
            (snapshot / path.name).symlink_to(Path("../..") / "blobs" / blob.name)
    return snapshot
