#!/usr/bin/env bash
# Builds the project in other ways and runs tests against each build, on each instruction set that it was built for.
#
#     tools/builds/variants.sh [NAME...] [-- PYTEST ARGUMENT...]
#
# Run it in a checkout. Without names: all that are listed below. Without arguments: the digests and the byte comparisons.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# What each variant is: the settings of its build, and the instruction sets that it must then have on x86-64.
fast="-Ofast -ffast-math -funsafe-math-optimizations -ffp-contract=fast -march=native"
describe_variant() {
  isas="baseline avx2 avx512"
  case $1 in
    gcc) settings=(CC=gcc) ;;
    clang) settings=(CC=clang) ;;
    O0) settings=(CC="$(appending gcc -O0)") ;;
    no-openmp) settings=(MSDA_OPENMP=0) ;;
    baseline) settings=(MSDA_BUILD_ISAS=baseline) isas=baseline ;;
    hostile) settings=(CC=gcc CFLAGS="$fast -flto=auto -mfma -mrecip -mfpmath=387 -fsingle-precision-constant" LDFLAGS="$fast -flto=auto") ;;
    hostile-clang) settings=(CC=clang CFLAGS="$fast -mfma -fapprox-func -fdenormal-fp-math=positive-zero" LDFLAGS="$fast") ;;
    *) die "no variant $1; there are: ${all[*]}" ;;
  esac
  [[ $(uname -m) == x86_64 ]] || isas=baseline
}
all=(gcc clang O0 no-openmp baseline hostile hostile-clang)

# appending COMPILER FLAG: a compiler that puts the flag after all others, setup.py's own included.
appending() {
  printf '#!/bin/sh\nexec %s "$@" %s -frecord-gcc-switches\n' "$1" "$2" > "$work/$1$2"
  chmod +x "$work/$1$2"
  echo "$work/$1$2"
}

# confirm NAME: fails unless the unpacked build shows that it is what its name says.
confirm() {
  local kernels=$work/unpacked/msda/_kernels isa built=()
  for isa in baseline avx2 avx512; do
    if compgen -G "$kernels/_$isa.*.so" > /dev/null; then built+=("$isa"); fi
  done
  [[ ${built[*]} == "$isas" ]] || die "$1: built for ${built[*]}, expected $isas"
  case $1 in
    clang | hostile-clang) uses_openmp && readelf -p .comment "$kernels"/_baseline.*.so | grep clang ;;
    O0) uses_openmp && readelf -p .GCC.command.line "$kernels"/_baseline.*.so | grep -- -O0 ;;
    no-openmp) ! uses_openmp ;;
    *) uses_openmp ;;
  esac > /dev/null || die "$1: the build is not what its name says"
}

names=()
while [[ $# != 0 && $1 != -- ]]; do names+=("$1"); shift; done
[[ $# == 0 ]] || shift
[[ $# != 0 ]] || set -- tests/test_digests.py tests/test_bits.py
[[ ${#names[@]} != 0 ]] || names=("${all[@]}")
for name in "${names[@]}"; do describe_variant "$name"; done

say "tools"
[[ ${names[*]} != *clang* ]] || debian clang libomp-dev
host=$(find_python 3.11 3.12 3.13) || die "needs a Python of 3.11 or newer"
environment "$host" "$work/venv"
python=$work/venv/bin/python

can_run() { # ISA: whether this machine can
  case $1 in
    baseline) true ;;
    avx2) grep -qw avx2 /proc/cpuinfo ;;
    avx512) grep -qw avx512f /proc/cpuinfo ;;
  esac
}

summary=()
for name in "${names[@]}"; do
  began=$SECONDS
  describe_variant "$name"
  say "$name: build (${settings[*]})"
  build_wheel "$python" "${settings[@]}"
  inspect objdump
  confirm "$name"
  install_wheel "$python"
  for isa in $isas; do
    if ! can_run "$isa"; then
      summary+=("$name on $isa: built, NOT RUN: this machine has no $isa")
      continue
    fi
    say "$name on $isa"
    describe env MSDA_ISA="$isa" "$python"
    run_tests 900 env MSDA_ISA="$isa" "$python" -- "$@"
    summary+=("$name on $isa: passed")
  done
  summary+=("$name took $((SECONDS - began)) s")
done
say "variants ($SECONDS s)"
printf '%s\n' "${summary[@]}"
