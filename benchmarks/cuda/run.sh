#!/usr/bin/env bash
# All rows on the CUDA device of this machine, the most valuable first; at most 8 minutes. Rows that this card has
# measured with these sources are not run again. Options: --rows NAMES, --minutes N, --out FOLDER, --dry (no GPU needed).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m benchmarks.cuda "$@"
