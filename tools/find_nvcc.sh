#!/bin/sh
# Prints the path of the CUDA compiler that the build is to use: $CUDACXX, the one on PATH, /usr/local/cuda, or the one that
# `tools/install_deps.sh cuda` put under build/. The first that is of CUDA 12 or newer; status 1 and no output if there is none.
set -eu
cd "$(dirname "$0")/.."

for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc "$PWD/build/cuda-toolkit/nvidia/cu13/bin/nvcc"; do
  [ -x "$nvcc" ] || continue
  major=$("$nvcc" --version 2>/dev/null | sed -nE 's/.*release ([0-9]+)\..*/\1/p')
  if [ "${major:-0}" -ge 12 ]; then
    echo "$nvcc"
    exit 0
  fi
done
exit 1
