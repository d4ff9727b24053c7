"""Launchers in ``deploy/``: each file by its own validator, if that is installed, and what all have in common."""

import ast
import fnmatch
import io
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from shoal.peer.cli.main import app
from shoal.peer.options import STOPPED_AT_ONCE, TERMINATED
from shoal.swarm import errors

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
USAGE = 2
"""Exit code of wrong arguments."""

OVER = {0, errors.RunEnded.exit_code}


def all_codes(root: type[errors.ShoalError] = errors.ShoalError) -> Iterator[type[errors.ShoalError]]:
    for one in root.__subclasses__():
        yield one
        yield from all_codes(one)


def documents(*names: str) -> list[dict[str, Any]]:
    return [one for name in names for one in yaml.safe_load_all((DEPLOY / name).read_text())]


def document(kind: str) -> dict[str, Any]:
    (found,) = (
        one for one in documents("kubernetes/base/host.yaml", "kubernetes/base/peers.yaml") if one["kind"] == kind
    )
    return found


# Exit codes ---------------------------------------------------------------------------------------------------


def table() -> dict[str, set[int]]:
    """Codes of the page's table by the first words of what a launcher does with them."""
    rows: dict[str, set[int]] = {}
    page = (DEPLOY / "README.md").read_text().partition("\n## Exit codes\n")[2]
    for codes, what in re.findall(r"^\| ([\d, –]+) \| (\w+)", page, flags=re.MULTILINE):
        for one in codes.replace(" ", "").split(","):
            first, _, last = one.partition("–")
            rows.setdefault(what, set()).update(range(int(first), int(last or first) + 1))
    return rows


def never_again() -> set[int]:
    """Codes after which a launcher does not start a peer again, without the run's end and a person's Ctrl-C."""
    return table()["nothing"] - OVER - {STOPPED_AT_ONCE}


def test_the_table_of_exit_codes_is_the_one_of_the_errors() -> None:
    assert table()["starts"] == {TERMINATED}
    users = {one.exit_code for one in all_codes() if issubclass(one, errors.UserError)} - {1}
    missing = users - never_again()
    assert not missing, f"{missing} need a person: add them to the table in deploy/README.md and to each launcher"
    final = {one.exit_code for one in errors.FINAL_ERRORS} - OVER
    assert final <= never_again()
    passes_by = (errors.Unreachable, errors.TryLater, errors.StorageError, errors.IslandBroken, errors.HostCrashed)
    assert not {one.exit_code for one in passes_by} & table()["nothing"]


def test_each_launcher_has_the_codes_of_the_table() -> None:
    never = never_again()
    rules = document("Job")["spec"]["podFailurePolicy"]["rules"]
    codes = {one["action"]: set(one["onExitCodes"]["values"]) for one in rules if "onExitCodes" in one}
    assert codes == {"Ignore": {TERMINATED}, "FailIndex": never | OVER - {0}}

    for unit in UNITS:
        assert {int(one) for one in setting(unit, "RestartPreventExitStatus").split()} == never, unit.name
    assert setting(DEPLOY / "systemd/shoal-peer@.service", "SuccessExitStatus") == f"26 {TERMINATED}"

    script = (DEPLOY / "slurm" / "peers.sbatch").read_text()
    (listed,) = re.findall(r'^    ([^)]+)\) exit "\$code" ;;$', script, flags=re.MULTILINE)
    patterns = listed.split(" | ")
    matched = {code for code in range(256) if any(fnmatch.fnmatchcase(str(code), one) for one in patterns)}
    assert matched == never | {STOPPED_AT_ONCE}

    tree = ast.parse((DEPLOY / "ray_peers.py").read_text())
    lists = {
        node.targets[0].id: eval(ast.unparse(node.value), {"range": range})  # noqa: S307 - a file of ours
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
    }
    assert (set(lists["DONE"]), set(lists["FINAL"])) == (OVER, never | {STOPPED_AT_ONCE})


def setting(unit: Path, name: str) -> str:
    (found,) = re.findall(rf"^{name}=(.*)$", unit.read_text(), flags=re.MULTILINE)
    return str(found)


