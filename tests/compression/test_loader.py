"""Compilation of kernels in the background; kernels that cannot be compiled cost one line in the log."""

import logging
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.fakes.codec_maps import get_codec_map

from shoal.compression.formats import CodecError
from shoal.compression.kernels import loader
from shoal.compression.registry import get_codec


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_ready", {})
    monkeypatch.setattr(loader, "_begun", {})


def put_kernels(monkeypatch: pytest.MonkeyPatch, warm_up: Any) -> list[str]:
    """Put modules with this ``warm_up`` under the names "one" and "two"; returns those that were imported since."""
    imported: list[str] = []

    def importer(name: str) -> Callable[[], ModuleType]:
        def import_it() -> ModuleType:
            imported.append(name)
            module = ModuleType(name)
            module.warm_up = warm_up  # type: ignore[attr-defined]
            return module

        return import_it

    monkeypatch.setattr(loader, "_IMPORTS", {name: importer(name) for name in ("one", "two")})
    return imported


def test_each_module_is_compiled_once_and_then_there(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    imported = put_kernels(monkeypatch, lambda: go_on.wait(10))
    threads = loader.compile_ahead(["one", "two"])
    assert loader.compile_ahead(["two", "one"]) == threads[::-1]
    assert loader.kernels("one") is None
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(imported) == ["one", "two"]
    found = loader.kernels("one")
    assert found is not None
    assert found.__name__ == "one"


@pytest.mark.parametrize(
    ("error", "level", "line"),
    [
        (ImportError("No module named 'numba'"), logging.INFO, "without compiled kernels .*No module named 'numba'"),
        (RuntimeError("no such instruction"), logging.WARNING, "kernels of one, .*no such instruction"),
    ],
)
def test_a_failure_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, level: int, line: str
) -> None:
    def fail() -> None:
        raise error

    put_kernels(monkeypatch, fail)
    with caplog.at_level(logging.INFO):
        for thread in loader.compile_ahead(["one"]) + loader.compile_ahead(["one"]):
            thread.join()
    assert loader.kernels("one") is None
    (record,) = caplog.records
    assert record.levelno == level
    assert re.search(line, record.getMessage())


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "sign", "topk"])
@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"values": "int8"}], ids=["plain", "seed", "int8 values"])
def test_nothing_is_compiled_after_warming_up(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip("numba")
    try:
        codec = get_codec(name, options)
    except CodecError:
        pytest.skip("no such option")
    (thread,) = loader.compile_ahead(get_codec_map(name, options).kernels)
    thread.join()
    (module,) = loader._ready.values()
    kernels = {name: one for name, one in vars(module).items() if hasattr(one, "signatures")}
    before = {name: len(one.signatures) for name, one in kernels.items()}
    for n in (1, 4096, 5000):
        values, total = torch.randn(n), torch.zeros(n)
        packed = codec.encode(values)
        codec.encode_residual(values, torch.zeros(n))
        codec.decode(packed.numpy().tobytes(), n, total)
        codec.decode(packed, n)
        codec.accumulate(memoryview(bytearray(packed.numpy().tobytes())), total, 3.0)
    assert kernels
    assert {name: len(one.signatures) for name, one in kernels.items()} == before


KERNEL = """
from shoal.compression.helper import answer
from shoal.compression.kernels.jit import njit

@njit
def ask():
    return answer()

print(ask())
"""
HELPER = """
from shoal.compression.kernels.jit import njit

@njit
def answer():
    return {}
"""


def test_machine_code_is_made_anew_when_only_a_helper_s_module_changes(tmp_path: Path) -> None:
    """numba itself looks at the module of the kernel alone, and would go on with the old answer."""
    pytest.importorskip("numba")
    folder = tmp_path / "shoal" / "compression"
    (folder / "kernels").mkdir(parents=True)
    (folder / "__init__.py").touch()
    shutil.copy(str(jit_path()), folder / "kernels")
    (folder / "kernel.py").write_text(KERNEL)
    answers = []
    for number in (1, 1, 2):
        (folder / "helper.py").write_text(HELPER.format(number))
        command = [sys.executable, "-c", "import shoal.compression.kernel"]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
        answers.append((ran.stdout.strip(), len(list(folder.glob("__pycache__/kernel.ask*.nbi")))))
    assert answers == [("1", 1), ("1", 1), ("2", 2)]


def jit_path() -> Path:
    from shoal.compression.kernels import jit

    return Path(jit.__file__)
