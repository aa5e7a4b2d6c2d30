#!/usr/bin/env bash
# Everything that needs a GPU, in less than nine minutes and without a network: its tests, the bundled model by every
# engine beside the plain script, and the workload of MLPerf's 3D-UNet.
#
#   benchmarks/gpu.sh --collect WHEELS [3.12]     where there is a network: wheels of all pins but torch, for a Python
#   benchmarks/gpu.sh [--wheels WHEELS] [--out FOLDER] [--device cuda] [--tiny]
#
# The machine brings Python, torch (2.8 or later) and its CUDA libraries; what else is missing comes from WHEELS and goes
# into FOLDER, not into that Python. FOLDER then holds report.md, report.json, and what each step printed. --tiny with
# --device cpu tries the script itself out, on shapes of no interest.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
wheels='' out=gpu-report device=cuda tiny=''
seconds=530

collect() {
    mkdir -p "$1"
    # torch is the machine's own, and brings its CUDA; OpenVINO is for CPUs.
    grep -Ev '^(torch|triton|nvidia-c|nvidia-n[^v]|cuda-|openvino)' constraints.txt >"$1/pins.txt"
    "$python" -m pip download --quiet --no-deps --only-binary=:all: ${2:+--python-version "$2"} -d "$1" -r "$1/pins.txt"
}

install_missing() {
    "$python" - "$wheels/pins.txt" >"$out/missing.txt" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

for line in open(sys.argv[1]):
    name = line.split("==")[0]
    try:
        version(name)
    except PackageNotFoundError:
        print(line, end="")
PYTHON
    "$python" -m pip install --quiet --no-index --find-links "$wheels" --no-deps --target "$out/site" -r "$out/missing.txt"
}

# step NAME MOST COMMAND...: at most so many seconds of those that are left; a failure is written down, and the next step follows.
step() {
    local name=$1 most=$2 left=$((seconds - SECONDS)) status=0
    shift 2
    printf '\n## %s\n\n    %s\n\n' "$name" "$*" >>"$out/report.md"
    if ((left < 10)); then
        echo "Left out: no time." >>"$out/report.md"
        return
    fi
    timeout "$((most < left ? most : left))" "$@" >"$out/$name.txt" 2>"$out/$name.log" || status=$?
    cat "$out/$name.txt" >>"$out/report.md"
    if ((status)); then
        { printf 'It ended with status %s:\n\n' "$status"; tail -n 15 "$out/$name.log" | sed 's/^/    /'; } >>"$out/report.md"
    fi
}

while (($#)); do
    case $1 in
    --collect) collect "$2" "${3:-}"; exit ;;
    --wheels) wheels=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --device) device=$2; shift 2 ;;
    --tiny) tiny=yes; shift ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done

rm -rf "$out"
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [[ -n $wheels ]]; then install_missing; fi
export PYTHONPATH=$PWD:$out/site XDG_CACHE_HOME=$out/cache
export STACKSEG_ENGINE__TUNE=first-start STACKSEG_ENGINE__TUNE_SECONDS=60

sizes=(1 2 4 8 16) shape=(64 512 512) repeats=3 building=70 small=()
if [[ -n $tiny ]]; then
    sizes=(1) shape=(16 64 64) repeats=1 building=1 small=(--tiny --shape 32 40 40)
    export STACKSEG_ENGINE__KIND=eager
fi

{
    echo "# StackSeg on this machine"
    echo
    "$python" -c 'import torch; print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")'
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || true
} >"$out/report.md"

if [[ $device != cpu ]]; then
    step tests 100 "$python" -m pytest -q -m gpu -p no:cacheprovider tests
fi
step nuclei 260 "$python" -m service bench --device "$device" --shape "${shape[@]}" --repeats "$repeats" --baseline \
    --compare-engines --batch-sizes "${sizes[@]}" --build-seconds "$building" \
    --json "$out/nuclei.json" --plot "$out/nuclei.png"
step kits19 170 "$python" benchmarks/kits19.py "${small[@]}" --device "$device" --repeats "$repeats" --baseline \
    --json "$out/kits19.json"

"$python" - "$out" "$SECONDS" <<'PYTHON'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
(folder / "report.json").write_text(json.dumps({"seconds": int(sys.argv[2]), **found}, indent=1))
PYTHON
printf '\n%s seconds in all.\n' "$SECONDS" >>"$out/report.md"
echo "$out/report.md"
test -s "$out/nuclei.json" && test -s "$out/kits19.json"
