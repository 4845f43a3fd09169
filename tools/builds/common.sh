# shellcheck shell=bash
# What the scripts beside this file share; they source it, with the checkout as the current folder. It sets
#   work    a temporary folder, removed at the end
#   source  in it, the checkout's files as git sees them (tracked, or new and not ignored)
#   tests   in it, the same without what the package is built from: tests run there, so only an installed msda is found
# Every step has a time limit, its output is shown only if it fails, and what is missing is installed from Debian and PyPI.

shopt -s inherit_errexit
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
unset PYTHONDONTWRITEBYTECODE
# A build is what a script says that it is, whatever the user has set.
unset PYTHONPATH CC CFLAGS CPPFLAGS LDFLAGS MSDA_OPENMP MSDA_BUILD_ISAS MSDA_BOUNDSCHECK MSDA_ISA MSDA_NUM_THREADS OMP_NUM_THREADS

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

# environment PYTHON FOLDER: a virtual environment with all that building and testing need.
environment() {
  [[ $1 == /usr/bin/* ]] && debian "$(basename "$(readlink -f "$1")")"-{dev,venv}
  debian gcc libc6-dev binutils
  quietly 120 "$1" -m venv "$2"
  requirements "$1" > "$work/requirements"
  quietly 600 "$2/bin/pip" install -r "$work/requirements"
}

# build_wheel PYTHON [NAME=VALUE...]: builds the project with these settings, from a fresh copy of its source, into the folder
# $work/wheel, and unpacks the wheel into $work/unpacked.
build_wheel() {
  rm -rf "$work"/{build,wheel,unpacked}
  cp -r "$source" "$work/build"
  quietly 900 env "${@:2}" "$1" -m pip wheel --no-build-isolation --no-deps --no-cache-dir -w "$work/wheel" "$work/build"
  mkdir "$work/unpacked"
  (cd "$work/unpacked" && "$1" -m zipfile -e "$work"/wheel/*.whl .)
}

# install_wheel PYTHON: installs the wheel in the place of any other build.
install_wheel() {
  quietly 120 "$1" -m pip install --no-deps --force-reinstall "$work"/wheel/*.whl
}

# Prints which build a Python imports, and holds it to what each build owes others: importing it must leave the
# floating-point mode alone. The command line may go through env or an emulator.
describe() {
  (cd "$tests" && timeout 120 "$@" -c '
import sys, msda, numpy
print(msda.__file__, f"python={sys.version.split()[0]} numpy={numpy.__version__}", *(f"{name}={value}" for name, value in msda.runtime_info().items()))
assert numpy.float32(1e-40) * numpy.float32(1) != 0, "importing msda switched on flush-to-zero"
')
}

# inspect OBJDUMP: fails if an extension just built holds a fused multiply-add, which no build may use, or instructions
# beyond what it is named after.
inspect() {
  local file name refused found
  for file in "$work"/unpacked/msda/_kernels/*.so; do
    name=$(basename "$file" | cut -d . -f 1)
    refused='\s(vfn?m(add|sub)|fn?m(add|sub)\s|fml[as]\s)'
    case $name in
      _avx512) ;;
      _avx2) refused+='|%zmm|%[xy]mm(1[6-9]|[23][0-9])|%k[0-7]' ;;
      *) refused+='|\sv.*%[xyz]mm' ;;
    esac
    found=$("$1" -d --no-show-raw-insn "$file" | grep -E "$refused" || true)
    [[ -z $found ]] || die "$name has instructions that it must not have, such as"$'\n'"$(head -n 5 <<< "$found")"
  done
}

# uses_openmp: whether the kernels just built do.
uses_openmp() {
  readelf -d "$work"/unpacked/msda/_kernels/_baseline.*.so | grep 'NEEDED.*omp' > /dev/null
}

# run_tests SECONDS PYTHON... -- ARGUMENT...: pytest, outside the checkout, with a time limit.
run_tests() {
  local limit=$1 interpreter=()
  shift
  while [[ $1 != -- ]]; do interpreter+=("$1"); shift; done
  shift
  (cd "$tests" && timeout -k 10 "$limit" "${interpreter[@]}" -m pytest -q -p no:cacheprovider "$@")
}
