"""A local server with the endpoints of the Hugging Face hub that `huggingface_hub` downloads models from.

with HubServer({"team/tiny": folder}) as hub:      # set HF_ENDPOINT=hub.url in a new process
    ...
    hub.downloads                                  # [("team/tiny", "config.json"), ...]
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """A hub with one commit of every model, which it serves from a folder."""

    def __init__(self, models: Mapping[str, Path]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = dict(models)
        self.downloads: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and (folder := self._folder(parts[2:4])):
            if parts[4] == "revision":
                self._send_json({"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": [], "private": False})
            else:
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                entries = [(str(path.relative_to(folder)), path.read_bytes()) for path in files]
                self._send_json(
                    [
                        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for name, data in entries
                    ]
                )
        else:
            self._send_file(parts)

    def do_HEAD(self) -> None:
        self._send_file(self.path.partition("?")[0].strip("/").split("/"))

    def _folder(self, owner_and_name: list[str]) -> Path | None:
        return self.server.models.get("/".join(owner_and_name))

    def _send_file(self, parts: list[str]) -> None:
        folder = self._folder(parts[:2]) if parts[2:3] == ["resolve"] else None
        path = folder / "/".join(parts[4:]) if folder else None
        if path is None or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if folder is None else "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.server.downloads.append(("/".join(parts[:2]), "/".join(parts[4:])))
            self.wfile.write(content)

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
