// What the ranks of a host tell each other in few bytes, by way of memory that they write for each other: see peer_sum.py, which defines
// the constants in capitals.
//
// A rank's memory has BOXES boxes. A program writes its rank's part to boxes of the same number in all others' memory, and waits for theirs
// in its own. What travels are letters of 16 bytes: two words, each of 4 bytes of data and, above them, the number of the box's run. An
// aligned access of 8 bytes is whole, so who reads the number has the data: nothing is fenced, nobody is asked whether he is ready.
//
// A run of a box is a launch that uses it. Every rank launches the same in the same order, so all count the same runs, whatever else a
// launch is made of; and as they are counted on the device, so do the launches of a graph.
//
// A box has two sides, which runs take in turn, and that suffices. Rank r writes run n + 2 in q's memory where n was. It began after r's
// launch of n + 1 had ended, which had read letters of q's n + 1; and q sent these after its own launch of n had ended, which had read all
// of n. (A launch begins where it has waited for the kernels before it, and a run has a letter from everybody to everybody.)
//
// Numbers come again after 2^32 runs, and a letter that few runs are large enough for may be old. So now and then a run renews those that
// it does not use, in its own memory: nobody else writes there before the run after the next.

struct Mail {
  u64 memories[8];  // of every rank
  u32* runs;        // [BOXES], the number of each box's next
  u32* missing;     // in the host's memory: 1 + the rank that this one has given up on
  u64 patience_ns;
  int rank;
};

constexpr u32 RENEWAL = 1 << 20;  // runs
constexpr int FLOATS = KIND == FLOAT32 ? 2 : 4;  // of a letter
constexpr int LOOKS = 1024;  // between two at the clock

// From that rank, in the memory that begins there.
__device__ __forceinline__ u64 letter_at(u64 memory, u32 run, int box, int from, int letter) {
  return memory + 16 * ((u64)(((run & 1) * BOXES + box) * RANKS + from) * LETTERS + letter);
}

__device__ __forceinline__ void send(u64 address, uint2 data, u32 run) {
  const u64 number = (u64)run << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(number | data.x), "l"(number | data.y) : "memory");
}

__device__ __forceinline__ ulonglong2 look_at(u64 address) {
  ulonglong2 words;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(words.x), "=l"(words.y) : "l"(address) : "memory");
  return words;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// The host finds the reason where it was left; after a trap the device does nothing more for this process.
__device__ __noinline__ void give_up(u32* missing, int rank) {
  *(volatile u32*)missing = 1 + rank;
  __threadfence_system();
  asm volatile("trap;");
}

// All ranks' parts of a letter.
__device__ __forceinline__ void receive(uint2 (&parts)[RANKS], uint2 mine, const Mail& mail, u32 run, int box, int letter) {
  u64 begun = 0;
  for (u32 looks = 1;; looks++) {
    ulonglong2 words[RANKS];
#pragma unroll
    for (int from = 0; from < RANKS; from++) {
      if (from != mail.rank) words[from] = look_at(letter_at(mail.memories[mail.rank], run, box, from, letter));
    }
    int missing = -1;
#pragma unroll
    for (int from = 0; from < RANKS; from++) {
      if (from == mail.rank) {
        parts[from] = mine;
      } else {
        parts[from] = make_uint2((u32)words[from].x, (u32)words[from].y);
        if ((u32)(words[from].x >> 32) != run || (u32)(words[from].y >> 32) != run) missing = from;
      }
    }
    if (missing < 0) return;
    if (looks % LOOKS == 0) {
      const u64 now = nanoseconds();
      if (begun == 0) begun = now;
      if (now - begun > mail.patience_ns) give_up(mail.missing, missing);
    }
  }
}

struct Values {
  float of[FLOATS];
};

__device__ __forceinline__ float float_of_half(u32 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)half));
  return value;
}

