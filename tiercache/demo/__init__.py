"""Run `make demo`: ask real vLLM on the CPU with a real model the same long question four times."""
