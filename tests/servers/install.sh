#!/usr/bin/env bash
# Servers whose packages must not meet ours, each in its own folder under .pdxfer/servers, at once, kept between runs:
# InfiniStore (venv) and Azurite (npm). Needs python3, npm, gcc and libibverbs-dev. About 40 s.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
place=${PDXFER_SERVERS:-$(cd "$here/../.." && pwd)/.pdxfer/servers}
python=${PYTHON:-python3}
mkdir -p "$place"

once() { # NAME INPUTS COMMAND: unless what INPUTS (files) say is there already
  local name=$1 inputs=$2 stamp=$place/$1/installed want
  want=$(cat $inputs "$here/install.sh" | sha256sum)
  [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && return
  rm -rf "${place:?}/$name" && mkdir -p "$place/$name"
  "$3" "$place/$name" >"$place/$name.log" 2>&1 || { tail -20 "$place/$name.log" >&2; echo "install.sh: $name failed" >&2; return 1; }
  echo "$want" >"$stamp"
}

infinistore() {
  "$python" -m venv "$1" &&
    "$1/bin/pip" install --no-deps --no-compile --disable-pip-version-check -r "$here/infinistore.lock" &&
    gcc -shared -fPIC -O1 -o "$1/libfakeibv.so" "$here/fakeibv.c"
}
azurite() { cp "$here/azurite/package.json" "$1" && npm install --prefix "$1" --no-audit --no-fund --loglevel=error --fetch-timeout=60000 --fetch-retries=1; }

jobs=()
once infinistore "$here/infinistore.lock $here/fakeibv.c" infinistore & jobs+=($!)
once azurite "$here/azurite/package.json" azurite & jobs+=($!)
failed=0
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
exit $failed
