"""The checks of `prefect-torch-ddp doctor`."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from distributed import Client
from prefect.settings import PREFECT_API_URL
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from prefect_torch_ddp.blocks import resolve_storage
from prefect_torch_ddp.doctor import on_worker
from prefect_torch_ddp.doctor.cluster_file import look_before_jobs, read_cluster_file
from prefect_torch_ddp.doctor.on_worker import WorkerFacts
from prefect_torch_ddp.errors import InvalidParamsError, PrefectTorchDdpError
from prefect_torch_ddp.gang.caller.placement import rank_addresses
from prefect_torch_ddp.gang.caller.workers import identify, running_workers
from prefect_torch_ddp.gang.run import run_gang
from prefect_torch_ddp.gang.versions import PACKAGES, conflicts, in_words, versions, who_has
from prefect_torch_ddp.params import ClusterParams, TrainParams
from prefect_torch_ddp.protocol.messages import WorkerIdentity
from prefect_torch_ddp.server import LEASES_IN, LEASES_IN_FILES, forgets_leases, is_prefect, none_at
from prefect_torch_ddp.storage.protocol import Storage, trial_object
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from prefect_torch_ddp.tasks.clusters.scheduler_file import scheduler_address

FEW_OPEN_FILES = 4096
LITTLE_SHARED_BYTES = 2**30
"""Docker's default is 64 MiB, with which DataLoader workers die of a bus error."""
TRIAL_BYTES = 2**25
"""Size of the object that is written to the storage and read back to measure its speed."""
MIB = 2**20


