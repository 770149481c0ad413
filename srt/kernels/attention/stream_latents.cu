// Decode attention over latents: see stream_latents.py, which defines the constants in capitals.
//
// A program has HEADS heads of a row and a split of the row's positions. One warp loads latents into a ring of SLOTS, 16 positions at a
// time. The WARPS others each have 16 columns of every 64. They add up products of queries and latents over their own columns, exchange
// these sums, compute the same weights, and add up weighted values for their own columns. So each warp reads each of its columns once as
// keys and once as values. In the products, positions or columns are the rows and heads the columns.
//
// Programs of a cluster merge their splits: each merges a part of the columns. If a row has several clusters, each program's part is
// merged again by the one that comes last.

extern __shared__ char memory[];

__device__ __forceinline__ void load_latents(u32 to, const TensorMap* map, int location, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %2}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(0), "r"(location), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void multiply_add(float (&sums)[4], const u32 (&rows)[4], u32 low, u32 high) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ void store_zeros(u32 address) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Waits for all warps but the one that loads.
__device__ __forceinline__ void sync_warps() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 address_in(u32 address, int rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ float4 four_at(u32 address) {
  float4 four;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(address)
               : "memory");
  return four;
}

__device__ __forceinline__ float2 two_at(u32 address) {
  float2 two;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(address) : "memory");
  return two;
}

__device__ __forceinline__ int count_arrival(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// The kernel.

constexpr int BLOCK = 16;  // positions of a load
constexpr int HEADS = 16;
constexpr int LINES = (RANK + ROPE) / BLOCK_K;
constexpr int VALUE_LINES = RANK / BLOCK_K;
constexpr int LINE_BYTES = BLOCK * LINE;  // of the columns of a block that fill one line
constexpr int SLOT_BYTES = LINES * LINE_BYTES;
constexpr int TILES = HEADS / 8;                            // of heads, in products
constexpr int EXCHANGED_BYTES = WARPS * 2 * TILES * 32 * 16;  // of a step's sums
constexpr int PITCH = RANK + 4;                             // floats, of a head's result in shared memory
constexpr int PART = RANK / CLUSTER;                        // columns that a program merges
constexpr int ITEMS = HEADS * PART / 4 / (32 * WARPS);      // fours of these columns that a thread merges
constexpr int MOST_AT_ONCE = 4;                             // of which it loads the results of groups before it merges them
constexpr int AT_ONCE = ITEMS < MOST_AT_ONCE ? ITEMS : MOST_AT_ONCE;
static_assert(RANK % BLOCK_K == 0 && ROPE == BLOCK_K, "lines are full");
static_assert(WARPS * 16 == BLOCK_K, "each warp has 16 columns of a line");
static_assert(HEADS * PART / 4 % (32 * WARPS) == 0 && ITEMS % AT_ONCE == 0, "all threads merge as much");
static_assert(HEADS * PITCH * 4 <= SLOTS * SLOT_BYTES, "results find room where latents were");

__device__ __forceinline__ void store_four(u16* to, const float4& four) {
  *(uint2*)to = make_uint2(pair_of(four.x, four.y), pair_of(four.z, four.w));
}

__device__ __forceinline__ void add_to(float4& sums, const float4& some, float factor) {
  sums.x += some.x * factor, sums.y += some.y * factor, sums.z += some.z * factor, sums.w += some.w * factor;
}

__device__ __forceinline__ float4 divided(const float4& some, float divisor) {
  return make_float4(some.x / divisor, some.y / divisor, some.z / divisor, some.w / divisor);
}

__device__ __forceinline__ float finite(float peak) { return peak == nothing() ? 0.0f : peak; }

// What a lane knows of its split, and what it has added up.
struct Reader {
  u32 ring, full, empty;
  float4* exchanged;
  int key, value, length, begin;  // positions of the row, and the split's first block
  float scale_log2;
  int number = 0, turn = 0;  // of the block, and of the step
  u32 queries[LINES][TILES][2] = {};
  float peaks[TILES][2], totals[TILES][2] = {}, sums[VALUE_LINES][TILES][4] = {};

  // Adds the next blocks. Not a generic lambda in the kernel: NVRTC 13.0 takes that for a function of the host.
  template <int BLOCKS>
  __device__ __forceinline__ void process() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float scores[BLOCKS][TILES][4] = {};
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const int slot = (number + b) % SLOTS, live = length - (begin + number + b) * BLOCK;  // positions; may be more than BLOCK
      const u32 block = ring + slot * SLOT_BYTES;
      wait_for(full + 8 * slot, (number + b) / SLOTS & 1);
      // Latents after the row's end may be anything, but a factor must be a number. Nothing is loaded after a row's last block, so these
      // stores need not precede a load.
      if (live < BLOCK) {
        for (int i = live; i < BLOCK; i++)
          store_zeros(block + lane / 4 * LINE_BYTES + i * LINE + ((2 * warp + lane / 2 % 2) ^ i % 8) * 16 + lane % 2 * 8);
        __syncwarp();
      }
    }
    // Products of both blocks take turns, so that sums wait for each other less.
#pragma unroll
    for (int line = 0; line < LINES; line++) {
      u32 rows[BLOCKS][4];
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) load_matrices(rows[b], ring + (number + b) % SLOTS * SLOT_BYTES + line * LINE_BYTES + key);
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
          multiply_add(scores[b][tile], rows[b], queries[line][tile][0], queries[line][tile][1]);
    }
    float4* const exchange = exchanged + turn % 2 * (EXCHANGED_BYTES / 16) + lane;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const float* four = scores[b][tile];
        exchange[((warp * 2 + b) * TILES + tile) * 32] = make_float4(four[0], four[1], four[2], four[3]);
      }
    sync_warps();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const int live = length - (begin + number + b) * BLOCK;
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        float4 sum = exchange[(b * TILES + tile) * 32];
#pragma unroll
        for (int other = 1; other < WARPS; other++) add_to(sum, exchange[((other * 2 + b) * TILES + tile) * 32], 1.0f);
        const bool lower = lane / 4 < live, upper = lane / 4 + 8 < live;
        scores[b][tile][0] = lower ? sum.x * scale_log2 : nothing(), scores[b][tile][1] = lower ? sum.y * scale_log2 : nothing();
        scores[b][tile][2] = upper ? sum.z * scale_log2 : nothing(), scores[b][tile][3] = upper ? sum.w * scale_log2 : nothing();
      }
    }
    float new_peaks[TILES][2];
    bool grows = false;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float peak = peaks[tile][i];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) peak = fmaxf(peak, fmaxf(scores[b][tile][i], scores[b][tile][i + 2]));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, distance));
        new_peaks[tile][i] = peak;  // finite: every block has a live position
        grows |= peak > peaks[tile][i];
      }
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float shrink = power_of_2(peaks[tile][i] - new_peaks[tile][i]);
          totals[tile][i] *= shrink, peaks[tile][i] = new_peaks[tile][i];
