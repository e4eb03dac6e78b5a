#!/bin/sh
# Bounded load on `headwater serve` for a while: eight clients that read whole answers, others that go away in mid-stream, send
# nonsense, or open connections and say nothing. Fails if an answer is not whole, the server's memory grows after the first
# quarter, pages are lost (by its own account in /metrics), cascade or eviction was never reached, or it does not drain and end.
#   tools/soak_server.sh [--seconds 600] [--model FILE] [--threads N] [--allow-mib 8] [PROGRAM]
# PROGRAM: default build/release/cli/headwater. Exit codes: 0 nothing found, 1 something was, 77 no model, so nothing was tested.
set -eu
here=$(dirname "$0")
for last in "" "$@"; do :; done
case "${last:-}" in
  */headwater) exec python3 -B "$here/soak_server.py" "$@" ;;
  *) exec python3 -B "$here/soak_server.py" "$@" "$here/../build/release/cli/headwater" ;;
esac
