#!/usr/bin/env bash
# From a bare clone to a table: installs into .venv, prepares the demo model, starts a pair and sends it requests.
# What was installed before is reused; after the first run it needs no network.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/lib/checks.sh"
. "$root/launch/lib/install.sh"

usage() {
  cat <<'TEXT'
Usage: launch/quickstart.sh [--serve] [--gpus N]

Installs pdxfer and vLLM into .venv (2.5 GB), prepares a small model (0.4 GB), starts router, prefill engine, decode
engine and proxy, sends three requests to one engine and to the pair, and prints what it measured.

  --serve     measure nothing: start the pair, print a curl line, leave it up until Ctrl-C
  --gpus N    use N NVIDIA GPUs; 0 for the CPU. Default: all that nvidia-smi lists
  --help      this text

The Python that .venv is made with: PYTHON=/path/to/python3, else the first of python3, python3.13, python3.12, ...
Example: launch/quickstart.sh --serve
TEXT
}

wrong_usage() { echo "quickstart.sh: $1; see launch/quickstart.sh --help" >&2; exit 2; }

gpus=all rest=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --serve) rest+=(--serve) ;;
    --gpus) [ $# -gt 1 ] || wrong_usage "--gpus needs a number"; gpus=$2; shift ;;
    --gpus=*) gpus=${1#*=} ;;
    *) wrong_usage "unknown argument $1" ;;
  esac
  shift
done
[ "$gpus" != all ] || gpus=$(facts_gpus)
case $gpus in "" | *[!0-9]*) wrong_usage "--gpus needs a number, not \"$gpus\"" ;; esac
[ "$gpus" -gt 0 ] && flavor=cuda || flavor=cpu
unset PYTHONHOME PYTHONPATH

fits=yes
check_system "$(uname -s)" "$(facts_libc)" || exit 1
check_cpu "$(uname -m)" "$(facts_cpu_flags)" "$gpus" || fits=no
check_memory "$(facts_memory_kib)" || fits=no
[ "$gpus" -eq 0 ] || check_driver "$(facts_driver)" || fits=no
if ! installed $flavor; then
  python=$(find_python)
  check_python "$(python_version "$python")" "$(python_has_venv "$python")" || fits=no
  check_disk "$(facts_free_kib "$root")" "$gpus" "$root" || fits=no
fi
[ $fits = yes ] || exit 1

mkdir -p "$work"
exec 9>"$work/install.lock"
if command -v flock >/dev/null && ! flock -n 9; then
  echo "Another quickstart is installing in this checkout; waiting for it" >&2
  flock -w 1800 9 || { echo "It did not end within half an hour; see $log" >&2; exit 1; }
fi
if installed $flavor; then
  echo "Using .venv as it is" >&2
else
  echo "Installing into .venv (once, a few minutes)" >&2
  install $flavor "${python:-$(find_python)}" || exit 1
fi
"$venv/bin/python" -m pdxfer.cli.main model demo >/dev/null || exit $?
exec 9>&-
exec "$venv/bin/python" -m pdxfer.launcher.quickstart --gpus "$gpus" ${rest[@]+"${rest[@]}"}
