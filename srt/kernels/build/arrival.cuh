// Common code of the kernels that wait for other ranks, which write data into this rank's memory.

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Leaves the reason where the host finds it. After a trap the device does no more work for this process.
__device__ __noinline__ void give_up(u32* missing, int rank) {
  *(volatile u32*)missing = 1 + rank;
  __threadfence_system();
  asm volatile("trap;");
}

// A number is written behind the data that it announces. A thread that has read the number finds the data.
__device__ __forceinline__ void write_number(u64* address, u64 number) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(address), "l"(number) : "memory");
}

__device__ __forceinline__ u64 read_number(const u64* address) {
  u64 number;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(number) : "l"(address) : "memory");
  return number;
}

__device__ __forceinline__ void await_number(const u64* address, u64 number, u32* missing, u64 patience_ns, int from) {
  constexpr int polls = 256;  // between two readings of the clock
  u64 begun = 0;
  for (u32 looks = 1; read_number(address) != number; looks++) {
    if (looks % polls == 0) {
      const u64 now = nanoseconds();
      if (begun == 0) begun = now;
      if (now - begun > patience_ns) give_up(missing, from);
    }
    __nanosleep(32);
  }
}

// What a kernel waits for. See arrival.py.
struct Arrival {
  const u64* at;
  u64 number;
  u32* missing;
  u64 patience_ns;
  int from;
};

__device__ __forceinline__ void await(const Arrival& arrival) {
  await_number(arrival.at, arrival.number, arrival.missing, arrival.patience_ns, arrival.from);
}
