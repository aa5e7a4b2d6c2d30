#!/usr/bin/env bash
# Pin the newest versions that pyproject.toml allows. The pins are valid for all supported Python versions and platforms.
# hashes.txt    versions with the SHA-256 of every file on the package index, and of torch's CPU builds
# constraints.txt    the same versions without hashes
# clients/napari/test-hashes.txt    napari and Qt, with which the plugin is tested in an environment of its own
# usage: scripts/constraints.sh [--keep]
# --keep  Keep the versions of hashes.txt, and only add packages and hashes.
# Environment: TORCH_CPU_INDEX is the package index with the CPU builds of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v uv >/dev/null || { echo "This script needs uv, because pip cannot resolve versions for all platforms. Install it: pip install uv" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
upgrade=--upgrade
if [ "${1:-}" = --keep ]; then
  upgrade=--no-upgrade
  sed '/^torch==/,/[^\]$/{/^ /d; s/ \\$//}' hashes.txt >"$work/hashes.txt"
fi

# Without UV_FIND_LINKS: local wheels would put local version suffixes such as +cpu into the pins.
compile() { env -u UV_FIND_LINKS uv pip compile --quiet --no-annotate --no-header --generate-hashes "$@"; }
compile pyproject.toml --extra dev --extra ray-serve --group build --group manifests --universal --python-version 3.11 \
  "$upgrade" --output-file "$work/hashes.txt"

# The CPU builds of torch have the same version as the CUDA builds, but are in an index of their own.
version=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' "$work/hashes.txt")
echo "torch==$version+cpu" | compile - --no-deps --index "${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}" |
  sed -n 's/^ *\(--hash=[^ ]*\).*/    \1 \\/p' >"$work/cpu"
sed "/^torch==/r $work/cpu" "$work/hashes.txt" >hashes.txt
sed -n 's/^\([a-z0-9].*[^ ]\) *\\$/\1/p' hashes.txt >constraints.txt
printf '%s\n' 'napari[pyqt6]>=0.9' httpx2 pytest tifffile |
  compile - --universal --python-version 3.11 "$upgrade" --output-file clients/napari/test-hashes.txt