#pragma unroll
          for (int line = 0; line < VALUE_LINES; line++) sums[line][tile][i] *= shrink, sums[line][tile][i + 2] *= shrink;
        }
    }
    u32 weights[BLOCKS][TILES][2];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          four[i] = power_of_2(scores[b][tile][i] - peaks[tile][i % 2]);
          totals[tile][i % 2] += four[i];
        }
        weights[b][tile][0] = turned(pair_of(four[0], four[1])), weights[b][tile][1] = turned(pair_of(four[2], four[3]));
      }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const int slot = (number + b) % SLOTS;
#pragma unroll
      for (int line = 0; line < VALUE_LINES; line++) {
        u32 rows[4];
        load_turned(rows, ring + slot * SLOT_BYTES + line * LINE_BYTES + value);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) multiply_add(sums[line][tile], rows, weights[b][tile][0], weights[b][tile][1]);
      }
      arrive_after_reads(empty + 8 * slot);
    }
    number += BLOCKS, turn++;
  }
};

// Program (split, HEADS heads, row); CLUSTER neighbouring splits are a cluster.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), PROGRAMS)
    stream_latents(const __grid_constant__ TensorMap map, const u16* q, const u16* rotated, const int* page_table,
                   const long long* slots_of_rows, const long long* seq_lens, float* partial, float* lse, int* arrived, u16* out,
                   float scale_log2, int num_heads, int q_token_stride, int q_head_stride, int rotated_token_stride,
                   int rotated_head_stride, int page_table_stride) {
  const u32 ring = (address_of(memory) + 1023) & ~1023u;
  char* const ring_at = memory + (ring - address_of(memory));
  float4* const exchanged = (float4*)(ring_at + SLOTS * SLOT_BYTES);                               // two, for steps in turn
  float2* const of_heads = (float2*)(ring_at + SLOTS * SLOT_BYTES + 2 * EXCHANGED_BYTES);          // largest score, sum of weights
  int* const is_last = (int*)(of_heads + HEADS);
  int* const kept_groups = is_last + 1;  // a register that the loop over positions does not need to keep
  const u32 full = ring + SLOTS * SLOT_BYTES + 2 * EXCHANGED_BYTES + 8 * HEADS + 16, empty = full + 8 * SLOTS;
  const int split = blockIdx.x, row = blockIdx.z, first_head = blockIdx.y * HEADS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const int* const pages = page_table + slots_of_rows[row] * page_table_stride;
  const int length = (int)seq_lens[row], row_blocks = (length + BLOCK - 1) / BLOCK;
  // Merging groups takes longer than reading a few blocks, so a short row has fewer. Programs of a cluster agree on that.
  const int groups = max(1, min((int)gridDim.x / CLUSTER, row_blocks / (CLUSTER * LEAST_BLOCKS))), num_splits = CLUSTER * groups;
  if (split >= num_splits) return;
  const int begin = row_blocks * split / num_splits;  // block
  const int num_blocks = row_blocks * (split + 1) / num_splits - begin;

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SLOTS; slot++) init_barrier(full + 8 * slot, 1), init_barrier(empty + 8 * slot, WARPS);
    publish_barriers();
    *kept_groups = groups;
    let_next_kernel_start();
  }
  __syncthreads();

  if (warp == WARPS) {
    // Latents of earlier steps are complete, so their loads start before the previous kernels have ended.
    const u64 policy = gridDim.y == 1 ? reading_once() : reading_again();
    for (int first = 0; first < num_blocks; first += 32) {
      const int position = (begin + first + lane) * BLOCK;
      const int location = first + lane < num_blocks ? pages[position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE : 0;
      const int count = min(32, num_blocks - first);
      for (int i = 0; i < count; i++) {
        const int number = first + i, slot = number % SLOTS;
        const int from = __shfl_sync(~0u, location, i);
        if (begin + number == row_blocks - 1) wait_for_earlier_kernels();  // the newest latent is in this block
        if (lane == 0) {
          const u32 barrier = full + 8 * slot;
          if (number >= SLOTS) wait_for(empty + 8 * slot, (number / SLOTS - 1) & 1);
          expect_bytes(barrier, SLOT_BYTES);
          load_latents(ring + slot * SLOT_BYTES, &map, from, barrier, policy);
        }
        __syncwarp();
      }
    }
    if constexpr (CLUSTER > 1) sync_cluster(), sync_cluster();
    return;
  }

  wait_for_earlier_kernels();
  const int column = lane % 4 * 2;  // the first of the two heads of a tile whose sums this lane has
  // Where a lane finds its rows of the warp's columns, within those of a line: as keys, and as values.
  const int key = lane % 16 * LINE + ((2 * warp + lane / 16) ^ lane % 8) * 16;
  const int value = (lane % 8 + lane / 16 * 8) * LINE + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  Reader reader{ring, full, empty, exchanged, key, value, length, begin, scale_log2};
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const int head = first_head + 8 * tile + lane / 4;
    if (head < num_heads) {
      const u16* first = q + (long long)row * q_token_stride + (long long)head * q_head_stride + 16 * warp + column;
      const u16* last = rotated + (long long)row * rotated_token_stride + (long long)head * rotated_head_stride + 16 * warp + column;
#pragma unroll
      for (int line = 0; line < LINES; line++) {
        const u16* from = line < VALUE_LINES ? first + BLOCK_K * line : last;
        reader.queries[line][tile][0] = *(const u32*)from, reader.queries[line][tile][1] = *(const u32*)(from + 8);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) reader.peaks[tile][0] = reader.peaks[tile][1] = nothing();
  while (reader.number + 2 <= num_blocks) reader.process<2>();
  if (reader.number < num_blocks) reader.process<1>();

  // Merge the results of the cluster.
  sync_warps();  // all warps have read the ring
  float* const found = (float*)ring_at;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = 8 * tile + column + i % 2;
#pragma unroll
      for (int line = 0; line < VALUE_LINES; line++)
        found[head * PITCH + BLOCK_K * line + 16 * warp + lane / 4 + i / 2 * 8] = reader.sums[line][tile][i];
      if (i < 2) {
        float total = reader.totals[tile][i];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
        if (warp == 0 && lane < 4) of_heads[head] = make_float2(reader.peaks[tile][i], total);
      }
    }
  if constexpr (CLUSTER > 1) {
    sync_cluster();
  } else {
    sync_warps();
  }
  const int num_groups = *kept_groups, rank = split % CLUSTER, group = split / CLUSTER, tile = row * gridDim.y + blockIdx.y;
  const u32 heads_at = ring + SLOTS * SLOT_BYTES + 2 * EXCHANGED_BYTES;
  float4 its_sums[ITEMS][CLUSTER];
  float2 its_totals[ITEMS][CLUSTER];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {  // all loads before the first use, because each takes long
    const int item = threadIdx.x + 32 * WARPS * i, head = item / (PART / 4), place = head * PITCH + rank * PART + item % (PART / 4) * 4;
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) {
      its_totals[i][other] = CLUSTER > 1 ? two_at(address_in(heads_at + 8 * head, other)) : of_heads[head];
      its_sums[i][other] = CLUSTER > 1 ? four_at(address_in(ring + 4 * place, other)) : *(const float4*)(found + place);
    }
  }
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int item = threadIdx.x + 32 * WARPS * i, head = item / (PART / 4), dim = rank * PART + item % (PART / 4) * 4;
    float peak = nothing(), total = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) peak = fmaxf(peak, its_totals[i][other].x);
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) {
      const float factor = power_of_2(its_totals[i][other].x - finite(peak));
      total += factor * its_totals[i][other].y;
      add_to(sum, its_sums[i][other], factor);
    }
    const float4 mean = divided(sum, total > 0 ? total : 1.0f);
    if (num_groups == 1) {
      if (first_head + head < num_heads) store_four(out + ((long long)row * num_heads + first_head + head) * RANK + dim, mean);
    } else {
      const long long place = ((long long)tile * (gridDim.x / CLUSTER) + group) * HEADS + head;
      *(float4*)(partial + place * RANK + dim) = mean;
      if (dim == rank * PART) lse[place * CLUSTER + rank] = total > 0 ? peak + log2f(total) : nothing();
    }
  }
  if constexpr (CLUSTER > 1) sync_cluster();  // others may still read this program's results
  if (num_groups == 1) return;

  // Merge the groups of the row, in the program that comes last with this part.
  sync_warps();
  if (threadIdx.x == 0) {
    int* counter = arrived + tile * CLUSTER + rank;
    *is_last = count_arrival(counter) == num_groups - 1;
    if (*is_last) *counter = 0;
  }
  sync_warps();
  if (!*is_last) return;
