"""Which Dask cluster a run uses: one that runs, a class to start, or a local one of its own.

It says where the cluster, its workers and its dashboard are, and what went wrong with it. What
runs there, and how ranks are placed on its workers, belongs to the tasks and to `gang`.
"""
