#!/usr/bin/env bash
# Build the CPU image and run it twice, locked down: first without any network until HEALTHCHECK passes, then published on
# a port of this machine to segment the bundled sample, with the plan that the first run made. With Docker where
# its daemon answers, else with podman. The image, localhost/stackseg:cpu, stays.
# Environment: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS and PIP_CERT reach pip in the build.
set -euo pipefail
cd "$(dirname "$0")/.."

image=localhost/stackseg:cpu
base=debian:bookworm-slim
sample=models/nuclei/sample.tif
work=$(mktemp -d)
volume=stackseg-$$
container=

say() { printf '%-10s %s\n' "$1" "${*:2}"; }
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

build_options=(--build-arg VARIANT=cpu)
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS; do
  if [ -n "${!name:-}" ]; then build_options+=(--build-arg "$name=${!name}"); fi
done

# Podman's defaults need more rights than a virtual machine or a service account may have: crun refuses mixed cgroup
# hierarchies, and limits on files and processes are raised.
use_podman() {
  local runtime path
  # It complains at length where no systemd would run the health check for it.
  engine=(podman --log-level fatal)
  runtime=$(command -v runc || command -v crun) || fail "podman needs runc: sudo apt-get install runc"
  printf '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n[engine]\nruntime = "%s"\n' \
    "$(basename "$runtime")" >"$work/containers.conf"
  export CONTAINERS_CONF=$work/containers.conf
  # HEALTHCHECK and STOPSIGNAL exist in Docker's format only.
  build_options+=(--format docker)
  podman image exists "$base" || podman pull --quiet "$base" >/dev/null 2>&1 || make_base
  path=${PIP_FIND_LINKS:-}
  if [ -d "$path" ]; then build_options+=(--volume "$path:$path:ro"); fi
  if [ -n "${PIP_CERT:-}" ]; then
    build_options+=(--volume "$PIP_CERT:/run/pip-cert.pem:ro" --build-arg PIP_CERT=/run/pip-cert.pem)
  fi
}

# Where no registry answers, the base image is made from Debian's own packages, about as small as the published one.
make_base() {
  command -v debootstrap >/dev/null && [ "$(id -u)" -eq 0 ] ||
    fail "$base cannot be pulled. To make it from Debian's packages, as root: apt-get install debootstrap"
  say base "made with debootstrap, since it cannot be pulled"
  debootstrap --variant=minbase bookworm "$work/rootfs" >"$work/log" || fail "$(tail "$work/log")"
  rm -rf "$work"/rootfs/{var/cache/apt/*,var/lib/apt/lists/*,usr/share/{doc,man,locale,info}/*}
  tar -C "$work/rootfs" -c . | podman import - "docker.io/library/$base" >/dev/null 2>&1
  rm -rf "$work/rootfs"
}

build() {
  local began=$SECONDS
  "${engine[@]}" build "${build_options[@]}" --network host --file docker/Dockerfile --tag "$image" . >"$work/log" 2>&1 ||
    fail "$(tail -n 40 "$work/log")"
  say image "$image, $(($("${engine[@]}" image inspect --format '{{.Size}}' "$image") / 1000000)) MB," \
    "built in $((SECONDS - began)) s with ${engine[0]}"
}

# /tmp is not executable, as is usual: what torch compiles goes to the volume.
start() {
  container=$("${engine[@]}" run --detach --read-only --tmpfs /tmp --cap-drop all --security-opt no-new-privileges \
    --memory 6g --volume "$volume:/var/lib/stackseg" --volume "$PWD/tests/attacks.py:/attacks/attacks.py:ro" \
    "$@" "$image")
}

# wait_for TITLE COMMAND...: until the command succeeds
wait_for() {
  local title=$1 began=$SECONDS
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$(inspect '{{.State.Running}}')" = true ] || fail "The container stopped before it was ready."
    [ $((SECONDS - began)) -lt 600 ] || fail "Not ready after 600 s."
    sleep 1
  done
  say "$title" "after $((SECONDS - began)) s"
}

# Docker runs HEALTHCHECK by itself; podman leaves that to systemd, where there is one.
healthy() {
  if [ "${engine[0]}" = podman ]; then
    "${engine[@]}" healthcheck run "$container"
  else
    [ "$(inspect '{{.State.Health.Status}}')" = healthy ]
  fi
}

check_lock() {
  local uid
  uid=$(in_container python -c 'import os; print(os.getuid())')
  [ "$uid" -ne 0 ] || fail "The service runs as root."
  if in_container python -c 'open("/opt/written", "w")' 2>/dev/null; then fail "/opt can be written to."; fi
  say locked "uid $uid, nothing but /tmp and the volume can be written to"
}

check_confinement() {
  in_container python /attacks/attacks.py >"$work/attacks" || fail "A taken over reader can: $(cat "$work/attacks")"
  say confined "$(head -n 4 "$work/attacks" | paste -s -d ,), $(grep -c ': E' "$work/attacks") attempts refused"
}

check_training() {
  in_container python -c '
import json, service.training.child, urllib.request
limits = json.load(urllib.request.urlopen("http://127.0.0.1:8000/limits"))
assert limits["training"], limits
' || fail "Nobody can train there."
  say training "installed, and switched on for the own host; others need a key"
}

check_segmentation() {
  curl --silent --show-error --max-time 300 --noproxy '*' --dump-header "$work/headers" --output "$work/labels.tif" \
    --header 'Content-Type: image/tiff' --data-binary "@$sample" "$address/segment"
  grep -q '^HTTP/1.1 200' "$work/headers" || fail "$(cat "$work/headers" "$work/labels.tif")"
  in_container python -c '
import io, sys, tifffile
from service.core.bundled import bundled_folder
labels = tifffile.imread(io.BytesIO(sys.stdin.buffer.read()))
expected = tifffile.imread(bundled_folder("models") / "nuclei" / "expected.tif")
agreement = ((labels > 0) == (expected > 0)).mean()
print(f"{labels.shape}, {labels.dtype}, {labels.max()} objects, foreground as expected in {agreement:.2%} of the voxels")
sys.exit(int(labels.max() == 0 or agreement < 0.99))
' <"$work/labels.tif" >"$work/comparison" || fail "Not the expected labels: $(cat "$work/comparison")"
  say segmented "$(cat "$work/comparison")"
  say stages "$(grep -i '^server-timing:' "$work/headers" | cut -d ' ' -f 2- | tr -d '\r')"
}

stop() {
  local began=$SECONDS status
  "${engine[@]}" stop --time 60 "$container" >/dev/null
  status=$(inspect '{{.State.ExitCode}}')
  [ "$status" -eq 0 ] || fail "SIGTERM ended it with status $status."
  say stopped "by SIGTERM in $((SECONDS - began)) s, status 0"
  remove
}

command -v curl >/dev/null || fail "This needs curl: sudo apt-get install curl"
if docker info >/dev/null 2>&1; then
  engine=(docker)
elif command -v podman >/dev/null; then
  use_podman
else
  fail "Neither Docker nor podman is here. On Debian: sudo apt-get install podman buildah runc"
fi
build

start --network none
wait_for healthy healthy
check_lock
check_confinement
check_training
stop

start --publish 127.0.0.1::8000
address=http://$("${engine[@]}" port "$container" 8000/tcp | head -n 1)
wait_for ready curl --silent --fail --max-time 2 --noproxy '*' "$address/health/ready"
check_segmentation
stop
