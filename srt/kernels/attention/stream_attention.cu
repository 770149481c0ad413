// Paged decode attention with equal shares for all programs: see stream_attention.py, which defines the constants in capitals, and
// even_attention.py, which says who reads what.
//
// One warp of a program loads keys and values into a ring of SLOTS, 16 positions at a time. Each of WARPS other warps processes every
// WARPS-th of these blocks, and keeps its result until the part of a row has been read. The last warp combines their results while they
// continue. In the products, positions are the rows and query heads the columns, so only 8 columns are multiplied; with queries as rows it
// would be 16.

constexpr int BLOCK = 16;  // positions
constexpr int HALVES = HEAD_DIM * (FP8 ? 1 : 2) / LINE;
constexpr int HALF_BYTES = BLOCK * LINE;  // of the columns of a block that fill one line
constexpr int BLOCK_BYTES = HALVES * HALF_BYTES;
constexpr int SLOT_BYTES = 2 * BLOCK_BYTES;  // keys, then values
static_assert(SLOTS % WARPS == 0, "a slot is always taken by the same warp, which so sees all its phases");
constexpr int STEPS = HEAD_DIM / 16;
constexpr int STEPS_AT_ONCE = FP8 ? 2 : 1;  // steps whose operands are loaded together: two chunks of 16 bytes
constexpr int STEPS_IN_LINE = 4 * STEPS_AT_ONCE;
static_assert(STEPS % STEPS_IN_LINE == 0, "lines are full");
constexpr int PITCH = HEAD_DIM + 4;  // of the warps' results in shared memory
constexpr int DIMS = HEAD_DIM / 32;  // per lane of the warp that combines them

// A warp's result for its blocks: for each query head the largest score, the sum of weights, and the weighted sum of values.
struct Found {
  float peaks[WARPS][8];
  float totals[WARPS][8];
  float sums[WARPS][GROUP][PITCH];
};

__device__ __forceinline__ void load_heads(u32 to, const TensorMap* map, int location, int head, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %2, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(location), "r"(head), "r"(barrier), "l"(policy)
      : "memory");
}

// Converts the lower and the upper two of four e4m3 numbers to f16, which takes one instruction; conversion to bf16 takes four more.
__device__ __forceinline__ void widen(u32 bytes, u32& lower, u32& upper) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(lower), "=r"(upper)
      : "r"(bytes));
}

// Values out of range become the largest f16 number, or 0.
__device__ __forceinline__ u32 half_pair_of(float low, float high) {
  u32 both;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Operands for the products with stored numbers, in the type to which those are converted.
__device__ __forceinline__ u32 factors_of(float low, float high) { return FP8 ? half_pair_of(low, high) : pair_of(low, high); }

#if FP8
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
__device__ __forceinline__ void multiply_add(float (&sums)[4], const u32 (&rows)[4], u32 low, u32 high) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(low), "r"(high));
}

// Reduces over the positions of a block, which are in the lanes with the same query heads.
template <typename Both>
__device__ __forceinline__ float over_positions(float value, Both both) {
  for (int distance = 4; distance < 32; distance *= 2) value = both(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}

// Reads past the L1 cache, which may hold old values.
__device__ __forceinline__ float load_new(const float* from) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void load_new(float (&values)[DIMS], const float* from) {
  constexpr int WIDTH = DIMS < 4 ? DIMS : 4;
#pragma unroll
  for (int i = 0; i < DIMS; i += WIDTH) {
    if (WIDTH == 2) {
      asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(values[i]), "=f"(values[i + 1]) : "l"(from + i) : "memory");
    } else {
      asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(values[i]), "=f"(values[i + 1]), "=f"(values[i + WIDTH - 2]), "=f"(values[i + WIDTH - 1])
                   : "l"(from + i)
                   : "memory");
    }
  }
}

// The positions of one row that the program reads, counted from the row's first one that is read: with a window those before it, up to a
// multiple of BLOCK, are left out.
struct Part {
  int row, begin, end;  // positions
  int length;           // of the row
  int left_out;         // positions of the row
  int hidden;           // positions that are read but lie before the window, less than BLOCK
  bool begins_row, ends_row;
  bool begins_share;
};

// The tables of EvenShares, in blocks of SHARE_UNIT positions.
struct Shares {
  const int* begins;
  const int* first_rows;
  const int* row_begins;
  const int* row_shares;
  const long long* lengths;
};

