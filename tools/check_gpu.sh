#!/bin/bash
# Checks of the CUDA back end on a machine with a GPU, from programs that were built before, perhaps elsewhere. `--help` tells.
#
# A part ends in one line: passed, FAILED, or NOT RUN, with figures and reasons. Passed takes evidence, not only status 0: tests
# that passed and none that missed a GPU, a sanitizer's own summary, figures for every cell. What cannot start is NOT RUN.
set -uo pipefail

usage() {
  cat <<'END'
usage: tools/check_gpu.sh [options] FOLDER [part...]

FOLDER holds the programs cuda_*_test and headwater, at any depth: a build folder or copies from one. Parts (all without one):
  tests     every cuda_*_test
  sanitize  compute-sanitizer's memcheck, racecheck, initcheck and synccheck over a reduced set of tests
  bench     headwater bench --device cuda: flat, auto and forest plans, cell by cell

options:
  --limit SECONDS   the most that a part may take (520); what is then still running has FAILED
  --filter TESTS    sanitize: tests to run, in GoogleTest's notation
  --tools NAMES     sanitize: tools to run ("memcheck racecheck initcheck synccheck")
  --cells FILE      bench: the cells; a line is: name Hq Hkv D count, then count pairs (parent, tokens). Without it a few are made up
  --logs FOLDER     where the full output goes (a new folder under $TMPDIR or /tmp)

Status 0: every part passed; 1: some part FAILED; 2: wrong usage; 3: none failed, but something was NOT RUN.

examples:
  make test-cuda && tools/check_gpu.sh build/cuda
  tools/check_gpu.sh carried/ tests
  tools/check_gpu.sh --tools memcheck --filter 'CudaShapes.*' build/cuda sanitize
  tools/check_gpu.sh --cells cells.txt --limit 120 build/cuda bench
END
}

limit=520
filter="CudaPlan.OneGraphServesLaterPlans:CudaPlan.TwoStreamsAtOnce:CudaShapes.TypesAndHeadDims:CudaShapes.GroupSizes:CudaShapes.PageSizes:CudaAppend.GraphReplaysReadTheirListsAnew:CudaCopyPages.ListOnTheDevice:CudaMergeStates.RowsThatDoNotExistAreNotRead:CudaDevicePlanner.BadInput:CudaMergeState.PairsAlsoInPlace:CudaLevels.*:CudaInvariant.BitsDoNotDependOnPolicyOrTiles"
sanitizers="memcheck racecheck initcheck synccheck"
cells=""
logs=""
folder=""
parts=()
die() { echo "check_gpu: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --limit | --filter | --tools | --cells | --logs)
      [ $# -ge 2 ] || die "$1 needs a value"
      case "$1" in
        --limit) limit=$2 ;;
        --filter) filter=$2 ;;
        --tools) sanitizers=$2 ;;
        --cells) cells=$2 ;;
        --logs) logs=$2 ;;
      esac
      shift ;;
    -*) die "unknown option $1; --help lists them" ;;
    *) if [ -z "$folder" ]; then folder=$1; else parts+=("$1"); fi ;;
  esac
  shift
