"""Real vLLM servers on the CPU: with tiercache, without any connector, and with an engine cache that holds everything."""
