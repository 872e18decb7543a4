"""`make demo`: real vLLM on the CPU with a real model, which gets the same long question four times."""