#pragma unroll 1
  for (int first = 0; first < ITEMS; first += AT_ONCE) {
    float4 some[AT_ONCE][MOST_GROUPS];
    float its_lse[AT_ONCE][MOST_GROUPS];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int item = threadIdx.x + 32 * WARPS * (first + i), head = item / (PART / 4), dim = rank * PART + item % (PART / 4) * 4;
#pragma unroll
      for (int other = 0; other < MOST_GROUPS; other++) {
        const long long its = ((long long)tile * (gridDim.x / CLUSTER) + (other < num_groups ? other : 0)) * HEADS + head;
        its_lse[i][other] = other < num_groups ? __ldcg(lse + its * CLUSTER + rank) : nothing();
        some[i][other] = __ldcg((const float4*)(partial + its * RANK + dim));
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int item = threadIdx.x + 32 * WARPS * (first + i), head = item / (PART / 4), dim = rank * PART + item % (PART / 4) * 4;
      float peak = nothing(), total = 0.0f;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int other = 0; other < MOST_GROUPS; other++) peak = fmaxf(peak, its_lse[i][other]);
#pragma unroll
      for (int other = 0; other < MOST_GROUPS; other++) {
        const float share = power_of_2(its_lse[i][other] - finite(peak));
        total += share;
        add_to(sum, some[i][other], share);
      }
      if (first_head + head < num_heads)
        store_four(out + ((long long)row * num_heads + first_head + head) * RANK + dim, divided(sum, total > 0 ? total : 1.0f));
    }
  }
}
