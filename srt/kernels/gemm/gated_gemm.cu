// silu(gates) * ups, where gates and ups are the halves of x Wᵀ, or x Wᵀ itself unless GATED, for many rows of x: multiplying takes most
// of the time. See gated_gemm.py, which defines the constants in capitals.
//
// A tile of the result is ROWS by WIDTH. As many programs as fit on the device process one tile after the other. In each, one thread
// loads blocks of 64 columns of both operands into a ring of STAGES; each other warpgroup multiplies HEIGHT times 64 rows of x. The
// programs of a cluster have neighbouring columns of the same rows: each loads its share of these rows' x for all of them.

constexpr int ROWS = 64 * WARPGROUPS * HEIGHT;
constexpr int X_BYTES = ROWS * LINE;
constexpr int W_ROWS = GATED ? 2 * WIDTH : WIDTH;
constexpr int STAGE_BYTES = X_BYTES + W_ROWS * LINE;
constexpr int MULTIPLYING = 128 * WARPGROUPS;  // threads
constexpr int SCALING = 96;                    // threads of the last warpgroup, except those of the loading warp
constexpr int GROUPS = WIDTH / 8;              // of 8 columns

// Loads constants; volatile, so that the compiler does not keep those of all columns in registers.
__device__ __forceinline__ float2 load_pair(const float* from) {
  float2 pair;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "l"(from));
  return pair;
}

// `width` is the number of columns of the result. If SCALED, x was multiplied by a norm's weight only, and `x_squares` holds the sums of
// squares for `find_scales`. If PARTED, the sums of each `split_blocks` blocks begin at zero and are added to a total.
// Tiles are processed in bands of BAND rows of tiles, so that programs that run together read the same data. If AWAITS, the rows from tile
// `first_tile` on come first, and those behind the first `own_tiles` are read once they have arrived.
extern "C" __global__ void __launch_bounds__(MULTIPLYING + 128, 1)
    gated_gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const float* x_squares,
              const float* x_scales, const float* w_scales, u16* out, int num_rows, int width, int num_blocks, int split_blocks,
              int x_parts, float eps, const __grid_constant__ Arrival arrival, int first_tile, int own_tiles) {
  extern __shared__ char memory[];
  __shared__ u64 barriers[2 * STAGES];
  __shared__ float scales[SCALED ? MOST_SCALED : 1];
  const u32 stages = (address_of(memory) + 1023) & ~1023u;
  const u32 full = address_of(barriers), empty = full + 8 * STAGES;
  const int warpgroup = threadIdx.x / 128, rank = blockIdx.x % CLUSTER;
  const int num_row_tiles = (num_rows + ROWS - 1) / ROWS, num_columns = (width + CLUSTER * WIDTH - 1) / (CLUSTER * WIDTH);
  const int first_item = blockIdx.x / CLUSTER, num_clusters = gridDim.x / CLUSTER, num_items = num_row_tiles * num_columns;

  if (threadIdx.x == MULTIPLYING) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(full + 8 * stage, 1);
      init_barrier(empty + 8 * stage, WARPGROUPS * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  meet_cluster();

  auto tile_of = [&](int item) {  // of rows
    const int band = item / (BAND * num_columns) * BAND, height = min(BAND, num_row_tiles - band);
    return band + item % (BAND * num_columns) % height;
  };
  auto row_of = [&](int item) { return (AWAITS ? (tile_of(item) + first_tile) % num_row_tiles : tile_of(item)) * ROWS; };
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");  // leaves registers to the multiplying warpgroups
    if (threadIdx.x == MULTIPLYING) {
      const u64 policy = CLUSTER == 1 ? reading_once() : reading_again();  // with clusters, many row tiles read the same weights
      // Weights are constant, so the first loads start before the previous kernels have ended.
      const int early = CLUSTER == 1 ? min(STAGES, num_blocks) : 0;
      auto load_rows_of_w = [&](u32 to, int block, int first, u32 barrier) {
        if (GATED) load_gates_and_ups(to, &w_map, block * BLOCK_K, first / 8, barrier, policy);
        if (!GATED) load_block(to, &w_map, block * BLOCK_K, first, barrier, policy);
      };
      for (int block = 0; block < early; block++) {
        expect_bytes(full + 8 * block, STAGE_BYTES);
        load_rows_of_w(stages + block * STAGE_BYTES + X_BYTES, block, column_of(first_item), full + 8 * block);
      }
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      asm volatile("griddepcontrol.wait;" ::: "memory");
      bool has_all = !AWAITS;
      for (int item = first_item; item < num_items; item += num_clusters) {
        const int row = row_of(item) + rank * (ROWS / CLUSTER), column = column_of(item);
        if (!has_all && tile_of(item) >= own_tiles) {
          await(arrival);
          asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads in another proxy, which an acquire does not order
          has_all = true;
        }
        for (int block = 0; block < num_blocks; block++, advance()) {
          const u32 to = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
          if (item != first_item || block >= early) {
            wait_for(empty + 8 * stage, parity ^ 1);
            expect_bytes(barrier, STAGE_BYTES);
            load_rows_of_w(to + X_BYTES, block, column, barrier);
          }
          const u32 share = to + rank * (X_BYTES / CLUSTER);
          if (CLUSTER > 1) load_for_all(share, &x_map, block * BLOCK_K, row, barrier);
          if (CLUSTER == 1) load_block(share, &x_map, block * BLOCK_K, row, barrier);
        }
      }
    }
    if (SCALED && threadIdx.x >= MULTIPLYING + 32) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      const int thread = threadIdx.x - MULTIPLYING - 32;
      find_scales(scales, x_squares, num_rows, num_rows, x_parts, num_blocks * BLOCK_K * (ROUNDED ? 2 : 1), eps, thread, SCALING);
      asm volatile("bar.arrive 2, %0;" ::"n"(MULTIPLYING + SCALING) : "memory");
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 2 ? 232 : 152));
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    auto release = [&](int used) {
      if (threadIdx.x % 128 < CLUSTER) arrive_at(empty + 8 * used, threadIdx.x % 128);
    };
    for (int item = first_item; item < num_items; item += num_clusters) {
      float sums[HEIGHT][W_ROWS / 2], totals[PARTED ? HEIGHT : 1][PARTED ? W_ROWS / 2 : 1] = {};
      auto finish_sums = [&] {
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int h = 0; h < HEIGHT; h++) {
#pragma unroll
          for (int i = 0; i < W_ROWS / 2; i++) {
            asm volatile("" : "+f"(sums[h][i])::"memory");  // keeps the compiler from reading earlier
            if (PARTED) totals[PARTED ? h : 0][PARTED ? i : 0] += sums[h][i];
          }
        }
      };
      int before = 0, of_split = 0;
      for (int block = 0; block < num_blocks; block++) {
        if (PARTED && of_split == split_blocks) finish_sums(), of_split = 0;
        const u32 x = stages + stage * STAGE_BYTES + warpgroup * HEIGHT * 64 * LINE;
        const u32 w = stages + stage * STAGE_BYTES + X_BYTES;
        wait_for(full + 8 * stage, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; k++) {
#pragma unroll
          for (int h = 0; h < HEIGHT; h++) {
            const u64 rows = operand(x + h * 64 * LINE) + 2 * k, columns = operand(w) + 2 * k;
            if (ROUNDED) {
              multiply_e4m3(sums[h], rows, columns, of_split + k != 0);
            } else {
              multiply(sums[h], rows, columns, of_split + k != 0);
            }
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (block > 0) release(before);
        before = stage, of_split++;
        advance();
      }
      finish_sums();
      release(before);

      if (SCALED && item == first_item) asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLYING + SCALING) : "memory");
      const int column = column_of(item);
      if (ROUNDED) asm volatile("griddepcontrol.wait;" ::: "memory");  // x_scales may be of the previous kernel
