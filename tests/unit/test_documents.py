"""The documents name what exists: words, numbers and files, in both directions."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from raftq.chaos.scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
CODE = ("client", "cluster", "node", "chaos")
CENTRAL = ("node/replication", "node/queue/core", "cluster")
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|([^|]*)\|$", re.MULTILINE)


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


@lru_cache
def classes() -> dict[str, list[Path]]:
    """Every class at the top of a module of the product, and its modules."""
    found: dict[str, list[Path]] = {}
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(path.relative_to(ROOT))
    return found


def glossary() -> dict[str, list[str]]:
    """Each word of the glossary, and the names of code beside it."""
    rows = [row for row in ROW.findall(text_of("docs/GLOSSARY.md")) if row[0] != "word"]
    assert len({word for word, *_ in rows}) == len(rows), "a word is explained twice"
    assert all(meaning.endswith(".") for _, meaning, _ in rows)
    return {word: re.findall(r"`([^`]+)`", names) for word, _, names in rows}


def exists(name: str) -> bool:
    return (ROOT / name).exists() if "/" in name else name in classes()


def stems(words: str) -> Iterator[str]:
    """Words in lower case without their endings: Deliveries, delivery -> deliver."""
    for word in re.findall(r"[A-Z]?[a-z]+", words):
        yield re.sub(r"(ies|ys?|ings?|ers?|ed|es|s|e)$", "", word.lower())


def central_classes() -> Iterator[tuple[str, Path]]:
    for name, places in classes().items():
        for place in places:
            if str(place).startswith(CENTRAL) and not name.startswith("_"):
                yield name, place
    for module in ("raftq", "raftq.aio"):
        for name in importlib.import_module(module).__all__:
            yield name, Path(module)


def test_every_name_in_the_glossary_exists_in_the_code() -> None:
    wrong = [(word, name) for word, names in glossary().items() for name in names]
    wrong = [(word, name) for word, name in wrong if not exists(name)]
    assert not wrong, wrong


def test_every_class_of_the_central_packages_has_a_word_of_the_glossary() -> None:
    """A new private word in the name of a class has to be explained, or another one be found."""
    known = {stem for word in glossary() for stem in stems(word)}
    strange = [
        f"{place}: {name}"
        for name, place in central_classes()
        if not known & {*stems(name), *stems(place.stem)}
    ]
    assert not strange, strange
    assert not known & set(stems("Courier Strand Conversation")), "the check would find nothing"


def test_the_page_of_settings_is_what_the_code_says(tmp_path: Path) -> None:
    """1. The page is up to date.
    2. `--check` finds one that is not.
    """
    script = tmp_path / ".ci" / "make_configuration.py"
    (tmp_path / "docs").mkdir()
    script.parent.mkdir()
    script.write_text(text_of(".ci/make_configuration.py"))
    page = text_of("docs/CONFIGURATION.md")
    assert not re.findall(r"^\| (`[^`]+`) .*\|  \|$", page, re.MULTILINE), "settings without a text"
    for text, code in ((page, 0), (page.replace("`min_insync`", "`min_in_sync`"), 1)):
        (tmp_path / "docs" / "CONFIGURATION.md").write_text(text)
        done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True)
        assert done.returncode == code, done.stderr.decode()


NUMBERED = re.compile(r"^\| (\d+) \| (.*) \|$", re.MULTILINE)
MISSING = re.compile(r"No (test|scenario) yet")


def numbered(text: str) -> tuple[set[int], set[int]]:
    """The numbers of a list, and those that say that nothing covers them yet."""
    rows = {int(number): rest for number, rest in NUMBERED.findall(text)}
    assert sorted(rows) == list(range(1, len(rows) + 1)), "the list has a gap"
    return set(rows), {number for number, rest in rows.items() if MISSING.search(rest)}


def numbers_of_tests(prefix: str) -> set[int]:
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(map(int, re.findall(rf"def test_{prefix}_(\d+)_", path.read_text())))
    return found


def test_the_numbers_in_names_of_tests_are_those_of_the_lists_of_mistakes() -> None:
    mistakes, rows = text_of("docs/MISTAKES.md").split("## Defects of the Raft library")
    for text, prefix in ((mistakes, "mistake"), (rows, "raft_row")):
        listed, missing = numbered(text)
        assert numbers_of_tests(prefix) == listed - missing, prefix


def test_the_rows_of_scenarios_are_those_of_the_list_of_faults() -> None:
    listed, missing = numbered(text_of("docs/FAULTS.md"))
    assert {row for one in SCENARIOS for row in one.rows} == listed - missing


def functions() -> Iterator[str]:
    """`name` and `Class.name` of every function and class of the product."""
    for path in (path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
            if isinstance(node, ast.ClassDef):
                yield from (f"{node.name}.{getattr(inner, 'name', '')}" for inner in node.body)


LEG = re.compile(r"^\| [^|]+ \((\d+)\) \| ([^|]+) \|([^|]*)\|$", re.MULTILINE)


def files_of(places: str) -> Iterator[Path]:
    """The files of a leg. A name without a folder is in the folder of the one before it."""
    folder = ""
    for place in places.split(","):
        before, _, name = place.strip().rpartition("/")
        folder = before or folder
        yield ROOT / folder / name


def test_the_walks_of_the_architecture_name_functions_and_files_that_exist() -> None:
    """The numbers of hops and files are those of the chains."""
    walks = text_of("ARCHITECTURE.md").split("## Three walks")[1].split("\n## ")[0]
    defined = set(functions())
    titles = re.findall(r"^### .*: (\d+) hops in (\d+) files.*$", walks, re.MULTILINE)
    parts = walks.split("\n### ")[1:]
    assert len(titles) == len(parts) == 3
    for (hops, files), part in zip(titles, parts, strict=True):
        found: set[Path] = set()
        total = 0
        for count, chain, places in LEG.findall(part):
            names = re.findall(r"`([\w.]+)`", chain)
            assert not set(names) - defined, set(names) - defined
            assert len(names) == chain.count("->") + 1 == int(count), chain
            total += len(names)
            found |= set(files_of(places))
        assert (total, len(found)) == (int(hops), int(files))
        assert not [str(file) for file in found if not file.exists()]


HOMES = (
    "topic setting", "error", "wire message", "backoff", "fault", "metric", "CLI verb",
    "REST route", "lane weight", "fsync policy",
)  # fmt: skip
A_PATH = re.compile(r"`([\w./-]+/[\w./-]*|\w+\.py)(?: [^`]*)?`")


def test_files_that_documents_name_exist() -> None:
    tracked = {path.name for folder in (*CODE, "tests") for path in (ROOT / folder).rglob("*.py")}
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *ROOT.glob("docs/*.md")]
    for page in pages:
        for name in A_PATH.findall(page.read_text()):
            if name.partition("/")[0] in (*CODE, "tests", "docs", ".ci", "src", "deploy"):
                assert (ROOT / name).exists(), f"{page.name}: {name}"
            elif "/" not in name:
                assert name in tracked, f"{page.name}: {name}"


def test_contributing_says_where_new_things_go() -> None:
    """Each of the ten has a row, whose home exists and has the names that the row mentions."""
    table = text_of("CONTRIBUTING.md").split("## Where is the home of")[1].split("\n## ")[0]
    rows = {what: (home, also) for what, home, also in ROW.findall(table)}
    assert len(rows) == len(HOMES) + 1, "the heading is a row, too"
    for name in HOMES:
        (found,) = [rows[what] for what in rows if what.endswith(name)]
        homes = [ROOT / path for path in A_PATH.findall(found[0]) if "/" in path]
        assert homes, name
        code = "".join(
            file.read_text()
            for path in homes
            for file in (path.rglob("*.py") if path.is_dir() else [path])
        )
        for word in re.findall(r"`([A-Za-z]+)`", found[0]):
            assert word in code, f"{name}: {word}"
