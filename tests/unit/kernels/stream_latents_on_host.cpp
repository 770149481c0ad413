// What stream_latents needs of a GPU, with a coroutine of the host for each thread of a cluster; test_stream_latents.py appends the kernel.
//
// The coroutines run one after the other, each until it waits. Loads end in any order, some turns after they were requested, so a thread
// that does not wait for one finds what was there before: at first numbers that are NaN.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
constexpr int BLOCK_K = 64, LINE = 128;
constexpr u32 UNALIGNED = 16;  // the memory's address is no multiple of what blocks need
constexpr int THREADS = 32 * (WARPS + 1);
constexpr long MOST_TURNS = 20000;  // more: a deadlock

struct TensorMap { const u16* latents; long long location_stride; };
struct Index { int x, y, z; };
struct Barrier { int count = 0, missing = 0, bytes = 0, phase = 0; };
struct Meeting { int arrived = 0, turn = 0; };
struct Program {
  std::vector<char> bytes = std::vector<char>(MEMORY_BYTES, (char)0xFF);
  std::vector<Barrier> barriers = std::vector<Barrier>(MEMORY_BYTES / 8);
  Meeting all, multiplying;
};
struct Warp { Meeting meeting; u32 given[32][6]; };
struct Thread { ucontext_t context; std::vector<char> stack; int index, program; Index block; bool has_ended; };
struct Load { Program* program; u32 to, barrier; const TensorMap* map; int location; };

static std::vector<Thread> threads;
static std::vector<Program> programs;
static std::vector<Warp> warps;
static std::vector<Load> loads;
static Meeting cluster;
static ucontext_t scheduler;
static int current;
static Index gridDim;
#define threadIdx (Index{threads[current].index, 0, 0})
#define blockIdx (threads[current].block)
#define memory (programs[threads[current].program].bytes.data())

static const char* failure;  // of the kernel, null while there is none
static bool is_scheduling;

// Ends the run. Does not return to a coroutine that calls it.
inline void fail(const char* why) {
  if (failure == nullptr) failure = why;
  if (!is_scheduling) setcontext(&scheduler);
}
inline void wait_a_turn() { swapcontext(&threads[current].context, &scheduler); }
inline void meet(Meeting& meeting, int count) {
  const int turn = meeting.turn;
  if (++meeting.arrived == count) {
    meeting.arrived = 0, meeting.turn++;
  } else {
    while (meeting.turn == turn) wait_a_turn();
  }
}
inline Program& program() { return programs[threads[current].program]; }
inline Warp& warp_of_thread() { return warps[threads[current].program * (THREADS / 32) + threads[current].index / 32]; }
inline int own_lane() { return threads[current].index % 32; }
inline void __syncwarp() { meet(warp_of_thread().meeting, 32); }
inline void __syncthreads() { meet(program().all, THREADS); }
inline void sync_warps() { meet(program().multiplying, THREADS - 32); }
inline void sync_cluster() { meet(cluster, (int)threads.size()); }
inline void __threadfence() {}
inline void wait_for_earlier_kernels() {}
inline void let_next_kernel_start() {}
inline void publish_barriers() {}
inline u64 reading_once() { return 0; }
inline u64 reading_again() { return 0; }

