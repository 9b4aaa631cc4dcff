#!/usr/bin/env bash
# Builds the native runtime for 64-bit Arm and runs its tests in Debian's user-mode emulator; then the same on this
# machine: the portable table must give the same bits on both. Needs cmake and ninja.
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v $program > /dev/null || {
    echo "there is no $program here; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user" >&2
    exit 1
  }
done

# A folder in build, then options of CMake.
run_tests() {
  local folder=build/$1
  shift
  cmake -S . -B "$folder" -G Ninja -DOCTAVO_PYTHON=OFF -DOCTAVO_TESTS=ON "$@" > /dev/null
  ninja -C "$folder" --quiet
  ctest --test-dir "$folder" --verbose > "$folder/tests.log" || { cat "$folder/tests.log"; exit 1; }
  sed -n "s|^[0-9]*: \(.*_test: \)|$folder: \1|p" "$folder/tests.log"
}
run_tests arm64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
run_tests native

digest() { grep -o 'digest .*' "build/$1/tests.log"; }
if [ "$(digest arm64)" = "$(digest native)" ]; then
  echo "arm64: the same bits as on $(uname -m)"
else
  echo "arm64: other bits than on $(uname -m)" >&2
  exit 1
fi
