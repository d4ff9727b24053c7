"""The layer rule peer -> swarm -> compression, and other promises that the source's shape can prove.

Everything here reads syntax trees and imports nothing of ours. The checkers are tested themselves, on
snippets, further down.
"""

import ast
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "compression": {"compression"},
    "swarm": {"swarm", "compression"},
    "peer": {"peer", "swarm", "compression"},
}

PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
# These unpickle or run what they read.
RUNS_WHAT_IT_READS = {
    "torch.load",
    "torch.serialization.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "builtins.eval",
    "builtins.exec",
}
UNPICKLING_METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


# --- the checkers ---------------------------------------------------------------------------------------


def import_names(tree: ast.AST) -> dict[str, str]:
    """What the imports of a module bind: name -> dotted name. Relative ones are left out."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """``a.b.c`` with ``a`` replaced by what was imported under that name; empty if it is no such chain."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, names)
        return f"{before}.{node.attr}" if before else ""
    return ""


def absolute(name: str, level: int, module: str, is_package: bool) -> str:
    """What ``level`` dots and ``name`` mean inside ``module``; "shoal.." if the dots lead out of it all."""
    if level == 0:
        return name
    package = module if is_package else module.rpartition(".")[0]
    try:
        return importlib.util.resolve_name("." * level + name, package)
    except ImportError:
        return "shoal.."


def constant(call: ast.Call, position: int, keyword: str) -> object:
    """An argument's constant value (a list or tuple of constants too); None if absent or computed."""
    nodes = [*call.args[position : position + 1], *(k.value for k in call.keywords if k.arg == keyword)]
    try:
        return ast.literal_eval(nodes[0]) if nodes else None
    except ValueError:
        return None


def imported_by_call(call: ast.Call, names: dict[str, str], module: str, is_package: bool) -> Iterator[str]:
    """What ``importlib.import_module(…)`` and ``__import__(…)`` import; "?" if that is computed."""
    function = dotted(call.func, names)
    if function in {"importlib.import_module", "importlib.__import__", "__import__", "builtins.__import__"}:
        name = constant(call, 0, "name")
        if not isinstance(name, str):
            yield "?"
        elif function == "importlib.import_module":
            base = name.lstrip(".")
            package = constant(call, 1, "package")
            within = (package, True) if isinstance(package, str) else (module, is_package)
            yield absolute(base, len(name) - len(base), *within)
        else:
            level = constant(call, 4, "level")
            base = absolute(name, level if isinstance(level, int) else 0, module, is_package)
            yield base
            parts = constant(call, 3, "fromlist")
            yield from (f"{base}.{part}" for part in parts or () if isinstance(parts, list | tuple))


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Every (line, absolute dotted name) that ``module`` imports or reaches for under the name ``shoal``."""
    tree = ast.parse(source)
    names = import_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level, module, is_package)
            for alias in node.names:
                yield node.lineno, base if alias.name == "*" else f"{base}.{alias.name}"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in imported_by_call(node, names, module, is_package))
        elif isinstance(node, ast.Attribute) and (name := dotted(node, names)).startswith("shoal."):
            yield node.lineno, name


def layer_violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of ``module`` (``shoal.ROOM.…``) that go against the layers, as "line: what is wrong"."""
    room = module.split(".")[1]
    found = set()
    for line, name in imports(source, module, is_package):
        top, _, rest = name.partition(".")
        if name == "?":
            if room != "peer":
                found.add((line, "imports a computed name, so its layer cannot be proven"))
        elif top in MAY_IMPORT:
            found.add((line, f"imports {name}; write shoal.{name}"))
        elif top == "shoal" and rest.partition(".")[0] not in MAY_IMPORT[room]:
            # `import shoal` alone gives whatever others have imported meanwhile.
            found.add((line, f"imports {name}; shoal.{room} may only use {sorted(MAY_IMPORT[room])}"))
    return [f"{line}: {problem}" for line, problem in sorted(found)]