@dataclass
class Doctor:
    """Runs the checks, and collects the problems that they find."""

    console: Console
    interface: str | None
    limit_s: float
    problems: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    """What wasn't tried, and why."""

    def cluster(self, client: Client) -> list[str]:
        """Check a cluster's versions, workers and network; return the workers that answer."""
        workers: list[WorkerIdentity] = []
        try:
            running = list(client.sync(running_workers, client))
            workers = client.sync(identify, client, running)
            hosts = rank_addresses(workers, self.interface)
        except PrefectTorchDdpError as error:
            self.problems.append(str(error))
            return [worker.address for worker in workers]
        found = list(hosts)
        self.problems += [f"worker {each} doesn't answer" for each in set(running) - set(found)]
        if not found:
            self.problems.append("no worker of the cluster answers: start one, or wait for it")
        elif self._versions(client, workers):
            self._machines(workers, client.run(on_worker.look, workers=found), hosts)
            self._network(client, hosts)
            self._gang(client, workers)
        return found

    def _versions(self, client: Client, workers: Sequence[WorkerIdentity]) -> bool:
        """Compare the versions; return whether a gang can run with them."""
        assert client.scheduler is not None
        # The scheduler may lack this package, so it is asked in Dask's own way.
        scheduler = client.sync(client.scheduler.versions, packages=list(PACKAGES))["packages"]
        python = scheduler["python"].split(".final")[0]
        of_workers = {worker.address: worker.versions for worker in workers}
        everybody = {"here": versions(), "scheduler": {**scheduler, "python": python}} | of_workers
        broken = conflicts(versions(), of_workers)
        self.problems += broken.values()
        here = ", ".join(f"{package} {version}" for package, version in versions().items())
        self.console.print(f"versions here: {here}")
        for package in ("python", *PACKAGES):
            who = who_has(package, everybody)
            if len(who) > 1 and package not in broken:
                text = f"{package} differs, but a gang can still run: {in_words(who)}"
                self.console.print(text, style="yellow")
            lacks = [name for name, has in everybody.items() if not has.get(package)]
            if who and lacks:
                self.console.print(in_words({f"no {package}": lacks}), style="yellow")
        return not broken

    def _machines(
        self,
        workers: Sequence[WorkerIdentity],
        facts: Mapping[str, WorkerFacts],
        hosts: Mapping[str, str],
    ) -> None:
        # Lines, not a table: in 80 columns that would have no room for whole addresses.
        self.console.print("Workers:")
        for worker in workers:
            has, at = facts[worker.address], f"worker {worker.address}"
            address = f"  {worker.address.partition('://')[2]}"
            self.console.print(address, soft_wrap=True, markup=False)
            shown = Text(_described(worker, has, hosts))
            self.console.print(Padding(shown, (0, 0, 0, 4), expand=False))
            if has.max_open_files < FEW_OPEN_FILES:
                way_out = f"set ulimit -n {FEW_OPEN_FILES} before the worker starts"
                self.problems.append(f"{at} may open only {has.max_open_files} files: {way_out}")
            if (shared := has.shared_memory_bytes) < LITTLE_SHARED_BYTES:
                free = f"{shared // MIB:,} MiB of shared memory free, too little for num_workers>0"
                way_out = "use docker run --shm-size, or free /dev/shm"
                self.problems.append(f"{at} has {free}: {way_out}")

    def _network(self, client: Client, hosts: Mapping[str, str]) -> None:
        workers = list(hosts)
        try:
            addresses = client.run(on_worker.listen, hosts, workers=workers)
            found = client.run(on_worker.unreachable, addresses, workers=workers)
        except OSError as error:  # from a worker whose machine doesn't have its address
            self.problems.append(f"a worker can't listen at its address: {error}")
            return
        finally:
            client.run(on_worker.close, workers=workers)
        self.problems += [
            f"worker {source} can't connect to {target}: {why}"
            for source, others in found.items()
            for target, why in others.items()
        ]
        if not any(found.values()):
            self.console.print(f"all {len(workers)} workers can connect to each other")

    def _gang(self, client: Client, workers: Sequence[WorkerIdentity]) -> None:
        if busy := [f"{each.address} ({each.occupant})" for each in workers if each.occupant]:
            self.untried.append(f"a gang, since workers are busy: {', '.join(busy)}")
            return
        started_s = time.monotonic()
        try:
            met: list[tuple[str, list[str]]] = run_gang(
                client,
                _meeting(),
                world_size=len(workers),
                name="doctor",
                interface=self.interface,
                workers_timeout_s=self.limit_s,
                rendezvous_timeout_s=self.limit_s,
            )
        except PrefectTorchDdpError as error:
            self.problems.append(f"a gang with one rank on each worker failed: {error}")
            return
        took_s = time.monotonic() - started_s
        devices = sorted({name for _, names in met for name in names}) or ["no CUDA device"]
        words = f"a gang of {len(met)} ranks connected by {met[0][0]} in {took_s:.1f} s"
        self.console.print(f"{words}, with {', '.join(devices)}")

    def storage(self, storage: Storage, client: Client | None, workers: Sequence[str]) -> None:
        """Check a storage: its conditional writes, its speed, and whether workers can use it.

        Raises:
            StorageError: the storage can't be used.
        """
        content = bytes(TRIAL_BYTES)
        storage.check_writable()
        with trial_object(storage) as key:
            started_s = time.monotonic()
            storage.write(key, content)
            written_s = time.monotonic()
            storage.read(key)
            read_s = time.monotonic()
            if client is not None and workers:
                found = client.run(on_worker.fails_to_use, storage, key, workers=list(workers))
                self.problems += [f"worker {worker} {why}" for worker, why in found.items() if why]
        speeds = [TRIAL_BYTES / MIB / each for each in (written_s - started_s, read_s - written_s)]
        words = "the storage %s honours conditional writes; from here it writes %.0f and reads %.0f"
        self.console.print(f"{words % (storage.uri, *speeds)} MiB/s")

    def server(self) -> None:
        """Check that the configured Prefect server, if any, is one, and survives a restart."""
        api = PREFECT_API_URL.value()
        if not api:
            return
        try:
            forgets = forgets_leases()
            # Only Prefect has the certificates and keys that https may need.
            is_there = urlsplit(api).scheme != "http" or is_prefect(api)
        except httpx.HTTPError as error:
            self.untried.append(f"the Prefect server of PREFECT_API_URL: {error}")
            return
        except (httpx.InvalidURL, ValueError):
            forgets = is_there = False
        if not is_there:
            self.problems.append(none_at(api))
        elif forgets:
            text = (
                "a restart of the Prefect server would crash deployed runs with a concurrency "
                f"limit, whose leases it keeps in memory: start it with {LEASES_IN}="
                f"{LEASES_IN_FILES}"
            )
            self.console.print(text, style="yellow", soft_wrap=True)


def _described(worker: WorkerIdentity, has: WorkerFacts, hosts: Mapping[str, str]) -> str:
    """Return the facts of a worker that matter for its ranks."""
    parts = [
        f"ranks {'are forked' if has.can_fork else 'start afresh'} at {hosts[worker.address]}",
        "1 core" if has.num_cores == 1 else f"{has.num_cores} cores",
        f"CUDA_VISIBLE_DEVICES={worker.visible_devices}" if worker.visible_devices else "",
        f"up to {has.max_open_files:,} open files",
        f"{has.shared_memory_bytes / 2**30:.1f} GiB of shared memory free",
        f"held by {worker.occupant}" if worker.occupant else "",
    ]
    return ", ".join(filter(None, parts))


