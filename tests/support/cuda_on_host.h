// What a simple CUDA kernel needs, with a thread of the host for each of its threads. For kernels whose programs wait for others: a GPU's
// barriers are the host's, and its memory order is that of C++, so ThreadSanitizer finds accesses that nothing orders.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Program {
  pthread_barrier_t all;
  pthread_barrier_t warps[32];
  float lanes[32][32];
  alignas(16) char shared[1024];
  explicit Program(int threads) {
    pthread_barrier_init(&all, nullptr, threads);
    for (int warp = 0; warp < threads / 32; warp++) pthread_barrier_init(&warps[warp], nullptr, 32);
  }
};
struct Index { u32 x; };
inline thread_local Index threadIdx, blockIdx;
inline thread_local Program* program_here;
inline thread_local u32 chance;  // makes threads late at places that differ

#define __global__
#define __device__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

inline void be_late() {
  chance = chance * 1664525u + 1013904223u;
  if (chance >> 29 == 0) for (u32 n = 0; n < (chance >> 20 & 15); n++) sched_yield();
}
inline void __syncthreads() {
  be_late();
  pthread_barrier_wait(&program_here->all);
  be_late();
}
inline float __shfl_xor_sync(u32, float value, int distance) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  program_here->lanes[warp][lane] = value;
  pthread_barrier_wait(&program_here->warps[warp]);
  const float other = program_here->lanes[warp][lane ^ distance];
  pthread_barrier_wait(&program_here->warps[warp]);
  return other;
}
inline void __threadfence_system() {}  // the order comes from what is released and acquired
inline void __nanosleep(int) { sched_yield(); }
template <typename T> T __ldcg(const T* address) { return *address; }
inline char* shared_memory() { return program_here->shared; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline float __uint_as_float(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
inline u32 __float_as_uint(float value) { u32 bits; memcpy(&bits, &value, 4); return bits; }
inline float float_of(u32 bf16) { return __uint_as_float(bf16 << 16); }
inline u32 rounded_to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 pair_of(float low, float high) { return rounded_to_bf16(low) | rounded_to_bf16(high) << 16; }

// In the place of the kernels' functions in assembler.
inline float float_of_half(u32) { abort(); }
inline u32 pair_of_halves(float, float) { abort(); }
inline u64 nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}
inline void give_up(u32*, int rank) {
  static std::atomic_flag has_said;
  while (has_said.test_and_set()) pause();  // only the first thread says so
  printf("gave up on rank %d\n", rank);
  fflush(stdout);
  _Exit(3);
}
inline void write_number(u64* address, u64 number) { __atomic_store_n(address, number, __ATOMIC_RELEASE); }
inline u64 read_number(const u64* address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }
inline void wait_for_earlier_kernels() {}
inline thread_local std::function<void()> between_sending_and_receiving;
inline void let_later_kernels_start() { if (between_sending_and_receiving) between_sending_and_receiving(); }
// The words of a place arrive one by one.
inline void write_place(u64 address, uint4 word) {
  const u32 words[4] = {word.x, word.y, word.z, word.w};
  for (int i = 0; i < 4; i++) {
    __atomic_store_n((u32*)address + i, words[i], __ATOMIC_RELAXED);
    be_late();
  }
}
inline uint4 look_at(u64 address) {
  u32 words[4];
  for (int i = 0; i < 4; i++) words[i] = __atomic_load_n((u32*)address + i, __ATOMIC_RELAXED);
  if (words[0] == 0xFFFFFFFF) usleep(100);  // a thread that waits leaves the processor to others
  return {words[0], words[1], words[2], words[3]};
}
