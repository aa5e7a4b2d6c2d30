#!/usr/bin/env bash
# Train the bundled models from scratch, on synthetic and recorded stacks: scripts/train_bundled.sh [FOLDER] [STAGE ...]
#
# The stages `nuclei-6` and `embryos` need the folder of recorded stacks that scripts/recipes/embryos.py creates. Set the
# environment variable EMBRYOS to this folder. If EMBRYOS is not set, these stages are skipped. `nuclei-7` also needs the
# folder that scripts/recipes/organoids.py creates, in ORGANOIDS.
# Each stage is one command. An interrupted stage resumes from its checkpoint. A completed stage is not run again. The
# log of a stage reports how many minutes it has run so far. The weights of a stage are in FOLDER/STAGE.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-build/models}
shift || true
python=${PYTHON:-.venv/bin/python}
threads=${OMP_NUM_THREADS:-1}
# BF16 takes little more than half the time on processors with BF16 instructions.
precision=()
if grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then precision=(--bf16); fi

train() {
    local stage=$1
    shift
    mkdir -p "$folder/$stage"
    "$python" -m scripts.recipes.train --out "$folder/$stage" --threads "$threads" "${precision[@]}" "$@" \
        2>&1 | tee -a "$folder/$stage/training.log"
}

# Continue `nuclei-6` with recorded organoids: train_with_organoids SEED STEPS SHARE ORGANOID_SHARE [EMBRYO ...]. The
# embryos are used in addition to all others, as patterns of names.
train_with_organoids() {
    local seed=$1 steps=$2 share=$3 organoid_share=$4 pattern
    local embryos=${EMBRYOS:?must be the folder that scripts/recipes/embryos.py creates}
    local organoids=${ORGANOIDS:?must be the folder that scripts/recipes/organoids.py creates}
    local images=("$embryos"/*/image.tif) labels=("$embryos"/*/core.tif)
    shift 4
    for pattern in "$@"; do
        # shellcheck disable=SC2206
        images+=("$embryos"/$pattern/image.tif) labels+=("$embryos"/$pattern/core.tif)
    done
    train "nuclei-7/$seed" --kind nuclei --steps "$steps" --learning-rate 1e-3 --ema-decay 0.99 --seed "$seed" \
        --keep-statistics --stated 0.65 --pool 64 --share "$share" --images "${images[@]}" --labels "${labels[@]}" \
        --spot-share 0.136 --flat-share 0.12 --organoids "$organoids"/*/image.tif \
        --organoid-labels "$organoids"/*/mask.tif --organoid-share "$organoid_share" \
        --init "$folder/nuclei-6/weights.safetensors"
}

run_stage() {
    case $1 in
    nuclei-1) train "$1" --kind nuclei --minutes 32 --learning-rate 3e-3 --seed 1 ;;
    nuclei-2) train "$1" --kind nuclei --minutes 34 --learning-rate 2e-3 --seed 50 --keep-statistics --stated 0.7 \
        --pool 48 --init "$folder/nuclei-1/weights.safetensors" ;;
    nuclei-3) train "$1" --kind nuclei --minutes 62 --learning-rate 1.5e-3 --seed 60 --keep-statistics --stated 0.7 \
        --pool 64 --init "$folder/nuclei-2/weights.safetensors" ;;
    nuclei-4) train "$1" --kind nuclei --minutes 18 --learning-rate 1e-3 --seed 70 --keep-statistics --stated 0.7 \
        --pool 40 --init "$folder/nuclei-3/weights.safetensors" ;;
    nuclei-5) train "$1" --kind nuclei --minutes 42 --learning-rate 2e-3 --seed 80 --keep-statistics --stated 0.7 \
        --pool 96 --init "$folder/nuclei-4/weights.safetensors" ;;
    nuclei-6)
        local stacks=${EMBRYOS:?must be the folder that scripts/recipes/embryos.py creates}
        train "$1" --kind nuclei --minutes 65 --learning-rate 1.5e-3 --seed 131 --keep-statistics --stated 0.65 \
            --pool 96 --share 0.25 --images "$stacks"/*/image.tif --labels "$stacks"/*/core.tif \
            --init "$folder/nuclei-5/weights.safetensors"
        ;;
    nuclei-7)
        local late=('*_t351' '*_t[45]?1')
        train_with_organoids 151 700 0.49 0.33
        train_with_organoids 152 700 0.49 0.25
        train_with_organoids 154 700 0.65 0.20
        train_with_organoids 155 1500 0.70 0.20 "${late[@]}"
        train_with_organoids 156 1500 0.70 0.25
        train_with_organoids 157 1500 0.70 0.20 "${late[@]}"
        train_with_organoids 158 1500 0.70 0.20 "${late[@]}"
        "$python" -m scripts.recipes.average_weights "$folder/$1" 151:0.15 152:0.15 154:0.1 155:0.15 156:0.15 \
            157:0.15 158:0.15
        ;;
    embryos)
        local stacks=${EMBRYOS:?must be the folder that scripts/recipes/embryos.py creates}
        train "$1" --kind nuclei --minutes 65 --learning-rate 1.5e-3 --seed 121 --keep-statistics --stated 0.65 \
            --pool 96 --share 0.4 --images "$stacks"/*/image.tif --labels "$stacks"/*/mask.tif \
            --init "$folder/nuclei-5/weights.safetensors"
        ;;
    membranes)
        local start=nuclei-6
        if [ ! -e "$folder/$start/weights.safetensors" ]; then start=nuclei-5; fi
        train "$1" --kind membranes --minutes 62 --learning-rate 2.5e-3 --seed 141 --keep-statistics --stated 0.75 \
            --edge 64 --pool 56 --init "$folder/$start/weights.safetensors"
        ;;
    *)
        echo "Unknown stage '$1': choose nuclei-1 to nuclei-7, embryos or membranes." >&2
        exit 2
        ;;
    esac
}

stages=("$@")
if ((!${#stages[@]})); then stages=(nuclei-{1..5} ${EMBRYOS:+nuclei-6 ${ORGANOIDS:+nuclei-7} embryos} membranes); fi
for stage in "${stages[@]}"; do run_stage "$stage"; done
