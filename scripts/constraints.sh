#!/usr/bin/env bash
# Pin the newest versions that pyproject.toml allows, for every supported Python at once, into constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v uv >/dev/null || { echo "Pinning needs uv, which resolves for all platforms at once." >&2; exit 1; }
# A folder of local wheels would put their local versions (+cpu) into the pins.
env -u UV_FIND_LINKS uv pip compile pyproject.toml --extra dev --extra ray-serve --universal --python-version 3.11 \
  --upgrade --no-annotate --no-header --output-file constraints.txt
