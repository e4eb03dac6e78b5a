#!/bin/sh
# Installs the package into a virtual environment outside the source tree and runs python/tests against it. Usage:
#   tools/test_python.sh BUILD_FOLDER [torch] [-- -DNAME=VALUE...]
# torch: with torch from PyPI too (several GB). Exit code 77, with the reason: python3-venv or the network is missing.
set -eu
cd "$(dirname "$0")/.."
source=$PWD
folder=$1
shift
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
torch=no
if [ "${1:-}" = torch ]; then torch=yes; shift; fi
if [ "${1:-}" = -- ]; then shift; fi

skip() { echo "SKIPPED: $*" >&2; exit 77; }
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
settings="--config-settings=cmake.define.HEADWATER_CUDA=OFF"  # kernels take long; python/tests/test_cuda*.py need a GPU
for flag in "$@"; do settings="$settings --config-settings=cmake.define.${flag#-D}"; done
# The build folder is kept, so that a second run compiles what changed only.
# shellcheck disable=SC2086
$pip install --no-build-isolation --no-deps --force-reinstall --config-settings=build-dir="$folder/build" $settings "$source"
cd "$folder"
exec "$venv/bin/python" -m pytest -p no:cacheprovider -ra -q "$source/python/tests"