def code_from_data(source: str) -> list[str]:
    """Ways in which a module could run what it has received, as "line: what is wrong"."""
    tree = ast.parse(source)
    names = import_names(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            words = {part for name in [*base, *(a.name for a in node.names)] for part in name.split(".")}
            found.update((node.lineno, f"imports {word}") for word in words & PICKLES)
            if isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                found.update((node.lineno, f"uses {name}") for name in full & RUNS_WHAT_IT_READS)
        elif isinstance(node, ast.Name) and node.id in {"eval", "exec"}:
            found.add((node.lineno, f"uses {node.id}"))
        elif isinstance(node, ast.Attribute):
            name = dotted(node, names)
            if name in RUNS_WHAT_IT_READS:
                found.add((node.lineno, f"uses {name}"))
            elif node.attr in PICKLES | UNPICKLING_METHODS:
                found.add((node.lineno, f"uses .{node.attr}, which pickles"))
        elif isinstance(node, ast.Call):
            imported = {name.partition(".")[0] for name in imported_by_call(node, names, "shoal.peer", True)}
            found.update((node.lineno, f"imports {name}") for name in imported & PICKLES)
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not allowed:
                    found.add((keyword.value.lineno, "allows pickles"))
    return [f"{line}: {problem}" for line, problem in sorted(found)]


def dependencies(sources: Mapping[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Which modules of ``sources`` (dotted name -> source, whether it is a package) each one imports when it is
    imported itself: not in functions, nor for type checkers alone."""
    found: dict[str, set[str]] = {module: set() for module in sources}
    for module, (source, is_package) in sources.items():
        nodes: list[ast.AST] = [ast.parse(source)]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                nodes += node.orelse
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                for _, name in imports(ast.unparse(node), module, is_package):
                    target = name if name in sources else name.rpartition(".")[0]
                    if target in sources and target != module:
                        found[module].add(target)
            nodes += ast.iter_child_nodes(node)
    return found


def cycles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """Groups of nodes of which each one leads to each other one."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for other in graph.get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    reached = {node: reach(node) for node in graph}
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return sorted(sorted(group) for group in groups if group)


def room_of(module: str, packages: Set[str]) -> str:
    """The package that a module is in. Those that lie directly in ``shoal.peer``, ``shoal.swarm`` and
    ``shoal.compression`` are rooms of their own: what is below them may use some, and others use what is below."""
    package = module if module in packages else module.rpartition(".")[0]
    return module if package.count(".") < 2 else package


OPENINGS = {"what", "who", "whose", "whom", "how", "where", "when", "which", "why", "if", "that", "it", "they", "only"}
"""A docstring that begins so says something of a thing that it does not name."""


def riddles(source: str) -> list[str]:
    """The module's docstring, if it does not open with a noun phrase or an imperative."""
    words = (ast.get_docstring(ast.parse(source)) or "").split()
    if not words:
        return ["there is no docstring"]
    first = words[0].strip("`,:").lower()
    return [f"its docstring begins with {words[0]!r}"] if first in OPENINGS else []


# --- our source -----------------------------------------------------------------------------------------


def modules() -> Iterator[tuple[Path, str, bool]]:
    """(file, dotted name, whether it is a package) of all modules of Shoal."""
    for room in MAY_IMPORT:
        files = sorted((ROOT / room).rglob("*.py"))
        assert files, f"{room}/ has no modules"
        for path in files:
            parts = ["shoal", *path.relative_to(ROOT).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            yield path, ".".join(parts[:-1] if is_package else parts), is_package


def complain(problems: list[str], rule: str) -> None:
    assert not problems, "\n".join([rule, *problems])


def sources() -> dict[str, tuple[str, bool]]:
    return {name: (path.read_text(), is_package) for path, name, is_package in modules()}


def test_no_modules_import_each_other() -> None:
    assert cycles(dependencies(sources())) == []


def test_no_packages_import_each_other() -> None:
    ours = sources()
    packages = {name for name, (_, is_package) in ours.items() if is_package}
    graph: dict[str, set[str]] = {}
    for module, others in dependencies(ours).items():
        room = room_of(module, packages)
        graph.setdefault(room, set()).update({room_of(other, packages) for other in others} - {room})
    assert cycles(graph) == []


def test_docstrings_of_modules_say_what_the_module_is() -> None:
    problems = [f"  {name}: {riddle}" for name, (source, _) in sources().items() for riddle in riddles(source)]
    complain(problems, "a module's docstring opens with a noun phrase or an imperative")


def test_the_tree_in_the_page_is_that_of_the_files() -> None:
    """It is made from the files and their docstrings, by `make docs`."""
    ran = subprocess.run([sys.executable, str(ROOT / "docs" / "make_tree.py"), "--check"], timeout=60)
    assert ran.returncode == 0, "docs/architecture.md is stale: make docs"


def test_imports_go_from_peer_to_swarm_to_compression() -> None:
    problems = [
        f"  {path.relative_to(ROOT)}:{violation}"
        for path, module, is_package in modules()
        for violation in layer_violations(path.read_text(encoding="utf-8"), module, is_package)
    ]
    complain(problems, "imports go one way, peer -> swarm -> compression:")


HOSTS = {
    *("shoal.peer.cli.access", "shoal.peer.cli.audits", "shoal.peer.cli.host", "shoal.peer.cli.host_events"),
    *("shoal.peer.cli.last_model", "shoal.peer.cli.standby", "shoal.peer.trials.conduct"),
}
"""The modules of a host, the only ones of peer/ that run a coordinator and read its journal."""


def test_only_the_host_command_imports_the_coordinator() -> None:
    problems = [
        f"  {path.relative_to(ROOT)}:{line}: imports {name}"
        for path, module, is_package in modules()
        if module.startswith("shoal.peer") and module not in HOSTS
        for line, name in imports(path.read_text(encoding="utf-8"), module, is_package)
        if name.startswith("shoal.swarm.coordinator")
    ]
    complain(problems, "peers know the protocol and not the coordinator's insides:")


def test_nothing_received_is_ever_run() -> None:
    problems = [
        f"  {path.relative_to(ROOT)}:{violation}"
        for path, _, _ in modules()
        for violation in code_from_data(path.read_text(encoding="utf-8"))
    ]
    complain(problems, "data, never code: nothing may be unpickled or evaluated:")


def test_every_module_says_what_it_is() -> None:
    problems = [
        f"  {path.relative_to(ROOT)}"
        for path, _, _ in modules()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    complain(problems, "these modules lack a docstring:")


# --- what a host needs ------------------------------------------------------------------------------------

TALKING = ("shoal.swarm.protocol", "shoal.swarm.transport", "shoal.swarm.client", "shoal.swarm.coordinator")
"""Packages that a host needs, which has neither a model nor tensors."""

IMPORT_ALL = f"""
import importlib, pkgutil, sys
for package in {TALKING}:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
print(*sorted({{"torch", "numba", "llvmlite"}} & sys.modules.keys()))
"""


def test_a_host_imports_neither_torch_nor_numba() -> None:
    assert run_python("-c", IMPORT_ALL).split() == []


# --- the folder `compression` beside the standard library's package --------------------------------------


def run_python(*arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_compression_is_a_folder_and_not_a_package() -> None:
    # With an __init__.py it would win over Python 3.14's own `compression`, and `import gzip` would break.
    assert not (ROOT / "compression" / "__init__.py").exists()


def test_standard_compressors_import_from_the_root() -> None:
    run_python("-c", "import gzip, bz2, lzma")


def test_standard_compressors_import_under_pytest_from_the_root(tmp_path: Path) -> None:
    tiny = tmp_path / "test_tiny.py"
    tiny.write_text("import gzip, bz2, lzma\n\ndef test_tiny():\n    assert gzip.decompress(gzip.compress(b'x'))\n")
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider"]
    out = run_python("-m", "pytest", *settings, tiny)
    assert "1 passed" in out


def test_a_standard_package_wins_over_our_folder(tmp_path: Path) -> None:
    # What Python 3.14 does, on any Python: a package further down the path than the checkout's root.
    package = tmp_path / "compression"
    package.mkdir()
    (package / "__init__.py").write_text("")
    script = f"import sys; sys.path[1:1] = [{str(tmp_path)!r}]; import compression; print(compression.__file__)"
    assert run_python("-c", script).strip() == str(package / "__init__.py")


# --- the checkers, checked ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "snippet",
    [
        "import shoal.peer",
        "import shoal.peer.cli.join as daemon",
        "import os, shoal.peer.x as y",
        "import shoal",
        "import shoal as s\ns.peer.daemon.join()",
        "from shoal import peer",
        "from shoal import compression, peer as p",
        "from shoal import *",
        "from shoal.peer import daemon",
        "from shoal.peer import *",
        "from shoal.peer.cli.join import join as j",
        "from ..peer import daemon",
        "from ..peer import *",
        "from ..peer.daemon import join",
        "from .. import peer",
        "from ... import peer",
        "def late():\n    from shoal.peer import daemon",
        "if TYPE_CHECKING:\n    from ..peer import daemon",
        "try:\n    import shoal.peer\nexcept ImportError:\n    pass",
        "import shoal.compression.codec\nshoal.peer.daemon.join()",
        "import importlib\nimportlib.import_module('shoal.peer.cli.join')",
        "import importlib as il\nil.import_module(name='shoal.peer')",
        "from importlib import import_module\nimport_module('shoal.peer')",
        "from importlib import import_module as im\nim('..peer', __package__)",
        "import importlib\nimportlib.import_module('.peer', 'shoal')",
        "import importlib\nimportlib.import_module('..peer', package='shoal.swarm')",
        "import importlib\nimportlib.import_module(f'shoal.{room}')",
        "__import__('shoal.peer')",
        "__import__('shoal', fromlist=['peer'])",
        "__import__('peer', globals(), locals(), [], 2)",
        "import builtins\nbuiltins.__import__('shoal.peer.daemon')",
        "import peer.daemon",
        "from peer import daemon",
        "from swarm.wire import decode",
        "import compression.codec",
    ],
)
def test_a_step_up_is_caught(snippet: str) -> None:
    assert layer_violations(snippet, "shoal.swarm.wire")


@pytest.mark.parametrize(
    "snippet", ["from shoal.swarm import wire", "from ..swarm import wire", "from ..swarm import *"]
)
def test_compression_may_not_import_swarm(snippet: str) -> None:
    assert layer_violations(snippet, "shoal.compression.codec")


@pytest.mark.parametrize(
    "snippet",
    [
        "import os.path, torch",
        "import gzip, bz2, lzma",
        "from shoal.swarm import wire",
        "from shoal.swarm.wire import *",
        "from shoal import compression",
        "import shoal.compression.codec as codec\ncodec.pack()",
        "import shoal.compression.codec\nshoal.compression.codec.pack()",
        "from . import peer",
        "from .peer import Peer",
        "from ..compression.codec import Codec",
        "import importlib\nimportlib.import_module('shoal.compression.codec')",
        "import importlib\nimportlib.import_module('.wire', __package__)",
        "peer.shoal.peer",
        "'import shoal.peer'",
    ],
)
def test_a_step_aside_or_down_is_fine(snippet: str) -> None:
    assert layer_violations(snippet, "shoal.swarm.wire") == []


def test_dots_count_from_the_package() -> None:
    source = "from ..peer import x"
    assert layer_violations(source, "shoal.swarm", is_package=True)  # leads out of shoal
    assert layer_violations(source, "shoal.swarm.averaging") != []
    assert layer_violations(source, "shoal.swarm.averaging", is_package=True) == []  # shoal.swarm.peer
    assert layer_violations(source, "shoal.swarm.averaging.averager") == []  # shoal.swarm.peer
    assert layer_violations("from ...peer import x", "shoal.swarm.averaging.averager") != []
    assert layer_violations("from ...peer import x", "shoal.swarm.averaging", is_package=True) != []


def test_violations_name_line_and_import() -> None:
    assert layer_violations("import os\n\nimport shoal.peer.daemon\n", "shoal.swarm.wire") == [
        "3: imports shoal.peer.daemon; shoal.swarm may only use ['compression', 'swarm']"
    ]


def test_peer_may_use_everything_of_ours() -> None:
    source = "import shoal.swarm.wire, shoal.compression.codec\nfrom . import daemon\nfrom shoal.peer import cli"
    assert layer_violations(source, "shoal.peer.session") == []
    assert layer_violations("import shoal", "shoal.peer.session")


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from torch.serialization import pickle",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('cloudpickle')",
        "import multiprocessing.reduction as r\nr.pickle.loads(b'')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=True)",
        "import torch as t\nread = t.load",
        "from torch import load",
        "from torch import load as read\nread('x')",
        "import torch.serialization\ntorch.serialization.load('x')",
        "import torch\ntorch.jit.load('x')",
        "eval('1')",
        "exec('x = 1')",
        "run = eval",
        "import builtins\nbuiltins.exec('')",
        "from builtins import eval as e",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=trusted)",
        "socket.recv_pyobj()",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
    ],
)
def test_code_from_data_is_caught(snippet: str) -> None:
    assert code_from_data(snippet)


def test_harmless_namesakes_are_fine() -> None:
    source = """
        import numpy as np
        import torch
        from safetensors.torch import load
        '''Neither pickle nor torch.load( nor eval( nor exec( is used.'''
        model.eval()
        load(b"")
        codec.load(b"")
        torch.compile(model)
        np.load("x", allow_pickle=False)
    """
    assert code_from_data(textwrap.dedent(source)) == []


def test_cycles_are_found_and_steps_are_none() -> None:
    chain = {"shoal.swarm.a": ("from shoal.swarm import b", False), "shoal.swarm.b": ("import shoal.swarm.c", False)}
    assert cycles(dependencies({**chain, "shoal.swarm.c": ("import os", False)})) == []
    round_about = {**chain, "shoal.swarm.c": ("if True:\n    from shoal.swarm.a import x", False)}
    assert cycles(dependencies(round_about)) == [["shoal.swarm.a", "shoal.swarm.b", "shoal.swarm.c"]]
    later = {**chain, "shoal.swarm.c": ("def f():\n    from shoal.swarm.a import x", False)}
    assert cycles(dependencies(later)) == []
    typed = {**chain, "shoal.swarm.c": ("if TYPE_CHECKING:\n    from shoal.swarm.a import x", False)}
    assert cycles(dependencies(typed)) == []


@pytest.mark.parametrize(
    ("docstring", "is_clear"),
    [
        ("The coordinator's journal: events on disk before anybody hears of them.", True),
        ("Detect stragglers.", True),
        ("Whom the others wait for.", False),
        ("What nearest rounding is shaken with.", False),
        ("", False),
    ],
)
def test_riddles_are_caught(docstring: str, is_clear: bool) -> None:
    assert (riddles(f'"""{docstring}"""') == []) is is_clear
