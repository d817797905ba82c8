"""deployments/clusters/kubernetes.yaml against dask-kubernetes: its schema, and what its operator
relies on. Skipped if that isn't installed; nothing here needs a cluster."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefect_torch_ddp import ClusterParams

ROOT = Path(__file__).parents[2]
CRD = "deployment/helm/dask-kubernetes-operator/crds/daskcluster.yaml"


def strict(schema: Any) -> Any:
    """Return a CRD's schema in which an unknown field is an error: Kubernetes drops it."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(item) for name, item in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        made.pop("type", None)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def test_the_manifest_is_a_daskcluster() -> None:
    """Every field is one of the custom resource's; what the operator and KubeCluster rely on is as
    dask-kubernetes makes it; KubeCluster knows each argument."""
    operator = pytest.importorskip("dask_kubernetes.operator")
    jsonschema = pytest.importorskip("jsonschema")
    values = yaml.safe_load((ROOT / "deployments/clusters/kubernetes.yaml").read_text("utf-8"))
    cluster = ClusterParams(**values)
    assert cluster.cluster_class == "dask_kubernetes.operator.KubeCluster"
    inspect.signature(operator.KubeCluster).bind(**cluster.cluster_kwargs)

    manifest = cluster.cluster_kwargs["custom_cluster_spec"]
    crd = yaml.safe_load((Path(operator.__file__).parent / CRD).read_text("utf-8"))
    (version,) = crd["spec"]["versions"]
    assert manifest["apiVersion"] == f"{crd['spec']['group']}/{version['name']}"
    assert manifest["kind"] == crd["spec"]["names"]["kind"]
    schema = strict(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    given = {"name": manifest["metadata"]["name"], "n_workers": 4, "env": {}, "resources": {}}
    made = operator.make_cluster_spec(**given)["spec"]
    for checked in (made, own := manifest["spec"]):
        jsonschema.validate(checked, schema)
    for wrong in ({"memroy": "8Gi"}, {"limits": 8}):
        broken = {**own["worker"]["spec"]["containers"][0], "resources": wrong}
        worker = {"replicas": 4, "spec": {"containers": [broken]}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**own, "worker": worker}, schema)

    assert own["scheduler"]["service"] == made["scheduler"]["service"]
    assert own["worker"]["replicas"] == made["worker"]["replicas"]
    for part in ("scheduler", "worker"):
        (mine,), (theirs,) = (each[part]["spec"]["containers"] for each in (own, made))
        assert (mine["name"], mine["ports"]) == (theirs["name"], theirs["ports"])
        # dask-kubernetes still names commands that Dask 2026.6 removed.
        program, *options = theirs["args"]
        expected = [*program.split("-"), *options]
        assert [each for each in mine["args"] if each in expected] == expected
        assert mine["args"][:2] == ["dask", part]
