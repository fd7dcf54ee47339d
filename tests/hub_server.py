"""A stand-in for the Hugging Face hub: the few calls of its HTTP interface that our commands make.

Large files go the way of Git LFS, for which HF_HUB_DISABLE_XET=1 has to be set: the way of Xet needs a server
of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

TOKEN = "hf_of_the_test"
OF_THE_HUB = {".gitattributes": b"*.safetensors filter=lfs\n"}
# what a fault does to a request: an HTTP status, or DROP
DROP = "drop"


@dataclass
class Repository:
    """Files by their paths, and the number of commits, which the newest commit's hash is made of."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(OF_THE_HUB))
    private: bool = False
    commits: int = 1

    @property
    def sha(self) -> str:
        return f"{self.commits:040x}"


class Hub:
    """The server, on a port of its own, in a thread, as a context manager.

    Attributes:
        models, datasets: repositories by USER/NAME.
        may_write: users for which TOKEN may write.
        faults: gets the number of each request for a file's content, its path and its first byte; returns
            what goes wrong with it, or None.
        requests: method and path of all requests.
    """

    def __init__(self, faults: Callable[[int, str, int], int | str | None] = lambda *request: None) -> None:
        self.models: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
        self.may_write = {"me"}
        self.faults = faults
        self.requests: list[str] = []
        self.contents = 0  # requests for a file's content
        self.objects: dict[str, bytes] = {}  # of Git LFS, by SHA-256
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """The variables of a process that takes this for the hub and knows no other; `home`: its cache."""
        found = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }
        return {**found, "HF_TOKEN": token or ""}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *about: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        for pattern, method in ROUTES:
            found = re.fullmatch(pattern, path)
            if found:
                return getattr(self, method)(*found.groups(), body)
        self._send(404, {"error": f"{path}: not in this stand-in"})

    def _send(self, status: int, content: object = b"", **headers: object) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        length = headers.pop("length", len(data))
        for name, value in {"Content-Length": length, **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refused(self, status: int, said: str) -> None:
        self._send(status, {"error": said}, X_Error_Message=said)

    def _known(self, kind: str, name: str) -> Repository | None:
        found = getattr(self.hub, kind).get(name)
        if found is None:
            self._send(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
        return found

    # --- reading

    def facts(self, kind: str, name: str, body: bytes) -> None:
        found = self._known(kind, name)
        if found:
            files = [{"rfilename": path} for path in found.files]
            about = {"id": name, "private": found.private, "sha": found.sha, "siblings": files, "tags": []}
            self._send(200, about)

    def tree(self, kind: str, name: str, below: str | None, body: bytes) -> None:
        found = self._known(kind, name)
        if not found:
            return
        root = f"{below.strip('/')}/" if below else ""
        folded = "recursive=true" not in self.path.lower()
        entries = {}
        for path, data in found.files.items():
            if path.startswith(root):
                head, more, _ = path.removeprefix(root).partition("/")
                folder = {"type": "directory", "path": root + head, "oid": "0" * 40, "size": 0}
                entry = folder if more and folded else _entry(path, data)
                entries[entry["path"]] = entry
        self._send(200 if entries else 404, list(entries.values()))

    def paths_info(self, kind: str, name: str, body: bytes) -> None:
        found = self._known(kind, name)
        if found:
            paths = json.loads(body)["paths"]
            self._send(200, [_entry(path, found.files[path]) for path in paths if path in found.files])

    def content(self, name: str, path: str, body: bytes) -> None:
        found = self._known("datasets", name)
        if not found:
            return
        if path not in found.files:
            return self._send(404, {"error": "not found"}, X_Error_Code="EntryNotFound")
        data = found.files[path]
        about = {"X_Repo_Commit": found.sha, "ETag": f'"{_oid(data)}"', "Accept_Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        first = int(wanted[1]) if wanted else 0
        last = min(int((wanted and wanted[2]) or len(data) - 1), len(data) - 1)
        fault = None
        if self.command == "GET":
            with self.hub.lock:
                fault = self.hub.faults(self.hub.contents, path, first)
                self.hub.contents += 1
        part = data[first : last + 1]
        if fault == DROP:
            # half of what was promised, and a reset
            self._send(206, part[: len(part) // 2], length=len(part), **about)
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif fault:
            self._refused(fault, "a fault of the test")
        elif wanted:
            self._send(206, part, Content_Range=f"bytes {first}-{last}/{len(data)}", **about)
        else:
            self._send(200, data, **about)

    # --- writing

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        page = {"url": f"{self.hub.url}/{name}"}
        if self._may_write(name):
            if name in self.hub.models:
                return self._send(409, page, X_Error_Message="You already created this model repo")
            self.hub.models[name] = Repository(private=asked.get("visibility") == "private")
            self._send(200, page)

    def _may_write(self, name: str) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token != TOKEN:
            self._refused(401, "Invalid user token.")
        elif name.split("/")[0] not in self.hub.may_write:
            self._refused(403, f"You don't have the rights to create a model under the namespace of {name}")
        else:
            return True
        return False

    def preupload(self, name: str, body: bytes) -> None:
        if self._may_write(name):
            files = [
                {"path": path, "uploadMode": "lfs" if path.endswith(".safetensors") else "regular",
                 "shouldIgnore": False}
                for path in (each["path"] for each in json.loads(body)["files"])
            ]  # fmt: skip
            self._send(200, {"files": files})

    def batch(self, name: str, body: bytes) -> None:
        if self._may_write(name):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.hub.url}/objects/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._send(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self._send(200)

    def commit(self, name: str, body: bytes) -> None:
        if not self._may_write(name):
            return
        found = self.hub.models[name]
        header, *files = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit") not in (None, found.sha):
            return self._refused(412, "A commit has happened since. Please refresh and try again.")
        for line in files:
            value = line["value"]
            large = line["key"] == "lfsFile"
            data = self.hub.objects[value["oid"]] if large else base64.b64decode(value["content"])
            found.files[value["path"]] = data
        found.commits += 1
        self._send(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{found.sha}", "commitOid": found.sha})


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}


NAME = r"([^/]+/[^/]+)"
ROUTES = (
    (rf"/api/(models|datasets)/{NAME}(?:/revision/[^/]+)?", "facts"),
    (rf"/api/(models|datasets)/{NAME}/tree/[^/]+(/.*)?", "tree"),
    (rf"/api/(models|datasets)/{NAME}/paths-info/[^/]+", "paths_info"),
    (rf"/datasets/{NAME}/resolve/[^/]+/(.+)", "content"),
    (r"/api/repos/create", "create"),
    (rf"/api/models/{NAME}/preupload/[^/]+", "preupload"),
    (rf"/{NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"/objects/(\w+)", "put"),
    (rf"/api/models/{NAME}/commit/[^/]+", "commit"),
)
