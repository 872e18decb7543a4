"""A trace played for real, through a cache with memory and files, beside its simulation."""
