"""The deployed flows and the workloads people meet first."""
