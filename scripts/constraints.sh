#!/usr/bin/env bash
# Pin the newest versions that pyproject.toml allows in constraints.txt. The pins are valid for all supported Python
# versions and platforms.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v uv >/dev/null || { echo "This script needs uv, because pip cannot resolve versions for all platforms. Install it: pip install uv" >&2; exit 1; }
# Without UV_FIND_LINKS: local wheels would put local version suffixes such as +cpu into the pins.
env -u UV_FIND_LINKS uv pip compile pyproject.toml --extra dev --extra ray-serve --universal --python-version 3.11 \
  --upgrade --no-annotate --no-header --output-file constraints.txt
