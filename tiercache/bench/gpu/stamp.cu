// Work of a known length that says when it ended, by the GPU's own clock. For `event_figures.py` and `accelerator.py`.

typedef unsigned long long u64;

__device__ static inline u64 now() {
  u64 ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Busy for `duration_ns`, then the time to `stamp`, which may lie in pinned host memory.
extern "C" __global__ void spin_and_stamp(u64 duration_ns, u64 stamp) {
  const u64 begin = now();
  u64 end;
  do end = now();
  while (end - begin < duration_ns);
  *(volatile u64*)stamp = end;
  __threadfence_system();
}

// Waits for each number 1 .. rounds in `flag` (host memory) and answers with the time in stamps[number - 1].
// Gives up after two seconds.
extern "C" __global__ void answer(u64 flag, u64 stamps, u64 rounds) {
  const u64 begin = now();
  for (u64 number = 1; number <= rounds; ++number) {
    while (*(volatile u64*)flag < number)
      if (now() - begin > 2000000000ULL) return;
    ((volatile u64*)stamps)[number - 1] = now();
    __threadfence_system();
  }
}
