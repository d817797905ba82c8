"""The extra `tables` is part of `dev`; without it there is nothing to test here."""

from importlib.util import find_spec

needs = ["test_table.py", "test_local_copy.py", "test_writing.py", "parquet_files.py"]
collect_ignore_glob = [] if find_spec("pyarrow") else needs
