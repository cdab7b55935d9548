"""Shell: a history that is written to a file while it happens, as JSON lines.

    {"number": 7, "row": {"kind": "publish", ...}}    an operation began or ended
    {"final": {...}}                                  the final state

If several lines have the same number, the last one counts. A file that ends in the middle of a
line, as after a kill, is read up to there.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from raftq.chaos.history import Final, History, Op, Operation, from_row, to_row

FLUSH_EVERY = 200


class HistoryJournal(History):
    """A history with a file. Use it as a context manager, or call `close`."""

    __slots__ = ("_file", "_lines", "_numbers")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w", encoding="utf-8")
        self._numbers: dict[int, int] = {}
        self._lines = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, operation: Op) -> Op:
        # The history keeps every operation, so the id of an operation is not used again.
        self._numbers[id(operation)] = len(self.operations)
        super().add(operation)
        self.note(operation)
        return operation

    def note(self, operation: Operation) -> None:
        number = self._numbers.get(id(operation))
        if number is not None:
            self._write({"number": number, "row": to_row(operation)})

    def conclude(self, final: Final) -> None:
        """Writes the final state, and every operation as it is now: some end without a note."""
        for operation in self.operations:
            self.note(operation)
        self._write({"final": final.to_json()})
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.closed:
            return  # a client that ends after the run adds nothing
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._lines += 1
        if self._lines % FLUSH_EVERY == 0:
            self._file.flush()


def read_journal(path: Path) -> tuple[History, Final | None]:
    """Reads the history from a file, and the final state if the file has one."""
    rows: dict[int, Operation] = {}
    final: Final | None = None
    for line in _lines(path):
        if "final" in line:
            final = Final.from_json(line["final"])
        else:
            rows[line["number"]] = from_row(line["row"])
    return History([rows[number] for number in sorted(rows)]), final


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for text in file:
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                return
