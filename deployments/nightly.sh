#!/usr/bin/env bash
# What `make nightly` runs, in the repository's root and with .venv/bin on PATH: all that a night's training needs at Prefect, then a
# worker, until Ctrl-C. Each step may be repeated: what is there stays, or is brought up to date.
set -euo pipefail
export WHEN_BUSY="${WHEN_BUSY:-ENQUEUE}"
PREFECT_API_URL="$(python -m prefect_torch_ddp.server)"
export PREFECT_API_URL

prefect work-pool inspect train-ddp >/dev/null 2>&1 || prefect work-pool create train-ddp --type process
prefect work-pool set-concurrency-limit train-ddp 2
if [ -n "${S3_BUCKET:-}" ]; then python deployments/register_blocks.py; fi
prefect --no-prompt deploy --prefect-file deployments/prefect.yaml --all
exec prefect worker start --pool train-ddp "$@"
