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
oldest_numpy=2.0
python=$work/venv/bin/python
summary=()

passes() { # NAME PYTEST ARGUMENT...: tests what is installed
  say "$1"
  describe "$python"
  run_tests 600 "$python" -- "${@:2}"
  summary+=("$1: passed")
}

for version in 3.11 3.12 3.13; do
  if ! host=$(find_python $version); then
    summary+=("Python $version: SKIPPED, this machine has none")
    [[ $version != 3.11 ]] || summary+=("NumPy $oldest_numpy: SKIPPED, it is tried with Python 3.11")
    continue
  fi
  environment "$host" "$work/venv"
  build_wheel "$python"
  install_wheel "$python"
  passes "Python $version ($host)" "$@"
  if [[ $version == 3.11 ]]; then # the wheel just built, not one built for this NumPy
    quietly 300 "$python" -m pip install "numpy==$oldest_numpy.*"
    passes "Python $version with NumPy $oldest_numpy" "$@"
  fi
  rm -rf "$work/venv"
done
say "Pythons ($SECONDS s)"
printf '%s\n' "${summary[@]}"