__device__ __forceinline__ u32 pair_of_halves(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ Values values_of(uint2 data) {
  Values values;
  const u32 words[2] = {data.x, data.y};
#pragma unroll
  for (int i = 0; i < FLOATS; i++) {
    const u32 pair = words[i * 2 / FLOATS], part = i % 2 ? pair >> 16 : pair & 0xFFFF;
    values.of[i] = KIND == FLOAT32 ? __uint_as_float(pair) : KIND == FLOAT16 ? float_of_half(part) : float_of(part);
  }
  return values;
}

__device__ __forceinline__ u32 rounded(float low, float high) {
  return KIND == FLOAT16 ? pair_of_halves(low, high) : pair_of(low, high);
}

__device__ __forceinline__ uint2 data_of(const Values& values) {
  if (KIND == FLOAT32) return make_uint2(__float_as_uint(values.of[0]), __float_as_uint(values.of[1]));
  return make_uint2(rounded(values.of[0], values.of[1]), rounded(values.of[FLOATS - 2], values.of[FLOATS - 1]));
}

__device__ __forceinline__ void add(Values& total, uint2 data) {
  const Values part = values_of(data);
#pragma unroll
  for (int i = 0; i < FLOATS; i++) total.of[i] += part.of[i];
}

__device__ __forceinline__ uint2 sum_of(const uint2 (&parts)[RANKS]) {
  Values total = values_of(parts[0]);
#pragma unroll
  for (int rank = 1; rank < RANKS; rank++) add(total, parts[rank]);
  return data_of(total);
}

__device__ __forceinline__ uint2 sum_of_two(uint2 first, uint2 second) {
  Values total = values_of(first);
  add(total, second);
  return data_of(total);
}

__device__ __forceinline__ float squares_of(uint2 data) {
  const Values values = values_of(data);
  float total = 0;
#pragma unroll
  for (int i = 0; i < FLOATS; i++) total += values.of[i] * values.of[i];
  return total;
}

__device__ __forceinline__ uint2 normed_by(uint2 data, float scale, uint2 weight) {
  Values values = values_of(data);
  const Values weights = values_of(weight);
#pragma unroll
  for (int i = 0; i < FLOATS; i++) values.of[i] = values.of[i] * scale * weights.of[i];
  return data_of(values);
}

__device__ __forceinline__ float sum_over_program(float value) {
  __shared__ float of_warps[LETTERS / 32];
  for (int distance = 1; distance < 32; distance *= 2) value += __shfl_xor_sync(~0u, value, distance);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < LETTERS / 32; warp++) total += of_warps[warp];
  return total;
}

// NORMS: the sum is added to `hidden`, and a row of that is normed.
struct Ending {
  const uint2* hidden;
  const uint2* weight;
  uint2* normed;
  float eps;
};

// Program p: row p of so many letters, in PARTS boxes; the last row may be shorter. `out` has as many letters as `part`, or where GATHERS
// as many of each rank.
extern "C" __global__ void __launch_bounds__(LETTERS)
    peer_sum(const __grid_constant__ Mail mail, const __grid_constant__ Ending ending, const uint2* part, uint2* out,
             int num_letters, int row_letters) {
  const int row = blockIdx.x * row_letters, count = min(row_letters, num_letters - row), boxes = blockIdx.x * PARTS;
  auto letter_of = [&](int i) { return i * LETTERS + (int)threadIdx.x; };  // of the row, in box i
  uint2 weight[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    if (NORMS && letter_of(i) < count) weight[i] = ending.weight[letter_of(i)];
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");

  u32 runs[PARTS];
  uint2 mine[PARTS], hidden[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    runs[i] = *(const volatile u32*)(mail.runs + boxes + i);
    mine[i] = make_uint2(0, 0);
    if (letter_of(i) < count) mine[i] = part[row + letter_of(i)];
  }
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    if (letter_of(i) >= count) continue;
#pragma unroll
    for (int to = 0; to < RANKS; to++) {
      if (to != mail.rank) send(letter_at(mail.memories[to], runs[i], boxes + i, mail.rank, threadIdx.x), mine[i], runs[i]);
    }
  }
  // What comes next sends for its weights while the others' parts are under way.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    if (NORMS && letter_of(i) < count) hidden[i] = ending.hidden[row + letter_of(i)];
  }

  float squares = 0;
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    const int letter = row + letter_of(i);
    if (letter_of(i) < count) {
      uint2 parts[RANKS];
      receive(parts, mine[i], mail, runs[i], boxes + i, threadIdx.x);
      if (GATHERS) {
#pragma unroll
        for (int from = 0; from < RANKS; from++) out[(u64)from * num_letters + letter] = parts[from];
      } else {
        mine[i] = sum_of(parts);
        if (NORMS) mine[i] = sum_of_two(hidden[i], mine[i]);
        if (NORMS) squares += squares_of(mine[i]);
        out[letter] = mine[i];
      }
    } else if (runs[i] % RENEWAL < 2) {  // both sides
      for (int from = 0; from < RANKS; from++) {
        send(letter_at(mail.memories[mail.rank], runs[i], boxes + i, from, threadIdx.x), mine[i], runs[i]);
      }
    }
  }
  if (NORMS) {
    const float scale = rsqrtf(sum_over_program(squares) / (row_letters * FLOATS) + ending.eps);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      if (letter_of(i) < count) ending.normed[row + letter_of(i)] = normed_by(mine[i], scale, weight[i]);
    }
  }
  __syncthreads();  // all have read them
  if (threadIdx.x < PARTS) mail.runs[boxes + threadIdx.x] += 1;
}
