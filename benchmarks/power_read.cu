// Reads all of a memory once: blocks of BLOCK bytes, through a ring of RING in shared memory. See power.py.
//
// One thread sends for blocks; where MULTIPLIES, four warps take them from there to the tensor cores, as attention does.

constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS + 32, PROGRAMS) power_read(const char* from, float* out, int num_blocks) {
  extern __shared__ char memory[];
  __shared__ u64 barriers[2 * RING];
  const u32 ring = (address_of(memory) + 1023) & ~1023u, full = address_of(barriers), empty = full + 8 * RING;
  const int mine = (num_blocks - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; i++) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 32 * WARPS) {
    const u64 policy = reading_once();
    for (int i = 0; i < mine; i++) {
      const int stage = i % RING;
      const u32 barrier = full + 8 * stage;
      if (i >= RING) wait_for(MULTIPLIES ? empty + 8 * stage : barrier, (i / RING - 1) & 1);
      expect_bytes(barrier, BLOCK);
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
              ring + stage * BLOCK),
          "l"(from + ((u64)i * gridDim.x + blockIdx.x) * BLOCK), "r"(BLOCK), "r"(barrier), "l"(policy)
          : "memory");
    }
    for (int i = max(mine - RING, 0); i < mine; i++) wait_for(full + 8 * (i % RING), (i / RING) & 1);
  }
  if (!MULTIPLIES || threadIdx.x >= 32 * WARPS) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 low = 0x3F803F80 + threadIdx.x * 0x00130017, high = 0xBF803F00 + threadIdx.x * 0x00110005;
  float sums[4] = {0, 0, 0, 0};
  for (int i = 0; i < mine; i++) {
    const int stage = i % RING;
    wait_for(full + 8 * stage, (i / RING) & 1);
#pragma unroll
    for (int part = 0; part < BLOCK / (512 * WARPS); part++) {
      const u32 at = ring + stage * BLOCK + (warp * (BLOCK / (512 * WARPS)) + part) * 512 + lane * 16;
      u32 a[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                   : "r"(at)
                   : "memory");
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
    }
    __syncwarp();
    if (lane == 0) arrive(empty + 8 * stage);
  }
  // So that none of it can be left out
  if (sums[0] + sums[1] + sums[2] + sums[3] == 0.12345f) out[threadIdx.x] = sums[0];
}
