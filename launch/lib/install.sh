# Installs one of requirements/*.lock and this checkout into .venv. Sourced by launch/quickstart.sh; set `root` first.
# .venv/pdxfer-install says what is there: "cpu DIGEST" after a complete installation, "cpu unfinished" during one.

venv=$root/.venv
stamp=$venv/pdxfer-install
work=$root/.pdxfer
log=$work/install.log
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

installed() { # FLAVOR: true if .venv is what the lock file and this checkout ask for
  [ "$(cat "$stamp" 2>/dev/null)" = "$1 $(digest "$1")" ] && "$venv/bin/python" -c '' 2>/dev/null || return 1
}

digest() { # of all that decides what gets installed; a moved checkout counts, .venv has its path inside; so do the C files
  { cat "$root/requirements/$1.lock" "$root/pyproject.toml" && echo "$root"
    cat "$root"/pdxfer/codec/native/*.[ch] 2>/dev/null; } | sha256sum | cut -d ' ' -f 1
}

install() { # FLAVOR PYTHON: from whatever state .venv is in; a flavor change starts it anew
  local flavor=$1 python=$2 lock=$root/requirements/$1.lock have
  have=$(cut -d ' ' -f 1 "$stamp" 2>/dev/null || true)
  mkdir -p "$work/tmp"
  : >"$log"
  if [ "${have:-$flavor}" != "$flavor" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    stage "Python environment .venv" "$python" -m venv --clear "$venv" || return 1
  fi
  echo "$flavor unfinished" >"$stamp"
  [ "$flavor" != cpu ] || stage "torch for CPU" install_cpu_torch "$lock" || return 1
  hint=packages_hint total=$(grep -c == "$lock")
  stage "vLLM for ${flavor^^} and its libraries" pip_install -r "$lock" || return 1
  hint=""
  stage "pdxfer" pip_install --no-build-isolation --editable "$root" || return 1
  echo "$flavor $(digest "$flavor")" >"$stamp"
  rm -rf "$work/tmp"
}

install_cpu_torch() { # PyPI's own torch wheel is for CUDA
  local pin
  pin=$(grep '^torch==' "$1")
  pip_install "$pin" || pip_install --index-url "$TORCH_CPU_INDEX" "$pin"
}

pip_install() { # without compiling: Python does that at first import, for the tenth of the files that are imported
  TMPDIR=$work/tmp PIP_USER=0 "$venv/bin/python" -m pip install --no-deps --no-compile --no-input --retries 2 \
    --progress-bar off --disable-pip-version-check --root-user-action ignore "$@"
}

packages_hint() { # of the stage that began in line $began of the log
  local there
  if tail -n "+$began" "$log" | grep -q '^Installing collected'; then
    there=$(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
    echo ", $((there < total ? there : total)) of $total packages installed"
  else
    echo ", $(tail -n "+$began" "$log" | grep -c '^Collecting') of $total packages downloaded"
  fi
}

stage() { # TITLE COMMAND...: runs it with its output in the log; a line with the time it took, on a terminal a live one
  local title=$1 start=$SECONDS child beat=0 began
  began=$(($(wc -l <"$log") + 1))
  shift
  set -m # a process group of its own, so that an interrupt ends pip with all it started
  "$@" >>"$log" 2>&1 </dev/null &
  child=$!
  set +m
  trap 'kill -- -$child 2>/dev/null; wait $child || true; echo >&2; exit 130' INT TERM
  while kill -0 $child 2>/dev/null; do
    if [ -t 2 ]; then
      printf '\r\033[K  %s ... %s s%s' "$title" $((SECONDS - start)) "$(${hint:-:})" >&2
    elif [ $((SECONDS - start)) -ge $beat ]; then
      echo "  $title ... $((SECONDS - start)) s$(${hint:-:})" >&2
      beat=$((beat + 20))
    fi
    sleep 0.3
  done
  trap - INT TERM
  [ ! -t 2 ] || printf '\r\033[K' >&2
  if wait $child; then
    echo "  $title: $((SECONDS - start)) s" >&2
  else
    echo "  $title failed after $((SECONDS - start)) s: $(why)" >&2
    echo "  all of pip's output: $log; run the command again, it goes on from here" >&2
    return 1
  fi
}

why() { # the stage failed, in one line
  local said host
  said=$(tail -n "+$began" "$log")
  if grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError' <<<"$said"; then
    host=$(grep -oE "host='[^']+'" <<<"$said" | tail -n 1 | cut -d "'" -f 2 || true)
    echo "${host:-the package index} cannot be reached; check the network, the proxy and pip's settings (PIP_FIND_LINKS: where else wheels lie)"
  else
    said=$(grep '^ERROR: ' <<<"$said" || echo "$said")
    said=$(tail -n 1 <<<"$said")
    echo "${said#ERROR: }"
  fi
}
