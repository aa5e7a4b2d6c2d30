#!/usr/bin/env bash
# Build a container image and check it. The script uses Docker if its daemon is running, otherwise podman. It leaves the
# image in place: localhost/stackseg:cpu or localhost/stackseg:gpu.
# usage: scripts/container.sh [cpu|gpu]
# cpu  Run the image twice with restricted privileges: first without network until HEALTHCHECK passes, then with a
#      published port to segment the bundled sample. The second run reuses the engine plan of the first one.
# gpu  Run the checks that need no GPU: the required driver version, the CUDA libraries, the compilers, and the error
#      messages for a missing driver and for an old one. The build downloads 3 GB.
# Environment: PIP_INDEX_URL and PIP_CERT are passed to pip in the build. PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS are
# passed for the CPU image only, because they usually provide the CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

variant=${1:-cpu}
case $variant in
  cpu) pip_sources=(PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS) ;;
  gpu)
    pip_sources=(PIP_INDEX_URL)
    unset PIP_FIND_LINKS
    ;;
  *) echo "usage: scripts/container.sh [cpu|gpu]" >&2; exit 2 ;;
esac

image=localhost/stackseg:$variant
base=$(sed -n 's/^ARG BASE=//p' docker/Dockerfile)
local_base=localhost/stackseg-base:bookworm
sample=models/nuclei/sample.tif
work=$(mktemp -d)
volume=stackseg-$$
container=

report() { printf '%-10s %s\n' "$1" "${*:2}"; }
fail() { echo "$*" >&2; exit 1; }
inspect() { "${engine[@]}" inspect --format "$1" "$container"; }
in_container() { "${engine[@]}" exec --interactive "$container" "$@"; }

remove() {
  if [ -n "$container" ]; then "${engine[@]}" rm --force "$container" >/dev/null 2>&1 || true; fi
  container=
}

finish() {
  local status=$?
  if [ -n "$container" ] && [ $status -ne 0 ]; then "${engine[@]}" logs "$container" 2>&1 | tail -n 40 >&2; fi
  remove
  if [ -v engine ]; then "${engine[@]}" volume rm "$volume" >/dev/null 2>&1 || true; fi
  rm -rf "$work"
}
trap finish EXIT

build_options=(--build-arg "VARIANT=$variant")
for name in "${pip_sources[@]}"; do
  if [ -n "${!name:-}" ]; then build_options+=(--build-arg "$name=${!name}"); fi
done

# Podman's defaults can fail in a virtual machine or with a service account: crun rejects mixed cgroup hierarchies, and
# podman raises the limits on open files and processes. Use runc if available, and set lower limits.
use_podman() {
  local runtime path
  # Without systemd, podman prints long warnings that it cannot schedule the health check.
  engine=(podman --log-level fatal)
  runtime=$(command -v runc || command -v crun) || fail "podman needs runc or crun: sudo apt-get install runc"
  printf '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n[engine]\nruntime = "%s"\n' \
    "$(basename "$runtime")" >"$work/containers.conf"
  export CONTAINERS_CONF=$work/containers.conf
  # Only Docker's image format supports HEALTHCHECK and STOPSIGNAL.
  build_options+=(--format docker)
  if ! podman image exists "$base" && ! podman pull --quiet "$base" >/dev/null 2>&1; then
    podman image exists "$local_base" || make_base
    build_options+=(--build-arg "BASE=$local_base")
  fi
  path=${PIP_FIND_LINKS:-}
  if [ -d "$path" ]; then build_options+=(--volume "$path:$path:ro"); fi
  if [ -n "${PIP_CERT:-}" ]; then
    build_options+=(--volume "$PIP_CERT:/run/pip-cert.pem:ro" --build-arg PIP_CERT=/run/pip-cert.pem)
  fi
}

