// x Wᵀ for a few dozen rows of x, where reading W is what takes time: see stream_gemm.py, which defines the constants in capitals.
//
// A program holds TILE rows of W and a part of the inner dimension. One thread of its last warpgroup sends for both operands, blocks of
// 64 columns at a time, through a ring of STAGES; each other warpgroup multiplies 64 rows of W with all of x. The programs of
// a tile are a cluster, and add up each other's sums by reading each other's shared memory.

constexpr int TILE = 64 * WARPGROUPS;
constexpr int WIDTH = GATED ? TILE / 2 : TILE;  // of the result; gates are the first half of a tile
constexpr int W_BYTES = TILE * LINE;
constexpr int STAGE_BYTES = W_BYTES + ROWS * LINE;
constexpr int MULTIPLYING = 128 * WARPGROUPS;  // threads
constexpr int PITCH = TILE + 4;                // of the sums in shared memory: neighbours in other banks
constexpr int QUADS = WIDTH / 4;               // of a row of the result; a thread makes one at a time
constexpr int TURNS = (ROWS * QUADS + SPLITS * MULTIPLYING - 1) / (SPLITS * MULTIPLYING);

__device__ __forceinline__ float4 read_sums(u32 address, u32 program) {
  float4 sums;
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(program));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(sums.x), "=f"(sums.y), "=f"(sums.z), "=f"(sums.w)
               : "r"(there));
  return sums;
}

// Not before the code above it: what it reads may be written by the kernel before this one.
__device__ __forceinline__ uint2 load_here(const u16* from) {
  uint2 pairs;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(pairs.x), "=r"(pairs.y) : "l"(from) : "memory");
  return pairs;
}

__device__ __forceinline__ void add(float4& to, float4 more) {
  to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Program (split, tile). `width`: columns of the result; W has as many rows, or twice as many where GATED.
extern "C" __global__ void __launch_bounds__(MULTIPLYING + 128, 1)
    stream_gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
                const u16* residual, u16* out, int num_rows, int width, int num_blocks) {
  extern __shared__ char memory[];
  __shared__ u64 barriers[2 * STAGES];
  const u32 stages = (address_of(memory) + 1023) & ~1023u;
  const u32 full = address_of(barriers), empty = full + 8 * STAGES;
  const int split = blockIdx.x, tile = blockIdx.y, warpgroup = threadIdx.x / 128;
  const int begin = num_blocks * split / SPLITS, count = num_blocks * (split + 1) / SPLITS - begin;
  const int early = count < STAGES ? count : STAGES;

  auto load_weights = [&](int block) {
    const int stage = block % STAGES, column = (begin + block) * BLOCK_K;
    const u32 to = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
    expect_bytes(barrier, STAGE_BYTES);
    load_block(to, &w_map, column, tile * WIDTH, barrier);
    if (GATED) load_block(to + W_BYTES / 2, &w_map, column, width + tile * WIDTH, barrier);
  };

  const bool is_loading = threadIdx.x == MULTIPLYING;
  if (is_loading) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(full + 8 * stage, 1);
      init_barrier(empty + 8 * stage, 4 * WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    // Weights are constants: they are on their way before the kernels before this one have ended.
    for (int block = 0; block < early; block++) load_weights(block);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  __syncthreads();

  if (warpgroup == WARPGROUPS) {
    if (is_loading) {
      wait_for_earlier_kernels();
      for (int block = 0; block < count; block++) {
        const int stage = block % STAGES;
        if (block >= STAGES) {
          wait_for(empty + 8 * stage, (block / STAGES - 1) & 1);
          load_weights(block);
        }
        load_block(stages + stage * STAGE_BYTES + W_BYTES, &x_map, (begin + block) * BLOCK_K, 0, full + 8 * stage);
      }
    }
    return;
  }

  float sums[ROWS / 2];
  for (int block = 0; block < count; block++) {
    const int stage = block % STAGES;
    const u32 w = stages + stage * STAGE_BYTES + warpgroup * 64 * LINE, x = stages + stage * STAGE_BYTES + W_BYTES;
    wait_for(full + 8 * stage, (block / STAGES) & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; k++) multiply(sums, operand(w) + 2 * k, operand(x) + 2 * k, block + k != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (block > 0 && threadIdx.x % 32 == 0) arrive(empty + 8 * ((block - 1) % STAGES));
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory");  // the ring is free

  // The sums as [row of x][row of W], where the other programs of the cluster find them.
  const int lane = threadIdx.x % 32, of_tile = warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const u32 target = stages + 4 * (of_tile + lane % 4 * 2 * PITCH);
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) {
    const int row = i / 4 * 8 + i % 2, column = i / 2 % 2 * 8;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(target + 4 * (row * PITCH + column)), "f"(sums[i]) : "memory");
  }

  wait_for_earlier_kernels();
  int rows[TURNS], places[TURNS];  // a row of -1: nothing to do
  uint2 before[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const int item = (turn * SPLITS + split) * MULTIPLYING + threadIdx.x;
    const int row = item / QUADS, column = tile * WIDTH + item % QUADS * 4;
    rows[turn] = row < num_rows && column < width ? row : -1;
    places[turn] = row * width + column;
    before[turn] = make_uint2(0, 0);
    if (HAS_RESIDUAL && rows[turn] >= 0) before[turn] = load_here(residual + places[turn]);
  }
  if (SPLITS == 1) {
    asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory");
  } else {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  float4 parts[TURNS][SPLITS], ups[TURNS][GATED ? SPLITS : 1];
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const int item = (turn * SPLITS + split) * MULTIPLYING + threadIdx.x;
    const u32 source = stages + 4 * (item / QUADS * PITCH + item % QUADS * 4);
    if (rows[turn] < 0) continue;
#pragma unroll
    for (int part = 0; part < SPLITS; part++) {
      parts[turn][part] = read_sums(source, part);
      if (GATED) ups[turn][part] = read_sums(source + 4 * WIDTH, part);
    }
  }
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    if (rows[turn] < 0) continue;
    float4 total = parts[turn][0];
#pragma unroll
    for (int part = 1; part < SPLITS; part++) add(total, parts[turn][part]);
    if (GATED) {
      float4 up = ups[turn][0];
#pragma unroll
      for (int part = 1; part < SPLITS; part++) add(up, ups[turn][part]);
      total = make_float4(silu(total.x) * up.x, silu(total.y) * up.y, silu(total.z) * up.z, silu(total.w) * up.w);
    }
    if (HAS_RESIDUAL) {
      const uint2 pairs = before[turn];
      add(total, make_float4(float_of(pairs.x & 0xFFFF), float_of(pairs.x >> 16), float_of(pairs.y & 0xFFFF),
                             float_of(pairs.y >> 16)));
    }
    *(uint2*)(out + places[turn]) = make_uint2(pair_of(total.x, total.y), pair_of(total.z, total.w));
  }
  // Nobody leaves while others may read its memory.
  if (SPLITS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