done
[ -n "$folder" ] || { usage >&2; exit 2; }
[ -d "$folder" ] || die "$folder is not a folder"
[[ "$limit" =~ ^[1-9][0-9]*$ ]] || die "--limit $limit, expected seconds"
[ -z "$cells" ] || [ -r "$cells" ] || die "cannot read $cells"
[ ${#parts[@]} -gt 0 ] || parts=(tests sanitize bench)
for part in "${parts[@]}"; do
  [[ "$part" =~ ^(tests|sanitize|bench)$ ]] || die "unknown part $part, expected tests, sanitize or bench"
done
[ -n "$logs" ] || logs=$(mktemp -d "${TMPDIR:-/tmp}/check_gpu.XXXXXX") || exit 2
mkdir -p "$logs" || exit 2
mapfile -t tests < <(find "$folder" -type f -name 'cuda_*_test' -perm -u+x | sort)

# What the part at hand has found: reasons for FAILED and for NOT RUN, and what went well.
failed=()
not_run=()
good=()

# Words of programs and tools that found no GPU that they can use.
no_gpu='no CUDA device( that this process can use)?$|no CUDA-capable device|driver version is insufficient|Device not supported|terminated before first instrumented'

join() {  # separator words...
  local separator=$1 all=""
  shift
  for word in "$@"; do all+="${all:+$separator}$word"; done
  echo "$all"
}

# Runs a command until `deadline` at most; its output goes to the end of $log.
bounded() {
  local left=$((deadline - SECONDS))
  if [ "$left" -le 0 ]; then return 124; fi
  timeout --kill-after=10 "$left" "$@" >>"$log" 2>&1
}

# Number of tests that GoogleTest counted as PASSED, FAILED or SKIPPED, over all programs in $log.
counted() { sed -nE "s/^\[ *$1 *\] ([0-9]+) tests?.*/\1/p" "$log" | awk '{n += $1} END {print n + 0}'; }

# status name: whether a program ended well; if not, why goes to failed or not_run.
ended_well() {
  case "$1" in
    0) return 0 ;;
    124 | 137) failed+=("$2 did not end in time") ;;
    126 | 127) not_run+=("$2 cannot start: $(tail -n 1 "$log")") ;;
    *) failed+=("$2 ended with status $1") ;;
  esac
  return 1
}

part_tests() {
  local program missed
  log="$logs/tests.log"
  : >"$log"
  for program in "${tests[@]}"; do
    bounded "$program"
    ended_well $? "$(basename "$program")"
  done
  grep -E '^\[  FAILED  \] [A-Za-z]+\.' "$log" | sort -u | head -n 20
  good+=("$(counted PASSED) tests passed, $(counted FAILED) failed, $(counted SKIPPED) skipped")
  missed=$(grep -cE "$no_gpu" "$log")
  [ "$missed" -eq 0 ] || not_run+=("no GPU for $missed tests")
  [ "$(counted PASSED)" -gt 0 ] || not_run+=("no test passed")
}

# One tool over the programs that have tests of the filter.
sanitize_by() {  # tool
  local program status=0 programs=0 late=0 summaries wrong
  log="$logs/$1.log"
  : >"$log"
  for program in "${tests[@]}"; do
    "$program" --gtest_list_tests --gtest_filter="$filter" 2>/dev/null | grep -q '^  ' || continue
    programs=$((programs + 1))
    bounded "$sanitizer" --tool "$1" --error-exitcode 66 --print-limit 20 "$program" --gtest_filter="$filter"
    case $? in
      0) ;;
      124 | 137) late=1 ;;
      *) status=1 ;;
    esac
  done
  summaries=$(grep -cE '^=+ (ERROR|RACECHECK) SUMMARY: ' "$log")
  wrong=$(sed -nE 's/^=+ (ERROR|RACECHECK) SUMMARY: ([0-9]+) .*/\2/p' "$log" | awk '{n += $1} END {print n + 0}')
  if [ "$programs" -eq 0 ]; then
    not_run+=("$1 (no program has a test of the filter)")
  elif grep -qE "$no_gpu" "$log"; then
    not_run+=("$1 ($(grep -m 1 -oE "$no_gpu" "$log"))")
  elif [ "$late" -ne 0 ]; then
    failed+=("$1 (did not end in time)")
  elif [ "$wrong" -gt 0 ]; then
    failed+=("$1 ($wrong reports)")
  elif [ "$summaries" -lt "$programs" ]; then
    not_run+=("$1 (no summary: $(tail -n 1 "$log"))")
  elif [ "$status" -ne 0 ] || [ "$(counted FAILED)" -gt 0 ]; then
    failed+=("$1 ($(counted FAILED) tests failed)")
  elif [ "$(counted PASSED)" -eq 0 ]; then
    not_run+=("$1 (no test passed)")
  else
    good+=("$1 clean over $(counted PASSED) tests")
  fi
}

part_sanitize() {
  local sanitizer end=$deadline left tool
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  if ! "$sanitizer" --version >"$logs/sanitizer.log" 2>&1; then
    not_run+=("compute-sanitizer cannot start: $(tail -n 1 "$logs/sanitizer.log")")
    return
  fi
  left=$(wc -w <<<"$sanitizers")
  for tool in $sanitizers; do
    deadline=$((SECONDS + (end - SECONDS) / left))
    sanitize_by "$tool"
    left=$((left - 1))
  done
}

