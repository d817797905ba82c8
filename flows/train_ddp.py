"""The deployable entrypoint: `train-ddp`, from data to a published, evaluated model.

Read prefect_torch_ddp/flow.py for what it does; everything that can be chosen is in
prefect_torch_ddp/params.py.
"""

from prefect_torch_ddp.flow import train_flow as train_ddp

if __name__ == "__main__":
    print(train_ddp().model_dump_json(indent=2))