# What all have in common --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_has_an_invite_or_names_a_registry(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"shoal://\S*key=[\w-]{20}", text)
    assert not re.search(r"https?://", text)
    images = re.findall(r"^(?:FROM|\s*(?:- )?image:) (\S+)", text, flags=re.MULTILINE)
    assert not [one for one in images if "/" in one], "the image of a registry that it names"


def joins() -> dict[str, list[str]]:
    """Arguments of ``shoal`` in each file, without the launcher's own variables."""
    compose = documents("compose.yaml")[0]["services"]
    found = {f"compose {name}": service["command"] for name, service in compose.items()}
    found["StatefulSet"] = document("StatefulSet")["spec"]["template"]["spec"]["containers"][0]["args"]
    found["Job"] = document("Job")["spec"]["template"]["spec"]["containers"][0]["args"]
    found["TrainJob"] = documents("kubeflow-trainjob.yaml")[0]["spec"]["trainer"]["command"][3:]
    found |= {unit.name: shlex.split(setting(unit, "ExecStart"))[1:] for unit in UNITS}
    texts = (documents("skypilot.yaml")[0]["run"], documents("peer.dstack.yml")[0]["commands"][-1])
    for name, text in zip(("SkyPilot", "dstack"), texts, strict=True):
        found[name] = text.partition("/shoal ")[2].partition("$")[0].split()
    line = next(one for one in (DEPLOY / "slurm/peers.sbatch").read_text().splitlines() if " shoal join " in one)
    found["Slurm"] = [one for one in shlex.split(line.partition(" shoal ")[2]) if one not in ("&", "$@")]
    return found


@pytest.mark.parametrize("name", joins())
def test_the_command_has_these_options(name: str) -> None:
    command, *arguments = (one for one in joins()[name] if one != "$OPTIONS")
    known = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    options = {option for one in known.params for option in (*one.opts, *one.secondary_opts)}
    given = {one for one in arguments if one.startswith("--")}
    assert given <= options
    assert command in ("host", "relay", "join")


def test_examples_of_options_in_comments_exist() -> None:
    known = typer.main.get_command(app).commands["join"]  # type: ignore[attr-defined]
    options = {option for one in known.params for option in one.opts}
    text = (DEPLOY / "systemd/shoal-peer@.service").read_text()
    assert set(re.findall(r"--[a-z-]+", text.partition("OPTIONS=")[2].partition("\n")[0])) <= options


# Each by its own ----------------------------------------------------------------------------------------------


@pytest.fixture
def kubernetes(tmp_path: Path) -> Path:
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder)
    for overlay in ("cpu", "gpu"):
        shutil.copy(ROOT / "examples" / "stdlib.toml", folder / "overlays" / overlay / "run.toml")
    return folder


@pytest.mark.parametrize("name", ["host.yaml", "peers.yaml"])
def test_kubernetes_knows_these_fields(name: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for one in documents(f"kubernetes/base/{name}"):
        validator.validate(one, "1.37", strict=True)


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
@pytest.mark.parametrize("kept", [False, True])
def test_overlays_build_what_kubernetes_knows(kubernetes: Path, overlay: str, kept: bool) -> None:
    validator, kubectl = pytest.importorskip("kubernetes_validate"), shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here; deploy/check.sh brings one")
    if kept:
        with (kubernetes / "overlays" / overlay / "kustomization.yaml").open("a") as file:
            file.write("components: [../../components/kept]\n")
    built = subprocess.run(
        [kubectl, "kustomize", str(kubernetes / "overlays" / overlay)], capture_output=True, text=True, check=True
    )
    found = {one["kind"]: one for one in yaml.safe_load_all(built.stdout)}
    assert set(found) == {"ConfigMap", "Service", "StatefulSet", "Job"} | ({"PersistentVolumeClaim"} if kept else set())
    for one in found.values():
        validator.validate(one, "1.37", strict=True)
    peer, host = found["Job"]["spec"]["template"]["spec"], found["StatefulSet"]["spec"]["template"]["spec"]
    image = {"cpu": "shoal:cpu", "gpu": "shoal:cuda"}[overlay]
    assert [peer["containers"][0]["image"], host["containers"][0]["image"]] == [image, image]
    assert host["volumes"][0]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    assert ("persistentVolumeClaim" in peer["volumes"][0]) == kept
    assert ("subPathExpr" in peer["containers"][0]["volumeMounts"][0]) == kept


def test_pods_may_do_little_and_their_keys_stay_private() -> None:
    for kind in ("StatefulSet", "Job"):
        pod = document(kind)["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        assert not pod["automountServiceAccountToken"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {mount["name"] for mount in container["volumeMounts"]} >= {"data", "tmp"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_verifies_the_units(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    command = shutil.which("true")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/shoal/bin/shoal", str(command)))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "shoal" in line]
    assert (done.returncode, said) == (0, []), done.stderr
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(copy)], capture_output=True, text=True
    )
    assert rated.returncode == 0, rated.stdout[-300:] + rated.stderr


