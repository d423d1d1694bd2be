"""A stand-in for the hub: its interface as `huggingface_hub` asks it, over HTTP on this machine, with faults on demand.

Large files (`.safetensors`, or above 10 MB) are stored as the hub stores them: their address redirects to another host
(here `localhost` in place of `127.0.0.1`), with the size and the SHA-256 in the redirect; the others come directly.

`python hub_server.py FOLDER` serves each FOLDER/OWNER/NAME until it is killed, and prints its address.
"""

import base64
import hashlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import ModelCard

CHUNK_BYTES = 1 << 20
TOKEN = "hf_of_the_tests"


@dataclass
class Stored:
    """A file of a repository: in memory, or on the disk."""

    raw: bytes | None = None
    path: Path | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.raw) if self.raw is not None else self.path.stat().st_size  # type: ignore[union-attr]

    def read(self, start: int, num_bytes: int) -> bytes:
        if self.raw is not None:
            return self.raw[start : start + num_bytes]
        assert self.path is not None
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for start in range(0, self.num_bytes, CHUNK_BYTES):
            digest.update(self.read(start, CHUNK_BYTES))
        return digest.hexdigest()


@dataclass
class Repository:
    """A repository. `access`: public, private (404 without the token) or gated (403 for its files without it)."""

    files: dict[str, Stored] = field(default_factory=dict)
    access: str = "public"
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr([(name, self.digest(name)) for name in sorted(self.files)]).encode()).hexdigest()

    def digest(self, name: str) -> str:
        if name not in self.digests:
            self.digests[name] = self.files[name].sha256()
        return self.digests[name]

    def put(self, name: str, stored: Stored) -> None:
        self.files[name] = stored
        self.digests.pop(name, None)

    def is_large(self, name: str) -> bool:
        return name.endswith(".safetensors") or self.files[name].num_bytes > 10_000_000


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose path has `part`: a status, or an answer cut after bytes."""

    part: str
    times: int
    status: int = 0
    cut_after: int = -1
    headers: dict[str, str] = field(default_factory=dict)


class HubServer(ThreadingHTTPServer):
    """The stand-in. `requests` counts requests by method and path; `sent_bytes` those of files' contents."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.blobs: dict[str, bytes] = {}  # uploaded, by digest
        self.requests: Counter[str] = Counter()
        self.sent_bytes = 0
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, folder: Path, inside: str = "", access: str = "public") -> Repository:
        """Adds a folder's files to a repository, under the folder `inside` of it."""
        repository = self.repositories.setdefault(name, Repository())
        repository.access = access
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            repository.put(inside + path.relative_to(folder).as_posix(), Stored(path=path))
        return repository

    def fault_of(self, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.part in path and fault.times:
                    fault.times -= 1
                    return fault
        return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that were killed."""


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """A hub that serves from a thread of its own."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def environment(server: HubServer, cache: Path) -> dict[str, str]:
    """Variables with which `huggingface_hub` asks the stand-in."""
    return {
        "HF_ENDPOINT": server.address,
        "HF_HUB_CACHE": str(cache),
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
    }


def ask_here(server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `huggingface_hub` in this process ask the stand-in, without a token."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", server.address)
    template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(f"{constants}.HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)
    for timeout in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(f"{constants}.{timeout}", 900)  # seconds: a busy machine answers late
    monkeypatch.delenv("HF_TOKEN", raising=False)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        body = self._body()
        with self.server.lock:
            self.server.requests[f"{self.command} {path}"] += 1
        self._fault = self.server.fault_of(path)
        if self._fault is not None and self._fault.status:
            return self._send(self._fault.status, b"{}", self._fault.headers)
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            return self._cdn(parts)
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4:], parse_qs(url.query), body)
        if parts[:2] == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if parts[:3] == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if parts[0] == "blobs":
            if hashlib.sha256(body).hexdigest() != parts[1]:
                return self._send(400, b"wrong digest")
            self.server.blobs[parts[1]] = body
            return self._send(200, b"")
        if parts[1].endswith(".git"):
            return self._batch(json.loads(body))
        return self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    @property
    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str, revision: str = "main") -> Repository | None:
        """The repository, if the client may see it; otherwise answers and returns None."""
        found = self.server.repositories.get(name)
        if found is None or (found.access == "private" and not self._has_token):
            # The hub hides from strangers whether there is a private repository.
            self._error(401 if not self._has_token else 404, "RepoNotFound", "Repository not found")
        elif revision not in ("main", found.commit):
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return found
        return None

    def _api(self, name: str, rest: list[str], query: dict[str, list[str]], body: bytes) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        repository = self._repository(name, revision)
        if repository is None:
            return
        action = rest[0] if rest else "revision"
        if action == "revision":
            siblings = [self._file(repository, path, "rfilename") for path in sorted(repository.files)]
            facts = {"id": name, "modelId": name, "sha": repository.commit, "private": False, "siblings": siblings}
            if "README.md" in repository.files:
                readme = repository.files["README.md"]
                card = ModelCard(readme.read(0, readme.num_bytes).decode())
                facts["cardData"] = card.data.to_dict()  # type: ignore[no-untyped-call]  # the client leaves it out
            self._json(facts)
        elif action == "tree":
            self._json([{"type": "file", **self._file(repository, path, "path")} for path in sorted(repository.files)])
        elif action == "preupload":
            self._preupload(repository, json.loads(body))
        elif action == "commit":
            self._commit(name, repository, body)
        else:
            self._error(404, "EntryNotFound", action)

    def _file(self, repository: Repository, path: str, key: str) -> dict[str, Any]:
        digest, num_bytes = repository.digest(path), repository.files[path].num_bytes
        facts: dict[str, Any] = {key: path, "size": num_bytes, "blobId": digest[:40], "oid": digest[:40]}
        if repository.is_large(path):
            facts["lfs"] = {"sha256": digest, "oid": digest, "size": num_bytes, "pointerSize": 134}
        return facts

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        if repository.access == "gated" and not self._has_token:
            return self._error(403, "GatedRepo", f"Access to model {name} is restricted")
        if path not in repository.files:
            return self._error(404, "EntryNotFound", f"{path} does not exist")
        digest = repository.digest(path)
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{digest[:40]}"', "Accept-Ranges": "bytes"}
        if repository.is_large(path):
            address = f"http://localhost:{self.server.server_port}/cdn/{name}/{path}"
            linked = {"X-Linked-Size": str(repository.files[path].num_bytes), "X-Linked-Etag": f'"{digest}"'}
            return self._send(302, b"", {**headers, **linked, "Location": address})
        return self._content(repository.files[path], headers)

    def _cdn(self, parts: list[str]) -> None:
        if "Authorization" in self.headers:  # a token must not leave the hub
            return self._send(400, b"a token reached the storage host")
        repository = self.server.repositories["/".join(parts[1:3])]
        path = "/".join(parts[3:])
        return self._content(repository.files[path], {"ETag": f'"{repository.digest(path)}"', "Accept-Ranges": "bytes"})

    def _content(self, stored: Stored, headers: dict[str, str]) -> None:
        """Sends a file or the range of it that is asked for; cuts the connection if a fault says so."""
        start, end, status = 0, stored.num_bytes, 200
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end, status = int(first), min(int(last) + 1 if last else end, end), 206
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{stored.num_bytes}"}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(end - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = end if self._fault is None else min(end, start + self._fault.cut_after)
        while start < limit:
            raw = stored.read(start, min(CHUNK_BYTES, limit - start))
            self.wfile.write(raw)
            start += len(raw)
            with self.server.lock:
                self.server.sent_bytes += len(raw)
        if limit < end:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(2)

    def _create(self, wanted: dict[str, Any]) -> None:
        if not self._has_token:
            return self._error(401, "", "Invalid credentials")
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.server.repositories:
            return self._json({"error": "exists", "url": f"{self.server.address}/{name}"}, 409)
        access = "private" if wanted.get("visibility") == "private" else "public"
        self.server.repositories[name] = Repository(access=access)
        return self._json({"url": f"{self.server.address}/{name}", "id": name})

    def _preupload(self, repository: Repository, wanted: dict[str, Any]) -> None:
        if not self._has_token:
            return self._error(403, "", "no write access")
        files = []
        for file in wanted["files"]:
            is_large = file["path"].endswith(".safetensors") or file["size"] > 10_000_000
            known = repository.digest(file["path"]) if file["path"] in repository.files else None
            mode = {"uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
            files.append({"path": file["path"], **mode, "oid": known if is_large else None})
        return self._json({"files": files})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for item in wanted["objects"]:
            has = item["oid"] in self.server.blobs
            action = {"upload": {"href": f"{self.server.address}/blobs/{item['oid']}", "header": {}}}
            objects.append({"oid": item["oid"], "size": item["size"], **({} if has else {"actions": action})})
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, body: bytes) -> None:
        lines = [json.loads(line) for line in body.decode().splitlines() if line]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repository.put(value["path"], Stored(raw=base64.b64decode(value["content"])))
            elif line["key"] == "lfsFile":
                repository.put(value["path"], Stored(raw=self.server.blobs[value["oid"]]))
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
        commit = repository.commit
        self._json({"success": True, "commitUrl": f"{self.server.address}/{name}/commit/{commit}", "commitOid": commit})

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _json(self, values: Any, status: int = 200) -> None:
        self._send(status, json.dumps(values).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, raw: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(raw))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)


if __name__ == "__main__":
    with running_hub() as hub:
        for folder in sorted(Path(sys.argv[1]).glob("*/*")):
            hub.add(f"{folder.parent.name}/{folder.name}", folder)
        sys.stdout.write(f"{hub.address}\n")
        sys.stdout.flush()
        while True:
            time.sleep(60)