template <typename Work>
__device__ __forceinline__ void for_each_part(const Shares& shares, int share, int window, Work work) {
  const int share_begin = shares.begins[share], share_end = shares.begins[share + 1];
  int begin = share_begin;
  for (int row = begin < share_end ? shares.first_rows[share] : 0; begin < share_end; row++) {
    const int row_begin = shares.row_begins[row], row_end = shares.row_begins[row + 1], end = min(row_end, share_end);
    Part part;
    const int length = (int)shares.lengths[row], before = max(length - window, 0);
    part.row = row, part.left_out = before / BLOCK * BLOCK;
    part.length = length - part.left_out, part.hidden = before - part.left_out;
    part.begin = (begin - row_begin) * SHARE_UNIT, part.end = min((end - row_begin) * SHARE_UNIT, part.length);
    part.begins_row = begin == row_begin, part.ends_row = end == row_end, part.begins_share = begin == share_begin;
    work(part);
    begin = end;
  }
}

// Program (KV head, share)
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 2), PROGRAMS)
    stream_attention(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                     const __grid_constant__ Shares shares, const u16* q, const int* page_table, const long long* slots_of_rows,
                     float* partial, float* lse, int* arrived, u16* out, float scale_log2, float v_scale, int window, int q_stride,
                     int page_table_stride, int out_stride) {
  extern __shared__ char memory[];
  __shared__ u64 barriers[2 * SLOTS + 4];
  const u32 ring = (address_of(memory) + 1023) & ~1023u;
  Found* const all_found = (Found*)(memory + (ring - address_of(memory)) + SLOTS * SLOT_BYTES);  // two, for parts in turn
  const u32 full = address_of(barriers), empty = full + 8 * SLOTS, is_found = empty + 8 * SLOTS, is_taken = is_found + 16;
  const int kv_head = blockIdx.x, share = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_heads = gridDim.x * GROUP, first_head = kv_head * GROUP;

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SLOTS; slot++) init_barrier(full + 8 * slot, 1), init_barrier(empty + 8 * slot, 1);
    for (int i = 0; i < 2; i++) init_barrier(is_found + 8 * i, WARPS), init_barrier(is_taken + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  __syncthreads();

  if (warp == WARPS) {
    // Keys and values of earlier steps are complete, so their loads start before the previous kernels have ended.
    const u64 once = reading_once();
    bool has_waited = false;
    int number = 0;  // of the block
    for_each_part(shares, share, window, [&](const Part& part) {
      const int* pages = page_table + slots_of_rows[part.row] * page_table_stride;
      for (int first = part.begin; first < part.end; first += 32 * BLOCK) {
        const int position = part.left_out + first + lane * BLOCK;
        const bool is_inside = first + lane * BLOCK < part.end;
        const int location = is_inside ? pages[position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE : 0;
        const int count = min(32, (part.end - first + BLOCK - 1) / BLOCK);
        for (int i = 0; i < count; i++, number++) {
          const int from = __shfl_sync(~0u, location, i);
          if (!has_waited && first + (i + 1) * BLOCK >= part.length) {  // the newest key and value are in this block
            wait_for_earlier_kernels();
            has_waited = true;
          }
          if (lane == 0) {
            const int slot = number % SLOTS;
            const u32 to = ring + slot * SLOT_BYTES, barrier = full + 8 * slot;
            if (number >= SLOTS) wait_for(empty + 8 * slot, (number / SLOTS - 1) & 1);
            expect_bytes(barrier, SLOT_BYTES);
            load_heads(to, &k_map, from, kv_head, barrier, once);
            load_heads(to + BLOCK_BYTES, &v_map, from, kv_head, barrier, once);
          }
          __syncwarp();
        }
      }
    });
    if (!has_waited) wait_for_earlier_kernels();
    return;
  }

  if (warp == WARPS + 1) {
    wait_for_earlier_kernels();
    int turn = 0;
    for_each_part(shares, share, window, [&](const Part& part) {
      const bool is_whole = part.begins_row && part.ends_row;
      const int place = 2 * share + !part.begins_share;
      const Found& found = all_found[turn % 2];
      auto write = [&](int head, const float (&means)[DIMS]) {
        u16* to = out + (u64)part.row * out_stride + (first_head + head) * HEAD_DIM + lane * DIMS;
#pragma unroll
        for (int i = 0; i < DIMS; i += 2) *(u32*)(to + i) = pair_of(means[i] * v_scale, means[i + 1] * v_scale);
      };
      wait_for(is_found + 8 * (turn % 2), turn / 2 & 1);
#pragma unroll
      for (int head = 0; head < GROUP; head++) {
        float peak = nothing(), total = 0, means[DIMS] = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, found.peaks[w][head]);
        if (part.length > 0) {
#pragma unroll
          for (int w = 0; w < WARPS; w++) {
            const float factor = power_of_2(found.peaks[w][head] - peak);
            total += factor * found.totals[w][head];
#pragma unroll
            for (int i = 0; i < DIMS; i++) means[i] += factor * found.sums[w][head][lane * DIMS + i];
          }
#pragma unroll
          for (int i = 0; i < DIMS; i++) means[i] /= total;
        }
        if (is_whole) {
          write(head, means);
        } else {
          const int to = place * num_heads + first_head + head;
#pragma unroll
          for (int i = 0; i < DIMS; i++) partial[(u64)to * HEAD_DIM + lane * DIMS + i] = means[i];
          if (lane == 0) lse[to] = peak + log2f(total);
        }
      }
      __syncwarp();
      if (lane == 0) arrive(is_taken + 8 * (turn % 2));
      turn++;
      if (is_whole) return;

      // The program that finishes a row last merges its parts: the last part of the row's first share, unless the row is all of that share,
      // and the first part of each other share.
      const int first_share = shares.row_shares[2 * part.row], last_share = shares.row_shares[2 * part.row + 1];
      const bool begins_inside = shares.row_begins[part.row] > shares.begins[first_share];
      __syncwarp();
      int num_arrived = 0;
      if (lane == 0) {
        __threadfence();
        int* counter = arrived + part.row * gridDim.x + kv_head;
        num_arrived = atomicAdd(counter, 1);
        if (num_arrived == last_share - first_share) *counter = 0;
        __threadfence();
      }
      if (__shfl_sync(~0u, num_arrived, 0) != last_share - first_share) return;
      __syncwarp();  // all lanes see the other programs' results
      float peaks[GROUP], totals[GROUP] = {}, means[GROUP][DIMS] = {};
#pragma unroll
      for (int head = 0; head < GROUP; head++) peaks[head] = nothing();
      for (int other = first_share; other <= last_share; other += 2) {
        // The results of two programs for all heads are requested at once: one by one, each would take as long as all together.
        float its_peaks[2][GROUP], its_means[2][GROUP][DIMS];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int its_share = min(other + i, last_share);
          const int from = (2 * its_share + (begins_inside && its_share == first_share)) * num_heads + first_head;
#pragma unroll
          for (int head = 0; head < GROUP; head++) {
            its_peaks[i][head] = load_new(lse + from + head);
            load_new(its_means[i][head], partial + (u64)(from + head) * HEAD_DIM + lane * DIMS);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (other + i > last_share) break;
#pragma unroll
          for (int head = 0; head < GROUP; head++) {
            const float its_peak = its_peaks[i][head], new_peak = fmaxf(peaks[head], its_peak);
            const float shrink = power_of_2(peaks[head] - new_peak), factor = power_of_2(its_peak - new_peak);
            totals[head] = totals[head] * shrink + factor, peaks[head] = new_peak;
#pragma unroll
            for (int j = 0; j < DIMS; j++) means[head][j] = means[head][j] * shrink + its_means[i][head][j] * factor;
          }
        }
      }
#pragma unroll
      for (int head = 0; head < GROUP; head++) {
#pragma unroll
        for (int j = 0; j < DIMS; j++) means[head][j] /= totals[head];
        write(head, means[head]);
      }
    });
    return;
  }

  wait_for_earlier_kernels();
  const int column = lane % 4 * 2;  // the first of the two query heads whose sums this lane holds
  int number = 0, turn = 0;         // of the part's first block, and of the part
  for_each_part(shares, share, window, [&](const Part& part) {
    // The queries are the second operand of the products; a lane holds columns of one head.
    u32 queries[STEPS][2] = {};
    if (lane / 4 < GROUP) {
      const u16* query = q + (u64)part.row * q_stride + (first_head + lane / 4) * HEAD_DIM + (FP8 ? 2 * column : column);
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        queries[k][0] = *(const u32*)(query + 16 * k), queries[k][1] = *(const u32*)(query + 16 * k + (FP8 ? 2 : 8));
        if (FP8) {
          for (u32& pair : queries[k]) pair = half_pair_of(float_of(pair & 0xFFFF), float_of(pair >> 16));
        }
      }
    }
    float peaks[2] = {nothing(), nothing()}, totals[2] = {}, sums[STEPS][4] = {};
    const int num_blocks = (part.end - part.begin + BLOCK - 1) / BLOCK;
    for (int block = (warp + WARPS - number % WARPS) % WARPS; block < num_blocks; block += WARPS) {
      const int slot = (number + block) % SLOTS, live = part.end - part.begin - block * BLOCK;  // positions; may be more than BLOCK
      const int hidden = part.begin == 0 && block == 0 ? part.hidden : 0;
      const u32 keys = ring + slot * SLOT_BYTES, values = keys + BLOCK_BYTES;
      wait_for(full + 8 * slot, ((number + block) / SLOTS) & 1);
      if (live < BLOCK) {  // values after the row's end may be anything, but a factor must be a number
        for (int i = live; i < BLOCK; i++) {
#pragma unroll
          for (int half = 0; half < HALVES; half++) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(values + half * HALF_BYTES + i * LINE + 4 * lane), "r"(0) : "memory");
          }
        }
        __syncwarp();
      }
      float scores[4] = {}, more[4] = {};
#pragma unroll
      for (int k = 0; k < STEPS; k += STEPS_AT_ONCE) {
        const int i = lane % 16, chunk = k * 2 / STEPS_AT_ONCE % 8 + lane / 16;
        u32 rows[4];
        load_matrices(rows, keys + k / STEPS_IN_LINE * HALF_BYTES + i * LINE + ((chunk ^ i % 8) << 4));
        if (FP8) {  // a lane has four neighbouring columns, as it has of the queries
          u32 first[4], second[4];
#pragma unroll
          for (int j = 0; j < 2; j++) widen(rows[j], first[j], first[2 + j]), widen(rows[2 + j], second[j], second[2 + j]);
          multiply_add(scores, first, queries[k][0], queries[k][1]);
          multiply_add(more, second, queries[k + STEPS_AT_ONCE - 1][0], queries[k + STEPS_AT_ONCE - 1][1]);
        } else {
          multiply_add(k % 2 ? more : scores, rows, queries[k][0], queries[k][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int position = lane / 4 + i / 2 * 8;
        const bool is_live = hidden <= position && position < live;
        scores[i] = is_live ? (scores[i] + more[i]) * scale_log2 : nothing();
      }
      float new_peaks[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float peak = over_positions(fmaxf(scores[i], scores[i + 2]), [](float a, float b) { return fmaxf(a, b); });
        new_peaks[i] = fmaxf(peaks[i], peak);  // finite: a block has a live position
      }
      if (__any_sync(~0u, new_peaks[0] > peaks[0] || new_peaks[1] > peaks[1])) {
        const float shrink[2] = {power_of_2(peaks[0] - new_peaks[0]), power_of_2(peaks[1] - new_peaks[1])};
#pragma unroll
        for (int i = 0; i < 2; i++) totals[i] *= shrink[i], peaks[i] = new_peaks[i];
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
#pragma unroll
          for (int i = 0; i < 4; i++) sums[k][i] *= shrink[i % 2];
        }
      }
      float weights[4];
#pragma unroll
      for (int i = 0; i < 4; i++) weights[i] = power_of_2(scores[i] - peaks[i % 2]), totals[i % 2] += weights[i];
      const u32 low = turned(factors_of(weights[0], weights[1])), high = turned(factors_of(weights[2], weights[3]));
#pragma unroll
      for (int k = 0; k < STEPS; k += STEPS_AT_ONCE) {
        const int i = lane % 8 + lane / 16 * 8, chunk = k * 2 / STEPS_AT_ONCE % 8 + lane / 8 % 2;
        u32 rows[4];
        load_turned(rows, values + k / STEPS_IN_LINE * HALF_BYTES + i * LINE + ((chunk ^ i % 8) << 4));
        if (FP8) {  // pairs of columns were permuted: even and odd ones are the two halves of the sums
          u32 first[4], second[4];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            widen(__byte_perm(rows[2 * j], 0, 0x3120), first[2 * j], first[2 * j + 1]);
            widen(__byte_perm(rows[2 * j + 1], 0, 0x3120), second[2 * j], second[2 * j + 1]);
          }
          multiply_add(sums[k], first, low, high);
          multiply_add(sums[k + STEPS_AT_ONCE - 1], second, low, high);
        } else {
          multiply_add(sums[k], rows, low, high);
        }
      }
      if (live < BLOCK) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the writes above precede the next load
      arrive_after_reads(empty + 8 * slot);
    }
    number += num_blocks;

    const int place = turn % 2;
    Found& found = all_found[place];
    if (turn >= 2) wait_for(is_taken + 8 * place, (turn / 2 - 1) & 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float total = over_positions(totals[i], [](float a, float b) { return a + b; });
      if (lane < 4) found.peaks[warp][column + i] = peaks[i], found.totals[warp][column + i] = total;
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int dim = FP8 ? lane / 4 * 2 + i / 2 : lane / 4 + i / 2 * 8;
        if (column + i % 2 < GROUP) found.sums[warp][column + i % 2][16 * k + dim] = sums[k][i];
      }
    }
    __syncwarp();
    if (lane == 0) arrive(is_found + 8 * place);
    turn++;
  });
}
