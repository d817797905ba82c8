"""Gangs on real CUDA devices: devices, backends, sharing, errors, forks."""

from collections.abc import Iterator

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from tests.gpu import on_gpu


def test_a_rank_for_each_gpu_talks_by_nccl(gpu_client: Client, num_gpus: int) -> None:
    """One rank per GPU: a device each; CUDA tensors by NCCL and CPU tensors by gloo, in one
    group."""
    ranks = run_gang(gpu_client, on_gpu.where, world_size=num_gpus)
    assert sorted(rank["device"] for rank in ranks) == sorted(
        f"cuda:{index}" for index in range(num_gpus)
    )
    assert [rank["device"] for rank in ranks] == [f"cuda:{rank['current']}" for rank in ranks]
    assert len({rank["name"] for rank in ranks}) == num_gpus
    assert [rank["sums"] for rank in ranks] == [(num_gpus, num_gpus)] * num_gpus
    assert {rank["backend"] for rank in ranks} == {"nccl"}


def test_nccl_by_name(gpu_client: Client, num_gpus: int) -> None:
    """`backend="nccl"` with a rank per GPU."""
    ranks = run_gang(gpu_client, on_gpu.all_reduce_on_cuda, world_size=num_gpus, backend="nccl")
    assert [total for _, total in ranks] == [num_gpus] * num_gpus


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_several_ranks_on_one_gpu_talk_by_gloo(
    gpu_client: Client, num_gpus: int, backend: str
) -> None:
    """A rank more than GPUs: two share one, `auto` takes gloo as `gloo` does, and CUDA tensors
    are summed right."""
    size = num_gpus + 1
    ranks = run_gang(gpu_client, on_gpu.where, world_size=size, backend=backend)
    assert all(rank["device"].startswith("cuda:") for rank in ranks)
    assert [rank["sums"] for rank in ranks] == [(size, size)] * size
    assert {rank["backend"] for rank in ranks} == {"gloo"}
    assert len({rank["name"] for rank in ranks}) == num_gpus


def test_four_ranks_of_one_worker(gpu_client: Client) -> None:
    """`ranks_per_worker=4` on one worker, whatever the number of GPUs."""
    ranks = run_gang(gpu_client, on_gpu.where, world_size=4, ranks_per_worker=4)
    assert [rank["sums"] for rank in ranks] == [(4.0, 4.0)] * 4


def test_nccl_with_more_ranks_than_gpus_is_refused(gpu_client: Client, num_gpus: int) -> None:
    """Asked for by name, NCCL with two ranks on a device is refused before it starts, with
    ranks, host and device count."""
    says = (
        r"backend 'nccl' can't be used: ranks .* on 127\.0\.0\.1 share one device "
        rf"\({num_gpus} CUDA devices are visible"
    )
    with pytest.raises(RankFailedError, match=says):
        run_gang(gpu_client, on_gpu.where, world_size=num_gpus + 1, backend="nccl")


@pytest.mark.parametrize("launcher", ["auto", "exec"])
def test_cuda_works_after_the_fork_and_is_untouched_before(
    gpu_client: Client, launcher: str
) -> None:
    """The fork server has no device file open, also after a rank has used CUDA; its ranks do,
    twice in a row. A Dask worker, the parent of a rank that is a process of its own, may have
    some: it monitors GPUs by NVML."""
    for _ in range(2):
        (rank,) = run_gang(gpu_client, on_gpu.where, world_size=1, launcher=launcher)  # type: ignore[arg-type]
        assert rank["own_devices"] > 0
        forked = rank["parent"] == "ddp-fork-server"
        assert forked == (launcher == "auto")
        assert not (forked and rank["parents_devices"])


def test_out_of_memory_reaches_the_caller(gpu_client: Client) -> None:
    """A CUDA OOM error is the cause of the caller's error, and the next gang works."""
    import torch

    with pytest.raises(RankFailedError, match="CUDA out of memory") as caught:
        run_gang(gpu_client, on_gpu.run_out_of_memory, world_size=1)
    assert isinstance(caught.value.__cause__, torch.cuda.OutOfMemoryError)
    assert run_gang(gpu_client, on_gpu.where, world_size=1)[0]["sums"] == (1.0, 1.0)


def test_a_model_comes_back_trainable(gpu_client: Client) -> None:
    """Its parameters are parameters on the CPU, of which as many are trained."""
    import torch

    (model,) = run_gang(gpu_client, on_gpu.partly_trained, world_size=1)
    model(torch.ones(1, 2)).sum().backward()
    assert [each.device.type for each in model.parameters()] == ["cpu", "cpu"]
    assert [each.requires_grad for each in model.parameters()] == [True, False]
    assert model.weight.grad is not None


def test_cuda_tensors_come_back_on_the_cpu(gpu_client: Client) -> None:
    """The caller needs no GPU to read what ranks return."""
    (value,) = run_gang(gpu_client, on_gpu.tensors, world_size=1)
    assert value["on_gpu"].device.type == "cpu"
    assert value["on_gpu"].tolist() == [0.0, 1.0, 2.0]


def test_cuda_without_a_process_group(gpu_client: Client) -> None:
    """`process_group="none"` has a device too."""
    assert run_gang(gpu_client, on_gpu.cuda_without_group, world_size=1, process_group="none") == [
        ("cuda:0", 10.0)
    ]


@pytest.fixture
def cuda_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Run dask-cuda's own cluster: a worker for each GPU, each sees another one first."""
    monkeypatch.setenv("RAPIDS_NO_INITIALIZE", "True")  # dask-cuda sets it and leaves it there
    dask_cuda = pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    with dask_cuda.LocalCUDACluster(dashboard_address=":0") as cluster, Client(cluster) as client:
        yield client


def test_dask_cudas_cluster(cuda_cluster: Client, num_gpus: int) -> None:
    """LocalCUDACluster as it is: every worker's rank takes that worker's own GPU, at its local
    rank, and NCCL serves them."""
    cuda_cluster.wait_for_workers(num_gpus, timeout=120)
    ranks = run_gang(cuda_cluster, on_gpu.where)
    assert [rank["device"] for rank in ranks] == [f"cuda:{number}" for number in range(num_gpus)]
    assert len({rank["name"] for rank in ranks}) == num_gpus
    assert {rank["backend"] for rank in ranks} == {"nccl"}
    assert [rank["sums"] for rank in ranks] == [(num_gpus, num_gpus)] * num_gpus
