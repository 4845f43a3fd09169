#!/usr/bin/env bash
# Builds the project and runs tests (by default the digests) on each supported Python that this machine has, and with the
# oldest supported NumPy.
#
#     tools/builds/pythons.sh [PYTEST ARGUMENT...]
#
# Run it in a checkout. Pythons are looked for in pyenv's versions and in PATH; those that are not there are skipped, and the
# last lines say so.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# != 0 ]] || set -- tests/test_digests.py
summary=()

# on NAME PYTHON [REQUIREMENT...] -- PYTEST ARGUMENT...
on() {
  local name=$1 host=$2 began=$SECONDS extra=()
  shift 2
  while [[ $1 != -- ]]; do extra+=("$1"); shift; done
  shift
  say "$name: $host"
  environment "$host" "$work/venv" "${extra[@]}"
  wheel "$work/venv/bin/python"
  install "$work/venv/bin/python"
  describe "$work/venv/bin/python"
  run_tests 600 "$work/venv/bin/python" -- "$@"
  rm -rf "$work/venv"
  summary+=("$name: passed ($((SECONDS - began)) s)")
}

for version in 3.11 3.12 3.13; do
  if host=$(find_python $version); then
    on "Python $version" "$host" -- "$@"
  else
    summary+=("Python $version: SKIPPED, this machine has none")
  fi
done
if host=$(find_python 3.11); then
  on "oldest NumPy" "$host" 'numpy==2.0.*' -- "$@"
else
  summary+=("oldest NumPy: SKIPPED, this machine has no Python 3.11")
fi
say "Pythons ($SECONDS s)"
printf '%s\n' "${summary[@]}"
