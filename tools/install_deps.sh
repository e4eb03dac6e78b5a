#!/bin/sh
# Installs the Debian packages that a group of tasks needs; only the missing ones, as root or through sudo. Usage:
#   tools/install_deps.sh [build] [check]
# build (default): to build, run and test. check: also clang-format, clang-tidy, the sanitizers' symbolizer, libFuzzer.
# docs/DEPENDENCIES.md says what each is for. A second run needs neither root nor network.
set -eu

build="g++ make cmake ninja-build pkg-config libdnnl-dev nlohmann-json3-dev libcli11-dev libfmt-dev libpcre2-dev
       libgtest-dev python3 python3-pip ca-certificates git"
check="clang-16 clang-tidy-16 clang-format-16 libclang-rt-16-dev llvm-16 ccache"

say() { echo "install_deps: $*" >&2; }

wanted=""
for group in "${@:-build}"; do
  case "$group" in
    build) wanted="$wanted $build" ;;
    check) wanted="$wanted $check" ;;
    *) say "unknown group '$group', expected build or check"; exit 2 ;;
  esac
done

if ! command -v dpkg-query >/dev/null; then
  say "no dpkg here: please provide the equivalents of:$(echo "$wanted" | tr -s ' \n' ' ')"
  exit 0
fi

missing=""
for package in $wanted; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing="$missing $package"
done
if [ -z "$missing" ]; then
  exit 0
fi

if [ "$(id -u)" -eq 0 ]; then
  as_root=""
elif command -v sudo >/dev/null; then
  as_root="sudo"
else
  say "not root and no sudo. Please run as root: apt-get install --no-install-recommends$missing"
  exit 1
fi

say "installing$missing"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -q
# sudo drops the environment; env hands the setting on.
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
