"""Packages that recipes come from: the version that a run names, and a digest of the files that were installed.

An installed package lists its files with their hashes (RECORD, of the specification of wheels). Its code and data have
the same hashes wherever it is installed; what builders and installers write themselves is left out."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from typing import Any

from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import RunFile

_ENTRY_POINTS = "entry_points.txt"
"""The file about a package that says what its code is for; the others depend on who has built or installed it."""

_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class InstalledPackage:
    """A package as it is installed here. ``digest``: of its files; ``wheel``: SHA-256 of the wheel, in hexadecimal,
    where the installer has kept it; both are those of every machine that has installed the same wheel."""

    name: str
    version: str
    digest: str
    wheel: str | None = None

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def plain_name(name: str) -> str:
    """Return a package's name as indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def provider_of(recipe: str, point_of: Distribution | None, named: str | None) -> str | None:
    """Return the name of the package that a recipe comes from; None for Shoal's own recipes in a run that names none.

    ``point_of``: the distribution of its entry point, None of our own; ``named``: the package that the run names, which
    for our own recipes is Shoal itself or, for ``hf``, transformers. Raises ``RecipeError`` for others."""
    if point_of is not None:
        provider = plain_name(point_of.name)
        if named not in (None, provider):
            raise RecipeError(
                f"recipe.package: {recipe!r} comes from the package {provider!r} here, not from {named!r}"
            )
        return provider
    allowed = ("shoal", "transformers") if recipe == "hf" else ("shoal",)
    if named is not None and named not in allowed:
        raise RecipeError(f"recipe.package: {recipe!r} comes with {' and '.join(allowed)}, not with {named!r}")
    return named


@cache
def installed_package(name: str) -> InstalledPackage:
    """Read the package of that name, all of its files, and check these by the hashes that it came with.

    Raises ``RecipeError`` where it is not installed, not from a wheel, or where a file has been changed since."""
    try:
        found = distribution(name)
    except PackageNotFoundError as error:
        raise RecipeError(f"the package {name!r} is not installed here") from error
    again = f"install it from a wheel: python -m pip install --force-reinstall --no-deps '{name}=={found.version}'"
    direct = _direct_url(found)
    if direct.get("dir_info", {}).get("editable"):
        raise RecipeError(
            f"the package {name!r} is installed in editable mode, where its code changes without a trace: {again}"
        )
    files = [one for one in found.files or () if _is_of_the_wheel(one)]
    if not any(one.suffix == ".py" for one in files):
        raise RecipeError(f"the package {name!r} has no list of its files here: {again}")
    listed = sorted((one.as_posix(), _checked(one, again)) for one in files)
    digest = hashlib.sha256(b"shoal package 1\0" + json.dumps([plain_name(found.name), found.version, listed]).encode())
    wheel = direct.get("archive_info", {}).get("hashes", {}).get("sha256")
    is_hash = isinstance(wheel, str) and re.fullmatch("[0-9a-f]{64}", wheel)
    return InstalledPackage(plain_name(found.name), found.version, digest.hexdigest(), wheel if is_hash else None)


def check_package(run: RunFile, point_of: Distribution | None, *, is_installed: bool) -> None:
    """Check that the recipe comes from the package that the run names and pins, in that version and with those files.

    ``point_of``: as of ``provider_of``; ``is_installed``: whether there is such a recipe at all. Nothing of the package
    is imported. Raises ``RecipeError`` that says how to install the right one."""
    wanted = run.recipe.package or (run.pins.package if run.pins else None)
    if wanted is None:
        return
    name, _, version = wanted.partition("==")
    how = _how_to_install(run, wanted)
    if not is_installed:
        raise RecipeError(f"recipe.name: {run.recipe.name!r} is not installed here: {how}")
    provider = provider_of(run.recipe.name, point_of, plain_name(name))
    assert provider is not None, "one was named"
    try:
        here = distribution(provider).version
    except PackageNotFoundError as error:
        raise RecipeError(f"the run's recipe needs the package {wanted}: {how}") from error
    if here != version:
        raise RecipeError(f"the run's recipe is of {wanted}, and {provider}=={here} is installed here: {how}")
    if run.pins is not None and run.pins.package_digest is not None:
        found = installed_package(provider)
        if found.digest != run.pins.package_digest:
            raise RecipeError(
                f"the files of {wanted} are others here ({found.digest[:16]}) than those that the run file pins "
                f"({run.pins.package_digest[:16]}), though they are those of the package that was installed: "
                f"{_how_to_install(run, wanted, again=True)}"
            )


def _how_to_install(run: RunFile, wanted: str, *, again: bool = False) -> str:
    """Return advice with the command that installs the package; ``again``: it is there, and is to be replaced."""
    wheel = run.pins.package_wheel if run.pins else None
    first, install = "", f"python -m pip install{' --force-reinstall' if again else ''}"
    if wheel is not None:  # with one hash, pip wants those of the dependencies, too
        listed = f"echo '{wanted} --hash=sha256:{wheel}' > recipe.txt"
        first, install = f"{listed} && {install} --no-deps -r recipe.txt && ", "python -m pip install"
    elif again:
        install += " --no-deps"
    return f"if you trust those who made it, give `{first}{install} '{wanted}'`, and join again"


def _is_of_the_wheel(file: PackagePath) -> bool:
    """Return whether a file is the same in every installation, also of wheels that were built of the same source."""
    folder = file.parts[0]
    # Scripts name the Python of a machine.
    if folder == ".." or file.suffix == ".pyc" or file.is_absolute():
        return False
    return not folder.endswith(".dist-info") or (len(file.parts) == 2 and file.name == _ENTRY_POINTS)


def _checked(file: PackagePath, again: str) -> str:
    """Return the hash of a file in hexadecimal, which is what it has and what it is to have."""
    if file.hash is None or file.hash.mode != "sha256":
        raise RecipeError(f"{file}: the list of the package's files has no SHA-256 of it: {again}")
    place, digest = file.locate(), hashlib.sha256()
    try:
        expected = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4))
        with open(place, "rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                digest.update(piece)
    except (OSError, binascii.Error) as error:
        raise RecipeError(f"{place}: cannot be read as the package's list of files says ({error}): {again}") from error
    if digest.digest() != expected:
        raise RecipeError(f"{place}: has been changed since it was installed: {again}")
    return digest.hexdigest()


def _direct_url(found: Distribution) -> dict[str, Any]:
    try:
        known = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}
