"""Checksums of tensors, which sender and receiver of a weight sync compare (`checksums.py`)."""

from camshaft.digest.checksums import BLOCK, QUEUE_BYTES, Digests, block_factors, digest, record_digests

__all__ = ["BLOCK", "QUEUE_BYTES", "Digests", "block_factors", "digest", "record_digests"]