# A shared prompt, a tree of two levels, no sharing.
write_cells() {
  leaves() { for ((i = 0; i < $1; ++i)); do printf ' %d %d' "$2" "$3"; done; }  # number parent tokens
  echo "shared_16x8192+256 32 8 128 17 -1 8192$(leaves 16 0 256)"
  echo "shared_64x2048+256 32 8 128 65 -1 2048$(leaves 64 0 256)"
  echo "tree_32x2048+1024+128 32 8 128 37 -1 2048 0 1024 0 1024 0 1024 0 1024$(leaves 8 1 128)$(leaves 8 2 128)$(leaves 8 3 128)$(leaves 8 4 128)"
  echo "unshared_16x4096 32 8 128 16$(leaves 16 -1 4096)"
}

part_bench() {
  local program wanted measured seconds
  log="$logs/bench.log"
  : >"$log"
  program=$(find "$folder" -type f -name headwater -perm -u+x | head -n 1)
  if [ -z "$program" ]; then
    not_run+=("no program headwater in $folder")
    return
  fi
  if [ -z "$cells" ]; then
    cells="$logs/cells.txt"
    write_cells >"$cells"
  fi
  # A third of the time for timed runs; the rest goes to filling memory and to the check against double precision.
  wanted=$(grep -cvE '^[[:space:]]*(#|$)' "$cells")
  if [ "$wanted" -eq 0 ]; then
    not_run+=("no cells in $cells")
    return
  fi
  seconds=$(awk -v limit="$limit" -v cells="$wanted" 'BEGIN {print limit / 3 / cells}')
  bounded "$program" bench --device cuda --cells "$cells" --dtype f16 --policy flat,auto,forest --csv "$logs/bench.csv" \
    --steps 5 --reps 3 --warmup 1 --cell-seconds "$seconds"
  local status=$?
  cat "$log"
  if grep -qE "$no_gpu" "$log"; then
    not_run+=("$(grep -m 1 -E "$no_gpu" "$log")")
    return
  fi
  ended_well "$status" 'headwater bench' || return
  # Cells that flat and auto have a time for, and the greatest ratio of the two.
  read -r measured worst < <(awk -F, '
    NR == 1 {for (i = 1; i <= NF; ++i) column[$i] = i; next}
    $column["median_us"] > 0 {
      if ($column["policy"] == "\"flat\"") flat[++cells] = $column["median_us"]
      if ($column["policy"] == "\"auto\"" && flat[cells] > 0) {
        ++measured
        if ($column["median_us"] / flat[cells] > worst) worst = $column["median_us"] / flat[cells]
      }
    }
    END {printf "%d %.2f\n", measured, worst}' "$logs/bench.csv")
  good+=("$measured of $wanted cells measured")
  [ "$measured" -eq "$wanted" ] || failed+=("cells are missing")
  good+=("auto takes at most $worst of flat's time")
}

result=0
for part in "${parts[@]}"; do
  failed=()
  not_run=()
  good=()
  start=$SECONDS
  deadline=$((SECONDS + limit))
  if [ "$part" != bench ] && [ ${#tests[@]} -eq 0 ]; then
    not_run+=("no cuda_*_test in $folder")
  else
    "part_$part"
  fi
  verdict=passed
  if [ ${#failed[@]} -gt 0 ]; then
    verdict=FAILED
    result=1
  elif [ ${#not_run[@]} -gt 0 ] || [ ${#good[@]} -eq 0 ]; then
    verdict="NOT RUN"
    [ "$result" -ne 0 ] || result=3
  fi
  printf '%-8s  %-7s  %4d s  %s\n' "$part" "$verdict" $((SECONDS - start)) \
    "$(join '; ' ${failed[@]+"${failed[@]/#/FAILED: }"} ${not_run[@]+"${not_run[@]/#/NOT RUN: }"} ${good[@]+"${good[@]}"})"
done
echo "logs in $logs"
exit $result
