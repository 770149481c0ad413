// Exchange of few bytes between the ranks of a host, through memory that they write for each other. See peer_sum.py, which defines the
// constants in capitals.
//
// A rank's memory has BOXES boxes. A program writes its rank's part to the boxes of the same number in all other ranks' memory, and waits
// for their parts in its own. Data is sent in letters of 16 bytes: two words, each with 4 bytes of data and, above them, the number of the
// box's run. An aligned access of 8 bytes is indivisible, so a reader that finds the number has the data too. No fence and no handshake is
// needed.
//
// A run of a box is a launch that uses it. All ranks launch the same kernels in the same order, so they count the same runs. They are
// counted on the device, so launches from a graph count as well.
//
// A box has two sides, which runs use alternately. Two suffice: rank r overwrites run n in q's memory in its run n + 2. That run began after
// r's launch of run n + 1 had ended, which had read q's letters of n + 1. And q sent these after its own launch of run n had ended, which had
// read all letters of n. (A launch waits for the kernels before it, and in each run every rank sends a letter to every other.)
//
// Numbers repeat after 2^32 runs, and a letter that only large runs use may be old by then. So now and then a run renews the letters that it
// does not use, in its own memory: no other rank writes there before the run after the next.

struct Mail {
  u64 memories[8];  // of every rank
  u32* runs;        // [BOXES], the number of each box's next run
  u32* missing;     // in host memory: 1 + the rank on which this one has given up
  u64 patience_ns;
  int rank;
};

constexpr u32 RENEWAL = 1 << 20;  // runs
constexpr int LOOKS = 1024;  // polls between two readings of the clock

// Location of the letters from that rank, in the memory that begins at this address.
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

// The parts of a letter from all ranks.
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

__device__ __forceinline__ uint2 sum_of(const uint2 (&parts)[RANKS]) {
  Values total = values_of(parts[0]);
#pragma unroll
  for (int rank = 1; rank < RANKS; rank++) add(total, parts[rank]);
  return data_of(total);
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

// NORMS: the sum is added to `hidden`, and each row of the result is normed.
struct Ending {
  const uint2* hidden;
  const uint2* weight;
  uint2* normed;
  float eps;
};

// Program p processes row p of `row_letters` letters, in PARTS boxes; the last row may be shorter. `out` has as many letters as `part`, with
// GATHERS as many for each rank.
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
  // The next kernel loads its weights while the other ranks' parts are in flight.
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
  __syncthreads();  // all threads have read the numbers
  if (threadIdx.x < PARTS) mail.runs[boxes + threadIdx.x] += 1;
}
