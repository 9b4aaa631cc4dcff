#!/usr/bin/env bash
# Builds the native runtime with sanitizers and runs what drives it: the pool's own test under ThreadSanitizer, then the
# kernels' own and the Python tests of kernels, sampling and backend under AddressSanitizer and UBSan.
# PYTHON: an interpreter with octavo's dev dependencies, cmake and ninja. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"
work=build/sanitize
mkdir -p $work

# A folder in build/sanitize, the sanitizers, what to build, and options of CMake.
build() {
  cmake -S . -B "$work/$1" -G Ninja -DOCTAVO_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS="-fsanitize=$2 -fno-omit-frame-pointer" "${@:4}" > /dev/null
  ninja -C "$work/$1" $3 > "$work/ninja.log" || { tail -n 40 "$work/ninja.log"; exit 1; }
}

build thread thread pool_test -DOCTAVO_PYTHON=OFF
$work/thread/pool_test

build address "address,undefined -fno-sanitize-recover=undefined" "kernels_test _native" \
  -DPython_EXECUTABLE="$(command -v "$python")"
$work/address/kernels_test

# Left out: pages_are_committed (the sanitizer commits pages of its own), test_pool (it ran above), child_may_drop
# (threads that are joined in a fork, whom the sanitizer's registry takes for the parent's).
# Python itself is not instrumented: the sanitizer's runtime is loaded before it, and its leaks are not ours.
rm -rf $work/tree && mkdir -p $work/tree
cp -r octavo tests pyproject.toml $work/tree/
cp $work/address/_native*.so $work/tree/octavo/
cd $work/tree
PYTHONPATH=$PWD ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
  "$python" -m pytest -q -p no:cacheprovider -m "not slow" tests/native tests/backends/test_cpu_backend.py \
  tests/backends/test_cpu_bits.py -k "not pages_are_committed and not test_pool and not child_may_drop" "$@"
