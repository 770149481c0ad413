// Copies between the stages of a pipeline, in the order of each stage's stream. See stage_link.py, which defines the constants in capitals.
//
// Hidden states: the stage that sends copies its rows to an entry of a ring in the next stage's memory, and behind each row it writes the
// number of the step. The next stage waits for this number before it reads the row. Numbers have 64 bits, so none occurs twice.
//
// Ids: the last stage writes a word for each row to an entry of a ring in the host's memory: the number of the step above, the id below. An
// aligned access of 8 bytes is indivisible, so a reader that finds the number has the id too. GPUs and hosts of the other stages read them.
//
// No kernel waits for an entry to become free: a ring has more entries than there are steps in flight.

struct Rows {
  u64 rows;     // [count][UNITS of 16 bytes], in this stage's memory
  u64 entry;    // of the ring: likewise
  u64 numbers;  // [count] u64, of the entry
  u64 number;   // of the step
  u64 missing;  // in host memory: 1 + the stage on which this one has given up
  u64 patience_ns;
  int count;
  int units;  // of 16 bytes, in a row
  int from;   // the stage that sends
};

struct Ids {
  u64 entry;   // of the ring in host memory: [count] u64
  u64 source;  // sender: [count] u64 in host memory, with the ids in their low halves; receiver: [2][width] of slots, then positions
  u64 tokens;  // receiver: token table [slots][stride] of int32
  u64 missing;
  u64 patience_ns;
  u64 stride;
  u32 number;
  int count;
  int width;
  int from;
};

constexpr int LOOKS = 256;  // polls between two readings of the clock

__device__ __forceinline__ u64 look_at(u64 address) {
  u64 word;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
  return word;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Leaves the reason where the host finds it. After a trap the device does no more work for this process.
__device__ __noinline__ void give_up(u64 missing, int stage) {
  *(volatile u32*)missing = 1 + stage;
  __threadfence_system();
  asm volatile("trap;");
}

// A word whose bits from SHIFT on are the number.
template <int SHIFT>
__device__ __forceinline__ u64 wait_for_number(u64 address, u64 number, u64 missing, u64 patience_ns, int stage) {
  u64 begun = 0;
  for (u32 looks = 1;; looks++) {
    const u64 word = look_at(address);
    if (word >> SHIFT == number) return word;
    if (looks % LOOKS == 0) {
      const u64 now = nanoseconds();
      if (begun == 0) begun = now;
      if (now - begun > patience_ns) give_up(missing, stage);
    }
    __nanosleep(100);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) send_rows(const __grid_constant__ Rows link) {
  for (int row = blockIdx.x; row < link.count; row += gridDim.x) {
    const uint4* source = (const uint4*)link.rows + (u64)row * link.units;
    uint4* target = (uint4*)link.entry + (u64)row * link.units;
    for (int i = threadIdx.x; i < link.units; i += THREADS) target[i] = source[i];
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(link.numbers + 8 * (u64)row), "l"(link.number) : "memory");
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) receive_rows(const __grid_constant__ Rows link) {
  for (int row = blockIdx.x; row < link.count; row += gridDim.x) {
    if (threadIdx.x == 0) {
      wait_for_number<0>(link.numbers + 8 * (u64)row, link.number, link.missing, link.patience_ns, link.from);
      __threadfence_system();
    }
    __syncthreads();
    const uint4* source = (const uint4*)link.entry + (u64)row * link.units;
    uint4* target = (uint4*)link.rows + (u64)row * link.units;
    // Past the first cache, which may hold a neighbour's bytes from before they were sent.
    for (int i = threadIdx.x; i < link.units; i += THREADS) target[i] = __ldcg(source + i);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) send_ids(const __grid_constant__ Ids link) {
  for (int row = threadIdx.x; row < link.count; row += THREADS) {
    const u64 id = *(const volatile u64*)(link.source + 8 * (u64)row) & 0xFFFFFFFFu, word = (u64)link.number << 32 | id;
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(link.entry + 8 * (u64)row), "l"(word) : "memory");
  }
}

// An id of -1 marks a row whose logits were not finite: its request ends, but a step of it may be planned already. A slot of -1 marks a row
// whose slot has been given to another request since.
extern "C" __global__ void __launch_bounds__(THREADS) receive_ids(const __grid_constant__ Ids link) {
  for (int row = threadIdx.x; row < link.count; row += THREADS) {
    const long long slot = *(const volatile long long*)(link.source + 8 * (u64)row);
    const long long position = *(const volatile long long*)(link.source + 8 * ((u64)link.width + row));
    if (slot < 0) continue;
    const u64 word =
        wait_for_number<32>(link.entry + 8 * (u64)row, link.number, link.missing, link.patience_ns, link.from);
    const int id = (int)(u32)word;
    ((int*)link.tokens)[slot * link.stride + position] = id < 0 ? 0 : id;
  }
}
