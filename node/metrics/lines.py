"""Lines of the text that Prometheus reads. (Pure.)"""

from collections.abc import Iterable, Iterator

PREFIX = "raftq_"

Lines = Iterator[str]
Samples = Iterable[tuple[str, float]]


def single(name: str, kind: str, text: str, value: float) -> Lines:
    return family(name, kind, text, [("", value)])


def family(name: str, kind: str, text: str, samples: Samples) -> Lines:
    """Help, type and lines; the label part of each sample comes with its braces."""
    name = PREFIX + name
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{labels} {value}"


def braced(**pairs: str) -> str:
    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in pairs.items()) + "}"


def escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
