// A x for the few tokens of a step, where each adapter's A is read once, however many tokens have it. See shared_shrink.py, which defines
// LOW and CHUNKS.
//
// Program (part, token, block) computes 16 rows of A x from a part of the inputs for all tokens with this token's adapter, if the token is
// the first of these. A waits in registers for x, and x is multiplied by tensor cores in groups of 8 tokens.

constexpr int WARPS = 4;
constexpr int CHUNK = 32;  // inputs of a warp at a time: 8 for each of the 4 lanes that share a row

__device__ __forceinline__ void multiply_8_tokens(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The place of the bit that is set after `count` others; -1 if there are fewer.
__device__ __forceinline__ int bit_after(u32 bits, int count) {
  for (int i = 0; i < count; i++) bits &= bits - 1;
  return __ffs(bits) - 1;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    shared_shrink(const u16* x, const u16* down, float* low, const int* numbers, int num_tokens, int num_adapters, int x_stride,
                  int down_stride) {
  __shared__ float parts[WARPS][8][16];  // [warp][token][row]
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int part = blockIdx.x, token = blockIdx.y, first_low = blockIdx.z * 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4;

  const int number = lane < num_tokens ? numbers[lane] : -1;
  const int own = __shfl_sync(~0u, number, token);
  u32 same = __ballot_sync(~0u, number == own);
  if (__ffs(same) - 1 != token) return;

  // Which inputs a lane multiplies does not matter, as long as it is the same ones of both operands: 16 bytes that lie together.
  const int inputs = gridDim.x * WARPS * CHUNKS * CHUNK, begin = (part * WARPS + warp) * CHUNKS * CHUNK + lane % 4 * 8;
  uint4 a[CHUNKS][2];
  if (own < num_adapters) {
    const u16* const from = down + (u64)own * down_stride + (u64)(first_low + group) * inputs + begin;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      a[i][0] = *(const uint4*)(from + i * CHUNK), a[i][1] = *(const uint4*)(from + 8 * inputs + i * CHUNK);
    }
  }
  int mine = bit_after(same, group), stored = bit_after(same, threadIdx.x / 16);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (own >= num_adapters) return;

  while (same) {
    uint4 b[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      b[i] = mine < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4*)(x + (u64)mine * x_stride + begin + i * CHUNK);
    }
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      multiply_8_tokens(sums, a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b[i].x, b[i].y);
      multiply_8_tokens(sums, a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, b[i].z, b[i].w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) parts[warp][lane % 4 * 2 + i % 2][group + i / 2 * 8] = sums[i];
    __syncthreads();
    if (stored >= 0) {
      const int row = threadIdx.x % 16;
      float total = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) total += parts[i][threadIdx.x / 16][row];
      low[((u64)part * num_tokens + stored) * LOW + first_low + row] = total;
    }
    for (int i = 0; i < 8; i++) same &= same - 1;
    mine = bit_after(same, group), stored = bit_after(same, threadIdx.x / 16);
    __syncthreads();
  }
}
