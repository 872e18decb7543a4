"""The arena that every payload of this process lies in, and the threads that touch payloads."""
