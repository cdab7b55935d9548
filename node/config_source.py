"""Where a node's settings come from: file, environment, arguments. (Shell.)

A later source wins over an earlier one, setting by setting: TOML file, then environment
(`RAFTQ_DATA_DIR`, `RAFTQ_STORAGE__SCRUB_BYTES_S`), then arguments (`storage.scrub_bytes_s`). All
problems of all sources are reported in one ConfigError.

    value         in the file                       as text (environment, arguments)
    address       "host:port" or {host=, port=}     host:port, or port alone for the default host
    http          false for none                    none
    voters        a table: 1 = "host:port"          1=host:port,2=host:port (also in the file)
    seeds         a list of "host:port"             host:port,host:port (also in the file)
    secret        secret = "...", secret_file = "path": not both
    no limit      "none"                            none

Paths in the file are relative to the folder of the file. A name in the environment with two
underscores must be a setting. An unknown name without them is ignored: others use the prefix too.
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_type_hints

from raftq.client.common.errors import ConfigError
from raftq.node.config import Address, NodeConfig

PREFIX = "RAFTQ_"
FILE_BYTES_MAX = 1024 * 1024
SECRET_BYTES_MAX = 64 * 1024
_ABSENT = ("none", "off", "")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class GivenValue:
    """One value as it was written, and where. `text` when its type has to be guessed."""

    value: Any
    source: str
    text: bool
    folder: str = ""


Tree = dict[str, "GivenValue | Tree"]


def load_config(
    path: str | None,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, str] | None = None,
) -> NodeConfig:
    """Return the settings of a node. `arguments` has dotted names."""
    problems: list[str] = []
    tree: Tree = {}
    variables = os.environ if environment is None else environment
    file = _from_file(path) if path is not None else {}
    for source in (file, _from_environment(variables), _from_arguments(arguments or {})):
        if "secret" in source or "secret_file" in source:
            tree.pop("secret", None)
            tree.pop("secret_file", None)
        _merge(tree, source)
    _read_secret(tree, problems)
    values = _read(NodeConfig, tree, "", problems)
    needed = [setting.name for setting in fields(NodeConfig) if _is_needed(setting)]
    problems += [f"{name} is missing" for name in needed if name not in tree]
    return _finish(values, problems)


def _finish(values: dict[str, Any], problems: list[str]) -> NodeConfig:
    """Check the whole even when parts are wrong, so that all problems are reported at once."""
    node_id = next(iter(values.get("voters", ())), 0)
    stand_in: dict[str, Any] = {"node_id": node_id, "secret": bytes(16), "data_dir": "x"}
    try:
        config = NodeConfig(**(stand_in | values))
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def _is_needed(setting: "Field[Any]") -> bool:
    return setting.default is MISSING and setting.default_factory is MISSING


def _from_file(path: str) -> Tree:
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is over {FILE_BYTES_MAX} bytes: not a node's settings")
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return _planted(document, path, os.path.dirname(os.path.abspath(path)))


def _from_environment(variables: Mapping[str, str]) -> Tree:
    tree: Tree = {}
    for name, text in variables.items():
        keys = name.removeprefix(PREFIX).lower().split("__")
        if name.startswith(PREFIX) and (
            len(keys) > 1 or keys[0] in _known(NodeConfig) or keys[0] == "secret_file"
        ):
            _merge(tree, _branch(keys, GivenValue(text, f"environment {name}", True)))
    return tree


def _from_arguments(arguments: Mapping[str, str]) -> Tree:
    tree: Tree = {}
    for name, text in arguments.items():
        keys = name.strip().lower().split(".")
        _merge(tree, _branch(keys, GivenValue(text, f"argument {name}", True)))
    return tree


def _planted(document: Mapping[str, Any], source: str, folder: str) -> Tree:
    return {
        name: _planted(value, source, folder)
        if isinstance(value, dict)
        else GivenValue(value, source, False, folder)
        for name, value in document.items()
    }


def _branch(keys: list[str], given: GivenValue) -> Tree:
    tree: Tree = {keys[-1]: given}
    for key in reversed(keys[:-1]):
        tree = {key: tree}
    return tree


def _merge(tree: Tree, later: Tree) -> None:
    for name, value in later.items():
        known = tree.get(name)
        if (
            isinstance(value, dict)
            and isinstance(known, GivenValue)
            and isinstance(known.value, str)
        ):
            known = _address_tree(known)
        if isinstance(value, dict) and isinstance(known, dict):
            tree[name] = known
            _merge(known, value)
        elif isinstance(value, dict):
            tree[name] = dict(value)
        else:
            tree[name] = value


def _address_tree(given: GivenValue) -> Tree | None:
    """Split an address that was written as one text, so that a later source can replace its port
    alone."""
    try:
        address = Address.parse(given.value)
    except ConfigError:
        return None
    host, port = (GivenValue(part, given.source, False) for part in (address.host, address.port))
    return {"host": host, "port": port}


def _read_secret(tree: Tree, problems: list[str]) -> None:
    """Replace `secret_file` by `secret`, so that the content of the file never appears in a
    setting."""
    given = tree.pop("secret_file", None)
    if given is None:
        return
    if not isinstance(given, GivenValue) or not isinstance(given.value, str) or not given.value:
        problems.append("secret_file is not a path")
        return
    if "secret" in tree:
        problems.append("secret and secret_file are both set")
        return
    path = os.path.join(given.folder, given.value)
    try:
        with open(path, "rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        problems.append(f"secret_file: cannot read {path}: {error.strerror or error}")
        tree["secret"] = GivenValue("x" * 16, given.source, True)
        return
    if len(content) > SECRET_BYTES_MAX:
        problems.append(f"secret_file: {path} is over {SECRET_BYTES_MAX} bytes")
    tree["secret"] = GivenValue(content, given.source, False)


@cache
def _known(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {setting.name: hints[setting.name] for setting in fields(kind)}


def _read(kind: type, tree: Tree, path: str, problems: list[str]) -> dict[str, Any]:
    """Return the values of one dataclass. Problems are added to `problems`."""
    values: dict[str, Any] = {}
    known = _known(kind)
    for name, item in tree.items():
        where = f"{path}{name}"
        if name not in known:
            problems.append(f"{where} is no setting{_source(item)}")
            continue
        try:
            values[name] = _value(known[name], item, where, problems)
        except ConfigError as error:
            problems.append(f"{error}{_source(item)}")
    return values


def _source(item: "GivenValue | Tree") -> str:
    while isinstance(item, dict):
        if not item:
            return ""
        item = next(iter(item.values()))
    return f" ({item.source})"


def _value(hint: Any, item: "GivenValue | Tree", where: str, problems: list[str]) -> Any:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if isinstance(item, GivenValue) and type(None) in kinds and _means_none(item):
        return None
    kind = kinds[0]
    if is_dataclass(kind):
        return _part(kind, item, where, problems)  # type: ignore[arg-type]
    if getattr(kind, "__origin__", None) is not None and kind.__origin__ is not tuple:
        return _voters(item, where)
    if isinstance(item, dict):
        raise ConfigError(f"{where} is a table, not a value")
    reader = _READERS.get(getattr(kind, "__origin__", kind))
    assert reader is not None, f"no reader for {kind}"
    return reader(item, where)


def _means_none(item: GivenValue) -> bool:
    value = item.value
    return value is False or (isinstance(value, str) and value.strip().lower() in _ABSENT)


def _part(kind: type, item: "GivenValue | Tree", where: str, problems: list[str]) -> Any:
    if isinstance(item, GivenValue):
        if kind is not Address:
            raise ConfigError(f"{where} is {item.value!r}, not a table")
        return _address(item, where)
    count = len(problems)
    values = _read(kind, item, f"{where}.", problems)
    usual = getattr(NodeConfig.__dataclass_fields__.get(where), "default", None)
    if isinstance(usual, Address):
        values = {"host": usual.host, "port": usual.port} | values
    try:
        return kind(**values)
    except ConfigError as error:
        problems += [
            f"{where}.{problem}" for problem in str(error).removeprefix(f"{where}: ").split("; ")
        ]
    except TypeError as error:
        if len(problems) == count:
            raise ConfigError(f"{where}: {error}") from None
    return kind()


def _address(item: GivenValue, where: str) -> Address:
    value = item.value
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return Address(port=value)
        if isinstance(value, str) and item.text and value.strip().isdecimal():
            return Address(port=int(value))
        if isinstance(value, str):
            return Address.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    raise ConfigError(f"{where} is {value!r}, not host:port")


def _voters(item: "GivenValue | Tree", where: str) -> dict[int, str]:
    if isinstance(item, dict):
        pairs = [
            (name, value.value if isinstance(value, GivenValue) else value)
            for name, value in item.items()
        ]
    elif isinstance(item.value, str):
        parts = [part for part in item.value.split(",") if part.strip()]
        pairs = [(name, address) for name, _, address in (part.partition("=") for part in parts)]
    else:
        raise ConfigError(f"{where} is {item.value!r}, not a table of node id and host:port")
    found: dict[int, str] = {}
    for name, address in pairs:
        digits = name.strip()
        if not (digits.isascii() and digits.isdigit()) or not isinstance(address, str):
            raise ConfigError(f"{where}: {name}={address!s} is not NODE=HOST:PORT")
        if int(digits) in found:
            raise ConfigError(f"{where} names node {digits} twice")
        found[int(digits)] = address.strip()
    return found


def _whole(item: GivenValue, where: str) -> int:
    value = item.value
    if item.text and isinstance(value, str):
        try:
            return int(value.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{where} is {value!r}, not a whole number") from None
    if type(value) is not int:
        raise ConfigError(f"{where} is {value!r}, not a whole number")
    return value


def _number(item: GivenValue, where: str) -> float:
    try:
        return float(item.value) if item.text or type(item.value) in (int, float) else _bad()
    except ValueError:
        raise ConfigError(f"{where} is {item.value!r}, not a number") from None


def _bad() -> float:
    raise ValueError


def _flag(item: GivenValue, where: str) -> bool:
    value = _FLAGS.get(item.value.strip().lower()) if item.text else item.value
    if not isinstance(value, bool):
        raise ConfigError(f"{where} is {item.value!r}, not true or false")
    return value


def _string(item: GivenValue, where: str) -> str:
    if not isinstance(item.value, str):
        raise ConfigError(f"{where} is {item.value!r}, not text")
    if where == "data_dir" and item.value:
        return os.path.join(item.folder, item.value)
    return item.value


def _bytes(item: GivenValue, where: str) -> bytes:
    if isinstance(item.value, bytes):
        return item.value
    if not isinstance(item.value, str):
        raise ConfigError(f"{where} is not text")  # never print a secret
    return item.value.encode("utf-8", "surrogateescape")


def _strings(item: GivenValue, where: str) -> tuple[str, ...]:
    value = item.value
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",") if item.strip()]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where} is {item.value!r}, not a list of texts")
    return tuple(value)


_READERS: dict[Any, Callable[[GivenValue, str], Any]] = {
    int: _whole,
    float: _number,
    bool: _flag,
    str: _string,
    bytes: _bytes,
    tuple: _strings,
}
