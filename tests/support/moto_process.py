"""Runs moto's server with one change: it looks at a condition and writes in two steps, between
which another thread may write."""

import sys
import threading
from functools import wraps

from moto.s3.responses import S3Response
from moto.server import main

_one_at_a_time = threading.Lock()
_put_object = S3Response.put_object


@wraps(_put_object)
def put_object(self: S3Response) -> object:
    """Look and write in one step, as S3 does."""
    with _one_at_a_time:
        return _put_object(self)


S3Response.put_object = put_object  # type: ignore[method-assign]

if __name__ == "__main__":
    main(sys.argv[1:])
