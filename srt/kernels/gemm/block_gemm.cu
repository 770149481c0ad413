// x Wᵀ of e4m3 numbers, of which each 128 columns of a row of x, and each 128 columns of 64 rows of W, have a scale. If GATED, the result
// is silu(gates) * ups of the halves of W. See block_gemm.py, which defines the constants in capitals.
//
// A tile is ROWS of x by W_ROWS of W. As many programs as fit on the device process one tile after the other. In each, one thread loads
// blocks of 128 columns of both operands into a ring of STAGES; each other warpgroup multiplies HEIGHT times 64 rows of x. The products of a
// block are summed up by themselves, then scaled and added to those before. The programs of a cluster have neighbouring columns of the
// same rows: each loads its share of these rows' x for all of them.

constexpr int ROWS = 64 * WARPGROUPS * HEIGHT;
constexpr int X_BYTES = ROWS * LINE;
constexpr int WIDTH = GATED ? W_ROWS / 2 : W_ROWS;  // columns of the result
constexpr int STAGE_BYTES = X_BYTES + W_ROWS * LINE;
constexpr int W_SCALE_BYTES = 16;                   // the least that a load takes; equal scales
constexpr int MULTIPLYING = 128 * WARPGROUPS;       // threads
constexpr int UNIT = 64;                            // rows of W that share scales
constexpr int UNITS = GATED ? 2 : W_ROWS / UNIT;    // gates and ups, or neighbouring rows
constexpr int GROUPS = WIDTH / 8;                   // of 8 columns
constexpr int SCALE_BYTES = 4 * ROWS + UNITS * W_SCALE_BYTES;  // of a stage; they are loaded like the blocks, because they take as long

