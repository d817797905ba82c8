#!/usr/bin/env bash
# What `make nightly` runs, in the repository's root and with .venv/bin on PATH: all that a night's training needs at Prefect, then a
# worker, until Ctrl-C. Each step may be repeated: what is there stays, or is brought up to date.
set -euo pipefail
export WHEN_BUSY="${WHEN_BUSY:-ENQUEUE}"
# How often the worker asks for runs: a run that is typed waited up to 10 s, Prefect's default.
export PREFECT_WORKER_QUERY_SECONDS="${PREFECT_WORKER_QUERY_SECONDS:-2}"
PREFECT_API_URL="$(python -m prefect_torch_ddp.server)"
export PREFECT_API_URL

# What a command says is shown if it fails: `deploy` says for each deployment that a worker is to be started, as is done below.
quietly() {
    local said
    said="$("$@" 2>&1)" || { printf '%s\n' "$said" >&2; return 1; }
}

prefect work-pool inspect train-ddp >/dev/null 2>&1 || quietly prefect work-pool create train-ddp --type process
quietly prefect work-pool set-concurrency-limit train-ddp 2
if [ -n "${S3_BUCKET:-}" ]; then python deployments/register_blocks.py; fi
echo "Deploying nightly and the examples ..."
quietly prefect --no-prompt deploy --prefect-file deployments/prefect.yaml --all

cat <<END

The deployments are ready, and this worker runs them until Ctrl-C. Open their forms and runs at
  $(python -c "from prefect.settings import PREFECT_UI_URL as url; print(url.value())")/deployments
or type in another terminal, instead of waiting for 02:00 UTC:
  export PREFECT_API_URL=$PREFECT_API_URL PATH="$(dirname "$(command -v prefect)"):\$PATH"
  prefect deployment run train-ddp/nightly --watch

END
exec prefect worker start --pool train-ddp "$@"
