#!/bin/sh
# The demonstration: a real model answers sixteen questions about one document (this repository's LICENSE) at once, first with
# flat, then with cascade attention.   tools/demo.sh <headwater binary> [flags of `headwater generate`]
set -eu

headwater=${1:?usage: tools/demo.sh <headwater binary> [flags]}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
model=$("$root/tools/fetch_model.sh")
exec "$headwater" generate --demo --model "$model" --shared-file "$root/LICENSE" --questions "$root/tools/demo/questions.txt" --max-tokens 48 "$@"
