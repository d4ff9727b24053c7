"""Digests of packages that pip has installed from a wheel, without a network."""

import base64
import hashlib
import importlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from shoal.peer.cli.prepare import pins_of
from shoal.peer.recipes import load_recipe, package_of
from shoal.peer.recipes.packages import InstalledPackage, installed_package
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import RunFile

NAME, VERSION = "reef-recipe", "1.2"
FOLDER = f"reef_recipe-{VERSION}.dist-info"
FILES = {
    "reef_recipe/__init__.py": b"from shoal.peer.recipes.gpt import GptRecipe\n",
    "reef_recipe/table.txt": b"1 2 3\n",
    f"{FOLDER}/METADATA": f"Metadata-Version: 2.1\nName: Reef_Recipe\nVersion: {VERSION}\n".encode(),
    f"{FOLDER}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{FOLDER}/entry_points.txt": (
        b"[shoal.recipes]\nreef = reef_recipe:GptRecipe\n[console_scripts]\nreef = reef_recipe:GptRecipe\n"
    ),
}
SETTINGS = {"layers": 1, "heads": 1, "width": 8, "context": 12}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wheels") / f"reef_recipe-{VERSION}-py3-none-any.whl"
    record = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in FILES.items()]
    record.append(f"{FOLDER}/RECORD,,")
    with zipfile.ZipFile(path, "w") as file:
        for name, content in {**FILES, f"{FOLDER}/RECORD": "\n".join(record).encode()}.items():
            file.writestr(name, content)
    return path


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two installations: one by pip, compiled and with a script; one as others would build and install it."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    options = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", str(folders[0]))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, timeout=120)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folders[1])
    (folders[1] / FOLDER / "INSTALLER").write_text("other\n")
    built = FILES[f"{FOLDER}/WHEEL"].replace(b"Generator: test", b"Generator: other")
    (folders[1] / FOLDER / "WHEEL").write_bytes(built)
    listed = folders[1] / FOLDER / "RECORD"
    listed.write_text(listed.read_text().replace(_hash(FILES[f"{FOLDER}/WHEEL"]), _hash(built)))
    with listed.open("a") as record:
        record.write(f"\n{FOLDER}/INSTALLER,sha256={_hash(b'other' + bytes([10]))},6\n")
    return folders


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    installed_package.cache_clear()
    yield monkeypatch
    installed_package.cache_clear()


def found_in(folder: Path, on_path: pytest.MonkeyPatch) -> InstalledPackage:
    with on_path.context() as path:
        path.syspath_prepend(str(folder))
        installed_package.cache_clear()
        return installed_package(NAME)


def copied(folder: Path, to: Path) -> Path:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            place = to / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    return to


def test_the_digest_is_that_of_every_installation(
    installed: tuple[Path, Path], wheel: Path, on_path: pytest.MonkeyPatch
) -> None:
    one, two = (found_in(folder, on_path) for folder in installed)
    assert one.requirement == two.requirement == f"{NAME}=={VERSION}"
    assert one.digest == two.digest
    assert any(installed[0].rglob("*.pyc")), "pip has compiled it"
    assert one.wheel == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert two.wheel is None


@pytest.mark.parametrize("name", ["reef_recipe/__init__.py", "reef_recipe/table.txt", f"{FOLDER}/entry_points.txt"])
def test_a_changed_file_is_refused(
    installed: tuple[Path, Path], tmp_path: Path, on_path: pytest.MonkeyPatch, name: str
) -> None:
    folder = copied(installed[1], tmp_path)
    (folder / name).write_bytes(FILES[name] + b"# mine\n")
    with pytest.raises(RecipeError, match=rf"{name}: has been changed since .* pip install --force-reinstall .*=="):
        found_in(folder, on_path)
    (folder / name).unlink()
    with pytest.raises(RecipeError, match=f"{name}: cannot be read"):
        found_in(folder, on_path)


