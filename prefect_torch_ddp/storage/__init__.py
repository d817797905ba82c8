"""Places for bytes: a directory or an S3 prefix, behind one narrow seam."""
