#!/bin/sh
# Installs what a group of tasks needs; only what is missing. Usage:
#   tools/install_deps.sh [build] [check] [cuda] [client]
# build (default): to build, run and test. check: also clang-format, clang-tidy, the sanitizers' symbolizer, libFuzzer. Both are
# Debian packages, installed as root or through sudo. cuda: where there is no CUDA compiler, NVIDIA's packages from PyPI, unpacked
# into build/cuda-toolkit (280 MB, no root). client: the Python package openai, for the server's end-to-end test, into
# build/client-venv. docs/DEPENDENCIES.md says what each is for. A second run needs neither root nor network.
set -eu
cd "$(dirname "$0")/.."

build="g++ make cmake ninja-build pkg-config libdnnl-dev nlohmann-json3-dev libcli11-dev libfmt-dev libpcre2-dev
       libgtest-dev libboost1.81-dev prometheus-cpp-dev python3 python3-pip python3-venv python3-dev ca-certificates git"
check="clang-16 clang-tidy-16 clang-format-16 libclang-rt-16-dev llvm-16 ccache chromium"
cuda="nvidia-cuda-nvcc==13.0.* nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.* nvidia-cuda-crt==13.0.* nvidia-nvvm==13.0.*"

say() { echo "install_deps: $*" >&2; }

# In a scratch folder first: an interrupted run leaves no half of a toolkit behind.
install_cuda() {
  if tools/find_nvcc.sh >/dev/null; then return 0; fi
  toolkit="build/cuda-toolkit"
  say "no nvcc of CUDA 12 or newer on PATH or in /usr/local/cuda/bin: installing CUDA 13.0 by pip into $toolkit"
  if ! python3 -m pip --version >/dev/null 2>&1; then
    say "pip is missing too. Please install the CUDA toolkit, or: apt-get install python3-pip"
    return 1
  fi
  rm -rf "$toolkit" "$toolkit.part"
  mkdir -p build
  set -f  # the stars are pip's
  # shellcheck disable=SC2086
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --no-deps --disable-pip-version-check --target "$toolkit.part" $cuda >&2 || {
    rm -rf "$toolkit.part"
    say "pip could not install $cuda. Please check the network (or pip's index and proxy settings), or install the CUDA toolkit"
    return 1
  }
  set +f
  # Names that an installed toolkit has: nvcc looks into lib64, CMake for libcudart.so.
  ln -s lib "$toolkit.part/nvidia/cu13/lib64"
  ln -s libcudart.so.13 "$toolkit.part/nvidia/cu13/lib/libcudart.so"
  mv "$toolkit.part" "$toolkit"
  if ! tools/find_nvcc.sh >/dev/null; then
    say "the nvcc in $toolkit does not run on this machine. Please install the CUDA toolkit"
    return 1
  fi
}

install_client() {
  if build/client-venv/bin/python3 -c 'import openai' 2>/dev/null; then return 0; fi
  rm -rf build/client-venv
  mkdir -p build
  python3 -m venv build/client-venv &&
    build/client-venv/bin/pip install --quiet --disable-pip-version-check openai >&2 || {
    rm -rf build/client-venv
    say "the package openai could not be installed. Please check the network (or pip's index and proxy settings)"
    return 1
  }
}

wanted=""
want_cuda=no
want_client=no
for group in "${@:-build}"; do
  case "$group" in
    build) wanted="$wanted $build" ;;
    check) wanted="$wanted $check" ;;
    cuda) want_cuda=yes ;;
    client) want_client=yes ;;
    *) say "unknown group '$group', expected build, check, cuda or client"; exit 2 ;;
  esac
done

# As root or through sudo.
install_debian() {
  if ! command -v dpkg-query >/dev/null; then
    say "no dpkg here: please provide the equivalents of:$(echo "$wanted" | tr -s ' \n' ' ')"
    return 0
  fi

  missing=""
  for package in $wanted; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing="$missing $package"
  done
  if [ -z "$missing" ]; then
    return 0
  fi

  if [ "$(id -u)" -eq 0 ]; then
    as_root=""
  elif command -v sudo >/dev/null; then
    as_root="sudo"
  else
    say "not root and no sudo. Please run as root: apt-get install --no-install-recommends$missing"
    return 1
  fi

  say "installing$missing"
  export DEBIAN_FRONTEND=noninteractive
  $as_root apt-get update -q
  # sudo drops the environment; env hands the setting on.
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
}

install_debian
if [ "$want_cuda" = yes ]; then install_cuda; fi
if [ "$want_client" = yes ]; then install_client; fi
