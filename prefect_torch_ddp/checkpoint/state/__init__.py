"""The state of a tracked object: what it is on one rank, whether ranks have the same, its bytes.

Manifests name the objects; when they are written, committed and swept is decided elsewhere.
"""
