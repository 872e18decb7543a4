"""The arena that holds every payload of this process, and the threads that read and write payloads."""
