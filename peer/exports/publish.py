"""Exports that go on to a hub or a registry: ``hub://ORG/NAME`` and ``mlflow://NAME``.

Tokens and addresses come from where the services' own packages look for them, and are never printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.peer.exports.about import ModelOrigin
from shoal.swarm.errors import RemoteStorageError, UserError

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"hub://({_NAME}/{_NAME})")
_MLFLOW = re.compile(r"mlflow://([^/:\s]{1,200})")
_EXPERIMENT = "shoal"


def open_target(url: str, *, private: bool = False) -> HubTarget | MlflowTarget:
    """Find the target that a person has named. Raises ``UserError``, and ``RemoteStorageError`` for a lack of rights
    that can be seen at once."""
    if found := _HUB.fullmatch(url):
        return HubTarget.open(found[1], private=private)
    if private:
        raise UserError("--private: is for --push hub://ORG/NAME")
    if found := _MLFLOW.fullmatch(url):
        return MlflowTarget.open(found[1])
    raise UserError(f"--push {url[:300]}: expected hub://ORG/NAME or mlflow://NAME")


@dataclass(frozen=True)
class HubTarget:
    """A model's repository on the Hugging Face Hub, or on the one that ``HF_ENDPOINT`` names."""

    api: Any
    name: str

    @classmethod
    def open(cls, name: str, *, private: bool, endpoint: str | None = None) -> HubTarget:
        """Make the repository if there is none. Raises ``UserError`` and ``RemoteStorageError``."""
        try:
            from huggingface_hub import HfApi, get_token
        except ImportError as error:
            raise UserError(f"--push hub://{name}: needs a package: pip install 'shoal[hf]' ({error})") from error
        if get_token() is None:
            raise RemoteStorageError(
                f"hub://{name}: no token of the Hub on this machine: run `hf auth login`, or set HF_TOKEN"
            )
        target = cls(HfApi(endpoint=endpoint), name)
        try:
            target.api.create_repo(name, private=private or None, exist_ok=True)
        except Exception as error:  # its client raises several families of errors
            raise target._refusal(error) from error
        return target

    def push(self, path: Path, origin: ModelOrigin) -> str:
        """Upload an export; return where it is. Files that are there under other names stay."""
        message = f"Anchor version {origin.version} of the run {origin.run.run.name} ({origin.run.hash.hex()[:16]})"
        try:
            if path.is_dir():
                self.api.upload_folder(repo_id=self.name, folder_path=path, commit_message=message)
            else:
                self.api.upload_file(
                    path_or_fileobj=path, path_in_repo=path.name, repo_id=self.name, commit_message=message
                )
        except Exception as error:
            raise self._refusal(error) from error
        return f"hub://{self.name}"

    def _refusal(self, error: Exception) -> RemoteStorageError:
        from huggingface_hub.errors import HfHubHTTPError

        where = f"hub://{self.name}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            return RemoteStorageError(f"{where}: the Hub does not know the token: run `hf auth login`")
        if status == 403:
            return RemoteStorageError(
                f"{where}: the token may not write there: it needs the right to write to this name"
            )
        if isinstance(error, HfHubHTTPError) and status is not None:
            return RemoteStorageError(f"{where}: the Hub answers with status {status}")
        kind = type(error).__name__
        return RemoteStorageError(
            f"{where}: cannot be reached ({kind}: {str(error)[:200]}); what was exported stays on this machine"
        )


@dataclass(frozen=True)
class MlflowTarget:
    """A model's name in the registry of MLflow that ``MLFLOW_TRACKING_URI`` names."""

    client: Any
    name: str

    @classmethod
    def open(cls, name: str) -> MlflowTarget:
        """Register the name if it is new. Raises ``UserError`` and ``RemoteStorageError``."""
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise UserError(
                f"--push mlflow://{name}: needs a package: pip install 'shoal[mlflow]' ({error})"
            ) from error
        try:
            client: Any = MlflowClient()
            if not client.search_registered_models(f"name = '{name.replace(chr(39), '')}'"):
                client.create_registered_model(name)
        except Exception as error:  # each store of MLflow raises its own
            raise _mlflow_refusal(name, error) from error
        return cls(client, name)

    def push(self, path: Path, origin: ModelOrigin) -> str:
        """Upload an export as a new version of the model; return where it is."""
        client, texts = self.client, origin.texts()
        try:
            experiment = client.get_experiment_by_name(_EXPERIMENT)
            number = experiment.experiment_id if experiment is not None else client.create_experiment(_EXPERIMENT)
            run = client.create_run(number, run_name=f"export of {origin.run.run.name}", tags=texts)
            log = client.log_artifacts if path.is_dir() else client.log_artifact
            log(run.info.run_id, str(path), "model")
            client.set_terminated(run.info.run_id)
            source = f"{run.info.artifact_uri}/model"
            made = client.create_model_version(self.name, source, run.info.run_id, tags=texts)
        except Exception as error:
            raise _mlflow_refusal(self.name, error) from error
        return f"mlflow://{self.name}, version {made.version}"


def _mlflow_refusal(name: str, error: Exception) -> RemoteStorageError:
    words = " ".join(str(error).split())[:300]
    raise RemoteStorageError(
        f"mlflow://{name}: MLflow refuses: {words} (MLFLOW_TRACKING_URI names the server)"
    ) from error
