"""The deployable entrypoint `evaluate-checkpoint`: scores a checkpoint while its run trains on.

`prefect_torch_ddp/flow.py` defines the flow; `deployments/on_checkpoint.yaml` runs it.
"""

import sys

from prefect_torch_ddp import evaluate_flow as evaluate_checkpoint

if __name__ == "__main__":
    print(evaluate_checkpoint(sys.argv[1]).model_dump_json(indent=2))
