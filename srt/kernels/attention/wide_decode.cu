// Decode attention from the packed projection, see wide_decode.py. Program (split, HEADS of a KV head's GROUP query heads, row). Each warp
// attends over POSITIONS of the split's positions at a time, with HEAD_DIM / 32 dimensions of keys and values in each lane: a product is a
// sum over lanes, and only the warps' results pass through shared memory. What is read before the wait was written before the last launch
// that is not dependent; angles are a dependent launch themselves, so they are read behind it.

constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK = WARPS * POSITIONS;  // positions
constexpr int HALF = HEAD_DIM / 2;
constexpr int PAIRS = HALF / 32;                    // dimensions of either half of a query or key in a lane
constexpr int DIMS = HEAD_DIM / 32;                 // neighbouring dimensions of a value in a lane
constexpr int PARTS = GROUP / HEADS;                // programs that share a KV head's positions
constexpr int SCORES = HEADS * POSITIONS;           // of a block
constexpr int EACH = SCORES > 32 ? SCORES / 32 : 1;  // scores that a lane keeps: of neighbouring positions, for one head
constexpr int COPIES = 32 / SCORES > 1 ? 32 / SCORES : 1;  // neighbouring lanes that keep the same score
constexpr int HEAD_LANES = 32 / HEADS;                     // neighbouring lanes that keep a head's scores
constexpr int RESULTS = HEADS * HEAD_DIM;
constexpr int MERGED = RESULTS > THREADS ? RESULTS / THREADS : 1;  // neighbouring dimensions of a merged result in a thread
constexpr int MERGERS = RESULTS / MERGED;                          // threads that merge
constexpr int WARP_HEADS = 32 * MERGED > HEAD_DIM ? 32 * MERGED / HEAD_DIM : 1;  // heads of which a warp merges dimensions
static_assert(PAIRS % 2 == 0 && POSITIONS <= 32, "a lane reads pairs, and finds one position");
static_assert(GROUP % HEADS == 0 && 32 % HEADS == 0, "a group is divided evenly, and a head's scores are kept by lanes of their own");
static_assert((SCORES & (SCORES - 1)) == 0, "lanes exchange halves of the scores");
static_assert(RESULTS % MERGED == 0 && MERGERS <= THREADS && MERGERS % 32 == 0, "every thread of a warp merges, or none does");

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

// Sums `scores` over lanes. A lane gets EACH of the sums, from number lane / COPIES * EACH on: lanes that differ in one bit exchange halves
// of what they have, for one bit after another.
__device__ __forceinline__ void scatter_sums(float (&scores)[SCORES], int lane) {
  int count = SCORES;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    if (count > 1) {
      count /= 2;
      const bool is_upper = lane & distance;
#pragma unroll
      for (int i = 0; i < SCORES / 2; i++) {
        if (i < count) {
          const float kept = is_upper ? scores[count + i] : scores[i], given = is_upper ? scores[i] : scores[count + i];
          scores[i] = kept + __shfl_xor_sync(~0u, given, distance);
        }
      }
    } else {
      scores[0] += __shfl_xor_sync(~0u, scores[0], distance);
    }
  }
}

// One warp's softmax over the positions that it has seen.
struct Attention {
  float peak, total;  // of this lane's head; the total is of the positions whose scores the lane has kept
  Some<float, DIMS> sums[HEADS];

  __device__ __forceinline__ Attention() {
    peak = nothing(), total = 0.0f;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
      for (int d = 0; d < DIMS; d++) sums[h].at[d] = 0.0f;
  }

  // Begins with one position, with this score for head h.
  __device__ __forceinline__ void begin(int h, float score, const Value& value, int lane) {
    if (lane / HEAD_LANES == h) peak = score, total = lane % HEAD_LANES < COPIES ? 1.0f : 0.0f;
    floats_of(value, sums[h].at);
  }

