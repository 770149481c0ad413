// Decode attention from the packed projection, see wide_decode.py. Program (split, KV head, row). Each warp attends over POSITIONS of the
// split's positions at a time, with HEAD_DIM / 32 dimensions of keys and values in each lane: a product is a sum over lanes, and only the
// warps' results pass through shared memory. What is read before the wait was written before the last launch that is not dependent. For
// angles, which are a dependent launch themselves, that is the embedding behind them, `copy_received`, or in a head of EAGLE3 torch.cat.

constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK = WARPS * POSITIONS;  // positions
constexpr int HALF = HEAD_DIM / 2;
constexpr int PAIRS = HALF / 32;                    // dimensions of either half of a query or key in a lane
constexpr int DIMS = HEAD_DIM / 32;                 // neighbouring dimensions of a value in a lane
constexpr int MERGED = GROUP * HEAD_DIM / THREADS;  // neighbouring dimensions of a merged result in a thread
static_assert(PAIRS % 2 == 0 && POSITIONS <= 32, "a lane reads pairs, and finds one position");
static_assert(MERGED >= 1 && HEAD_DIM % (32 * MERGED) == 0, "a warp merges dimensions of one head");

template <typename T, int N>
struct __align__(N * sizeof(T)) Some {
  T at[N];
};

using Half = Some<u32, PAIRS / 2>;  // pairs of bfloat16
using Value = Some<u32, DIMS / 2>;
using Result = Some<float, MERGED>;

struct Block {
  Half low[POSITIONS], high[POSITIONS];
  Value values[POSITIONS];
};

struct Head {
  float low[PAIRS], high[PAIRS];  // a lane's dimensions of either half
};

template <int N>
__device__ __forceinline__ void floats_of(const Some<u32, N>& pairs, float* to) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    to[2 * i] = float_of(pairs.at[i]);
    to[2 * i + 1] = __uint_as_float(pairs.at[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ float rounded(float value) { return float_of(pair_of(value, 0.0f)); }

__device__ __forceinline__ Half half_at(const u16* head, int lane) { return ((const Half*)head)[lane]; }

__device__ __forceinline__ Head head_at(const u16* head, int lane) {
  Half low = half_at(head, lane), high = half_at(head + HALF, lane);
  Head both;
  floats_of(low, both.low);
  floats_of(high, both.high);
  return both;
}

__device__ __forceinline__ void store_half(u16* head, const float (&values)[PAIRS], int lane) {
  Half pairs;
#pragma unroll
  for (int i = 0; i < PAIRS / 2; i++) pairs.at[i] = pair_of(values[2 * i], values[2 * i + 1]);
  ((Half*)head)[lane] = pairs;
}

__device__ __forceinline__ float product_of(const Head& query, const Head& key) {
  float product = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) product += query.low[i] * key.low[i] + query.high[i] * key.high[i];
  return product;
}

// Reads past the L1 cache, which may hold old values.
template <int N>
__device__ __forceinline__ Some<float, N> load_new(const float* from) {
  Some<float, N> some;
  if constexpr (N >= 4) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float4 four = __ldcg((const float4*)(from + i));
      some.at[i] = four.x, some.at[i + 1] = four.y, some.at[i + 2] = four.z, some.at[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) some.at[i] = __ldcg(from + i);
  }
  return some;
}

// Norms and rotates a head, and rounds the result.
__device__ __forceinline__ void prepare(Head& head, bool has_norm, const Head& weight, float offset, float eps,
                                        const Some<float, PAIRS>& cos, const Some<float, PAIRS>& sin) {
  if (has_norm) {
    float scale = rsqrtf(sum_over(product_of(head, head), 32) / HEAD_DIM + eps);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      head.low[i] *= scale * (weight.low[i] + offset);
      head.high[i] *= scale * (weight.high[i] + offset);
    }
  }
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    float low = head.low[i], high = head.high[i];
    head.low[i] = rounded(low * cos.at[i] - high * sin.at[i]);
    head.high[i] = rounded(high * cos.at[i] + low * sin.at[i]);
  }
}

// One warp's softmax over the positions that it has seen.
struct Attention {
  float peak[GROUP], total[GROUP];
  Some<float, DIMS> sums[GROUP];

