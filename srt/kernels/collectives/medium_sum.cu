// Sums of up to a few MiB over the ranks of a host, through memory that they write for each other. See medium_sum.py, which defines the
// constants in capitals.
//
// A rank's memory has BOXES boxes for each other rank, with a place of 16 bytes for each thread. While nothing has arrived at a place, its
// four words are EMPTY. A program writes its rank's part to the boxes of the same numbers in all other ranks' memory, waits at its own until
// no word is EMPTY, and empties them again. An aligned word of 4 bytes is indivisible and is written once, so who finds it has it. Nothing
// but the data is sent. No fence and no handshake is needed.
//
// EMPTY is a NaN in float32, and two in the types of 16 bits. A part that contains it is sent with another NaN instead. That changes no
// result, because all sums with NaNs are rounded to one and the same NaN.
//
// A run of a box is a launch that uses it. All ranks launch the same sums in the same order, so they count the same runs. They are counted
// on the device, so launches from a graph count as well.
//
// A box has two sides, which runs use alternately. Two suffice: rank r writes to q's memory for run n again in its run n + 2. That began
// after r's launch of run n + 1 had ended, which had read words that q had sent in that launch. And q sent these after its own launch of run
// n had ended, which had read all words of n and had emptied their places. (A launch waits for the kernels before it, and in each launch
// every rank sends words to every other.)

struct Mail {
  u64 memories[8];  // of every rank
  u32* runs;        // [BOXES], the number of each box's next run
  u32* missing;     // in host memory: 1 + the rank on which this one has given up
  u64 patience_ns;
  int rank;
};

struct Sum {
  const uint4* part;    // [num_words] of 16 bytes: this rank's summand
  uint4* out;           // likewise: the sum. NORMS: hidden + sum
  const uint4* hidden;  // NORMS: likewise
  const uint4* weight;  // NORMS: [row_words]
  uint4* normed;        // NORMS: the norm of `out`, by rows
  int num_words;
  int row_words;  // at most PARTS * THREADS; the last row may be shorter
  float eps;
};

constexpr u32 EMPTY = 0xFFFFFFFF;
constexpr u32 OTHER_NAN = 0x7FFFFFFF;
constexpr int LOOKS = 1024;  // polls between two readings of the clock

__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_later_kernels_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void write_place(u64 address, uint4 word) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

__device__ __forceinline__ uint4 look_at(u64 address) {
  uint4 word;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address)
               : "memory");
  return word;
}

// This thread's place for what `from` sends to `to`, in the memory of `to`.
__device__ __forceinline__ u64 place_at(const Mail& mail, u32 run, int box, int to, int from) {
  const int sender = (from - to + RANKS) % RANKS - 1;
  return mail.memories[to] + 16 * ((u64)(((run & 1) * (RANKS - 1) + sender) * BOXES + box) * THREADS + threadIdx.x);
}

__device__ __forceinline__ u32 sendable(u32 word) { return word == EMPTY ? OTHER_NAN : word; }

__device__ __forceinline__ bool has_empty(uint4 word) {
  return word.x == EMPTY || word.y == EMPTY || word.z == EMPTY || word.w == EMPTY;
}

__device__ __forceinline__ void send(const Mail& mail, u32 run, int box, uint4 word) {
  const uint4 sent = make_uint4(sendable(word.x), sendable(word.y), sendable(word.z), sendable(word.w));
#pragma unroll
  for (int to = 0; to < RANKS; to++) {
    if (to != mail.rank) write_place(place_at(mail, run, box, to, mail.rank), sent);
  }
}

