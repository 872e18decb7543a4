"""What device memory costs, on a machine with a CUDA GPU: `python -m tests.bench.gpu`, or `make gpu-check`.

Runs the tests that use a GPU and then the measurements, each in a process and with a time limit of its own; needs no
network.
"""