__device__ __forceinline__ void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ float load_shared(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// `width` is the number of columns of the result, `pitch` the distance of x_scales' lines, [blocks, pitch], of which each has room for all
// rows of the tiles; w_scales are [blocks, rows of W].
// Tiles are processed in bands of BAND rows of tiles, so that programs that run together read the same data.
extern "C" __global__ void __launch_bounds__(MULTIPLYING + 128, 1)
    block_gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const float* x_scales,
               const float* w_scales, u16* out, int num_rows, int width, int num_blocks, int pitch) {
  extern __shared__ char memory[];
  __shared__ u64 barriers[2 * STAGES];
  const u32 stages = (address_of(memory) + 1023) & ~1023u;
  const u32 full = address_of(barriers), empty = full + 8 * STAGES, scales = stages + STAGES * STAGE_BYTES;
  const int warpgroup = threadIdx.x / 128, rank = blockIdx.x % CLUSTER;
  const int num_row_tiles = (num_rows + ROWS - 1) / ROWS, num_columns = (width + CLUSTER * WIDTH - 1) / (CLUSTER * WIDTH);
  const int first_item = blockIdx.x / CLUSTER, num_clusters = gridDim.x / CLUSTER, num_items = num_row_tiles * num_columns;

  if (threadIdx.x == MULTIPLYING) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(full + 8 * stage, 1);
      init_barrier(empty + 8 * stage, 4 * WARPGROUPS * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  meet_cluster();

  auto row_of = [&](int item) {
    const int band = item / (BAND * num_columns) * BAND, height = min(BAND, num_row_tiles - band);
    return (band + item % (BAND * num_columns) % height) * ROWS;
  };
  auto column_of = [&](int item) {
    const int band = item / (BAND * num_columns) * BAND, height = min(BAND, num_row_tiles - band);
    return (item % (BAND * num_columns) / height * CLUSTER + rank) * WIDTH;
  };

  int stage = 0;
  u32 parity = 0;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };

  if (warpgroup == WARPGROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");  // leaves registers to the multiplying warpgroups
    if (threadIdx.x == MULTIPLYING) {
      const u64 policy = num_row_tiles == 1 ? reading_once() : reading_again();
      const int rows_of_w = GATED ? 2 * width : width;
      auto load_weights = [&](int stage, int block, int column) {
        const u32 to = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
        expect_bytes(barrier, STAGE_BYTES + SCALE_BYTES);
        for (int unit = 0; unit < UNITS; unit++) {
          const int w_row = min(column + (GATED ? 0 : unit * UNIT), width - UNIT) + (GATED ? unit * width : 0);
          load_bytes(scales + stage * SCALE_BYTES + 4 * ROWS + unit * W_SCALE_BYTES, w_scales + (u64)block * rows_of_w + w_row,
                     W_SCALE_BYTES, barrier);
        }
        if (GATED) load_gates_and_ups(to + X_BYTES, &w_map, block * BLOCK_K, column / 8, barrier, policy);
        if (!GATED) load_block(to + X_BYTES, &w_map, block * BLOCK_K, column, barrier, policy);
      };
      // Weights are constant, so the first loads start before the previous kernels have ended.
      const int early = min(STAGES, num_blocks);
      for (int block = 0; block < early; block++) {
        load_weights(block, block, column_of(first_item));
      }
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (int item = first_item; item < num_items; item += num_clusters) {
        const int row = row_of(item) + rank * (ROWS / CLUSTER), column = column_of(item);
        for (int block = 0; block < num_blocks; block++, advance()) {
          const u32 to = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
          if (item != first_item || block >= early) {
            wait_for(empty + 8 * stage, parity ^ 1);
            load_weights(stage, block, column);
          }
          load_bytes(scales + stage * SCALE_BYTES, x_scales + (u64)block * pitch + row_of(item), 4 * ROWS, barrier);
          const u32 share = to + rank * (X_BYTES / CLUSTER);
          if (CLUSTER > 1) load_for_all(share, &x_map, block * BLOCK_K, row, barrier);
          if (CLUSTER == 1) load_block(share, &x_map, block * BLOCK_K, row, barrier);
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    const int row_of_tile = warpgroup * HEIGHT * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (int item = first_item; item < num_items; item += num_clusters) {
      // This thread has row `row + 64 * h` and the row 8 below, and of each 8 columns two.
      const int row = row_of(item) + row_of_tile, column = column_of(item);
      float sums[HEIGHT][W_ROWS / 2] = {};
      for (int block = 0; block < num_blocks; block++) {
        const u32 x = stages + stage * STAGE_BYTES + warpgroup * HEIGHT * 64 * LINE;
        const u32 w = stages + stage * STAGE_BYTES + X_BYTES;
        const u32 of_x = scales + stage * SCALE_BYTES + 4 * row_of_tile, of_w = scales + stage * SCALE_BYTES + 4 * ROWS;
        wait_for(full + 8 * stage, parity);
        float factors[HEIGHT][2][UNITS];
#pragma unroll
        for (int h = 0; h < HEIGHT; h++) {
          const float upper = load_shared(of_x + 256 * h), lower = load_shared(of_x + 256 * h + 32);
#pragma unroll
          for (int unit = 0; unit < UNITS; unit++) {
            const float scale = load_shared(of_w + unit * W_SCALE_BYTES);
            factors[h][0][unit] = upper * scale, factors[h][1][unit] = lower * scale;
          }
        }
#pragma unroll
        for (int h = 0; h < HEIGHT; h++) {
          float products[W_ROWS / 2];
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int k = 0; k < BLOCK_K / 16; k++) multiply_e4m3(products, operand(x + h * 64 * LINE) + 2 * k, operand(w) + 2 * k, k != 0);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
          if (h == HEIGHT - 1 && lane < CLUSTER) arrive_at(empty + 8 * stage, lane);
#pragma unroll
          for (int i = 0; i < W_ROWS / 2; i++) {
            asm volatile("" : "+f"(products[i])::"memory");  // keeps the compiler from reading earlier
            const int unit = GATED ? i / 4 % 2 : i / (UNIT / 2);
            sums[h][i] += products[i] * factors[h][i / 2 % 2][unit];
          }
        }
        advance();
      }

#pragma unroll
      for (int h = 0; h < HEIGHT; h++) {
        auto pair = [&](int group, int lower) {
          if (!GATED) return pair_of(sums[h][4 * group + 2 * lower], sums[h][4 * group + 2 * lower + 1]);
          const float *gates = sums[h] + 8 * group + 2 * lower, *ups = gates + 4;
          return pair_of(gated(gates[0], ups[0]), gated(gates[1], ups[1]));
        };
#pragma unroll
        for (int group = 0; group < GROUPS; group += 4) {
#pragma unroll
          for (int lower = 0; lower < 2; lower++) {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) pairs[i] = pair(group + i, lower);
            turn(pairs, quarter);
            const int first = column + (group + quarter) * 8, of_out = row + 64 * h + 8 * lower;
            if (of_out < num_rows && first < width) {
              *(uint4*)(out + (u64)of_out * width + first) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
          }
        }
      }
    }
  }
  meet_cluster();  // No program may exit while others can still send to its memory.
}