// Waits for the parts of all ranks at this thread's place, and empties it.
__device__ __forceinline__ void receive(uint4 (&parts)[RANKS], uint4 mine, const Mail& mail, u32 run, int box) {
  u64 begun = 0;
  for (u32 looks = 1;; looks++) {
    int missing = -1;
#pragma unroll
    for (int from = 0; from < RANKS; from++) {
      parts[from] = mine;
      if (from != mail.rank) parts[from] = look_at(place_at(mail, run, box, mail.rank, from));
    }
#pragma unroll
    for (int from = 0; from < RANKS; from++) {
      if (from != mail.rank && has_empty(parts[from])) missing = from;
    }
    if (missing < 0) break;
    if (looks % LOOKS == 0) {
      const u64 now = nanoseconds();
      if (begun == 0) begun = now;
      if (now - begun > mail.patience_ns) give_up(mail.missing, missing);
    }
  }
#pragma unroll
  for (int from = 0; from < RANKS; from++) {
    if (from != mail.rank) write_place(place_at(mail, run, box, mail.rank, from), make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
  }
}

// Program p processes rows ROWS * p on. Row r has boxes PARTS * r on.
extern "C" __global__ void __launch_bounds__(THREADS) medium_sum(const __grid_constant__ Mail mail, const __grid_constant__ Sum sum) {
  auto word_of = [&](int i) { return i * THREADS + (int)threadIdx.x; };  // of a row, in its box i
  auto first_of = [&](int r) { return ((int)blockIdx.x * ROWS + r) * sum.row_words; };  // word of row r of the program
  auto is_in = [&](int r, int i) { return word_of(i) < min(sum.row_words, sum.num_words - first_of(r)); };
  uint4 weight[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    if (NORMS && word_of(i) < sum.row_words) weight[i] = sum.weight[word_of(i)];
  }
  wait_for_earlier_kernels();

  const int first_box = (int)blockIdx.x * ROWS * PARTS;
  u32 runs[ROWS * PARTS];
  uint4 mine[ROWS * PARTS], hidden[ROWS * PARTS];
#pragma unroll
  for (int n = 0; n < ROWS * PARTS; n++) {
    mine[n] = hidden[n] = make_uint4(0, 0, 0, 0);
    if (first_of(n / PARTS) >= sum.num_words) continue;
    runs[n] = *(const volatile u32*)(mail.runs + first_box + n);
    if (is_in(n / PARTS, n % PARTS)) mine[n] = sum.part[first_of(n / PARTS) + word_of(n % PARTS)];
  }
  // That of the box whose runs this thread counts. Without a condition nothing waits for it here, and at the end it is there.
  const u32 own_run = *(const volatile u32*)(mail.runs + first_box + min((int)threadIdx.x, ROWS * PARTS - 1));
#pragma unroll
  for (int n = 0; n < ROWS * PARTS; n++) {
    if (is_in(n / PARTS, n % PARTS)) send(mail, runs[n], first_box + n, mine[n]);
  }
  // The next kernel loads its weights while the other ranks' parts are in flight.
  let_later_kernels_start();
#pragma unroll
  for (int n = 0; n < ROWS * PARTS; n++) {
    if (NORMS && is_in(n / PARTS, n % PARTS)) hidden[n] = sum.hidden[first_of(n / PARTS) + word_of(n % PARTS)];
  }

  // The first rows are finished while the last ones arrive.
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (first_of(r) >= sum.num_words) break;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const int n = r * PARTS + i;
      if (!is_in(r, i)) continue;
      uint4 parts[RANKS];
      receive(parts, mine[n], mail, runs[n], first_box + n);
      mine[n] = sum_of(parts);
      if (NORMS) mine[n] = sum_of_two(hidden[n], mine[n]);
      if (NORMS) squares += squares_of(mine[n]);
      sum.out[first_of(r) + word_of(i)] = mine[n];
    }
    if (NORMS) {
      const float scale = rsqrtf(sum_over_program(squares, r % 2) / (sum.row_words * 2 * FLOATS) + sum.eps);
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        if (is_in(r, i)) sum.normed[first_of(r) + word_of(i)] = normed_by(mine[r * PARTS + i], scale, weight[i]);
      }
    }
  }
  __syncthreads();  // all threads have read the numbers
  if (threadIdx.x < ROWS * PARTS && first_of(threadIdx.x / PARTS) < sum.num_words) mail.runs[first_box + threadIdx.x] = own_run + 1;
}