#pragma unroll
      for (int h = 0; h < HEIGHT; h++) {
        const int row = row_of(item) + (warpgroup * HEIGHT + h) * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
        // Columns 2 * quarter and 2 * quarter + 1 of a group, in this row and in row + 8
        float factors[2] = {SCALED && row < num_rows ? scales[row] : 1.0f, SCALED && row + 8 < num_rows ? scales[row + 8] : 1.0f};
#pragma unroll
        for (int lower = 0; lower < (ROUNDED ? 2 : 0); lower++) {
          if (row + 8 * lower < num_rows) factors[lower] *= *(const volatile float*)(x_scales + row + 8 * lower);
        }
        auto pair = [&](int group, int lower) {
          if (!GATED) {
            const float* both = (PARTED ? totals[PARTED ? h : 0] : sums[h]) + 4 * group + 2 * lower;
            return pair_of(both[0] * factors[lower], both[1] * factors[lower]);
          }
          const float *gates = sums[h] + 8 * group + 2 * lower, *ups = gates + 4, factor = factors[lower];
          if (ROUNDED) {
            const int first = min(column + 8 * group, width - 8) + 2 * quarter;
            const float2 of_gates = load_pair(w_scales + first), of_ups = load_pair(w_scales + width + first);
            return pair_of(gated(gates[0] * factor * of_gates.x, ups[0] * factor * of_ups.x),
                           gated(gates[1] * factor * of_gates.y, ups[1] * factor * of_ups.y));
          }
          return pair_of(gated(gates[0] * factor, ups[0] * factor), gated(gates[1] * factor, ups[1] * factor));
        };
#pragma unroll
        for (int group = 0; group < GROUPS; group += 4) {
#pragma unroll
          for (int lower = 0; lower < 2; lower++) {
            u16* line = out + (u64)(row + 8 * lower) * width;
            const bool is_inside = row + 8 * lower < num_rows;
            if (group + 4 <= GROUPS) {
              u32 pairs[4];
#pragma unroll
              for (int i = 0; i < 4; i++) pairs[i] = pair(group + i, lower);
              turn(pairs, quarter);
              const int first = column + (group + quarter) * 8;
              if (is_inside && first < width) *(uint4*)(line + first) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            } else {
#pragma unroll
              for (int i = group; i < GROUPS; i++) {
                const int first = column + i * 8;
                if (is_inside && first < width) *(u32*)(line + first + 2 * quarter) = pair(i, lower);
              }
            }
          }
        }
      }
    }
  }
  meet_cluster();  // No program may exit while others can still send to its memory.
}
