#!/usr/bin/env bash
# Installs what the tests need (into .venv, and with apt where they need a system package), then runs one tier.
#   tests/run.sh fast   lint, types, import contracts, the quick tests without vLLM; a minute once installed
#   tests/run.sh        what CI runs: fast, then every kind of case on real vLLM engines at reduced counts
#   tests/run.sh full   the counts of the promises: long soaks and many prompts; takes hours, run before a release
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
. launch/lib/checks.sh
. launch/lib/install.sh

tier=${1:-ci}
case $tier in
  fast | ci | full) ;;
  *) echo "run.sh: unknown tier $tier; use fast, full or nothing" >&2; exit 2 ;;
esac

step() { printf '\n== %s\n' "$1" >&2; }

step "install"
if ! installed cpu; then
  install cpu "$(find_python)"
fi
tests_stamp=$venv/pdxfer-tests
if [ "$(cat "$tests_stamp" 2>/dev/null)" != "$(sha256sum <requirements/test.lock)" ]; then
  stage "test tools" pip_install -r requirements/test.lock
  sha256sum <requirements/test.lock >"$tests_stamp"
fi
if [ "$tier" != fast ] && ! "$venv/bin/python" -c 'import ucxx' 2>/dev/null; then
  stage "ucxx (ucx channel)" pip_install -r requirements/ucx.lock
fi
PATH=$PATH:/usr/sbin:/sbin  # ip and tc live there, and tests miss them
if [ "$tier" != fast ] && ! { command -v ip && command -v tc; } >/dev/null; then
  stage "iproute2 (two-host tests)" sh -c 'apt-get update -q && apt-get install -y -q iproute2'
fi
if [ "$tier" != fast ] && ! command -v chromium >/dev/null; then
  stage "chromium (status page)" sh -c 'apt-get update -q && apt-get install -y -q chromium'
fi
if [ "$tier" != fast ] && ! { command -v redis-server && command -v memcached && command -v npm &&
  [ -e /usr/include/infiniband/verbs.h ]; } >/dev/null; then
  node=$(command -v npm >/dev/null || echo nodejs npm)  # other builds of Node.js bring npm and clash with Debian's
  stage "redis, memcached, npm, verbs headers (remote tiers)" sh -c "apt-get update -q &&
    apt-get install -y -q --no-install-recommends redis-server memcached $node gcc libc6-dev libibverbs-dev"
fi
if [ "$tier" != fast ]; then
  stage "InfiniStore and Azurite (remote tiers)" env PYTHON="$venv/bin/python" tests/servers/install.sh
fi
python=$venv/bin/python
export PATH="$venv/bin:$PATH" HF_HUB_OFFLINE=1 PDXFER_TIER=$tier

check() {
  ruff check . && mypy && lint-imports
}

if [ "$tier" = fast ]; then  # two processes, and the checks beside them
  step "lint, types, import contracts; quick tests without vLLM"
  check &
  checking=$! status=0
  # Compiled once, not by three processes in each run. The fuzzer reads the whole API's description before its first
  # test; CI runs it.
  unset PYTHONDONTWRITEBYTECODE
  "$python" -m pytest -n 2 --dist loadfile -p no:schemathesis --ignore tests/test_controller_fuzz.py \
    -m "not vllm and not full and not slow" tests || status=$?
  wait "$checking" || status=$?
  exit "$status"
fi
step "lint, types, import contracts"
check
step "demo model"
pdxfer model demo >/dev/null
failed=0  # one tier's failures do not hide the next one's
step "tests without vLLM, the slow ones too"
"$python" -m pytest -m "not vllm and not full" tests || failed=1

step "tests on real vLLM"
marker="vllm and not full"
[ "$tier" = full ] && marker="vllm or full"
limit=900  # seconds a test, the start of its engines included
[ "$tier" = full ] && limit=7200
"$python" -m pytest -m "$marker" --timeout "$limit" -rA -s tests || failed=1

step "quickstart"
launch/quickstart.sh || failed=1
exit "$failed"