def _meeting() -> Callable[[], tuple[str, list[str]]]:
    """Return the function of each rank, sent by value so that no rank loads this module."""

    def meet() -> tuple[str, list[str]]:
        import torch  # noqa: PLC0415 - only in a rank
        import torch.distributed as dist  # noqa: PLC0415

        backend = dist.get_backend()
        ones = torch.ones(1, device="cuda" if "nccl" in backend else "cpu")
        dist.all_reduce(ones)
        if ones.item() != dist.get_world_size():
            msg = f"the ranks' sum is {ones.item():g} instead of {dist.get_world_size()}"
            raise RuntimeError(msg)
        return backend, [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]

    return meet


def examine(
    cluster: str | None = None,
    storage: str | None = None,
    interface: str | None = None,
    limit_s: float = 60.0,
    cluster_file: Path | None = None,
) -> int:
    """Check a cluster and a storage; return 1 if there is a problem, else 0.

    Of a configured Prefect server it says whether there is one, and whether a restart would cost
    deployed runs.

    Args:
        cluster: address of a Dask scheduler; None: a local cluster is started.
        storage: a path, a URI or a Prefect block; None: the one of a training that names none.
        interface: network interface, or network, of the ranks.
        limit_s: limit of each wait, in seconds.
        cluster_file: a YAML file of ClusterParams. For the class of a batch system, the job
            script is shown and no job is submitted.

    Raises:
        InvalidParamsError: the file doesn't hold ClusterParams.
    """
    if cluster and cluster_file:
        msg = "--cluster names a running cluster, --cluster-file a new one: give only one of them"
        raise InvalidParamsError(msg)
    params = ClusterParams() if cluster_file is None else read_cluster_file(cluster_file)
    cluster = cluster or scheduler_address(params, limit_s)
    logging.getLogger("distributed").setLevel(logging.ERROR)
    doctor = Doctor(Console(), interface, limit_s)
    doctor.server()
    with ExitStack() as stack:
        client, workers = None, list[str]()
        if params.cluster_class:
            doctor.problems += look_before_jobs(params, doctor.console)
            doctor.untried.append(
                "the workers, their network and a gang, since no job was submitted"
            )
        else:
            try:
                local = {"n_workers": 2, **params.cluster_kwargs}
                at = cluster or stack.enter_context(local_cluster(**local))
                client = stack.enter_context(Client(at, timeout=limit_s))
                if not cluster:
                    stack.callback(client.run, on_worker.hush, on_error="ignore")
            except Exception as error:  # noqa: BLE001 - without certificates it is a TypeError
                what = (
                    f"no scheduler answers at {cluster}" if cluster else "no local cluster starts"
                )
                doctor.problems.append(f"{what}: {type(error).__name__}: {error}")
            else:
                workers = doctor.cluster(client)
        look_at_storage(doctor, storage, client, workers, is_cluster_given=bool(cluster))
    return _verdict(doctor)


def look_at_storage(
    doctor: Doctor,
    given: str | None,
    client: Client | None,
    workers: Sequence[str],
    *,
    is_cluster_given: bool,
) -> None:
    """Check the storage that is given, or else the one of a training that names none.

    A cluster that was given may serve gangs whose storage is another: its workers aren't asked.
    """
    storage = given or str(TrainParams.model_fields["storage"].default)
    if not given:
        words = f"no --storage is given: checking {storage}, where a training writes by default"
        doctor.console.print(words)
        if is_cluster_given and workers:
            way_out = "give the storage of your runs by --storage"
            doctor.untried.append(f"whether the workers can use {storage}: {way_out}")
            workers = []
    try:
        doctor.storage(resolve_storage(storage), client, workers)
    except PrefectTorchDdpError as error:
        doctor.problems.append(str(error))
    except Exception as error:  # noqa: BLE001 - what Prefect raises if its server is down
        what = f"storage {storage} can't be opened"
        doctor.problems.append(f"{what}: {type(error).__name__}: {error}")


def _verdict(doctor: Doctor) -> int:
    if doctor.untried:
        lines = [f"  {text}" for text in doctor.untried]
        doctor.console.print("\n".join(["not tried:", *lines]), style="yellow", markup=False)
    if not (problems := doctor.problems):
        text = "nothing is wrong with what was tried" if doctor.untried else "nothing is wrong"
        doctor.console.print(text, style="green")
        return 0
    many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"  {number}. {text}" for number, text in enumerate(problems, 1)]
    doctor.console.print("\n".join([f"{many}:", *lines]), style="red", markup=False)
    return 1
