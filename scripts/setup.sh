#!/usr/bin/env bash
# Create .venv in this clone where it is missing, and install StackSeg into it with the pinned dependencies.
# usage: scripts/setup.sh run|demo|dev|ray
# Environment: PYTHON names the interpreter to use; uv is used when it is on the PATH, else venv and pip.
set -euo pipefail
cd "$(dirname "$0")/.."

set_name=${1:?usage: scripts/setup.sh run|demo|dev|ray}
case $set_name in
  run) target=".[train]" covered=(run) ;;
  demo) target=".[demo,train]" covered=(run demo) ;;
  dev) target=".[dev]" covered=(run demo dev) ;;
  ray) target=".[dev,ray-serve]" covered=(run demo dev ray) ;;
  *) echo "There is no set of dependencies named '$set_name'; choose run, demo, dev or ray." >&2; exit 2 ;;
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
  echo "StackSeg needs Python 3.11, 3.12 or 3.13; none of '${PYTHON:-python3 python3.13 python3.12 python3.11}'" \
    "is one. Install one, or name it: make PYTHON=/path/to/python3 ..." >&2
  return 1
}

# Debian splits pip off the standard library. Its wheel, unpacked from the package into .cache, does without installing
# that package on the machine.
bootstrap_pip() {
  local python=$1 wheel
  "$python" -m venv --without-pip .venv
  mkdir -p .cache/pip-package
  (cd .cache/pip-package && apt-get -qq -o APT::Sandbox::User=root download python3-pip-whl && dpkg-deb -x python3-pip-whl_*.deb .) || {
    rm -rf .venv .cache/pip-package
    echo "This Python has no pip to put into a virtual environment. Install it, then run the same command again:" >&2
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
    uv venv --quiet --seed --python "${PYTHON:->=3.11,<3.14}" .venv
    return
  fi
  python=$(find_python)
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv .venv
  else
    bootstrap_pip "$python"
  fi
}

install() {
  if command -v uv >/dev/null; then
    UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} \
      uv pip install --python .venv/bin/python --constraint constraints.txt --editable "$target"
    return
  fi
  .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip
  .venv/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable "$target"
}

.venv/bin/python -c "$supported" 2>/dev/null || create
install
# pip and uv do not show what the build says; this says it again where there are no kernels.
.venv/bin/python hatch_build.py
for name in "${covered[@]}"; do touch ".venv/stamp-$name"; done
