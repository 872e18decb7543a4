"""What `make demo` runs: real vLLM on the CPU with a real model, asked the same long question four times."""
