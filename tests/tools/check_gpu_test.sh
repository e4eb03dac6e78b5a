#!/bin/bash
# tools/check_gpu.sh with stand-ins for test programs, the command and compute-sanitizer: what may pass, and what must be FAILED or
# NOT RUN. Needs no GPU.
set -uo pipefail
script=$1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
wrong=0

# program name text...: a program that prints the lines and ends with $status (0).
program() {
  local path="$work/$1"
  shift
  { echo '#!/bin/bash'; printf 'echo %q\n' "$@"; echo "exit ${status:-0}"; } >"$path"
  chmod +x "$path"
}
fresh() { rm -rf "${work:?}"/*; mkdir "$work/bin"; }

# expect status pattern arguments...: how the script ends and the summary line that it prints.
expect() {
  local wanted=$1 pattern=$2 output got
  shift 2
  output=$(PATH="$work/bin:$PATH" "$script" --logs "$work/logs" "$@" "$work" "$part" 2>&1)
  got=$?
  if [ "$got" -ne "$wanted" ] || ! grep -qE "^$part +$pattern" <<<"$output"; then
    printf '%s: status %d, expected %d and "%s" in:\n%s\n' "$part" "$got" "$wanted" "$pattern" "$output"
    wrong=1
  fi
}

part=tests
fresh
expect 3 'NOT RUN .*no cuda_\*_test'
program cuda_a_test '[  PASSED  ] 3 tests.'
program cuda_b_test '[  PASSED  ] 1 test.'
expect 0 'passed .* 4 tests passed, 0 failed, 0 skipped'
program cuda_b_test 'no CUDA device' '[  PASSED  ] 0 tests.' '[  SKIPPED ] 1 test, listed below:'
expect 3 'NOT RUN .*no GPU for 1 tests; 3 tests passed, 0 failed, 1 skipped'
status=1 program cuda_b_test '[  PASSED  ] 0 tests.' '[  FAILED  ] 1 test, listed below:' '[  FAILED  ] A.B'
expect 1 'FAILED .*cuda_b_test ended with status 1.* 3 tests passed, 1 failed'
status=127 program cuda_b_test 'error while loading shared libraries: libx.so'
expect 3 'NOT RUN .*cuda_b_test cannot start: error while loading'
program cuda_b_test
rm "$work/cuda_a_test"
expect 3 'NOT RUN .*no test passed'
printf '#!/bin/bash\nexec sleep 30\n' >"$work/cuda_b_test"
expect 1 'FAILED .*cuda_b_test did not end in time' --limit 1

# sanitizer summary...: a compute-sanitizer that runs its program and prints the lines.
sanitizer() { program bin/compute-sanitizer "$@" '[  PASSED  ] 2 tests.'; }
tests() { program cuda_a_test 'Suite.' '  Name'; }

part=sanitize
fresh
tests
status=1 sanitizer 'cannot'
expect 3 'NOT RUN .*compute-sanitizer cannot start'
sanitizer '========= ERROR SUMMARY: 0 errors'
expect 0 'passed .* memcheck clean over 2 tests; initcheck clean' --tools 'memcheck initcheck'
sanitizer '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'
expect 0 'passed .* racecheck clean over 2 tests' --tools racecheck
sanitizer '========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)'
expect 1 'FAILED .*racecheck \(2 reports\)' --tools racecheck
sanitizer '========= ERROR SUMMARY: 5 errors'
expect 1 'FAILED .*memcheck \(5 reports\).*synccheck \(5 reports\)' --tools 'memcheck synccheck'
sanitizer '========= Error: Device not supported. Please refer to the documentation' '========= ERROR SUMMARY: 1 error'
expect 3 'NOT RUN .*memcheck \(Device not supported\)' --tools memcheck
sanitizer 'no CUDA device' '========= ERROR SUMMARY: 0 errors'
expect 3 'NOT RUN .*memcheck \(no CUDA device\)' --tools memcheck
sanitizer 'internal error'
expect 3 'NOT RUN .*memcheck \(no summary: ' --tools memcheck
program bin/compute-sanitizer '========= ERROR SUMMARY: 0 errors' '[  PASSED  ] 0 tests.'
expect 3 'NOT RUN .*memcheck \(no test passed\)' --tools memcheck
program bin/compute-sanitizer '========= ERROR SUMMARY: 0 errors' '[  PASSED  ] 1 test.' '[  FAILED  ] 1 test, listed below:'
expect 1 'FAILED .*memcheck \(1 tests failed\)' --tools memcheck
program cuda_a_test
expect 3 'NOT RUN .*no program has a test of the filter' --tools memcheck

part=bench
fresh
expect 3 'NOT RUN .*no program headwater'
status=4 program headwater 'headwater: error: device cuda: no CUDA device that this process can use'
expect 3 'NOT RUN .*no CUDA device that this process can use'
status=4 program headwater 'headwater: error: device cuda: this build has no CUDA back end (CMake option HEADWATER_CUDA)'
expect 1 'FAILED .*headwater bench ended with status 4'
status=1 program headwater 'error: out of memory'
expect 1 'FAILED .*headwater bench ended with status 1'
# A command that writes the CSV it is told to.
cat >"$work/headwater" <<'END'
#!/bin/bash
while [ $# -gt 0 ] && [ "$1" != --csv ]; do shift; done
printf '%s\n' 'workload,policy,path,median_us' '"cell","flat","flat",10.00' '"cell","auto","cascade",9.10' \
  '"cell","forest","cascade",9.10' >"$2"
END
printf '# a comment\n\ncell 32 8 128 1 -1 64\n' >"$work/one"
expect 0 "passed .*1 of 1 cells measured; auto takes at most 0.91 of flat's time" --cells "$work/one"
expect 1 'FAILED .*cells are missing; 1 of 4 cells measured'

part=unknown
output=$("$script" "$work" unknown 2>&1)
[ $? -eq 2 ] || { echo "unknown part: $output"; wrong=1; }
exit $wrong
