"""Lays out `.types/raftq/...`: real folders named like the imports, files as symlinks.

mypy and import-linter read folders, and cannot see the package-dir mapping of pyproject.toml.
"""

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".types"
HOMES = {"raftq": ".", "node": "node", "cluster": "cluster", "client": "client", "chaos": "chaos"}


def main() -> None:
    shutil.rmtree(TREE, ignore_errors=True)
    for source, target in HOMES.items():
        for file in (ROOT / source).rglob("*"):
            if file.suffix not in {".py", ".typed"}:
                continue
            link = TREE / "raftq" / target / file.relative_to(ROOT / source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(file, link.parent))


if __name__ == "__main__":
    main()
