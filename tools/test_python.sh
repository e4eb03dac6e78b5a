#!/bin/sh
# Installs the package into a virtual environment outside the source tree and runs python/tests against it. Usage:
#   tools/test_python.sh BUILD_FOLDER [torch|cuda] [-- -DNAME=VALUE...]
# torch: with torch from PyPI too (several GB). cuda: with torch and the CUDA back end, and of the tests those that need a GPU,
# none of which may be skipped. Exit code 77, with the reason: python3-venv or the network is missing (cuda: a failure).
set -eu
cd "$(dirname "$0")/.."
source=$PWD
folder=$1
shift
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
torch=no
cuda=no
case "${1:-}" in
  torch) torch=yes; shift ;;
  cuda) torch=yes; cuda=yes; shift ;;
esac
if [ "${1:-}" = -- ]; then shift; fi

skip() {
  if [ "$cuda" = yes ]; then echo "FAILED: $*" >&2; exit 1; fi
  echo "SKIPPED: $*" >&2
  exit 77
}
venv="$folder/venv"
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"
export PIP_ROOT_USER_ACTION=ignore

[ -x "$venv/bin/python" ] && $pip --version >/dev/null 2>&1 || {
  rm -rf "$venv"
  python3 -m venv "$venv" >/dev/null 2>&1 || skip "python3 -m venv does not work: apt-get install python3-venv"
}
$pip install -r python/tests/requirements.txt || skip "pip could not install python/tests/requirements.txt: no network?"
if [ "$torch" = yes ]; then
  $pip install -r python/tests/requirements-torch.txt || skip "pip could not install torch: no network?"
fi

# scikit-build-core would take the compiler's name from Python; under the name that the other builds use, ccache has the library.
export CC="${CC:-cc}" CXX="${CXX:-c++}"
tests="$source/python/tests"
if [ "$cuda" = yes ]; then
  nvcc=$(tools/find_nvcc.sh) || skip "no nvcc of CUDA 12 or newer: tools/install_deps.sh cuda"
  set -- -DHEADWATER_CUDA=ON "-DCMAKE_CUDA_COMPILER=$nvcc" "$@"
  tests="--no-skips $(echo "$source"/python/tests/test_cuda*.py)"
else
  set -- -DHEADWATER_CUDA=OFF "$@"  # kernels take long, and their tests need a GPU
fi
settings=""
for flag in "$@"; do
  shift
  case " $* " in *" ${flag%%=*}="*) continue ;; esac  # pip makes a list of what is given twice; the last one counts
  settings="$settings --config-settings=cmake.define.${flag#-D}"
done
# The build folder is kept, so that a second run compiles what changed only.
# shellcheck disable=SC2086
$pip install --no-build-isolation --no-deps --force-reinstall --config-settings=build-dir="$folder/build" $settings "$source"
cd "$folder"
# shellcheck disable=SC2086
exec "$venv/bin/python" -m pytest -p no:cacheprovider -ra -q $tests