  // Adds the first `count` positions of a block; at least one. Lanes share their weights in `weights`.
  __device__ __forceinline__ void add(const Head (&queries)[HEADS], const Block& block, int count, float scale_log2, int lane,
                                      Some<float, POSITIONS>* weights) {
    float scores[SCORES];
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) {
      Head key;
      floats_of(block.low[i], key.low);
      floats_of(block.high[i], key.high);
#pragma unroll
      for (int h = 0; h < HEADS; h++) scores[h * POSITIONS + i] = product_of(queries[h], key);
    }
    scatter_sums(scores, lane);
    const int first = lane % HEAD_LANES / COPIES * EACH;  // position of the lane's first score
    float new_peak = peak;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      scores[i] = first + i < count ? scores[i] * scale_log2 : nothing();
      new_peak = fmaxf(new_peak, scores[i]);
    }
#pragma unroll
    for (int distance = COPIES; distance < HEAD_LANES; distance *= 2)
      new_peak = fmaxf(new_peak, __shfl_xor_sync(~0u, new_peak, distance));
    const float shrink = power_of_2(peak - new_peak);
    peak = new_peak;
    total *= shrink;
    __syncwarp();  // all lanes have read the weights of the block before
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const float weight = power_of_2(scores[i] - new_peak);
      total += weight;
      weights[lane / HEAD_LANES].at[first + i] = weight;
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      const float shrink_of_head = __shfl_sync(~0u, shrink, h * HEAD_LANES);
#pragma unroll
      for (int d = 0; d < DIMS; d++) sums[h].at[d] *= shrink_of_head;
    }
    Some<float, POSITIONS> weights_of[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) weights_of[h] = weights[h];
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) {
      float value[DIMS];
      floats_of(block.values[i], value);
#pragma unroll
      for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int d = 0; d < DIMS; d++) sums[h].at[d] += weights_of[h].at[i] * value[d];
    }
  }

  // Sums the total of each head over its lanes.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int distance = COPIES; distance < HEAD_LANES; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    wide_decode(const u16* qkv, const u16* q_weight, const u16* k_weight, const float* cosines, const float* sines,
                const long long* locations, u16* keys, u16* values, const int* page_table, const long long* slots,
                const long long* seq_lens, float* partial, float* lse, int* arrived, u16* out, float eps, float scale_log2,
                int has_norm, float offset, int window, int key_stride, int value_stride, int table_stride) {
  __shared__ Some<float, DIMS> found[WARPS][HEADS][32];
  __shared__ Some<float, POSITIONS> weights[WARPS][HEADS];
  __shared__ float peaks[WARPS][HEADS], totals[WARPS][HEADS], shares[WARPS][WARP_HEADS][MOST_SPLITS];
  __shared__ int is_last;

  const int split = blockIdx.x, num_splits = gridDim.x, row = blockIdx.z;
  const int kv_head = blockIdx.y / PARTS, num_kv_heads = gridDim.y / PARTS, first_head = blockIdx.y * HEADS;
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
  const Head q_factors = head_at(q_weight, lane), k_factors = head_at(k_weight, lane);
  const long long location = locations[row];
  asm volatile("griddepcontrol.wait;" ::: "memory");

  // The angles are those of a dependent launch, which may still run before the wait.
  const Some<float, PAIRS> cos = ((const Some<float, PAIRS>*)(cosines + row * HALF))[lane];
  const Some<float, PAIRS> sin = ((const Some<float, PAIRS>*)(sines + row * HALF))[lane];
  const u16* packed = qkv + (long long)row * (GROUP + 2) * num_kv_heads * HEAD_DIM;
  Head queries[HEADS];
  Attention attention;
#pragma unroll
  for (int h = 0; h < HEADS; h++) queries[h] = head_at(packed + (first_head + h) * HEAD_DIM, lane);
#pragma unroll
  for (int h = 0; h < HEADS; h++) prepare(queries[h], has_norm, q_factors, offset, eps, cos, sin);
  if (split == num_live - 1 && warp == 0) {  // the new position
    const u16* new_key = packed + (GROUP * num_kv_heads + kv_head) * HEAD_DIM;
    Head key = head_at(new_key, lane);
    Value value = ((const Value*)(new_key + num_kv_heads * HEAD_DIM))[lane];
    prepare(key, has_norm, k_factors, offset, eps, cos, sin);
    if (blockIdx.y % PARTS == 0) {
      u16* place = keys + location * key_stride + kv_head * HEAD_DIM;
      store_half(place, key.low, lane);
      store_half(place + HALF, key.high, lane);
      ((Value*)(values + location * value_stride + kv_head * HEAD_DIM))[lane] = value;
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) attention.begin(h, sum_over(product_of(queries[h], key), 32) * scale_log2, value, lane);
  }
  while (begin < end) {
    attention.add(queries, block, end - begin, scale_log2, lane, weights[warp]);
    begin += BLOCK;
    if (begin < end) load(block);
  }

  // Merge the warps' results.
  attention.finish();
#pragma unroll
  for (int h = 0; h < HEADS; h++) found[warp][h][lane] = attention.sums[h];
  if (lane % HEAD_LANES == 0)
    peaks[warp][lane / HEAD_LANES] = attention.peak, totals[warp][lane / HEAD_LANES] = attention.total;
  __syncthreads();
  const bool merges = threadIdx.x < MERGERS;
  const int dim = merges ? threadIdx.x * MERGED : 0, head = dim / HEAD_DIM, group = row * gridDim.y + blockIdx.y;
  float peak = nothing(), total = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, peaks[w][head]);
  Result result = {};
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    float share = power_of_2(peaks[w][head] - peak);
    Result some = ((const Result*)found[w])[dim / MERGED];
    total += share * totals[w][head];