  __device__ __forceinline__ Attention() {
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
      peak[h] = nothing(), total[h] = 0.0f;
#pragma unroll
      for (int d = 0; d < DIMS; d++) sums[h].at[d] = 0.0f;
    }
  }

  // Begins with one position.
  __device__ __forceinline__ void begin(int h, float score, const Value& value) {
    peak[h] = score, total[h] = 1.0f;
    floats_of(value, sums[h].at);
  }

  // Adds the first `count` positions of a block; at least one.
  __device__ __forceinline__ void add(const Head (&queries)[GROUP], const Block& block, int count, float scale_log2) {
    float scores[GROUP][POSITIONS];
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) {
      Head key;
      floats_of(block.low[i], key.low);
      floats_of(block.high[i], key.high);
#pragma unroll
      for (int h = 0; h < GROUP; h++) scores[h][i] = product_of(queries[h], key);
    }
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
      float new_peak = peak[h];
#pragma unroll
      for (int i = 0; i < POSITIONS; i++) {
        float score = sum_over(scores[h][i], 32) * scale_log2;
        scores[h][i] = i < count ? score : nothing();
        new_peak = fmaxf(new_peak, scores[h][i]);
      }
      float shrink = power_of_2(peak[h] - new_peak);
      peak[h] = new_peak;
      total[h] *= shrink;
#pragma unroll
      for (int d = 0; d < DIMS; d++) sums[h].at[d] *= shrink;
#pragma unroll
      for (int i = 0; i < POSITIONS; i++) total[h] += scores[h][i] = power_of_2(scores[h][i] - new_peak);
    }
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) {
      float value[DIMS];
      floats_of(block.values[i], value);
#pragma unroll
      for (int h = 0; h < GROUP; h++)
#pragma unroll
        for (int d = 0; d < DIMS; d++) sums[h].at[d] += scores[h][i] * value[d];
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    wide_decode(const u16* qkv, const u16* q_weight, const u16* k_weight, const float* cosines, const float* sines,
                const long long* locations, u16* keys, u16* values, const int* page_table, const long long* slots,
                const long long* seq_lens, float* partial, float* lse, int* arrived, u16* out, float eps, float scale_log2,
                int has_norm, float offset, int window, int key_stride, int value_stride, int table_stride) {
  __shared__ Some<float, DIMS> found[WARPS][GROUP][32];
  __shared__ float peaks[WARPS][GROUP], totals[WARPS][GROUP], shares[WARPS][MOST_SPLITS];
  __shared__ int is_last;

  const int split = blockIdx.x, num_splits = gridDim.x, kv_head = blockIdx.y, num_kv_heads = gridDim.y, row = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int* pages = page_table + slots[row] * table_stride;
  const int seq_len = (int)seq_lens[row];
  const int first = max(seq_len - window, 0), old = seq_len - 1 - first;
  const int tokens = max((old + num_splits * BLOCK - 1) / (num_splits * BLOCK), 1) * BLOCK;
  const int num_live = max((old + tokens - 1) / tokens, 1);
  if (split >= num_live) return;  // without waiting, so that the next kernel's programs find room; the row's first split waits
  const int end = min(first + (split + 1) * tokens, seq_len - 1);
  int begin = first + split * tokens + warp * POSITIONS;

  auto load = [&](Block& block) {
    u32 position = min(begin + lane, end - 1);
    u32 location_of_lane = pages[position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE;
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) {
      long long location = __shfl_sync(~0u, location_of_lane, i);
      const u16* key = keys + location * key_stride + kv_head * HEAD_DIM;
      block.low[i] = half_at(key, lane);
      block.high[i] = half_at(key + HALF, lane);
      block.values[i] = ((const Value*)(values + location * value_stride + kv_head * HEAD_DIM))[lane];
    }
  };
  Block block;
  if (begin < end) load(block);
  // The next kernel's programs read weights when they start. These loads shall not wait behind those.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const Some<float, PAIRS> cos = ((const Some<float, PAIRS>*)(cosines + row * HALF))[lane];
  const Some<float, PAIRS> sin = ((const Some<float, PAIRS>*)(sines + row * HALF))[lane];
  const Head q_factors = head_at(q_weight, lane), k_factors = head_at(k_weight, lane);
  const long long location = locations[row];
  asm volatile("griddepcontrol.wait;" ::: "memory");

  const u16* packed = qkv + (long long)row * (GROUP + 2) * num_kv_heads * HEAD_DIM;
  Head queries[GROUP];
  Attention attention;
#pragma unroll
  for (int h = 0; h < GROUP; h++) queries[h] = head_at(packed + (kv_head * GROUP + h) * HEAD_DIM, lane);
#pragma unroll
  for (int h = 0; h < GROUP; h++) prepare(queries[h], has_norm, q_factors, offset, eps, cos, sin);
  if (split == num_live - 1 && warp == 0) {  // the new position
    const u16* new_key = packed + (GROUP * num_kv_heads + kv_head) * HEAD_DIM;
    Head key = head_at(new_key, lane);
    Value value = ((const Value*)(new_key + num_kv_heads * HEAD_DIM))[lane];
    prepare(key, has_norm, k_factors, offset, eps, cos, sin);
    u16* place = keys + location * key_stride + kv_head * HEAD_DIM;
    store_half(place, key.low, lane);
    store_half(place + HALF, key.high, lane);
    ((Value*)(values + location * value_stride + kv_head * HEAD_DIM))[lane] = value;
#pragma unroll
    for (int h = 0; h < GROUP; h++) attention.begin(h, sum_over(product_of(queries[h], key), 32) * scale_log2, value);
  }
  while (begin < end) {
    attention.add(queries, block, end - begin, scale_log2);
    begin += BLOCK;
    if (begin < end) load(block);
  }

  // Merge the warps' results.
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    found[warp][h][lane] = attention.sums[h];
    if (lane == 0) peaks[warp][h] = attention.peak[h], totals[warp][h] = attention.total[h];
  }
  __syncthreads();
  const int dim = threadIdx.x * MERGED, head = dim / HEAD_DIM, group = row * num_kv_heads + kv_head;
  float peak = nothing(), total = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, peaks[w][head]);
  Result result = {};
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    float share = power_of_2(peaks[w][head] - peak);
    Result some = ((const Result*)found[w])[threadIdx.x];
    total += share * totals[w][head];
