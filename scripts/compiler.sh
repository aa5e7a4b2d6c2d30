#!/usr/bin/env bash
# Say so where the compiled engine will not work for want of a C++ compiler or of Python's headers; never fails.
set -euo pipefail
cd "$(dirname "$0")/.."

header=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
missing=()
command -v "${CXX:-g++}" >/dev/null || missing+=(g++)
[ -e "$header" ] || missing+=(python3-dev)
if [ ${#missing[@]} -gt 0 ]; then
  echo "Without ${missing[*]} the model runs uncompiled, which is slower. To compile it: sudo apt-get install ${missing[*]}"
fi
