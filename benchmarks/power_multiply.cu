// Multiplies what lies in shared memory, again and again. See power.py.
//
// Each warpgroup has 64 rows of its own, and all the same COLUMNS, in STAGES blocks of 64 that take turns.

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, 1) power_multiply(const uint4* from, float* out, int turns) {
  extern __shared__ char memory[];
  constexpr int STAGE_BYTES = (64 * WARPGROUPS + COLUMNS) * LINE;
  uint4* const blocks = (uint4*)(((u64)memory + 1023) & ~1023ull);
  const u32 stages = address_of(blocks);
  for (int i = threadIdx.x; i < STAGES * STAGE_BYTES / 16; i += blockDim.x) blocks[i] = from[i + blockIdx.x * 977];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  float sums[COLUMNS / 2];
  for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0;
  for (int turn = 0; turn < turns; turn++) {
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
      const u32 rows = stages + stage * STAGE_BYTES + threadIdx.x / 128 * 64 * LINE;
      const u32 columns = stages + stage * STAGE_BYTES + WARPGROUPS * 64 * LINE;
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < BLOCK_K / 16; k++) multiply(sums, operand(rows) + 2 * k, operand(columns) + 2 * k, 1);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  float total = 0;
  for (int i = 0; i < COLUMNS / 2; i++) total += sums[i];
  if (total == 0.12345f) out[threadIdx.x] = total;  // so that none of it can be left out
}
