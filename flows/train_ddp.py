"""The deployable entrypoint: `train-ddp`, from data to a published, evaluated model.

`prefect_torch_ddp/flow.py` defines the flow, `prefect_torch_ddp/params.py` its parameters.
"""

from prefect_torch_ddp import train_flow as train_ddp

if __name__ == "__main__":
    print(train_ddp().model_dump_json(indent=2))
