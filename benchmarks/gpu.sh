#!/usr/bin/env bash
# Everything that needs a GPU, in less than nine minutes and without a network, what matters most first.
#
#   benchmarks/gpu.sh --collect WHEELS [3.12]     where there is a network: what to carry to a machine with that Python
#   benchmarks/gpu.sh [--wheels WHEELS] [--data FOLDER] [--out FOLDER] [--device cuda] [--tiny] [STEP...]
#
# The machine brings Python, torch (2.8 or later), NumPy and a C++ compiler; the package need not be installed. WHEELS are
# unpacked into a temporary folder, not into that Python. FOLDER (gpu-report) gets report.md, to which each row is
# written as it is measured, log.txt, and figures as JSON; a second run adds to them. Whatever ends the script, rows
# that were finished are there. STEPs, if any are named, are all that runs. Stacks of --data
# (FOLDER/NAME/image.tif) are segmented on the GPU and on the CPU. --tiny with --device cpu tries the script itself out,
# on shapes of no interest. The status is that of the last step that failed.
# shellcheck disable=SC2329  # steps are called by their names
set -uo pipefail
cd "$(dirname "$0")/.." || exit

python=${PYTHON:-python3}
wheels='' data='' out=gpu-report device=cuda tiny='' only=()
seconds=${SECONDS_IN_ALL:-530} worst=0
steps=(machine request tests asynchronous script labels engines kits19 clients loads)

collect() {
    local options=() number
    # pip takes such a tag for itself alone, not for older ones.
    for number in 39 36 35 34 31 28 27 24 17; do options+=(--platform "manylinux_2_${number}_x86_64"); done
    options+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    mkdir -p "$1"
    "$python" benchmarks/wheels.py "${2:-3.12}" >"$1/pins.txt" &&
        "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${2:-3.12}" --implementation cp \
            "${options[@]}" -d "$1" -r "$1/pins.txt" && du -sh "$1"
}

# run NAME MOST COMMAND...: at most so many seconds of those that are left. What it prints goes to the report line by
# line, so that whatever ends this script leaves every row that was finished.
run() {
    local name=$1 most=$2 left=$((seconds - SECONDS)) status=0
    shift 2
    if [[ -n $tiny ]]; then most=$left; fi
    printf '\n## %s\n\n    %s\n\n' "$name" "$*" >>"$out/report.md"
    if ((left < 10)); then
        echo "Left out: no time." >>"$out/report.md"
        worst=1
        return
    fi
    printf '\n## %s\n\n' "$name" >>"$out/log.txt"
    timeout --kill-after 5 "$((most < left ? most : left))" "$@" >>"$out/report.md" 2>>"$out/log.txt" || status=$?
    if ((status)); then
        { printf '\nIt ended with status %s:\n\n' "$status"; tail -n 15 "$out/log.txt" | sed 's/^/    /'; } >>"$out/report.md"
        worst=$status
    fi
    printf '\n%s seconds so far.\n' "$SECONDS" >>"$out/report.md"
}

service() { run "$1" "$2" "$python" -m service "${@:3}"; }
benchmark() { run "$1" "$2" "$python" "benchmarks/$3.py" "${@:4}"; }

machine() { benchmark machine 60 gpu machine; }
request() {
    service request 150 bench "${config[@]}" --device "$device" --shape "${shape[@]}" --repeats "$repeats" \
        --json "$out/request.json"
}
tests() {
    local files
    # Others import what such a machine lacks.
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    if [[ $device != cpu ]]; then run tests 100 "$python" -m pytest -q -m gpu -p no:cacheprovider "${files[@]}"; fi
}
asynchronous() {
    benchmark asynchronous 120 gpu asynchronous --device "$device" --shape "${shape[@]}" --repeats "$repeats"
}
script() {
    service script 120 bench "${config[@]}" --device "$device" --shape "${shape[@]}" --repeats "$repeats" --baseline \
        --json "$out/script.json"
}
labels() {
    local model stacks=()
    for model in "${models[@]}"; do
        benchmark "labels of $model" 60 labels "models/$model/sample.tif" --model "$model" --one device.name=cpu \
            --other "device.name=$device" "${fast[@]}"
    done
    if [[ -n $data ]]; then mapfile -t stacks < <(find "$data" -name image.tif -size -64M | sort); fi
    if ((${#stacks[@]})); then
        benchmark "labels of real stacks" 90 labels "${stacks[@]}" --channel 0 --one device.name=cpu \
            --other "device.name=$device" "${fast[@]}"
    fi
}
engines() { benchmark engines 150 gpu engines --device "$device" --batch-sizes "${sizes[@]}"; }
kits19() {
    # Random weights change more labels than any precision may, so it is set.
    STACKSEG_ENGINE__PRECISION=$precision benchmark kits19 120 kits19 "${small[@]}" "${config[@]}" --device "$device" \
        --repeats "$repeats" --json "$out/kits19.json"
}
clients() {
    benchmark clients 90 gpu clients "${config[@]}" --device "$device" --shape "${shape[@]}" --seconds "$load"
}
loads() { benchmark loads 120 gpu loads --device "$device" --loads "$changes"; }

while (($#)); do
    case $1 in
    --collect) collect "$2" "${3:-}"; exit ;;
    --wheels) wheels=$2; shift 2 ;;
    --data) data=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --device) device=$2; shift 2 ;;
    --tiny) tiny=yes; shift ;;
    -*) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
    *)
        if [[ " ${steps[*]} " != *" $1 "* ]]; then
            echo "There is no step $1; there are ${steps[*]}." >&2
            exit 2
        fi
        only+=("$1")
        shift
        ;;
    esac
done

config=(--config gpu) fast=(engine.kind=cudagraph engine.precision=bf16) precision=bf16
models=(nuclei membranes tissue) sizes=(8 1 2 4 16) shape=(64 512 512) repeats=5 load=15 changes=50 small=()
if [[ $device == cpu ]]; then config=() fast=() precision=fp32; fi
if [[ -n $tiny ]]; then
    seconds=${SECONDS_IN_ALL:-1800}
    models=(nuclei) sizes=(1) shape=(16 64 64) repeats=1 load=1 changes=2 small=(--tiny --shape 32 40 40)
    export STACKSEG_ENGINE__KIND=eager STACKSEG_ENGINE__PRECISION=fp32
fi

mkdir -p "$out"
out=$(cd "$out" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [[ -n $wheels ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || exit
fi
export PYTHONPATH=$PWD:$site PYTHONUNBUFFERED=1 XDG_CACHE_HOME=$site/cache STACKSEG_LIMITS__CACHE_BYTES=0
"$python" hatch_build.py >>"$out/log.txt" 2>&1

printf '# StackSeg on this machine\n' >>"$out/report.md"
for step in "${only[@]:-${steps[@]}}"; do "$step"; done
cat "$out/report.md"
exit "$worst"