#pragma unroll
    for (int d = 0; d < MERGED; d++) result.at[d] += share * some.at[d];
  }
  float factor = 1.0f / total;

  if (num_live > 1) {  // merge the splits' results in the program that finishes last
    float* parts = partial + (long long)group * num_splits * RESULTS;
    float* lse_of_heads = lse + group * HEADS * num_splits;
    if (merges) {
#pragma unroll
      for (int d = 0; d < MERGED; d++) result.at[d] *= factor;
      ((Result*)(parts + split * RESULTS))[threadIdx.x] = result;
      if (dim % HEAD_DIM == 0) lse_of_heads[head * num_splits + split] = peak + log2f(total);
    }
    __syncthreads();  // all threads have stored their results before the program counts as arrived
    if (threadIdx.x == 0) {
      int before;
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived + group) : "memory");
      is_last = before == num_live - 1;
      if (is_last) arrived[group] = 0;
    }
    __syncthreads();
    if (!is_last || !merges) return;
    const int first = warp * 32 * MERGED / HEAD_DIM;  // the warp's first head
    float factors[WARP_HEADS];
#pragma unroll
    for (int h = 0; h < WARP_HEADS; h++) {
      float* own = shares[warp][h];
      peak = nothing(), total = 0.0f;
      for (int s = lane; s < num_live; s += 32) peak = fmaxf(peak, own[s] = __ldcg(lse_of_heads + (first + h) * num_splits + s));
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, distance));
      for (int s = lane; s < num_live; s += 32) total += own[s] = power_of_2(own[s] - peak);
      factors[h] = 1.0f / sum_over(total, 32);
    }
    __syncwarp();
    factor = factors[0];
#pragma unroll
    for (int h = 1; h < WARP_HEADS; h++) factor = head == first + h ? factors[h] : factor;
    result = {};
#pragma unroll 16
    for (int s = 0; s < num_live; s++) {
      Result some = load_new<MERGED>(parts + s * RESULTS + dim);
#pragma unroll
      for (int d = 0; d < MERGED; d++) result.at[d] += shares[warp][head - first][s] * some.at[d];
    }
  }
  if (!merges) return;
  Some<u16, MERGED> rounded_result;
#pragma unroll
  for (int d = 0; d < MERGED; d++) rounded_result.at[d] = (u16)pair_of(result.at[d] * factor, 0.0f);
  ((Some<u16, MERGED>*)(out + (long long)group * RESULTS))[threadIdx.x] = rounded_result;
}