def test_a_package_with_other_files_has_another_digest(
    installed: tuple[Path, Path], tmp_path: Path, on_path: pytest.MonkeyPatch
) -> None:
    folder, name = copied(installed[1], tmp_path), "reef_recipe/table.txt"
    (folder / name).write_bytes(b"3 2 1\n")
    record = folder / FOLDER / "RECORD"
    record.write_text(record.read_text().replace(_hash(FILES[name]), _hash(b"3 2 1\n")))
    assert found_in(folder, on_path).digest != found_in(installed[0], on_path).digest


def test_code_in_editable_mode_is_refused(
    installed: tuple[Path, Path], tmp_path: Path, on_path: pytest.MonkeyPatch
) -> None:
    folder = copied(installed[1], tmp_path)
    (folder / FOLDER / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))
    with pytest.raises(RecipeError, match="'reef-recipe' is installed in editable mode"):
        found_in(folder, on_path)
    (folder / FOLDER / "direct_url.json").unlink()
    (folder / FOLDER / "RECORD").unlink()
    with pytest.raises(RecipeError, match="'reef-recipe' has no list of its files"):
        found_in(folder, on_path)


# Runs ---------------------------------------------------------------------------------------------------------


def run_file(recipe: str = "reef", package: str | None = None, pins: dict[str, object] | None = None) -> RunFile:
    content = {
        "run": {"name": "r"},
        "recipe": {"name": recipe, "settings": SETTINGS} | ({"package": package} if package else {}),
        "round": {"tokens": 1},
    }
    if pins:
        fixed = {"layout": "0" * 64, "elements": 1, "tokens_per_sample": 12}
        content["pins"] = fixed | pins
    return RunFile.model_validate(content)


def test_a_run_says_which_package_its_recipe_comes_from(
    installed: tuple[Path, Path], on_path: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=r"'reef' is not installed here: if you .*pip install 'reef-recipe==1\.2'"):
        load_recipe(run_file(package="reef-recipe==1.2"))
    on_path.syspath_prepend(str(installed[0]))
    importlib.invalidate_caches()
    found = package_of(run_file())
    assert found is not None
    assert found.requirement == "reef-recipe==1.2", "of the recipe's entry point, though the run does not name it"
    pins = pins_of(run_file(), lambda _: None)
    assert (pins.package, pins.package_digest, pins.package_wheel) == (found.requirement, found.digest, found.wheel)
    pinned: dict[str, object] = {
        "package": found.requirement,
        "package_digest": found.digest,
        "package_wheel": found.wheel,
    }
    load_recipe(run_file(pins=pinned))
    load_recipe(run_file(package="Reef_Recipe==1.2", pins=pinned))
    with pytest.raises(RecipeError, match=r"reef-recipe==1\.2 is installed here: .*'reef-recipe==1\.3'"):
        load_recipe(run_file(package="reef-recipe==1.3"))
    with pytest.raises(RecipeError, match=r"comes from the package 'reef-recipe' here, not from 'other'"):
        load_recipe(run_file(package="other==1.2"))
    with pytest.raises(RecipeError, match=rf"are others here .*--hash=sha256:{found.wheel}' > .*-r recipe\.txt"):
        load_recipe(run_file(pins=pinned | {"package_digest": "0" * 64}))


def test_our_own_recipes_come_with_shoal() -> None:
    assert package_of(run_file("gpt")) is None
    with pytest.raises(RecipeError, match=r"'gpt' comes with shoal, not with 'transformers'"):
        load_recipe(run_file("gpt", "transformers==5.0"))
    version = distribution("transformers").version
    with pytest.raises(RecipeError, match=rf"transformers=={version} is installed here: .*'transformers==0\.1'"):
        load_recipe(run_file("hf", "transformers==0.1"))


@pytest.mark.parametrize("package", ["x", "x==1; rm", "x==1'", "==1", "x==", "x ==1", "-x==1", "x==1\n"])
def test_a_package_is_a_name_and_a_version(package: str) -> None:
    with pytest.raises(ValueError, match="package"):
        run_file(package=package)