#pragma unroll
    for (int d = 0; d < MERGED; d++) result.at[d] += share * some.at[d];
  }
  float factor = 1.0f / total;

  if (num_live > 1) {  // merge the splits' results in the program that finishes last
#pragma unroll
    for (int d = 0; d < MERGED; d++) result.at[d] *= factor;
    float* parts = partial + (long long)group * num_splits * GROUP * HEAD_DIM;
    ((Result*)(parts + split * GROUP * HEAD_DIM))[threadIdx.x] = result;
    float* own_lse = lse + (group * GROUP + head) * num_splits;
    if (dim % HEAD_DIM == 0) own_lse[split] = peak + log2f(total);
    __syncthreads();  // all threads have stored their results before the program counts as arrived
    if (threadIdx.x == 0) {
      int before;
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived + group) : "memory");
      is_last = before == num_live - 1;
      if (is_last) arrived[group] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    peak = nothing(), total = 0.0f;
    for (int s = lane; s < num_live; s += 32) peak = fmaxf(peak, shares[warp][s] = __ldcg(own_lse + s));
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, distance));
    for (int s = lane; s < num_live; s += 32) total += shares[warp][s] = power_of_2(shares[warp][s] - peak);
    factor = 1.0f / sum_over(total, 32);
    __syncwarp();
    result = {};
#pragma unroll 16
    for (int s = 0; s < num_live; s++) {
      Result some = load_new<MERGED>(parts + s * GROUP * HEAD_DIM + dim);
#pragma unroll
      for (int d = 0; d < MERGED; d++) result.at[d] += shares[warp][s] * some.at[d];
    }
  }
  Some<u16, MERGED> rounded_result;
#pragma unroll
  for (int d = 0; d < MERGED; d++) rounded_result.at[d] = (u16)pair_of(result.at[d] * factor, 0.0f);
  ((Some<u16, MERGED>*)(out + (long long)group * GROUP * HEAD_DIM))[threadIdx.x] = rounded_result;
}
