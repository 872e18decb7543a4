"""Stands in for 3FS's package of this name. See tiercache.testing.hf3fs."""
