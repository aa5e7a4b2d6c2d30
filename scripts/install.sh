#!/bin/sh
# Install packages into a virtual environment. pip refuses every file whose SHA-256 is not in hashes.txt.
# usage: scripts/install.sh PYTHON PIP_ARGUMENTS...
# The package `torch` stands for the CPU build if a package index or folder of pip's configuration provides it, otherwise
# for the CUDA build.
set -eu
hashes=$(dirname "$0")/../hashes.txt
python=$1
shift

pip_install() { "$python" -m pip install --disable-pip-version-check "$@"; }

# pip reads hashes from constraints since version 26; older versions read them only from requirements.
sed -n '/^pip==/,/[^\]$/p' "$hashes" | pip_install --quiet --require-hashes --requirement /dev/stdin

# pip prefers files whose hash it knows before the download, which is not the case in a folder. Name the build explicitly.
cpu_torch=$(sed -n 's/^torch==\([^ ]*\).*/torch==\1+cpu/p' "$hashes")
for argument; do
  shift
  if [ "$argument" = torch ] && pip_install --quiet --dry-run --ignore-installed --no-deps "$cpu_torch" 2>/dev/null; then
    argument=$cpu_torch
  fi
  set -- "$@" "$argument"
done
pip_install --require-hashes --constraint "$hashes" "$@"
