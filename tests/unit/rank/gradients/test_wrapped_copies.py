"""What people do with a model in DDP beside training it: copy, average, save and forget it."""

import copy
import gc
import io
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from prefect_torch_ddp.checkpoint.serial import load_state, state_of
from prefect_torch_ddp.data.sampler import BatchShare, GlobalBatches
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.gradients.share_weights import ShareWeights

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradient(model: nn.Module) -> float:
    """Return the gradient of one backward pass from ones."""
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad.item()


def test_a_copy_is_trained_by_share_as_well() -> None:
    """Plain averaging would count an uneven tail wrongly, silently; the copy's weights are its
    own."""
    # The group has one rank, of two that share the batch: 3 samples of 4 are here.
    weights = ShareWeights(2)
    model = weights.wrap(nn.Linear(1, 1, bias=False), CPU, {})
    copied = copy.deepcopy(model)
    assert str(copied) == str(model)
    weights.begin_step(1, BatchShare(1, 0, num_local=3, num_global=4, is_last=True))
    assert [gradient(model), gradient(copied)] == [0.75, 0.75]
    with torch.no_grad():
        next(copied.parameters()).fill_(7)
    assert next(model.parameters()).item() != 7


def test_averaged_and_saved_as_plain_ddp() -> None:
    """`AveragedModel` takes it, and what `torch.save` writes is a plain DDP."""
    model = ShareWeights(2).wrap(nn.Linear(1, 1, bias=False), CPU, {})
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"prefect_torch_ddp" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is DistributedDataParallel
    x = torch.ones(1, 1)
    assert model(x) == averaged(x) == loaded(x)


def test_names_inside_a_module_are_those_of_one_rank() -> None:
    """So a checkpoint and an exported model fit any number of ranks: plain PyTorch's names, in
    its order, with the _metadata; and it is loaded into both."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    on_one, on_two = (AveragedModel(ShareWeights(n).wrap(net(), CPU, {})) for n in (1, 2))
    saved = state_of(on_two)
    assert list(saved) == list(on_one.state_dict())
    assert saved._metadata == on_one.state_dict()._metadata
    load_state(on_one, saved)
    assert torch.equal(on_one.module[0].weight, on_two.module.module[0].weight)
    with torch.no_grad():
        on_one.module[0].weight.fill_(7)
    load_state(on_two, state_of(on_one))
    assert on_two.module.module[0].weight.tolist() == [[7, 7], [7, 7]]
    wraps_twice = nn.ModuleDict({"a": nn.ModuleDict({"module": on_two}), "b": on_two})
    load_state(wraps_twice, state_of(wraps_twice))
    assert list(state_of(wraps_twice))[:2] == ["a.module.n_averaged", "a.module.module.0.weight"]


def test_a_model_that_nobody_holds_is_freed() -> None:
    """Else a cross-validation fills the memory with the models of earlier folds."""
    weights = ShareWeights(2)
    model = weights.wrap(nn.Linear(1, 1, bias=False), CPU, {})
    gradient(model)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
    for (x,), _ in weights.micro_batches((torch.ones(2, 1),), 1):
        assert len(x) == 1


@pytest.mark.parametrize(("num_samples", "global_batch_size"), [(11, 4), (12, 3)])
def test_layers_that_talk_to_other_ranks_need_equal_shares(
    num_samples: int, global_batch_size: int
) -> None:
    """Before the first step, where a tail or each batch can't be shared out equally: gradients
    would be wrong, and a stand-in would enter the statistics."""
    weights = ShareWeights(2)
    model = weights.wrap(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), CPU, {})
    nn.SyncBatchNorm.convert_sync_batchnorm(model)  # behind wrap, since DDP wants a GPU for it
    uneven = GlobalBatches(num_samples, global_batch_size)
    with pytest.raises(InvalidParamsError, match=r"SyncBatchNorm \(1\) needs equal shares"):
        weights.begin_loop(uneven)
    weights.begin_loop(GlobalBatches(11, 4, drop_last=True))
    model.eval()  # such as frozen statistics
    weights.begin_loop(uneven)
    weights.end_step(1)
    weights.begin_loop(uneven)
    model.train()  # in the step's body
    with pytest.raises(InvalidParamsError, match=r"SyncBatchNorm \(1\) needs equal shares"):
        weights.end_step(1)
