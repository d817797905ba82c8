"""The deployable entrypoint and the workloads people meet first."""
