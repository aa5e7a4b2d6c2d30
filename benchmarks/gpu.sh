#!/usr/bin/env bash
# Run the GPU tests and benchmarks in less than eight minutes and without network access, the most important steps first.
#
#   benchmarks/gpu.sh --collect WHEELS [3.12]     with network access: download the packages for this Python version
#   benchmarks/gpu.sh [--wheels WHEELS] [--data FOLDER] [--out FOLDER] [--device cuda] [--tiny] [STEP...]
#
# The machine provides Python, torch (2.8 or later), NumPy and a C++ compiler. StackSeg does not need to be installed.
# The wheels are installed in a temporary folder. The results are written to the folder --out (default: gpu-report):
# report.md, to which each row is added as soon as it is measured, log.txt, and JSON files. A second run appends to them.
# If the script is killed, the report has the finished rows. By default, all steps except `graphs`, `loads` and `profile`
# (which writes a trace of a request) are run. `labels` compares the labels of the GPU with those of the CPU, for the
# samples of the models and for the stacks in --data (FOLDER/NAME/image.tif).
# The environment variable SECONDS_IN_ALL limits the whole run. Use --device cpu --tiny for a rehearsal without a GPU.
# The exit status is that of the last failed step.
# shellcheck disable=SC2329  # steps are called by name
set -uo pipefail
cd "$(dirname "$0")/.." || exit

python=${PYTHON:-python3}
wheels='' data='' out=gpu-report device=cuda tiny='' only=()
seconds=${SECONDS_IN_ALL:-470} worst=0
default_steps=(machine check request script kits19 labels clients engines tests)
steps=("${default_steps[@]}" graphs loads profile)

collect() {
    local options=() number
    # pip does not accept wheels for older manylinux versions unless they are listed.
    for number in 39 36 35 34 31 28 27 24 17; do options+=(--platform "manylinux_2_${number}_x86_64"); done
    options+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    mkdir -p "$1"
    "$python" benchmarks/wheels.py "${2:-3.12}" >"$1/pins.txt" &&
        "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${2:-3.12}" --implementation cp \
            "${options[@]}" -d "$1" -r "$1/pins.txt" &&
        "$python" benchmarks/wheels.py --repack "$1" && "$python" benchmarks/wheels.py --size "$1"
}

# run NAME LIMIT COMMAND...: run a step for at most LIMIT seconds, or until SECONDS_IN_ALL have passed. The command
# appends its output to the report directly, so that finished rows are not lost if this script is killed.
run() {
    local name=$1 limit=$2 left=$((seconds - SECONDS)) status=0
    shift 2
    if [[ -n $tiny ]]; then limit=$left; fi
    printf '\n## %s\n\n    %s\n\n' "$name" "$*" >>"$out/report.md"
    if ((left < 10)); then
        echo "Skipped: no time left." >>"$out/report.md"
        worst=1
        return
    fi
    printf '\n## %s\n\n' "$name" >>"$out/log.txt"
    timeout --kill-after 5 "$((limit < left ? limit : left))" "$@" >>"$out/report.md" 2>>"$out/log.txt" || status=$?
    if ((status)); then
        { printf '\nThe step failed with status %s:\n\n' "$status"; tail -n 15 "$out/log.txt" | sed 's/^/    /'; } >>"$out/report.md"
        worst=$status
    fi
    printf '\n%s seconds so far.\n' "$SECONDS" >>"$out/report.md"
}

service() { run "$1" "$2" "$python" -m service "${@:3}"; }
benchmark() { run "$1" "$2" "$python" "benchmarks/$3.py" "${@:4}"; }

machine() { benchmark machine 60 gpu machine; }
check() { benchmark check 110 gpu check --device "$device"; }
request() {
    service request 120 bench "${config[@]}" --device "$device" --shape "${shape[@]}" --repeats "$repeats" \
        --json "$out/request.json"
}
profile() { benchmark profile 45 gpu profile --device "$device" --shape "${shape[@]}" --out "$out"; }
tests() {
    local files
    # Other test files import packages that the GPU machine does not have.
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    run tests 60 "$python" -m pytest -q -n 0 -m gpu -p no:cacheprovider "${files[@]}"
}
graphs() { benchmark graphs 60 gpu graphs --device "$device" --batch-sizes "${sizes[@]}"; }
# compare_labels NAME LIMIT TOLERANCE ARGUMENT...: the last arguments are the settings of the device.
compare_labels() {
    local name=$1 limit=$2 tolerance=$3
    shift 3
    benchmark "labels of $name" "$limit" labels --diameter none --tolerance "$tolerance" "$@"
}
script() {
    service script 110 bench "${config[@]}" --device "$device" --shape "${shape[@]}" --repeats 2 --baseline \
        --json "$out/script.json"
}
clients() {
    benchmark clients 75 gpu clients "${config[@]}" --device "$device" --shape "${shape[@]}" --seconds "$load"
}
labels() {
    local model stacks=() both=(--one device.name=cpu --other "device.name=$device")
    for model in "${models[@]}"; do
        compare_labels "$model" 45 "$sample_tolerance" "models/$model/sample.tif" --model "$model" "${both[@]}" "${fast[@]}"
    done
    if [[ -n $data ]]; then mapfile -t stacks < <(find "$data" -name image.tif -size -64M | sort); fi
    if ((${#stacks[@]})); then
        compare_labels "recorded stacks in FP32" 60 0.0001 "${stacks[@]}" --channel 0 "${both[@]}" "${exact[@]}"
        # The objects of some of these stacks are so faint that BF16 decides whether they are found.
        compare_labels "recorded stacks" 60 "$stack_tolerance" "${stacks[@]}" --channel 0 "${both[@]}" "${fast[@]}"
    fi
}
engines() { benchmark engines 180 gpu engines --device "$device" --batch-sizes "${sizes[@]}"; }
loads() { benchmark loads 120 gpu loads --device "$device" --loads "$changes"; }
kits19() {
    # With random weights, a reduced precision changes more labels than the check at startup allows, so the precision is fixed.
    STACKSEG_ENGINE__PRECISION=$precision benchmark kits19 120 kits19 "${small[@]}" "${config[@]}" --device "$device" \
        --repeats "$repeats" --json "$out/kits19.json"
}

while (($#)); do
    case $1 in
    --collect) collect "$2" "${3:-}"; exit ;;
    --wheels) wheels=$2; shift 2 ;;
    --data) data=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --device) device=$2; shift 2 ;;
    --tiny) tiny=yes; shift ;;
    -*) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2 ;;
    *)
        if [[ " ${steps[*]} " != *" $1 "* ]]; then
            echo "Unknown step: $1. The steps are ${steps[*]}." >&2
            exit 2
        fi
        only+=("$1")
        shift
        ;;
    esac
done

config=(--config gpu) fast=(engine.kind=cudagraph engine.precision=bf16) exact=(engine.matmul_precision=highest)
precision=bf16 sample_tolerance=0.001 stack_tolerance=0.01
models=(nuclei membranes tissue embryos) sizes=(8 11 32) shape=(64 512 512) repeats=5 load=8 changes=50 small=()
if [[ $device == cpu ]]; then config=() fast=() precision=fp32 sample_tolerance=0 stack_tolerance=0; fi
if [[ -n $tiny ]]; then
    seconds=${SECONDS_IN_ALL:-1800}
    models=(nuclei) sizes=(1 2) shape=(16 64 64) repeats=1 load=1 changes=2 small=(--tiny --shape 32 40 40)
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
for step in "${only[@]:-${default_steps[@]}}"; do "$step"; done
cat "$out/report.md"
exit "$worst"
