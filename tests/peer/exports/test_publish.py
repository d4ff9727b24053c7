"""Exports go to a hub and to a registry; what goes wrong there is said in a sentence, and without the token."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.peer.exports.runs import gpt_toml

from shoal.peer.exports.about import ModelOrigin
from shoal.peer.exports.publish import HubTarget, MlflowTarget, open_target
from shoal.swarm.errors import RemoteStorageError, UserError
from shoal.swarm.protocol.run_file import parse_run_file

TOKEN = "hf_secretsecretsecret"
ORIGIN = ModelOrigin(parse_run_file(gpt_toml()), 2)


class Hub(ThreadingHTTPServer):
    """As much of the Hub as an upload of small files needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, object]] = []
        self.messages: list[str] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer({"id": "org/reef", "sha": "0" * 40, "siblings": [], "private": False}, self.server.status)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers["Transfer-Encoding"] == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.server.status != 200:
            self._answer({"error": "no"}, self.server.status)
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self._answer({"url": f"{self.server.url}/org/reef", "name": "org/reef", "id": "1"})
        elif self.path.endswith("/preupload/main"):
            names = [one["path"] for one in json.loads(body)["files"]]
            self._answer({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif self.path.endswith("/commit/main"):
            for line in body.splitlines():
                one = json.loads(line)
                if one["key"] == "file":
                    self.server.files[one["value"]["path"]] = base64.b64decode(one["value"]["content"])
                else:
                    self.server.messages.append(one["value"]["summary"])
            self._answer({"commitUrl": f"{self.server.url}/org/reef/commit/1", "commitOid": "1", "success": True})
        else:
            self._answer({"valid": True})

    def _answer(self, content: object, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_folder_and_a_file_go_to_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"values")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    target = HubTarget.open("org/reef", private=True, endpoint=hub.url)
    assert target.push(tmp_path / "out", ORIGIN) == "hub://org/reef"
    target.push(tmp_path / "model.gguf", ORIGIN)
    assert hub.files == {"config.json": b"{}", "model.safetensors": b"values", "model.gguf": b"GGUF"}
    assert (hub.made[0]["name"], hub.made[0]["organization"]) == ("reef", "org")
    assert "private" in json.dumps(hub.made[0])
    assert hub.messages[0].startswith("Anchor version 2 of the run reef (")


@pytest.mark.parametrize(
    ("status", "words"), [(401, "does not know the token"), (403, "may not write there"), (422, "with status 422")]
)
def test_what_the_hub_refuses_is_said(hub: Hub, tmp_path: Path, status: int, words: str) -> None:
    target = HubTarget.open("org/reef", private=False, endpoint=hub.url)
    hub.status = status
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(RemoteStorageError, match=words):
        target.push(tmp_path / "model.gguf", ORIGIN)
    with pytest.raises(RemoteStorageError, match=words) as refused:
        HubTarget.open("org/reef", private=False, endpoint=hub.url)
    assert TOKEN not in str(refused.value)


def test_a_hub_that_is_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(RemoteStorageError, match=r"cannot be reached .* stays on this machine"):
        HubTarget.open("org/reef", private=False, endpoint=hub.url)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(RemoteStorageError, match="no token of the Hub on this machine"):
        open_target("hub://org/reef")


@pytest.mark.parametrize("url", ["hub://reef", "hub://a/b/c", "s3://a/b", "mlflow://", "hub://org/..%2f"])
def test_other_targets_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="expected hub://ORG/NAME or mlflow://NAME"):
        open_target(url)


def test_private_is_of_the_hub() -> None:
    with pytest.raises(UserError, match="--private"):
        open_target("mlflow://reef", private=True)


def test_versions_in_mlflows_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    for version in ("1", "2"):
        assert MlflowTarget.open("reef").push(tmp_path / "out", ORIGIN) == f"mlflow://reef, version {version}"
    found = mlflow.MlflowClient().get_model_version("reef", "2")
    assert found.tags["run_hash"] == ORIGIN.run.hash.hex()
    fetched = mlflow.artifacts.download_artifacts(artifact_uri="models:/reef/2")
    assert (Path(fetched) / "config.json").read_text() == "{}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    with pytest.raises(RemoteStorageError, match="MLflow refuses"):
        MlflowTarget.open("reef")