def test_the_image_runs_the_wheel_as_a_user_who_is_not_root() -> None:
    parser = pytest.importorskip("dockerfile_parse").DockerfileParser(
        fileobj=io.BytesIO((DEPLOY / "Dockerfile").read_bytes())
    )
    steps = parser.structure
    assert parser.parent_images[0] == "python:3.11.14-slim-bookworm"
    assert [step["value"] for step in steps if step["instruction"] == "USER"] == ["10001:10001"]
    assert {step["value"].split()[0] for step in steps if step["instruction"] == "COPY"} == {
        "constraints.txt",
        "dist/shoal-*.whl",
    }
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert kept == ["*", "!constraints.txt", "!dist/shoal-*.whl"]
    pip = [step["value"] for step in steps if step["instruction"] == "RUN" and "pip" in step["value"]]
    assert len(pip) == 3
    assert all("-c constraints.txt" in one for one in pip)
    (extras,) = re.findall(r"\[([\w,]+)\]", pip[-1])
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))


def test_slurms_script_is_a_shell_script() -> None:
    script = DEPLOY / "slurm" / "peers.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.read_text().startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("ends", "state", "code", "asked"),
    [
        (0, "RUNNING", 0, False),
        (26, "RUNNING", 0, False),
        (143, "RUNNING", 143, True),
        (20, "RUNNING", 20, True),
        (143, "COMPLETING", 143, False),
        (50, "RUNNING", 50, False),
        (18, "RUNNING", 18, False),
        (130, "RUNNING", 130, False),
    ],
)
def test_slurms_script_queues_its_task_again_where_that_helps(
    tmp_path: Path, ends: int, state: str, code: int, asked: bool
) -> None:
    """With Slurm's commands replaced by scripts of the test, which write down what was asked."""
    commands = {
        "shoal": f'echo "$SHOAL_HOME $@" > {tmp_path}/joined; exit {ends}',
        "squeue": f"echo {state}",
        "scontrol": f'echo "$@" > {tmp_path}/asked',
        "sleep": "exit 0",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": "40",
        "SLURM_ARRAY_JOB_ID": "40",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    environment.pop("SHOAL_HOME", None)
    script = str(DEPLOY / "slurm" / "peers.sbatch")
    done = subprocess.run(["bash", script, "reef.invite"], env=environment, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    joined = (tmp_path / "joined").read_text()
    assert joined.startswith(f"{tmp_path}/.shoal/slurm/40/3 join @reef.invite --name ")
    assert joined.endswith("-3 --devices all\n")
    assert (tmp_path / "asked").exists() == asked
    if asked:
        assert (tmp_path / "asked").read_text() == "requeue 40_3\n"


def test_compose_takes_the_file() -> None:
    schema = os.environ.get("COMPOSE_SCHEMA")
    if schema is None:
        pytest.skip("no schema here; deploy/check.sh brings one")
    jsonschema = pytest.importorskip("jsonschema")
    (compose,) = documents("compose.yaml")
    loaded = yaml.safe_load(Path(schema).read_text())
    assert [error.message for error in jsonschema.Draft7Validator(loaded).iter_errors(compose)] == []
