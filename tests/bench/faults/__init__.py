"""Correctness of caches on disk under faults: tiercache beside vLLM's `fs` tier and LMCache's back ends.

`stores` drives each of them through its Python interface, `instance` gives each opened one a process of its own, `matrix`
has the faults and counts what comes back.
"""
