#!/usr/bin/env bash
# Cross-builds the extensions for aarch64 and runs tests (by default the digests) under user-mode emulation.
#
#     tools/builds/aarch64.sh [PYTEST ARGUMENT...]
#
# Run it in a checkout on x86-64 Debian 12. setup.py itself does the build, by Python's own way of cross-compiling: a
# Python of the same version on this machine, told that the platform is linux-aarch64 by the foreign Python's
# configuration, which also names the compiler. The foreign Python is Debian's, unpacked into a temporary folder with what
# it needs (this machine's own package lists are left as they are); NumPy and the test tools are PyPI's aarch64 wheels.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

version=3.11 # Debian 12's Python
triple=aarch64-linux-gnu
[[ $(uname -m) != aarch64 ]] || die "this machine is an aarch64 itself: variants.sh tests its builds"
host=$(find_python $version) || die "needs a Python $version on this machine (Debian 12's python3, or pyenv's)"

say "tools"
debian gcc-$triple libc6-dev-arm64-cross qemu-user-static
environment "$host" "$work/host"

say "Python $version of Debian for arm64"
mkdir -p "$work"/apt/{state/lists/partial,cache/archives/partial} "$work/root"
: > "$work/apt/status"
foreign_apt() {
  quietly 300 apt-get -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root \
    -o Dir::State="$work/apt/state" -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt/cache" "$@"
}
foreign_apt update
foreign_apt install -y --no-install-recommends --download-only \
  python$version-minimal libpython$version-{stdlib,dev} libstdc++6 libgomp1
for package in "$work"/apt/cache/archives/*.deb; do dpkg -x "$package" "$work/root"; done

# sys.executable is this script, so that tests can start Pythons of their own. A plain ARMv8.0 core is emulated.
cat > "$work/python" <<END
#!/bin/sh
export QEMU_CPU=cortex-a72 QEMU_LD_PREFIX='$work/root' PYTHONHOME='$work/root/usr'
exec qemu-aarch64-static -0 "\$0" '$work/root/usr/bin/python$version' "\$@"
END
chmod +x "$work/python"

foreign_pip() {
  quietly 300 "$work/host/bin/pip" install --target "$work/root/usr/lib/python3/dist-packages" --only-binary=:all: \
    --implementation cp --python-version $version --platform=linux_aarch64 \
    --platform=manylinux2014_aarch64 --platform=manylinux_2_{17,24,26,27,28,31,34,35,36}_aarch64 "$@"
}
foreign_pip -r "$work/requirements"

say "build"
mkdir "$work/configuration"
cp "$work/root/usr/lib/python$version/_sysconfigdata__$triple.py" "$work/configuration"
build_wheel "$work/host/bin/python" PYTHONPATH="$work/configuration" \
  _PYTHON_SYSCONFIGDATA_NAME=_sysconfigdata__$triple _PYTHON_HOST_PLATFORM=linux-aarch64 \
  CFLAGS="-I$work/root/usr/include/python$version -I$work/root/usr/include"
inspect $triple-objdump
uses_openmp || die "the build is without OpenMP"
foreign_pip --no-deps "$work"/wheel/*.whl

say "aarch64, emulated"
describe "$work/python"
[[ $# != 0 ]] || set -- tests/test_digests.py
run_tests 900 "$work/python" -- "$@"
say "aarch64: passed ($SECONDS s)"