# Build the base image from Debian packages if no registry is reachable. debootstrap checks their signatures. The size is
# similar to that of the published image.
make_base() {
  command -v debootstrap >/dev/null && [ "$(id -u)" -eq 0 ] ||
    fail "$base cannot be pulled. To build it from Debian packages, run as root, and: apt-get install debootstrap"
  report base "built with debootstrap, because it cannot be pulled"
  debootstrap --variant=minbase bookworm "$work/rootfs" >"$work/log" || fail "$(tail "$work/log")"
  rm -rf "$work"/rootfs/{var/cache/apt/*,var/lib/apt/lists/*,usr/share/{doc,man,locale,info}/*}
  # As in the published image, make apt delete the package files after each installation.
  echo 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };' \
    >"$work/rootfs/etc/apt/apt.conf.d/docker-clean"
  tar -C "$work/rootfs" -c . | podman import - "$local_base" >/dev/null 2>&1
  rm -rf "$work/rootfs"
}

build() {
  local started=$SECONDS
  "${engine[@]}" build "${build_options[@]}" --network host --file docker/Dockerfile --tag "$image" . >"$work/log" 2>&1 ||
    fail "$(tail -n 40 "$work/log")"
  report image "$image, $(($("${engine[@]}" image inspect --format '{{.Size}}' "$image") / 1000000)) MB," \
    "built in $((SECONDS - started)) s with ${engine[0]}"
}

# /tmp is mounted noexec, as is common. The code that torch compiles is stored in the volume.
locked=(--read-only --tmpfs /tmp --cap-drop all --security-opt no-new-privileges --memory 6g
  --volume "$volume:/var/lib/stackseg")

start() {
  container=$("${engine[@]}" run --detach "${locked[@]}" --volume "$PWD/tests/attacks.py:/attacks/attacks.py:ro" \
    "$@" "$image")
}

# wait_for TITLE COMMAND...: wait until the command succeeds
wait_for() {
  local title=$1 started=$SECONDS
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$(inspect '{{.State.Running}}')" = true ] || fail "The container stopped before it was ready."
    [ $((SECONDS - started)) -lt 600 ] || fail "The container was not ready after 600 s."
    sleep 1
  done
  report "$title" "after $((SECONDS - started)) s"
}

# Docker runs HEALTHCHECK itself. Podman relies on systemd, which may be missing, so run the check explicitly.
is_healthy() {
  if [ "${engine[0]}" = podman ]; then
    "${engine[@]}" healthcheck run "$container"
  else
    [ "$(inspect '{{.State.Health.Status}}')" = healthy ]
  fi
}

check_privileges() {
  local uid
  uid=$(in_container python -c 'import os; print(os.getuid())')
  [ "$uid" -ne 0 ] || fail "The service runs as root."
  if in_container python -c 'open("/opt/written", "w")' 2>/dev/null; then fail "/opt is writable."; fi
  report locked "uid $uid, only /tmp and the volume are writable"
}

check_confinement() {
  in_container python /attacks/attacks.py >"$work/attacks" || fail "A compromised reader process can: $(cat "$work/attacks")"
  report confined "$(head -n 4 "$work/attacks" | paste -s -d ,), $(grep -c ': E' "$work/attacks") attempts blocked"
}

check_training() {
  in_container python -c '
import json, service.training.process, urllib.request
limits = json.load(urllib.request.urlopen("http://127.0.0.1:8000/limits"))
assert limits["training"], limits
' || fail "Training is not available in the container."
  report training "installed, and enabled for the local host; other hosts need an API key"
}

check_segmentation() {
  curl --silent --show-error --max-time 300 --noproxy '*' --dump-header "$work/headers" --output "$work/labels.tif" \
    --header 'Content-Type: image/tiff' --data-binary "@$sample" "$address/segment"
  grep -q '^HTTP/1.1 200' "$work/headers" || fail "$(cat "$work/headers" "$work/labels.tif")"
  in_container python -c '
import io, sys, tifffile
from service.core.files.bundled import get_bundled_folder
labels = tifffile.imread(io.BytesIO(sys.stdin.buffer.read()))
expected = tifffile.imread(get_bundled_folder("models") / "nuclei" / "expected.tif")
agreement = ((labels > 0) == (expected > 0)).mean()
print(f"{labels.shape}, {labels.dtype}, {labels.max()} objects, foreground matches in {agreement:.2%} of the voxels")
sys.exit(int(labels.max() == 0 or agreement < 0.99))
' <"$work/labels.tif" >"$work/comparison" || fail "The labels differ from the expected ones: $(cat "$work/comparison")"
  report segmented "$(cat "$work/comparison")"
  report stages "$(grep -i '^server-timing:' "$work/headers" | cut -d ' ' -f 2- | tr -d '\r')"
}

stop() {
  local started=$SECONDS status
  "${engine[@]}" stop --time 60 "$container" >/dev/null
  status=$(inspect '{{.State.ExitCode}}')
  [ "$status" -eq 0 ] || fail "The service exited with status $status after SIGTERM."
  report stopped "by SIGTERM in $((SECONDS - started)) s, status 0"
  remove
}

# `void` hides the GPUs of the host.
no_gpu=(--network none --env NVIDIA_VISIBLE_DEVICES=void)

# run_without_gpu OPTIONS... IMAGE ARGUMENTS...: run a container in the foreground
run_without_gpu() { "${engine[@]}" run --rm --interactive "${locked[@]}" "${no_gpu[@]}" "$@"; }

check_requirements() {
  local variables expected
  variables=$("${engine[@]}" image inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$image")
  for expected in 'REQUIRE_CUDA=cuda>=13.0' VISIBLE_DEVICES=all DRIVER_CAPABILITIES=compute,utility; do
    grep -q -x -F "NVIDIA_$expected" <<<"$variables" || fail "The image lacks NVIDIA_$expected. It has: $variables"
  done
  report requires "$(grep '^NVIDIA_' <<<"$variables" | paste -s -d ' ')"
}

check_libraries() {
  run_without_gpu --entrypoint python "$image" - \
    >"$work/libraries" <<'EOF' || fail "Wrong user or version: $(cat "$work/libraries")"
import os, sys, torch
from service.core.hardware import devices
cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version()
print(f"uid {os.getuid()}, torch {torch.__version__} for CUDA {cuda}, cuDNN {cudnn}")
sys.exit(not (os.getuid() and cuda and cuda.startswith("13.") and devices.explain_faulty_cudnn(cudnn) is None))
EOF
  report libraries "$(cat "$work/libraries")"
}

# check_refusal TITLE MESSAGE OPTIONS...: the service must exit with the message instead of falling back to the CPU.
check_refusal() {
  local title=$1 message=$2 status
  start "${no_gpu[@]}" "${@:3}"
  status=$(timeout 300 "${engine[@]}" wait "$container") || fail "The service runs without a GPU instead of exiting."
  "${engine[@]}" logs "$container" >"$work/refusal" 2>&1
  [ "$status" -eq 2 ] || fail "The service exited with status $status instead of 2."
  grep -F "$message" "$work/refusal" >"$work/message" || fail "The service exited without the message '$message'."
  report "$title" "status 2, $(cat "$work/message")"
  remove
}

# Compile replacements for two libraries of the NVIDIA driver. They report driver version 550.54 and CUDA 12.4.
driver=/var/lib/stackseg
make_old_driver() {
  run_without_gpu --entrypoint sh "$image" -c "cd $driver && gcc -shared -fPIC -x c - -o libcuda.so.1 &&
    cp libcuda.so.1 libnvidia-ml.so.1" <<'EOF' || fail "gcc cannot compile in this image."
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { strncpy(version, "550.54", length); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12040; return 0; }
EOF
}

# On first use, Triton compiles its driver interface with gcc and links it with libcuda. The replacement of libcuda lacks
# most functions, which works with lazy binding. Kernels are compiled by the ptxas that Triton includes.
check_triton() {
  cat >"$work/kernel.py" <<'EOF'
import os, sys, torch, triton
from triton import language
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaUtils
from service.engine import backends
from service.engine.tuning.plans import EngineConfig

@triton.jit
def add_one(x, size: language.constexpr):
    offsets = x + language.arange(0, size)
    language.store(offsets, language.load(offsets) + 1)

config = EngineConfig("cudagraph", "bf16", "channels_last_3d", 1, "reduce-overhead")
if missing := backends.explain_unavailability(config, torch.device("cuda")):
    sys.exit(missing)
sys.setdlopenflags(os.RTLD_LAZY)
CudaUtils()
architectures = torch.cuda.get_arch_list()
for name in architectures:
    source = triton.compiler.ASTSource(add_one, {"x": "*fp32", "size": "constexpr"}, {"size": 128})
    kernel = triton.compile(source, target=GPUTarget("cuda", int(name.removeprefix("sm_")), 32))
    assert kernel.asm["cubin"], name
print(f"{triton.__version__}, compiled its driver interface and a kernel for", *architectures)
EOF
  run_without_gpu --env TRITON_LIBCUDA_PATH=$driver --env LD_LIBRARY_PATH=$driver --entrypoint python \
    --volume "$work/kernel.py:/check/kernel.py:ro" "$image" /check/kernel.py >"$work/triton" ||
    fail "Triton cannot compile in this image."
  report triton "$(cat "$work/triton")"
}

check_gpu_image() {
  check_requirements
  check_libraries
  check_refusal no-driver "no CUDA device is available: no NVIDIA driver was found; install it"
  make_old_driver
  check_refusal old-driver "the NVIDIA driver 550.54 is too old: it supports CUDA up to 12.4, but PyTorch was built for" \
    --env LD_LIBRARY_PATH=$driver
  check_triton
}

command -v curl >/dev/null || fail "This script needs curl: sudo apt-get install curl"
if docker info >/dev/null 2>&1; then
  engine=(docker)
elif command -v podman >/dev/null; then
  use_podman
else
  fail "Neither Docker nor podman is available. On Debian: sudo apt-get install podman buildah runc"
fi
build

if [ "$variant" = gpu ]; then
  check_gpu_image
  exit
fi

start --network none
wait_for healthy is_healthy
check_privileges
check_confinement
check_training
stop

start --publish 127.0.0.1::8000
address=http://$("${engine[@]}" port "$container" 8000/tcp | head -n 1)
wait_for ready curl --silent --fail --max-time 2 --noproxy '*' "$address/health/ready"
check_segmentation
stop
