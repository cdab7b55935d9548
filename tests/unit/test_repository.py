"""The house rules that linters do not know, checked on every file. Also part of `make check`."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = ("src/raftq", "node", "cluster", "client", "chaos", "bench", "demo")
TOP_PACKAGES = {"node", "cluster", "client", "chaos"}
FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
# Put together from halves, so that this file does not find itself.
LEFTOVER = re.compile(
    r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b"
)
MAY_PRINT = {"cli", "demo", "bench"}
DOES_IO = {
    "asyncio", "concurrent", "logging", "os", "pathlib", "secrets", "selectors", "socket",
    "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip

Found = Iterator[tuple[int, str]]


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def violations(paths: list[Path], *rules: Callable[[Path, str, ast.Module], Found]) -> list[str]:
    found = []
    for path in paths:
        text = path.read_text()
        tree = ast.parse(text, str(path))
        for rule in rules:
            place = path.relative_to(ROOT)
            found += [f"{place}:{line}: {what}" for line, what in rule(path, text, tree)]
    return found


@lru_cache(maxsize=1)
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All of a file, walked once for all its rules: that is most of what they take."""
    return list(ast.walk(tree))


def short_files(path: Path, text: str, tree: ast.Module) -> Found:
    lines = len(text.splitlines())
    if lines > FILE_LINES_MAX:
        yield lines, f"{lines} lines, at most {FILE_LINES_MAX}"


def short_functions(path: Path, text: str, tree: ast.Module) -> Found:
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def docstrings(path: Path, text: str, tree: ast.Module) -> Found:
    if not ast.get_docstring(tree):
        yield 1, "the module has no docstring"


def no_print(path: Path, text: str, tree: ast.Module) -> Found:
    parts = {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    if parts & MAY_PRINT:
        return
    for node in nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield node.lineno, "print() in library code"


def no_silent_except(path: Path, text: str, tree: ast.Module) -> Found:
    for node in nodes(tree):
        steps = node.body if isinstance(node, ast.ExceptHandler) else []
        if steps and all(isinstance(step, ast.Pass) for step in steps):
            yield node.lineno, "an error is passed over in silence (except: pass)"


def no_leftovers(path: Path, text: str, tree: ast.Module) -> Found:
    for number, line in enumerate(text.splitlines(), 1):
        if match := LEFTOVER.search(line):
            yield number, f"leftover {match[0]}"


def no_bare_imports(path: Path, text: str, tree: ast.Module) -> Found:
    for node in nodes(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            if name.split(".")[0] in TOP_PACKAGES:
                yield node.lineno, f"import raftq.{name}, not {name}"


def some_small(path: Path, text: str, tree: ast.Module) -> Found:
    """`make test` keeps some of every kind, and a kind is a file."""
    full = "pytest.mark.full"
    tests = [one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [one for one in tests if one.name.startswith("test_")]
    small = [one for one in tests if full not in map(ast.unparse, one.decorator_list)]
    if tests and (not small or re.search(rf"^pytestmark.*{full}", text, re.MULTILINE)):
        yield 1, "all of its tests are marked full, so `make test` runs none of this kind"


def label_of(tree: ast.Module) -> str:
    """What a module calls itself in the first lines of its docstring: Core, Pure, Shell..."""
    first = (ast.get_docstring(tree) or "").split("\n\n")[0]
    found = re.match(r"([A-Z]\w+):", first) or re.search(r"\(([A-Z]\w+)\b[^)]*\)", first)
    return found[1] if found else ""


def cores_do_no_io(path: Path, text: str, tree: ast.Module) -> Found:
    """A module that calls itself Core or Pure imports nothing that does I/O or knows the time."""
    if label_of(tree) not in {"Core", "Pure"}:
        return
    for node in nodes(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            if name.split(".")[0] in DOES_IO:
                yield node.lineno, f"a {label_of(tree)} module imports {name}"


def homonyms() -> list[str]:
    """A class name exists once; the blocking clients have the names of the asyncio ones."""
    homes: dict[str, list[str]] = {}
    for path in files("node", "cluster", "client", "chaos"):
        place = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not place.startswith("client/sync/"):
                homes.setdefault(node.name, []).append(place)
    return [
        f"{place}: class {name} is also in {', '.join(x for x in places if x != place)}"
        for name, places in sorted(homes.items())
        for place in places[1:]
        if not name.startswith("_")
    ]


def report(found: list[str]) -> str:
    return f"{len(found)} violations of the house rules:\n  " + "\n  ".join(found)


def test_the_repository_keeps_its_own_rules() -> None:
    everywhere = (no_leftovers, no_bare_imports)
    library = (short_files, short_functions, docstrings, no_print, no_silent_except, cores_do_no_io)
    found = violations(files(*LIBRARY), *library, *everywhere)
    found += violations(files("tests"), some_small, *everywhere)
    found += violations(files(".ci"), *everywhere)
    found += homonyms()
    assert not found, report(found)


def test_each_rule_finds_what_it_is_for() -> None:
    """A rule that never fires looks like a tidy repository: so each meets an offender."""
    offenders = {
        short_files: "x = 1\n" * (FILE_LINES_MAX + 1),
        short_functions: "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX,
        docstrings: "x = 1\n",
        no_print: "print('x')\n",
        no_silent_except: "try:\n    x = 1\nexcept ValueError:\n    pass\n",
        no_leftovers: "x = 1  # TO" + "DO: later\n",
        no_bare_imports: "import node.storage\nfrom client import wire\n",
        cores_do_no_io: '"""A thing. (Core.)"""\n\nimport time\n',
        some_small: "@pytest.mark.full\ndef test_a():\n    x = 1\n",
    }
    for rule, text in offenders.items():
        path = ROOT / "node" / "offender.py"
        assert list(rule(path, text, ast.parse(text))), rule.__name__
        clean = '"""Doc."""\n\nfrom raftq.node import storage\n\ndef test_a():\n    x = 1\n'
        assert not list(rule(path, clean, ast.parse(clean))), rule.__name__
