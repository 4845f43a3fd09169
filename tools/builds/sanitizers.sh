#!/usr/bin/env bash
# Runs tests (by default all that do not limit address space) on a build with AddressSanitizer and
# UndefinedBehaviorSanitizer, then looks for leaks with valgrind.
#
#     tools/builds/sanitizers.sh [PYTEST ARGUMENT...]
#
# Run it in a checkout. Tests marked limits_memory are left out: the sanitizers themselves need more address space.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# != 0 ]] || set -- tests

say "tools"
debian valgrind libc6-dbg
host=$(find_python 3.11 3.12 3.13) || die "needs a Python of 3.11 or newer"
environment "$host" "$work/venv"
venv=$work/venv/bin/python

say "AddressSanitizer, UndefinedBehaviorSanitizer"
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
build_wheel "$venv" CC="gcc $flags"
uses_openmp || die "the build is without OpenMP"
install_wheel "$venv"
# Python itself is a plain build, so it must load the sanitizers first; its own allocations at exit are no leaks of ours. A
# request for more memory than there is fails as it does without them.
sanitized=(env
  LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so.6)"
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
  UBSAN_OPTIONS=print_stacktrace=1
  PYTHONMALLOC=malloc
  "$venv")
describe "${sanitized[@]}"
# What a sanitizer prints before it ends the process must not be kept by pytest.
run_tests 2400 "${sanitized[@]}" -- --capture=sys -m "not limits_memory" "$@"

say "leaks"
# valgrind knows no AVX-512.
build_wheel "$venv" CC="gcc -g" MSDA_BUILD_ISAS=baseline,avx2
install_wheel "$venv"
cat > "$work/calls.py" << 'END'
"""Calls of every kind, as many times as the argument says: results, errors, other layouts and dtypes, two threads."""
import sys

import numpy as np

import msda

shapes = [(5, 7), (3, 4), (0, 2)]
rng = np.random.default_rng(0)
value = rng.standard_normal((2, 47, 2, 19))
locations = rng.uniform(-0.2, 1.2, (2, 9, 2, 3, 2, 2))
weights = rng.random((2, 9, 2, 3, 2))
grad_output = rng.standard_normal((2, 9, 38))

for _ in range(int(sys.argv[1])):
    for dtype in (np.float16, np.float32, np.float64):
        for order in "CF":
            arrays = [array.astype(dtype, order) for array in (value, locations, weights, grad_output)]
            inputs = (arrays[0], shapes, None, arrays[1], arrays[2])
            for num_threads in (1, 2):
                msda.forward(*inputs, num_threads=num_threads)
                msda.backward(*inputs, arrays[3], num_threads=num_threads)
                for wrt in ("attention_weights",), ("value",):
                    msda.backward(*inputs, arrays[3], wrt=wrt, num_threads=num_threads)
            for wrong in ((value[:, 1:], *inputs[1:]), (*inputs[:4], "weights"), (None, *inputs[1:])):
                try:
                    msda.forward(*wrong)
                except (TypeError, ValueError):
                    pass
                else:
                    sys.exit("an error was expected")
END
# unfreed ROUNDS: how many blocks and bytes nobody had freed at the end, reachable or not.
unfreed() {
  env PYTHONMALLOC=malloc OMP_WAIT_POLICY=passive timeout -k 10 600 \
    valgrind --leak-check=full --log-file="$work/valgrind-$1" "$venv" "$work/calls.py" "$1"
  sed -nE 's/,//g; s/.*(lost|reachable): ([0-9]+) bytes in ([0-9]+) blocks.*/\3 \2/p' "$work/valgrind-$1" |
    awk '{ blocks += $1; bytes += $2 } END { print blocks, bytes }'
}
# Python and NumPy leave much unfreed at the end, but no more after many calls than after few.
few=4 many=40
first=$(unfreed $few)
last=$(unfreed $many)
read -r blocks bytes more_blocks more_bytes <<< "$first $last"
echo "unfreed after $few rounds: $blocks blocks, $bytes bytes; after $many: $more_blocks blocks, $more_bytes bytes"
if (( more_blocks - blocks >= many - few || more_bytes - bytes >= 64 * (many - few) )); then
  sed 's/^==[0-9]*== *//' "$work/valgrind-$many" | awk -v RS= -v ORS='\n\n' '/lost in loss record/ && /__pyx/' | tail -n 60
  die "memory is lost in calls"
fi
say "sanitizers: passed ($SECONDS s)"
