// Common code of the kernels that add up summands of several ranks in words of 16 bytes. Behind summands.cuh. RANKS is the number of ranks,
// and THREADS that of a program's threads.

__device__ __forceinline__ uint4 both(uint2 low, uint2 high) { return make_uint4(low.x, low.y, high.x, high.y); }
__device__ __forceinline__ uint2 low(uint4 word) { return make_uint2(word.x, word.y); }
__device__ __forceinline__ uint2 high(uint4 word) { return make_uint2(word.z, word.w); }

// In rank order, rounded once.
__device__ __forceinline__ uint4 sum_of(const uint4 (&parts)[RANKS]) {
  Values lows = values_of(low(parts[0])), highs = values_of(high(parts[0]));
#pragma unroll
  for (int rank = 1; rank < RANKS; rank++) {
    add(lows, low(parts[rank]));
    add(highs, high(parts[rank]));
  }
  return both(data_of(lows), data_of(highs));
}

__device__ __forceinline__ uint4 sum_of_two(uint4 first, uint4 second) {
  return both(sum_of_two(low(first), low(second)), sum_of_two(high(first), high(second)));
}

__device__ __forceinline__ float squares_of(uint4 word) { return squares_of(low(word)) + squares_of(high(word)); }

__device__ __forceinline__ uint4 normed_by(uint4 word, float scale, uint4 weight) {
  return both(normed_by(low(word), scale, low(weight)), normed_by(high(word), scale, high(weight)));
}

// `turn` alternates between calls: a program that is late still reads what it has of the call before.
__device__ __forceinline__ float sum_over_program(float value, int turn) {
  __shared__ float of_warps[2][THREADS / 32];
  for (int distance = 1; distance < 32; distance *= 2) value += __shfl_xor_sync(~0u, value, distance);
  if (threadIdx.x % 32 == 0) of_warps[turn][threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; warp++) total += of_warps[turn][warp];
  return total;
}

