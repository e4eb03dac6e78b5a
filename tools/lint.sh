#!/bin/sh
# clang-tidy over the project's .cc files, in parallel; the checks are in .clang-tidy, every warning is an error. Usage:
#   tools/lint.sh [build folder with compile_commands.json] [jobs] [files...]   (no files: all that git knows and cmake builds)
set -eu
build="${1:-build/release}"
jobs="${2:-2}"
[ $# -ge 2 ] && shift 2 || shift $#
tidy="${CLANG_TIDY:-clang-tidy-16}"

[ -f "$build/compile_commands.json" ] || { echo "lint: $build/compile_commands.json is missing: configure first" >&2; exit 2; }
if [ $# -eq 0 ]; then
  for file in $(git ls-files '*.cc'); do
    grep -q "/$file\"" "$build/compile_commands.json" && set -- "$@" "$file"
  done
fi
echo "lint: $# files" >&2
# xargs stops at nothing and returns 123 if any call failed. One file a call keeps both cores busy to the end.
printf '%s\n' "$@" | xargs -P "$jobs" -n 1 "$tidy" -p "$build" --quiet --extra-arg=-Wno-unknown-warning-option \
  --extra-arg=-Wno-error 2>/dev/null