inline u32 address_of(const char* at) { return (u32)(at - memory) + UNALIGNED; }
inline char* at(Program& program, u32 address, int size) {
  if (address < UNALIGNED || address - UNALIGNED + size > MEMORY_BYTES || address % size) fail("an address");
  return program.bytes.data() + address - UNALIGNED;
}
inline char* at(u32 address, int size) { return at(program(), address, size); }
inline Barrier& barrier_at(Program& program, u32 address) { return program.barriers[(address - UNALIGNED) / 8]; }
inline Barrier& barrier_at(u32 address) { return barrier_at(program(), address); }
inline void turn_if_complete(Barrier& barrier) {
  if (barrier.missing < 0) fail("more arrive than a barrier expects");
  if (barrier.missing == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.missing = barrier.count;
}
inline void init_barrier(u32 address, u32 count) {
  at(address, 8);
  barrier_at(address) = {(int)count, (int)count, 0, 0};
}
inline void expect_bytes(u32 address, u32 bytes) {
  Barrier& barrier = barrier_at(address);
  barrier.bytes += bytes, barrier.missing--;
  turn_if_complete(barrier);
}
inline void arrive(u32 address) {
  barrier_at(address).missing--;
  turn_if_complete(barrier_at(address));
}
inline void arrive_after_reads(u32 address) {
  __syncwarp();
  if (own_lane() == 0) arrive(address);
}
inline void wait_for(u32 address, u32 parity) {
  while ((u32)barrier_at(address).phase == parity) wait_a_turn();
}
inline void load_latents(u32 to, const TensorMap* map, int location, u32 barrier, u64) {
  if (to % 1024) fail("a block that is not aligned for its swizzle pattern");
  loads.push_back({&program(), to, barrier, map, location});
}
inline void finish(const Load& load) {
  constexpr int LINES = (RANK + ROPE) / BLOCK_K;
  for (int line = 0; line < LINES; line++)
    for (int row = 0; row < 16; row++)
      for (int chunk = 0; chunk < 8; chunk++) {
        const u32 to = load.to + line * 16 * LINE + row * LINE + (chunk ^ row % 8) * 16;
        const u16* from = load.map->latents + (load.location + row) * load.map->location_stride + line * BLOCK_K + chunk * 8;
        memcpy(load.program->bytes.data() + to - UNALIGNED, from, 16);
      }
  Barrier& barrier = barrier_at(*load.program, load.barrier);
  barrier.bytes -= LINES * 16 * LINE;
  turn_if_complete(barrier);
}

inline float float_from(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
inline u32 bits_of(float value) { u32 bits; memcpy(&bits, &value, 4); return bits; }
inline float bf16_of(u32 pair, int which) { return float_from(which ? pair & 0xFFFF0000u : pair << 16); }
inline u32 rounded(float value) {
  const u32 bits = bits_of(value);
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 pair_of(float low, float high) { return rounded(low) | rounded(high) << 16; }
inline float nothing() { return -INFINITY; }
inline float power_of_2(float x) { return exp2f(x); }

// Gives a number to the lanes of the warp, takes one of what they gave, and lets them give the next ones.
template <typename Take>
inline u32 exchange_in_warp(u32 given, Take take) {
  Warp& warp = warp_of_thread();
  warp.given[own_lane()][0] = given;
  __syncwarp();
  const u32 taken = take(warp);
  __syncwarp();
  return taken;
}
inline int __shfl_sync(u32, int value, int from) {
  return (int)exchange_in_warp((u32)value, [&](const Warp& warp) { return warp.given[from][0]; });
}
inline float __shfl_xor_sync(u32, float value, int distance) {
  const int from = own_lane() ^ distance;
  return float_from(exchange_in_warp(bits_of(value), [&](const Warp& warp) { return warp.given[from][0]; }));
}
inline bool __any_sync(u32, bool value) {
  return exchange_in_warp(value, [](const Warp& warp) {
    return (u32)std::any_of(warp.given, warp.given + 32, [](const u32(&given)[6]) { return given[0] != 0; });
  });
}
inline u32 turned(u32 pair) {
  const int lane = own_lane();
  return exchange_in_warp(pair, [&](const Warp& warp) {
    u32 both = 0;
    for (int i = 0; i < 2; i++) both |= (warp.given[(lane % 4 * 2 + i) * 4 + lane / 8][0] >> 16 * (lane / 4 % 2) & 0xFFFF) << 16 * i;
    return both;
  });
}
inline void load_parts(u32 (&parts)[4], u32 address, bool is_turned) {
  const int lane = own_lane();
  exchange_in_warp(address, [&](const Warp& warp) {
    for (int part = 0; part < 4; part++) {
      parts[part] = 0;
      for (int i = 0; i < 2; i++) {
        const int row = is_turned ? lane % 4 * 2 + i : lane / 4, column = is_turned ? lane / 4 : lane % 4 * 2 + i;
        parts[part] |= (u32)((const u16*)at(warp.given[8 * part + row][0], 16))[column] << 16 * i;
      }
    }
    return 0u;
  });
}
inline void load_matrices(u32 (&parts)[4], u32 address) { load_parts(parts, address, false); }
inline void load_turned(u32 (&parts)[4], u32 address) { load_parts(parts, address, true); }
inline void multiply_add(float (&sums)[4], const u32 (&rows)[4], u32 low, u32 high) {
  const int lane = own_lane();
  u32(&own)[6] = warp_of_thread().given[lane];
  for (int i = 1; i < 4; i++) own[i] = rows[i];
  own[4] = low, own[5] = high;
  exchange_in_warp(rows[0], [&](const Warp& warp) {
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; k++) {
        const u32 first = warp.given[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], second = warp.given[column * 4 + k % 8 / 2][4 + k / 8];
        sums[i] += bf16_of(first, k % 2) * bf16_of(second, k % 2);
      }
    }
    return 0u;
  });
}
inline void store_zeros(u32 address) { memset(at(address, 8), 0, 8); }
inline u64 address_in(u32 address, int rank) { return (u64)rank << 32 | address; }
template <typename T>
inline T there(u64 address) {
  const Thread* its_threads = &threads[(address >> 32) * THREADS];
  if (std::all_of(its_threads, its_threads + THREADS, [](const Thread& one) { return one.has_ended; })) fail("memory of a program that has ended");
  return *(const T*)at(programs[address >> 32], (u32)address, sizeof(T));
}
inline float4 four_at(u64 address) { return there<float4>(address); }
inline float2 two_at(u64 address) { return there<float2>(address); }
inline int count_arrival(int* counter) { return (*counter)++; }
template <typename T> T __ldcg(const T* address) { return *address; }

static std::function<void()> kernel;
static void begin() {
  kernel();
  threads[current].has_ended = true;
  wait_a_turn();
}

// Runs the programs of one cluster to their end.
inline void run_cluster(int first, int y, int z) {
  programs = std::vector<Program>(CLUSTER);
  warps = std::vector<Warp>(CLUSTER * THREADS / 32);
  threads = std::vector<Thread>(CLUSTER * THREADS);
  cluster = {};
  for (int i = 0; i < CLUSTER * THREADS; i++) {
    Thread& thread = threads[i];
    thread.index = i % THREADS, thread.program = i / THREADS, thread.block = {first + i / THREADS, y, z}, thread.has_ended = false;
    thread.stack.resize(1 << 16);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, begin, 0);
  }
  bool is_running = true;
  for (long turns = 0; is_running && failure == nullptr; turns++) {
    if (turns == MOST_TURNS) fail("a deadlock");
    is_running = false;
    const int count = (int)threads.size(), start = rand() % count;
    for (int i = 0; i < count; i++) {
      current = (start + i) % count;
      if (threads[current].has_ended) continue;
      is_scheduling = false;
      swapcontext(&scheduler, &threads[current].context);
      is_scheduling = true;
      if (failure != nullptr) break;
      is_running |= !threads[current].has_ended;
    }
    for (size_t i = 0; i < loads.size();) {
      if (rand() % 3) {
        i++;
      } else {
        finish(loads[i]);
        loads.erase(loads.begin() + i);
      }
    }
  }
  if (failure == nullptr && !loads.empty()) fail("a load that nothing waited for");
}

#include "kernel.h"

// Runs all programs. Returns what the kernel does wrong, or null.
extern "C" const char* run(const u16* latents, long long location_stride, const u16* q, const u16* rotated, const int* page_table,
                           const long long* slots, const long long* seq_lens, float* partial, float* lse, int* arrived, u16* out,
                           float scale_log2, int num_heads, int q_token_stride, int q_head_stride, int rotated_token_stride,
                           int rotated_head_stride, int page_table_stride, int splits, int tiles, int rows) {
  srand(1);
  is_scheduling = true;
  const TensorMap map = {latents, location_stride};
  gridDim = {splits, tiles, rows};
  kernel = [&] {
    stream_latents(map, q, rotated, page_table, slots, seq_lens, partial, lse, arrived, out, scale_log2, num_heads, q_token_stride,
                   q_head_stride, rotated_token_stride, rotated_head_stride, page_table_stride);
  };
  for (int split = 0; split < splits; split += CLUSTER)  // a group of all rows before the next, so that no row may use another's memory
    for (int row = 0; row < rows; row++)
      for (int tile = 0; tile < tiles; tile++) run_cluster(split, tile, row);
  return failure;
}
