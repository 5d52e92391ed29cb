# What keeps pdxfer and vLLM from running here. Sourced by launch/quickstart.sh.
# Each check takes the facts as arguments, and says on stderr in one line what is wrong and what to do, and returns 1.
# The facts_* functions read them from the machine.

GIB_KIB=$((1024 * 1024))
MIN_DRIVER=580 # the first NVIDIA driver series that runs CUDA 13, which the pinned torch is built with

problem() { echo "cannot run here: $*" >&2; return 1; }

check_system() { # SYSTEM LIBC, as `uname -s` and `getconf GNU_LIBC_VERSION` print them
  [ "$1" = Linux ] || { problem "this is $1, vLLM runs on Linux: use a Linux machine, container or WSL 2"; return 1; }
  local version=${2#glibc }
  [ "$version" != "$2" ] && [ "$(printf '%s\n' 2.28 "$version" | sort -V | head -n 1)" = 2.28 ] ||
    problem "the vLLM wheels need glibc 2.28 or newer, here is ${2:-another C library}: use a newer distribution (Debian 10, Ubuntu 18.10, RHEL 8 or later)"
}

check_cpu() { # MACHINE FLAGS GPUS
  case $1 in
    x86_64) [ "$3" -gt 0 ] || case " $2 " in *" avx2 "*) ;; *)
      problem "this CPU has no AVX2, which vLLM for CPU needs: use a machine with AVX2 (Intel since 2013, AMD since 2015), or tell the virtual machine to pass it on" ;;
      esac ;;
    aarch64) [ "$3" -eq 0 ] || problem "the CUDA requirements are locked for x86_64, this is aarch64: add --gpus 0 for the CPU" ;;
    *) problem "there are no vLLM wheels for $1: use an x86_64 or aarch64 machine" ;;
  esac
}

check_python() { # VERSION ("" if there is none) HAS_VENV (yes or no)
  case $1 in
    3.11 | 3.12 | 3.13 | 3.14) ;;
    *) problem "Python 3.11 to 3.14 is needed, found ${1:-none}: install one, or name it with PYTHON=/path/to/python3"; return 1 ;;
  esac
  [ "$2" = yes ] || problem "Python $1 has no venv module with pip: install it (Debian, Ubuntu: apt install python$1-venv)"
}

check_disk() { # FREE_KIB GPUS FOLDER
  local need=8
  [ "$2" -eq 0 ] || need=24
  [ "$1" -ge $((need * GIB_KIB)) ] ||
    problem "$3 has $(gib "$1") GiB free, the installation needs $need GiB: make room, or clone onto a bigger disk"
}

check_memory() { # AVAILABLE_KIB
  [ "$1" -ge $((8 * GIB_KIB)) ] ||
    problem "$(gib "$1") GiB of memory are available, two engines need 8 GiB: close programs, or raise the container's limit"
}

check_driver() { # VERSION
  [ "${1%%.*}" -ge $MIN_DRIVER ] 2>/dev/null ||
    problem "the NVIDIA driver is ${1:-not found by nvidia-smi}, CUDA 13 needs $MIN_DRIVER or newer: update it, or add --gpus 0 for the CPU"
}

gib() { echo "$(($1 / GIB_KIB)).$(($1 * 10 / GIB_KIB % 10))"; }

facts_libc() { getconf GNU_LIBC_VERSION 2>/dev/null || true; }

facts_cpu_flags() { sed -n '/^flags/ { s/^[^:]*: //; p; q; }' /proc/cpuinfo; }

facts_gpus() { # how many NVIDIA GPUs work
  { timeout 5 nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU ' || true
}

facts_driver() { timeout 5 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true; }

facts_free_kib() { df -Pk "$1" | awk 'NR == 2 { print $4 }'; }

facts_memory_kib() { # what is available, or less where a container's limit is lower
  local least limit file
  least=$(awk '/^MemAvailable/ { print $2 }' /proc/meminfo)
  for file in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
    limit=$(cat "$file" 2>/dev/null || true)
    case $limit in "" | *[!0-9]* | ???????????????????*) ;; *) [ $((limit / 1024)) -ge "$least" ] || least=$((limit / 1024)) ;; esac
  done
  echo "$least"
}

find_python() { # prints the first interpreter that will do, else the first there is; nothing if there is none
  local name any=""
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    name=$(command -v "$name" || true)
    [ -n "$name" ] || continue
    any=${any:-$name}
    case $(python_version "$name") in 3.11 | 3.12 | 3.13 | 3.14) [ "$(python_has_venv "$name")" = no ] || { echo "$name"; return; } ;; esac
  done
  echo "$any"
}

python_version() { [ -z "$1" ] || "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

python_has_venv() { [ -n "$1" ] && "$1" -c 'import venv, ensurepip' 2>/dev/null && echo yes || echo no; }
