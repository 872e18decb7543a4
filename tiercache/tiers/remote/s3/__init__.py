"""The S3 tier: an object a chunk, in a bucket of any store that speaks S3."""

from tiercache.tiers.remote.s3.tier import S3Tier

__all__ = ["S3Tier"]
