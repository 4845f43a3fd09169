# shellcheck shell=bash
# What the scripts beside this file share; they source it, with the checkout as the current folder. It sets
#   work    a temporary folder, removed at the end
#   source  in it, the checkout's files as git sees them (tracked, or new and not ignored)
#   tests   in it, the same without what the package is built from: tests run there, so only an installed msda is found
# Every step has a time limit, its output is shown only if it fails, and what is missing is installed from Debian and PyPI.

[[ -f setup.py && -d src/msda ]] || { echo "run this in a checkout of the project" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source=$work/source
tests=$work/tests
mkdir "$source"
git ls-files -z --cached --others --exclude-standard --deduplicate | tar -c --null --ignore-failed-read -T - | tar -x -C "$source"
cp -r "$source" "$tests"
rm -r "$tests/src" "$tests/setup.py"

export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Extensions are compiled on all CPUs.
printf '[build_ext]\nparallel = %d\n' "$(nproc)" > "$work/build.cfg"
export DIST_EXTRA_CONFIG=$work/build.cfg
# Emulated and sanitized programs start slowly: let them keep their byte code.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH

say() { printf '\n== %s\n' "$*"; }
die() { echo "$*" >&2; exit 1; }

# quietly SECONDS COMMAND...: runs it, and prints what it printed only if it fails or takes too long.
quietly() {
  if ! timeout -k 10 "$@" > "$work/log" 2>&1; then
    tail -n 200 "$work/log" >&2
    die "failed, or took more than $1 s: ${*:2}"
  fi
}

as_root() {
  if [[ $EUID == 0 ]]; then
    quietly "$@"
  elif sudo -n true 2> /dev/null; then
    quietly "$1" sudo -n DEBIAN_FRONTEND=noninteractive "${@:2}"
  else
    die "root (or sudo without a password) is needed once for: ${*:2}"
  fi
}

# debian PACKAGE...: installs those that are missing.
debian() {
  local package missing=()
  for package; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null) == installed ]] || missing+=("$package")
  done
  [[ ${#missing[@]} == 0 ]] && return
  as_root 120 apt-get update
  as_root 600 apt-get install -y --no-install-recommends "${missing[@]}"
}

# find_python VERSION...: prints the first of these Pythons that pyenv or PATH has; fails if there is none.
find_python() {
  local version candidate
  for version; do
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python "/usr/bin/python$version" "python$version" python3; do
      if "$candidate" - "$version" 2> /dev/null <<< '
import sys, sysconfig
is_it = sys.argv[1] == "%d.%d" % sys.version_info[:2] and sys.prefix == sys.base_prefix
sys.exit(not is_it or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
'; then
        command -v "$candidate"
        return
      fi
    done
  done
  return 1
}

# The packages that building and testing need, as pyproject.toml lists them.
requirements() {
  "$1" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
wanted = project["build-system"]["requires"] + project["project"]["dependencies"] + project["dependency-groups"]["test"]
print("\n".join(wanted))
'
}

# environment PYTHON FOLDER [REQUIREMENT...]: a virtual environment with all that building and testing need.
environment() {
  [[ $1 == /usr/bin/* ]] && debian "$(basename "$(readlink -f "$1")")"-{dev,venv}
  debian gcc libc6-dev binutils
  quietly 120 "$1" -m venv "$2"
  requirements "$1" > "$work/requirements"
  quietly 600 "$2/bin/pip" install -r "$work/requirements" "${@:3}"
}

# wheel PYTHON FOLDER [NAME=VALUE...]: builds the wheel with these settings, from a fresh copy, into the folder.
wheel() {
  rm -rf "$work/build" "$2"
  cp -r "$source" "$work/build"
  quietly 900 env "${@:3}" "$1" -m pip wheel --no-build-isolation --no-deps --no-cache-dir -w "$2" "$work/build"
  rm -rf "$work/build"
}

# install PYTHON FOLDER: installs the wheel in the folder in the place of any other build.
install() {
  quietly 120 "$1" -m pip install --no-deps --force-reinstall "$2"/*.whl
}

# Prints which build a Python imports, and holds it to what each build owes others: importing it must leave the
# floating-point mode alone. The command line may go through env or an emulator.
describe() {
  (cd "$tests" && timeout 120 "$@" -c '
import msda, numpy
print("msda", msda.__file__, *(f"{name}={value}" for name, value in msda.runtime_info().items()), sep="\n   ")
assert numpy.float32(1e-40) * numpy.float32(1) != 0, "importing msda switched on flush-to-zero"
')
}

# unfused OBJDUMP WHEEL: fails if a kernel holds a fused multiply-add, which no build may use.
unfused() {
  local file found
  rm -rf "$work/unpacked"
  mkdir "$work/unpacked"
  (cd "$work/unpacked" && python3 -m zipfile -e "$2" .)
  while read -r file; do
    found=$("$1" -d "$file" | grep -cE '\s(vf[n]?m(add|sub)|fn?m(add|sub)\s|fml[as]\s)' || true)
    [[ $found == 0 ]] || die "$(basename "$file") has $found fused multiply-adds"
  done < <(find "$work/unpacked" -name '*.so')
}

# run_tests SECONDS PYTHON... -- ARGUMENT...: pytest, outside the checkout, with a time limit.
run_tests() {
  local limit=$1 interpreter=()
  shift
  while [[ $1 != -- ]]; do interpreter+=("$1"); shift; done
  shift
  (cd "$tests" && timeout -k 10 "$limit" "${interpreter[@]}" -m pytest -q -p no:cacheprovider "$@")
}
