// All layers of a decode step of a few rows, computed by programs that stay on their multiprocessors. See resident_layers.py, which defines
// the constants in capitals.
//
// One warp of a program loads the program's share of all weights, in the order of their use, into a ring of 150 to 200 KB. It never waits
// for results of other programs. The other warps compute the layers. Results that all programs need are exchanged in words of 8 bytes, data
// and tag. A word is written and read as a whole, so a reader that finds the expected tag has the data too, and waits for nothing else. A tag
// is the number of a layer, counted over all steps.
//
// A word is overwritten one layer later. By then all programs have read it: every program computes a share of every product, so a program
// that has all results of a product knows that all programs have read the words before it.
//
// Only as many loads are in flight as keep the memory busy (IN_FLIGHT), because words wait behind weights.
//
// Weights have bfloat16, or e4m3 numbers, which become bfloat16 in registers, or 4-bit ones, which are multiplied as integers (BITS). Those of
// 8 and 4 bits have a scale for each output, or for each SCALE_INPUTS inputs of an output, which sums are multiplied by.

constexpr int WARPS = 15;  // warps that multiply and attend; one more loads. With more there would be too few registers
constexpr int THREADS = 32 * WARPS;
constexpr int UNIT = 8;  // rows of a weight in one multiplication
constexpr int HEADS = QUERY_WIDTH / HEAD_DIM;
constexpr int KV_HEADS = KV_WIDTH / HEAD_DIM;
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int PACKED_WIDTH = QUERY_WIDTH + 2 * KV_WIDTH;
constexpr int LINE_COLUMNS = LINE * 8 / BITS;       // of a weight
constexpr int LINES = CHUNK / LINE_COLUMNS;         // per row of a chunk
constexpr int STAGE_BYTES = UNIT * LINE * LINES;    // blocks of a line of each row, one after the other
constexpr bool IS_PACKED = BITS < 16;
constexpr int LOADING = IS_PACKED ? 4 : 1;  // lanes that load

// The products of a layer: queries, keys and values; attention's output; gates and ups; down.
enum { PACKED, OUTPUT, GATES, DOWN };
constexpr int PRODUCTS = 4;
__device__ constexpr int SLICES[PRODUCTS] = {HIDDEN / CHUNK, QUERY_WIDTH / CHUNK, HIDDEN / CHUNK, INNER / CHUNK};
// A program's share: units of each weight, and pairs of each result
__device__ constexpr int UNITS[PRODUCTS] = {PACKED_WIDTH / UNIT / PROGRAMS, HIDDEN / UNIT / PROGRAMS, 2 * (INNER / UNIT / PROGRAMS),
                                            HIDDEN / UNIT / PROGRAMS};
__device__ constexpr int PAIRS[PRODUCTS] = {PACKED_WIDTH / 2 / PROGRAMS, HIDDEN / 2 / PROGRAMS, INNER / 2 / PROGRAMS,
                                            HIDDEN / 2 / PROGRAMS};
// A product's number of these, chosen by instructions: they would be read from memory if a variable were their index.
template <const int (&OF)[PRODUCTS]>
__device__ __forceinline__ int of(int product) {
  return product == PACKED ? OF[PACKED] : product == OUTPUT ? OF[OUTPUT] : product == GATES ? OF[GATES] : OF[DOWN];
}
constexpr int HIDDEN_PAIRS = HIDDEN / 2 / PROGRAMS;
constexpr int ATTENDED = ROWS * QUERY_WIDTH / PROGRAMS;  // numbers of the heads' outputs that a program combines

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int WIDEST = larger(larger(HIDDEN, QUERY_WIDTH), INNER);
constexpr int X_PITCH = CHUNK / 8 + 4;  // words: of one lane's pairs of columns, in all groups of 8 columns of a chunk
constexpr int X_SLICE = IS_PACKED ? CHUNK / 2 : 4 * X_PITCH;  // of a chunk's columns
constexpr int X_ROW = WIDEST / CHUNK * X_SLICE;
constexpr int LOW_BYTES = WIDEST + 32;  // begin in other banks than the high ones
constexpr int MOST_CHUNKS = larger(larger(UNITS[PACKED] * SLICES[PACKED], UNITS[OUTPUT] * SLICES[OUTPUT]),
                                   larger(UNITS[GATES] * SLICES[GATES], UNITS[DOWN] * SLICES[DOWN]));

// Number of warps for whose results there is room: all, or half where bfloat16 fills the ring.
constexpr int ATTENDING = GROUP <= 2 || IS_PACKED ? WARPS : WARPS / 2;
constexpr int FINISHING = 4;  // lanes that sum up two numbers of a product
constexpr int HALF = HEAD_DIM / 2;
constexpr int AHEAD = 2;  // turns of attention whose keys and values are loaded together
constexpr int PREFETCHED = AHEAD + 16;  // turns whose keys and values are prefetched
constexpr float NOTHING = -1e30f;

static_assert(HEAD_DIM == 128, "a half of a warp has a head, 8 numbers each");
static_assert(PACKED_WIDTH % (UNIT * PROGRAMS) == 0 && HIDDEN % (UNIT * PROGRAMS) == 0 && INNER % (UNIT * PROGRAMS) == 0 &&
              ROWS * QUERY_WIDTH % (2 * PROGRAMS) == 0);
static_assert(STAGES >= WARPS, "a warp that waits for a chunk must know that the one before the last in its place is done with");
static_assert(LOADING <= IN_FLIGHT && IN_FLIGHT <= STAGES);
static_assert(HIDDEN % CHUNK == 0 && QUERY_WIDTH % CHUNK == 0 && INNER % CHUNK == 0 && CHUNK % LINE_COLUMNS == 0);
static_assert(FINISHING * ROWS * HIDDEN_PAIRS <= THREADS && ROWS <= UNIT && GROUP + 2 <= WARPS && ROWS * KV_HEADS * SPLITS <= PROGRAMS);
static_assert(SPLITS <= 16 && (SPLITS & (SPLITS - 1)) == 0);

// Scales and zero points of a program's outputs: for each product [groups, outputs], gates before ups.
constexpr int SUMMED = 128;  // columns whose products are summed up before they are scaled, or a multiple of them
#if BITS < 16
// Bytes for each output: float, or bfloat16 beside 4-bit numbers; or of SHARING outputs, which have equal scales, the first 16 bytes.
constexpr int SCALE_ITEM = SHARING > 1 ? 16 / SHARING : BITS == 8 ? 4 : 2;
__device__ constexpr int groups_of(int inputs) { return SCALE_INPUTS ? inputs / (SCALE_INPUTS ? SCALE_INPUTS : 1) : 1; }
__device__ constexpr int GROUPS[PRODUCTS] = {groups_of(HIDDEN), groups_of(QUERY_WIDTH), groups_of(HIDDEN), groups_of(INNER)};
__device__ constexpr int OUTPUTS[PRODUCTS] = {PACKED_WIDTH / PROGRAMS, HIDDEN / PROGRAMS, INNER / PROGRAMS, HIDDEN / PROGRAMS};
__device__ constexpr int HALVES[PRODUCTS] = {1, 1, 2, 1};
__device__ constexpr int box_of(int groups, int outputs, int item) { return (groups * outputs * item + 127) / 128 * 128; }
__device__ constexpr int SCALE_BOX[PRODUCTS] = {
    box_of(GROUPS[PACKED], OUTPUTS[PACKED], SCALE_ITEM), box_of(GROUPS[OUTPUT], OUTPUTS[OUTPUT], SCALE_ITEM),
    box_of(GROUPS[GATES], OUTPUTS[GATES], SCALE_ITEM), box_of(GROUPS[DOWN], OUTPUTS[DOWN], SCALE_ITEM)};
__device__ constexpr int ZERO_BOX[PRODUCTS] = {
    HAS_ZEROS * box_of(GROUPS[PACKED], OUTPUTS[PACKED], 2), HAS_ZEROS * box_of(GROUPS[OUTPUT], OUTPUTS[OUTPUT], 2),
    HAS_ZEROS * box_of(GROUPS[GATES], OUTPUTS[GATES], 2), HAS_ZEROS * box_of(GROUPS[DOWN], OUTPUTS[DOWN], 2)};
__device__ constexpr int boxes_of(int product) { return HALVES[product] * (SCALE_BOX[product] + ZERO_BOX[product]); }
__device__ constexpr int SCALES_AT[PRODUCTS] = {0, boxes_of(PACKED), boxes_of(PACKED) + boxes_of(OUTPUT),
                                                boxes_of(PACKED) + boxes_of(OUTPUT) + boxes_of(GATES)};
__device__ constexpr int ZEROS_AT[PRODUCTS] = {
    SCALES_AT[PACKED] + SCALE_BOX[PACKED], SCALES_AT[OUTPUT] + SCALE_BOX[OUTPUT], SCALES_AT[GATES] + 2 * SCALE_BOX[GATES],
    SCALES_AT[DOWN] + SCALE_BOX[DOWN]};
constexpr int SCALE_BYTES = SCALES_AT[DOWN] + boxes_of(DOWN);
__device__ constexpr int loaded_scales(int product) {
  return HALVES[product] * GROUPS[product] * OUTPUTS[product] * (SCALE_ITEM + 2 * HAS_ZEROS);
}
static_assert(SCALE_INPUTS % SUMMED == 0 && (BITS == 4 || !HAS_ZEROS) && ROWS == 1 && (SHARING == 1 || BITS == 8));
static_assert(HIDDEN % groups_of(HIDDEN) == 0 && QUERY_WIDTH % groups_of(QUERY_WIDTH) == 0 && INNER % groups_of(INNER) == 0);
#else
__device__ constexpr int loaded_scales(int) { return 0; }
#endif

// Tensor maps of the weights: blocks of a line, with all rows. And of all groups' scales of a program's outputs.
struct LayerMaps {
  TensorMap weights[PRODUCTS];
#if BITS < 16
  TensorMap scales[PRODUCTS];
#endif
#if HAS_ZEROS
  TensorMap zeros[PRODUCTS];
#endif
};

struct Layer {
  const u16* norm;
  const u16* mlp_norm;
  const u16* q_norm;
  const u16* k_norm;
  u16* k_buffer;
  u16* v_buffer;
};

// Where the words that become x have a pair of columns. With 4-bit weights a lane needs each pair beside the one 8 columns further, as W has
// them (`order_operands` in int_weight.py), so these follow each other.
__device__ __forceinline__ u32 place_of_pair(u32 pair) { return BITS == 4 ? pair / 8 * 8 + pair % 4 * 2 + pair / 4 % 2 : pair; }

// Buffers of the exchanged words. Those of all but `packed`, `parts` and `factors` are in the order of `place_of_pair`.
struct Exchange {
  u64* packed;    // [rows, PACKED_WIDTH / 2] pairs
  u64* parts;     // [rows, heads, SPLITS, HEAD_DIM] sums
  u64* factors;   // [rows, heads, SPLITS, 2] maximum and total
  u64* attended;  // [rows, QUERY_WIDTH / 2] pairs
  u64* added;     // [rows, HIDDEN / 2] pairs: the stream after attention
  u64* active;    // [rows, INNER / 2] pairs
  u64* stream;    // [rows, HIDDEN / 2] pairs: the stream after the layer
  u32* tag;       // first tag of the next step
};

struct Step {
  const LayerMaps* maps;
  const Layer* layers;
  const u16* embedded;  // [rows, HIDDEN]
  u16* out;             // [rows, HIDDEN]
  const float* cosines;  // [rows, HALF]
  const float* sines;
  const long long* locations;
  const long long* slots;
  const long long* seq_lens;  // the new position included
  const int* page_table;
  long long page_stride;
  long long k_stride;
  long long v_stride;
  int num_layers;
  float eps;
  float head_eps;
  float scale_log2;
};

struct Words {
  u64 first, second;
};

__device__ __forceinline__ Words load_words(const u64* from) {
  Words words;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(words.first), "=l"(words.second) : "l"(from) : "memory");
  return words;
}

__device__ __forceinline__ u64 load_word(const u64* from) {
  u64 word;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

__device__ __forceinline__ void store_word(u64* to, u32 data, u32 tag) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"((u64)tag << 32 | data) : "memory");
}

__device__ __forceinline__ bool has(u64 word, u32 tag) { return (u32)(word >> 32) == tag; }

// Reads the words at several places. Those that have not arrived are read again together: one after the other, each would take as long as all.
template <int COUNT, class Place>
__device__ __forceinline__ void await(Words (&found)[COUNT], u32 tag, Place place) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) found[i].first = found[i].second = (u64)~tag << 32;  // a tag that is not expected
  bool is_early;
  do {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const u64* from = place(i);
      if (from && !(has(found[i].first, tag) && has(found[i].second, tag))) found[i] = load_words(from);
    }
    is_early = false;
#pragma unroll
    for (int i = 0; i < COUNT; i++) is_early |= place(i) && !(has(found[i].first, tag) && has(found[i].second, tag));
  } while (is_early);
}

__device__ __forceinline__ uint4 load_once(const u16* from) {
  uint4 values;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
               : "l"(from)
               : "memory");
  return values;
}

__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

__device__ __forceinline__ void wait_for_all() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ float exp2_of(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// Attention's data in shared memory, at the place of the products' x and parts.
struct Attention {
  float queries[GROUP][HEAD_DIM];
  u32 new_key[HALF], new_value[HALF];
  float2 factors[ATTENDING][GROUP];
  __align__(16) float sums[ATTENDING][GROUP][HEAD_DIM];
};

// The norms of a layer, which are loaded with its weights, in two loads.
struct First {
  u16 norm[HIDDEN];
  u16 q_norm[HEAD_DIM], k_norm[HEAD_DIM];
  u16 *k_buffer, *v_buffer;
};
struct Second {
  u16 norm[HIDDEN];
};

struct Memory {
  char stages[STAGES * STAGE_BYTES];
#if BITS < 16
  __align__(128) char scales[LAYERS_AHEAD][SCALE_BYTES];
  uint4 nothing[8];  // zeros
#endif
  First first[LAYERS_AHEAD];
  Second second[LAYERS_AHEAD];
  u64 full[STAGES], empty[STAGES];
  u64 first_full[LAYERS_AHEAD], first_empty[LAYERS_AHEAD], second_full[LAYERS_AHEAD], second_empty[LAYERS_AHEAD];
  float squares[ROWS * WARPS];
  union __align__(IS_PACKED ? 128 : 16) {
    struct {
      union {
        u32 x[ROWS * X_ROW];
        char bytes[BITS == 4 ? LOW_BYTES + WIDEST : 1];  // of x as integers: the high ones, then the low ones
      };
      float parts[MOST_CHUNKS * ROWS * UNIT];  // [chunk, row, UNIT]
#if BITS < 16
      float2 factors[BITS == 4 ? 2 * WIDEST / SUMMED : 1];  // of x as integers; and what zero points of 8, or of 1, add
#endif
    };
    Attention attention;
  };
};

__device__ __forceinline__ void load_bytes(const void* to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address_of(to)),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

#if BITS < 16
// Loads the scales and zero points of a product.
__device__ __forceinline__ void load_scales(Memory& memory, const LayerMaps& maps, int product, int place, u32 barrier) {
  const int halves = HALVES[product];
  const u32 to = address_of(memory.scales[place] + SCALES_AT[product]);
  for (int half = 0; half < halves; half++) {
    const int output = half * INNER + blockIdx.x * OUTPUTS[product];
#if SHARING > 1
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2}], [%4];" ::"r"(
            to + half * SCALE_BOX[product]),
        "l"(&maps.scales[product]), "r"(0), "r"(output / SHARING), "r"(barrier)
        : "memory");
#else
    load_block(to + half * SCALE_BOX[product], &maps.scales[product], output, 0, barrier);
#endif
#if HAS_ZEROS
    load_block(to + halves * SCALE_BOX[product] + half * ZERO_BOX[product], &maps.zeros[product], output, 0, barrier);
#endif
  }
}
#endif

// Loads everything that the other warps need, in their order. Run by LOADING lanes of a warp, which wait for room together: one thread that waits for each chunk by itself takes longer than a chunk of packed numbers takes to come.
__device__ __forceinline__ void load_layers(Memory& memory, const Step& step) {
  const u64 policy = reading_once();
  const u32 full = address_of(memory.full), empty = address_of(memory.empty), stages = address_of(memory.stages);
  const int lane = threadIdx.x - THREADS;
  int begin = 0;  // number of the product's first chunk
  for (int i = 0; i < step.num_layers; i++) {
    const int place = i % LAYERS_AHEAD, turn = i / LAYERS_AHEAD;
    const Layer& layer = step.layers[i];
    for (int product = 0; product < PRODUCTS; product++) {
      const TensorMap* map = &step.maps[i].weights[product];
      asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
      if (product == PACKED && lane == 0) {
        First& to = memory.first[place];
        const u32 barrier = address_of(memory.first_full + place);
        if (turn > 0) wait_for(address_of(memory.first_empty + place), (turn - 1) & 1);
        expect_bytes(barrier, 2 * HIDDEN + (HEAD_NORM ? 4 * HEAD_DIM : 0) + 16 + loaded_scales(PACKED) + loaded_scales(OUTPUT));
        load_bytes(to.norm, layer.norm, 2 * HIDDEN, barrier);
        if (HEAD_NORM) load_bytes(to.q_norm, layer.q_norm, 2 * HEAD_DIM, barrier);
        if (HEAD_NORM) load_bytes(to.k_norm, layer.k_norm, 2 * HEAD_DIM, barrier);
        load_bytes(&to.k_buffer, &layer.k_buffer, 16, barrier);
#if BITS < 16
        load_scales(memory, step.maps[i], PACKED, place, barrier);
        load_scales(memory, step.maps[i], OUTPUT, place, barrier);
#endif
      }
      if (product == OUTPUT && lane == 0) {
        const u32 barrier = address_of(memory.second_full + place);
        if (turn > 0) wait_for(address_of(memory.second_empty + place), (turn - 1) & 1);
        expect_bytes(barrier, 2 * HIDDEN + loaded_scales(GATES) + loaded_scales(DOWN));
        load_bytes(memory.second[place].norm, layer.mlp_norm, 2 * HIDDEN, barrier);
#if BITS < 16
        load_scales(memory, step.maps[i], GATES, place, barrier);
        load_scales(memory, step.maps[i], DOWN, place, barrier);
#endif
      }
      const int units = of<UNITS>(product), slices = of<SLICES>(product), chunks = units * slices;
      int stage = (begin + lane) % STAGES, round = (begin + lane) / STAGES, unit = lane / slices, slice = lane % slices;
      for (int index = lane; index - lane < chunks; index += LOADING) {
        const bool is_mine = index < chunks;
        if (is_mine && round > 0) wait_for(empty + 8 * stage, (round - 1) & 1);
        if (is_mine && begin + index >= IN_FLIGHT) {
          const bool is_before = stage < IN_FLIGHT;  // whether that chunk was in the round before
          wait_for(full + 8 * (stage - IN_FLIGHT + (is_before ? STAGES : 0)), (round - is_before) & 1);
        }
        if (LOADING > 1) __syncwarp((1 << LOADING) - 1);
        int row = (blockIdx.x * units + unit) * UNIT;
        if (product == GATES) row = unit % 2 * INNER + (blockIdx.x * (units / 2) + unit / 2) * UNIT;
        if (is_mine) {
          expect_bytes(full + 8 * stage, STAGE_BYTES);
          asm volatile(
              "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
              "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(stages + stage * STAGE_BYTES),
              "l"(map), "r"(0), "r"(row), "r"(slice * LINES), "r"(full + 8 * stage), "l"(policy)
              : "memory");
        }
        if ((stage += LOADING) >= STAGES) stage -= STAGES, round++;
        for (slice += LOADING; slice >= slices; slice -= slices) unit++;
      }
      begin += chunks;
    }
  }
}

#if BITS < 16
__device__ __forceinline__ u32 permuted(u32 low, u32 high, u32 selector) {
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}

__device__ __forceinline__ u32 product_of_pairs(u32 a, u32 b) {
  u32 result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

__device__ __forceinline__ u32 larger_of_pairs(u32 a, u32 b) {
  u32 result;
  asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Two e4m3 numbers as bfloat16, divided by 2 ** 120: their bits are moved to the same places. x is multiplied by X_FACTOR in turn, so that
// no product becomes too small.
__device__ __forceinline__ u32 from_e4m3(u32 bytes, u32 selector) {
  return permuted(bytes, 0, selector) << 4 & 0x87F087F0;  // each number behind a byte of its sign
}
constexpr u32 FIRST_TWO = 0x9180, LAST_TWO = 0xB3A2;
constexpr float X_FACTOR = BITS == 8 ? 0x1p64f : 1.0f;
constexpr float PRODUCT_FACTOR = 0x1p56f;

#if BITS == 8
// Stores 4 columns of x, from column 4 * i on, where the lanes read them that multiply them: see `multiply`.
__device__ __forceinline__ void place_columns(Memory& memory, int i, u32 low, u32 high) {
  const int line = i / (LINE_COLUMNS / 4), chunk = i % (LINE_COLUMNS / 4) / (LINE_COLUMNS / 32), word = i % 4;
  u32* to = memory.x + line * (LINE_COLUMNS / 2) + chunk % 2 * (LINE_COLUMNS / 4) + chunk / 2 * 8;
  *(uint2*)(to + word % 2 * 4 + word / 2 * 2) = make_uint2(low, high);
}
#else
// Stores the 4 columns of x in two words as integers, in the order of W's bytes: the first column, that 8 further, and those that follow
// these. A warp has the SUMMED columns that share a factor, a power of two with which the largest takes 15 bits with its sign: bfloat16 from
// 1 / 64 of it on are exact. Each is 256 times a byte and another byte, both with signs.
__device__ __forceinline__ void place_columns(Memory& memory, int i, u32 low, u32 high) {
  const u32 both = larger_of_pairs(low & 0x7FFF7FFF, high & 0x7FFF7FFF);
  u32 most = max(both & 0xFFFF, both >> 16);
  asm("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(most) : "r"(most));
  const u32 exponent = max(most >> 7, 14u);
  const float factor = __uint_as_float(267 - exponent << 23);  // 2 ** (13 - the exponent without its bias)
  constexpr float ROUNDING = 12582912 + 128;  // leaves an integer in the last bits, and 128 makes the low byte's rest positive
  const u32 a = __float_as_uint(low_of(low) * factor + ROUNDING), b = __float_as_uint(high_of(low) * factor + ROUNDING);
  const u32 c = __float_as_uint(low_of(high) * factor + ROUNDING), d = __float_as_uint(high_of(high) * factor + ROUNDING);
  const u32 ac = permuted(a, c, 0x5140), bd = permuted(b, d, 0x5140);  // the low bytes, then the high ones
  const u32 low_bytes = permuted(ac, bd, 0x5410) ^ 0x80808080, high_bytes = permuted(ac, bd, 0x7632);
  char* to = memory.bytes + 4 * i;
  *(u32*)to = high_bytes, *(u32*)(to + LOW_BYTES) = low_bytes;
  int sum = __dp4a((int)high_bytes, 0x01010101, 0) * 256 + __dp4a((int)low_bytes, 0x01010101, 0);
  asm("redux.sync.add.s32 %0, %1, 0xFFFFFFFF;" : "=r"(sum) : "r"(sum));
  if (threadIdx.x % 32 == 0) {
    const float scale = exponent == 255 ? __uint_as_float(0x7FC00000) : __uint_as_float(exponent - 13 << 23);
    const float offset = scale * sum * (HAS_ZEROS ? 1 : 8);
    // Of numbers in the low halves of bytes, and in the high ones, which are 16 times larger.
    memory.factors[i / 32] = make_float2(scale, offset), memory.factors[WIDEST / SUMMED + i / 32] = make_float2(scale / 16, 0);
  }
}
#endif
#else
constexpr float X_FACTOR = 1;

// Stores 4 columns of x, from column 4 * i on, where lanes read them.
__device__ __forceinline__ void place_columns(u32* row, int i, u32 low, u32 high) {
  const int inside = i % (CHUNK / 4);
  u32* to = row + i / (CHUNK / 4) * X_SLICE + inside % 2 * 2 * X_PITCH + inside / 2;
  to[0] = low, to[X_PITCH] = high;
}
#endif

// Copies x of a product, computed by other programs, to where lanes read it. With `norm`, x is multiplied by these weights, and each warp
// stores its sum of squares; the norm's factor is applied to the product.
__device__ __forceinline__ void take(Memory& memory, const u64* words, u32 tag, int size, const u16* norm) {
  constexpr int TOGETHER = HIDDEN <= 2048 ? 2 : 4;  // loads in flight per thread
#pragma unroll 1
  for (int row = 0; row < ROWS; row++, words += size / 2) {
    float total = 0;
#pragma unroll 1
    for (int first = threadIdx.x; first < size / 4; first += TOGETHER * THREADS) {
      Words found[TOGETHER];
      await(found, tag, [&](int j) { return first + j * THREADS < size / 4 ? words + 2 * (first + j * THREADS) : nullptr; });
#pragma unroll
      for (int j = 0; j < TOGETHER; j++) {
        const int i = first + j * THREADS;
        if (i >= size / 4) break;
        u32 low = (u32)found[j].first, high = (u32)found[j].second;
        if (norm) {
          const u16* const of_first = norm + (BITS == 4 ? i / 4 * 16 + i % 4 * 2 : 4 * i);
          const uint2 weights = BITS == 4 ? make_uint2(*(const u32*)of_first, *(const u32*)(of_first + 8)) : *(const uint2*)of_first;
          const float a = low_of(low), b = high_of(low), c = low_of(high), d = high_of(high);
          total += a * a + b * b + c * c + d * d;
          low = pair_of(a * low_of(weights.x) * X_FACTOR, b * high_of(weights.x) * X_FACTOR);
          high = pair_of(c * low_of(weights.y) * X_FACTOR, d * high_of(weights.y) * X_FACTOR);
        }
#if BITS == 16
        place_columns(memory.x + row * X_ROW, i, low, high);
#else
        if (BITS == 8 && !norm) low = product_of_pairs(low, 0x5F805F80), high = product_of_pairs(high, 0x5F805F80);
        place_columns(memory, i, low, high);
#endif
      }
    }
    if (norm) {
      total = sum_over(total, 32);
      if (threadIdx.x % 32 == 0) memory.squares[row * WARPS + threadIdx.x / 32] = total;
    }
  }
}

#if BITS == 16
// The operands of lanes for 64 columns: of a unit, and of x.
//
// An instruction multiplies 16 rows of 16 columns, with 8 rows in a register. Here its rows from the 8th on hold other columns of x. So with
// the first and third 8 columns of a unit, the first 8 rows of the result are the products with x's first and third 8 columns; and with the
// unit's second and fourth 8 columns, the other rows are the products with x's second and fourth. The other halves of the sums have no
// meaning, but registers can be used as they are loaded. Missing rows of x are replaced by its first row.
struct Operands {
  u32 pairs[8];
  uint4 x[2];

  __device__ __forceinline__ void load(u32 even, u32 odd, const uint4* values) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(even)
                 : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[4]), "=r"(pairs[5]), "=r"(pairs[6]), "=r"(pairs[7])
                 : "r"(odd)
                 : "memory");
    x[0] = values[0], x[1] = values[1];
  }

  __device__ __forceinline__ void multiply(float (&sums)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 rows = x[i / 2];
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
          : "r"(rows.x), "r"(rows.y), "r"(rows.z), "r"(rows.w), "r"(pairs[2 * i]), "r"(pairs[2 * i + 1]));
    }
  }
};

// Multiplies x with a program's chunks, which are in the ring from chunk `begin` on. Warps take the chunks in turn.
__device__ __forceinline__ void multiply(Memory& memory, int product, int begin, int) {
  constexpr int BLOCKS = CHUNK / 64;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, x_row = lane / 4, chunks = of<UNITS>(product) * of<SLICES>(product);
  const int eighth = lane / 16 + lane / 8 % 2 * 2;  // of 64 columns, or the fourth after it; its place depends on the row
  const u32 of_even = (eighth ^ lane % 8) * 16, of_odd = (eighth + 4 ^ lane % 8) * 16;
#pragma unroll 1
  for (int i = (warp + WARPS - begin % WARPS) % WARPS; i < chunks; i += WARPS) {
    const int stage = (begin + i) % STAGES, round = (begin + i) / STAGES;
    const int slice = product == OUTPUT ? i % SLICES[OUTPUT] : product == DOWN ? i % SLICES[DOWN] : i % SLICES[PACKED];
    const u32 full = address_of(memory.full + stage), empty = address_of(memory.empty + stage);
    const u32 w = address_of(memory.stages) + stage * STAGE_BYTES + lane % 8 * LINE;
    const uint4* values = (const uint4*)(memory.x + (x_row < ROWS ? x_row : 0) * X_ROW + slice * X_SLICE + lane % 4 * X_PITCH);
    float sums[4][4] = {};
    if (round > 0) wait_for(empty, (round - 1) & 1);  // another warp may still read the previous chunk in this place
    wait_for(full, round & 1);
    Operands operands[2];
    operands[0].load(w + of_even, w + of_odd, values);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      const int next = block + 1;
      if (next < BLOCKS) operands[next % 2].load(w + next * UNIT * LINE + of_even, w + next * UNIT * LINE + of_odd, values + 2 * next);
      operands[block % 2].multiply(sums);
    }
    arrive_after_reads(empty);
    if (x_row < ROWS) {
      const float first = sums[0][0] + sums[1][2] + sums[2][0] + sums[3][2];
      const float second = sums[0][1] + sums[1][3] + sums[2][1] + sums[3][3];
      *(float2*)(memory.parts + (i * ROWS + x_row) * UNIT + lane % 4 * 2) = make_float2(first, second);
    }
  }
}

#elif BITS == 4
// Four integers of 8 bits in each word: without signs, and with.
__device__ __forceinline__ void multiply_bytes(int (&sums)[4], u32 a, u32 b, u32 c, u32 d, u32 x, u32 y) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(y));
}

// Multiplies x with a program's chunks, which are in the ring from chunk `begin` on. Warps take the chunks in turn.
//
// Lane (row, t) reads 16 bytes of row `row` of a unit at a time: of a line's eight, those numbered 2 t, then 2 t + 1. Two words of them are the
// operand of an instruction, which multiplies 16 rows of 32 bytes: the first 8 rows are the low halves of the bytes, and the other 8 the
// high halves where they are. x is the other operand, with 8 columns: for low halves and high halves, for the two SUMMED columns of a line,
// the high bytes and the low bytes of x. The columns for the line's first half are zero where t is 2 or 3, and those for the second where
// t is 0 or 1. So of the low halves, lane t = 0 gets the sums of a line's first half, and t = 1 those of the second; of the high halves
// t = 2 and t = 3. Other sums have no meaning.
__device__ __forceinline__ void multiply(Memory& memory, int product, int begin, int place) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  const int slices = of<SLICES>(product), chunks = of<UNITS>(product) * slices, outputs = of<OUTPUTS>(product);
  const bool has_x = row / 2 % 2 == t / 2;
  const char* x = has_x ? memory.bytes + row % 2 * LOW_BYTES + row / 4 * 16 + t * 64 : (const char*)memory.nothing + (row < 4 ? 16 : 0);
  const int x_line = has_x ? LINE_COLUMNS : 0, x_turn = has_x ? 32 : 0, x_slice = has_x ? CHUNK : 0;
  const char* of_lane = memory.stages + row * LINE;
  const int places[2] = {(2 * t ^ row) * 16, (2 * t + 1 ^ row) * 16};
  const float2* factors = memory.factors + t % 2 + (t < 2 ? 0 : WIDEST / SUMMED);
  int i = (warp + WARPS - begin % WARPS) % WARPS, stage = (begin + i) % STAGES, round = (begin + i) / STAGES;
#pragma unroll 1
  for (; i < chunks; i += WARPS) {
    const int unit = product == OUTPUT ? i / SLICES[OUTPUT] : product == DOWN ? i / SLICES[DOWN] : i / SLICES[PACKED];
    const int slice = i - unit * slices, half = product == GATES ? unit % 2 : 0;
    const int output = (product == GATES ? unit / 2 : unit) * UNIT + row;
    const char* scales = memory.scales[place] + of<SCALES_AT>(product) + half * SCALE_BOX[GATES];
#if HAS_ZEROS
    const char* zeros = memory.scales[place] + of<ZEROS_AT>(product) + half * ZERO_BOX[GATES];
#endif
    const u32 full = address_of(memory.full + stage), empty = address_of(memory.empty + stage);
    const char* w = of_lane + stage * STAGE_BYTES;
    const char* columns = x + slice * x_slice;
    float total = 0;
    if (round > 0) wait_for(empty, (round - 1) & 1);  // another warp may still read the previous chunk in this place
    wait_for(full, round & 1);
#pragma unroll
    for (int line = 0; line < LINES; line++) {
      int sums[4] = {};
#pragma unroll
      for (int turn = 0; turn < 2; turn++) {
        const uint4 words = *(const uint4*)(w + line * UNIT * LINE + places[turn]);
        const uint4 four = *(const uint4*)(columns + line * x_line + turn * x_turn);
        multiply_bytes(sums, words.x & 0x0F0F0F0F, words.x & 0xF0F0F0F0, words.y & 0x0F0F0F0F, words.y & 0xF0F0F0F0, four.x, four.y);
        multiply_bytes(sums, words.z & 0x0F0F0F0F, words.z & 0xF0F0F0F0, words.w & 0x0F0F0F0F, words.w & 0xF0F0F0F0, four.z, four.w);
      }
      const float sum = (float)(t < 2 ? sums[0] * 256 + sums[1] : sums[2] * 256 + sums[3]);
      const int summed = (slice * LINES + line) * (LINE_COLUMNS / SUMMED);
      const int at = (SCALE_INPUTS ? (summed + t % 2) / (SCALE_INPUTS ? SCALE_INPUTS / SUMMED : 1) : 0) * outputs + output;
      const float2 factor = factors[summed];
#if HAS_ZEROS
      const float zero = ((const short*)zeros)[at];
      total += float_of(((const u16*)scales)[at]) * (sum * factor.x - zero * factor.y);
#else
      total += float_of(((const u16*)scales)[at]) * (sum * factor.x - factor.y);
#endif
    }
    arrive_after_reads(empty);
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (t == 0) memory.parts[i * UNIT + row] = total;
    if ((stage += WARPS) >= STAGES) stage -= STAGES, round++;
  }
}
#else
__device__ __forceinline__ void multiply_pairs(float (&sums)[4], u32 a, u32 b, u32 c, u32 d, u32 x, u32 y) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(y));
}

// Multiplies x with a program's chunks, which are in the ring from chunk `begin` on. Warps take the chunks in turn.
//
// Lane (row, t) reads 16 bytes of row `row` of a unit at a time: of a line's eight, those numbered 2 t, then 2 t + 1. They are the operand
// of two instructions. An instruction multiplies 16 rows; here the first 8 have some of the unit's columns and the other 8 have others. x, as
// columns of the other operand, is there twice: column 0 has what belongs to the first 8 rows, and column 1 what belongs to the others. So
// lanes with t = 0 get the sum. Other sums have no meaning.
__device__ __forceinline__ void multiply(Memory& memory, int product, int begin, int place) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  const int chunks = of<UNITS>(product) * of<SLICES>(product), outputs = of<OUTPUTS>(product);
  const int operand = t * 2 + row % 2;  // in 16 bytes
#pragma unroll 1
  for (int i = (warp + WARPS - begin % WARPS) % WARPS; i < chunks; i += WARPS) {
    const int stage = (begin + i) % STAGES, round = (begin + i) / STAGES;
    const int unit = product == OUTPUT ? i / SLICES[OUTPUT] : product == DOWN ? i / SLICES[DOWN] : i / SLICES[PACKED];
    const int slice = i - unit * of<SLICES>(product), half = product == GATES ? unit % 2 : 0;
    const char* scales = memory.scales[place] + of<SCALES_AT>(product) + half * SCALE_BOX[GATES];
    const int output = (product == GATES ? unit / 2 : unit) * UNIT + row;
    const u32 full = address_of(memory.full + stage), empty = address_of(memory.empty + stage);
    const char* w = memory.stages + stage * STAGE_BYTES + row * LINE;
    const uint4* x = (const uint4*)(memory.x + slice * X_SLICE) + operand;
    float sums[2][4] = {}, total = 0;
    if (round > 0) wait_for(empty, (round - 1) & 1);  // another warp may still read the previous chunk in this place
    wait_for(full, round & 1);
#pragma unroll
    for (int line = 0; line < LINES; line++) {
#pragma unroll
      for (int turn = 0; turn < 2; turn++) {
        const uint4 words = *(const uint4*)(w + line * UNIT * LINE + ((2 * t + turn) ^ row) * 16);
        const uint4 columns = x[(2 * line + turn) * 8];
        multiply_pairs(sums[0], from_e4m3(words.x, FIRST_TWO), from_e4m3(words.y, FIRST_TWO), from_e4m3(words.x, LAST_TWO),
                       from_e4m3(words.y, LAST_TWO), columns.x, columns.y);
        multiply_pairs(sums[1], from_e4m3(words.z, FIRST_TWO), from_e4m3(words.w, FIRST_TWO), from_e4m3(words.z, LAST_TWO),
                       from_e4m3(words.w, LAST_TWO), columns.z, columns.w);
      }
      if (!SCALE_INPUTS && line + 1 < LINES) continue;
      const float sum = (sums[0][0] + sums[1][0]) + (sums[0][3] + sums[1][3]);
#pragma unroll
      for (int j = 0; j < 4; j++) sums[0][j] = sums[1][j] = 0;
      const int summed = (slice * LINES + line) * (LINE_COLUMNS / SUMMED);
      const int at = (SCALE_INPUTS ? summed / (SCALE_INPUTS ? SCALE_INPUTS / SUMMED : 1) : 0) * outputs + output;
      if (SHARING > 1) {
        total += sum * PRODUCT_FACTOR * *(const float*)(scales + (at - output % SHARING) * SCALE_ITEM);
      } else {
        total += sum * PRODUCT_FACTOR * ((const float*)scales)[at];
      }
    }
    arrive_after_reads(empty);
    if (t == 0) memory.parts[i * UNIT + row] = total;
  }
}
#endif

// Two neighbouring numbers of a row of a product, summed up by FINISHING lanes.
__device__ __forceinline__ float2 sums_of(const Memory& memory, int unit, int slices, int row, int column) {
  float2 total = make_float2(0, 0);
  const float* parts = memory.parts + (unit * slices * ROWS + row) * UNIT + column;
#pragma unroll 4
  for (int slice = threadIdx.x % FINISHING; slice < slices; slice += FINISHING) {
    const float2 part = *(const float2*)(parts + slice * ROWS * UNIT);
    total.x += part.x, total.y += part.y;
  }
  return make_float2(sum_over(total.x, FINISHING), sum_over(total.y, FINISHING));
}

// Sends the results of a product to all programs. `mine` is the thread's pair of the stream, to which two of the products are added.
__device__ __forceinline__ void finish(const Memory& memory, int product, u32& mine, u64* words, u32 tag, float eps) {
  const int slices = of<SLICES>(product), pairs = of<PAIRS>(product);
  const bool is_added = product == OUTPUT || product == DOWN;
#pragma unroll 1
  for (int first = threadIdx.x / 32 * 32; first < FINISHING * ROWS * pairs; first += THREADS) {  // whole warps
    const int index = min((first + (int)threadIdx.x % 32) / FINISHING, ROWS * pairs - 1);
    const int row = ROWS == 1 ? 0 : index / pairs, pair = index - row * pairs;
    const int unit = pair / (UNIT / 2), column = pair % (UNIT / 2) * 2;
    float2 result = sums_of(memory, product == GATES ? 2 * unit : unit, slices, row, column);
    if (is_added) {
      result.x += low_of(mine), result.y += high_of(mine);
    } else {
      float squares = 0;
#pragma unroll
      for (int warp = 0; warp < WARPS; warp += FINISHING) {
        const int one = warp + threadIdx.x % FINISHING;
        if (one < WARPS) squares += memory.squares[row * WARPS + one];
      }
      const float scale = rsqrtf(sum_over(squares, FINISHING) / HIDDEN + eps);
      result.x *= scale, result.y *= scale;
      if (product == GATES) {
        const float2 up = sums_of(memory, 2 * unit + 1, slices, row, column);
        result.x = result.x / (1 + __expf(-result.x)) * (up.x * scale);
        result.y = result.y / (1 + __expf(-result.y)) * (up.y * scale);
      }
    }
    const u32 both = pair_of(result.x, result.y);
    if (is_added) mine = both;
    const int place = (row * PROGRAMS + blockIdx.x) * pairs + pair;
    if (threadIdx.x % FINISHING == 0) store_word(words + (product == PACKED ? place : place_of_pair(place)), both, tag);
  }
}

// Norms (if heads are normed) and rotates a head. Lane i has columns 2 i, 2 i + 1 and the two that are half a head further on.
__device__ __forceinline__ void turn_head(float (&head)[4], const u16* norm, float2 cosine, float2 sine, float eps) {
  if (HEAD_NORM) {
    const u32 first = ((const u32*)norm)[threadIdx.x % 32], second = ((const u32*)norm)[threadIdx.x % 32 + HALF / 2];
    const float squares = head[0] * head[0] + head[1] * head[1] + head[2] * head[2] + head[3] * head[3];
    const float scale = rsqrtf(sum_over(squares, 32) / HEAD_DIM + eps);
    head[0] *= scale * low_of(first), head[1] *= scale * high_of(first);
    head[2] *= scale * low_of(second), head[3] *= scale * high_of(second);
  }
  const float a = head[0], b = head[1], c = head[2], d = head[3];
  head[0] = a * cosine.x - c * sine.x, head[1] = b * cosine.y - d * sine.y;
  head[2] = c * cosine.x + a * sine.x, head[3] = d * cosine.y + b * sine.y;
}

// The result of half a warp for its positions. Lane i has columns 8 i to 8 i + 7.
struct Found {
  float peak[GROUP], total[GROUP], sums[GROUP][8];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int head = 0; head < GROUP; head++) {
      peak[head] = NOTHING, total[head] = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) sums[head][i] = 0;
    }
  }

  __device__ __forceinline__ void attend(const float (&queries)[GROUP][HEAD_DIM], const uint4 (&keys)[AHEAD],
                                         const uint4 (&values)[AHEAD], const bool (&is_there)[AHEAD]) {
    const int columns = threadIdx.x % 16 * 8;
#pragma unroll
    for (int head = 0; head < GROUP; head++) {
      float scores[AHEAD], most = peak[head];
      const float4 q = *(const float4*)(queries[head] + columns), p = *(const float4*)(queries[head] + columns + 4);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const uint4 k = keys[i];
        float score = q.x * low_of(k.x) + q.y * high_of(k.x) + q.z * low_of(k.y) + q.w * high_of(k.y) + p.x * low_of(k.z) +
                      p.y * high_of(k.z) + p.z * low_of(k.w) + p.w * high_of(k.w);
#pragma unroll
        for (int distance = 8; distance > 0; distance /= 2) score += __shfl_xor_sync(~0u, score, distance);
        scores[i] = is_there[i] ? score : NOTHING;
        most = fmaxf(most, scores[i]);
      }
      const float shrink = exp2_of(peak[head] - most);
      peak[head] = most, total[head] *= shrink;
#pragma unroll
      for (int i = 0; i < 8; i++) sums[head][i] *= shrink;
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const float weight = is_there[i] ? exp2_of(scores[i] - most) : 0.0f;
        const uint4 v = values[i];
        total[head] += weight;
        sums[head][0] += weight * low_of(v.x), sums[head][1] += weight * high_of(v.x);
        sums[head][2] += weight * low_of(v.y), sums[head][3] += weight * high_of(v.y);
        sums[head][4] += weight * low_of(v.z), sums[head][5] += weight * high_of(v.z);
        sums[head][6] += weight * low_of(v.w), sums[head][7] += weight * high_of(v.w);
      }
    }
  }

  // Combines both halves of the warp, and stores the result for all warps.
  __device__ __forceinline__ void leave(Attention& own) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane / 16, columns = lane % 16 * 8;
#pragma unroll
    for (int head = 0; head < GROUP; head++) {
      const float most = fmaxf(peak[head], __shfl_xor_sync(~0u, peak[head], 16)), shrink = exp2_of(peak[head] - most);
      const float mine = total[head] * shrink, all = mine + __shfl_xor_sync(~0u, mine, 16);
      float kept[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {  // each half keeps one half of the columns, and gives the other
        const float first = sums[head][i] * shrink, second = sums[head][i + 4] * shrink;
        kept[i] = (half ? second : first) + __shfl_xor_sync(~0u, half ? first : second, 16);
      }
      *(float4*)(own.sums[warp][head] + columns + 4 * half) = make_float4(kept[0], kept[1], kept[2], kept[3]);
      if (lane == 0) own.factors[warp][head] = make_float2(most, all);
    }
  }
};

// A program's part of attention: positions of one row, for the query heads of one KV head.
struct Share {
  int row, kv_head, split;
  int begin, end, newest;  // the newest position is received from other programs, not read from the KV memory
  long long new_location;
  const int* pages;
  float2 cosine, sine;
  u64 first_locations[AHEAD];

  __device__ __forceinline__ Share(const Step& step) {
    const int program = blockIdx.x, lane = threadIdx.x % 32;
    row = program / (KV_HEADS * SPLITS), kv_head = program / SPLITS % KV_HEADS, split = program % SPLITS;
    begin = end = newest = 0, new_location = 0, pages = step.page_table;
    if (!has_work()) return;
    const int length = (int)step.seq_lens[row], share = (length + SPLITS - 1) / SPLITS;
    begin = min(split * share, length), end = min(begin + share, length), newest = length - 1;
    pages += step.slots[row] * step.page_stride;
    new_location = step.locations[row];
    cosine = *(const float2*)(step.cosines + row * HALF + 2 * lane);
    sine = *(const float2*)(step.sines + row * HALF + 2 * lane);
#pragma unroll
    for (int turn = 0; turn < AHEAD; turn++) first_locations[turn] = is_old(turn) ? location_of(turn) : 0;
  }

  __device__ __forceinline__ bool has_work() const { return row < ROWS; }
  __device__ __forceinline__ bool has_newest() const { return begin <= newest && newest < end; }
  __device__ __forceinline__ int position_of(int turn) const {
    return begin + (turn * ATTENDING + threadIdx.x / 32) * 2 + threadIdx.x % 32 / 16;
  }
  __device__ __forceinline__ bool is_there(int turn) const { return threadIdx.x < 32 * ATTENDING && position_of(turn) < end; }
  __device__ __forceinline__ bool is_old(int turn) const { return is_there(turn) && position_of(turn) != newest; }
  __device__ __forceinline__ u64 location_of(int turn) const {
    const int position = position_of(turn);
    int page;  // loaded ahead of its use
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(page) : "l"(pages + position / PAGE_SIZE));
    return (u64)page * PAGE_SIZE + position % PAGE_SIZE;
  }

  // Prefetches keys and values.
  __device__ __forceinline__ void bring(const Step& step, const First& layer) const {
    if (threadIdx.x % 8) return;
    const int columns = kv_head * HEAD_DIM + threadIdx.x % 16 * 8;
#pragma unroll 1
    for (int first = 0; first < PREFETCHED && is_old(first); first += AHEAD) {
      u64 locations[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        locations[j] = first == 0 ? first_locations[j] : is_old(first + j) ? location_of(first + j) : 0;
      }
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        if (!is_old(first + j)) continue;
        prefetch(layer.k_buffer + locations[j] * step.k_stride + columns);
        prefetch(layer.v_buffer + locations[j] * step.v_stride + columns);
      }
    }
  }

  // Computes the results of the group's heads for these positions, and sends them to all programs.
  __device__ __forceinline__ void attend(Attention& own, const Step& step, const Exchange& exchange, const First& layer, u32 tag) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = lane % 16 * 8;
    const u16 *k_head = layer.k_buffer + kv_head * HEAD_DIM, *v_head = layer.v_buffer + kv_head * HEAD_DIM;
    uint4 keys[AHEAD], values[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      keys[j] = values[j] = make_uint4(0, 0, 0, 0);
      if (is_old(j)) {
        keys[j] = load_once(k_head + first_locations[j] * step.k_stride + columns);
        values[j] = load_once(v_head + first_locations[j] * step.v_stride + columns);
      }
    }
    wait_for_all();  // this part of shared memory is free
    if (warp < GROUP || (has_newest() && warp < GROUP + 2)) {
      const int head_of_packed = warp < GROUP ? kv_head * GROUP + warp : HEADS + (warp - GROUP) * KV_HEADS + kv_head;
      const u64* from = exchange.packed + row * (PACKED_WIDTH / 2) + head_of_packed * HALF + lane;
      u64 words[2];
      do {
        words[0] = load_word(from), words[1] = load_word(from + HALF / 2);
      } while (!has(words[0], tag) || !has(words[1], tag));
      u32 first = (u32)words[0], second = (u32)words[1];
      if (warp <= GROUP) {
        float head[4] = {low_of(first), high_of(first), low_of(second), high_of(second)};
        turn_head(head, warp < GROUP ? layer.q_norm : layer.k_norm, cosine, sine, step.head_eps);
        first = pair_of(head[0], head[1]), second = pair_of(head[2], head[3]);
      }
      if (warp < GROUP) {
        float* to = own.queries[warp] + 2 * lane;
        *(float2*)to = make_float2(low_of(first) * step.scale_log2, high_of(first) * step.scale_log2);
        *(float2*)(to + HALF) = make_float2(low_of(second) * step.scale_log2, high_of(second) * step.scale_log2);
      } else {
        const bool is_key = warp == GROUP;
        u32* near = is_key ? own.new_key : own.new_value;
        u16* far = is_key ? layer.k_buffer + new_location * step.k_stride : layer.v_buffer + new_location * step.v_stride;
        u32* memory = (u32*)(far + kv_head * HEAD_DIM);
        near[lane] = memory[lane] = first, near[lane + HALF / 2] = memory[lane + HALF / 2] = second;
      }
    }
    wait_for_all();

    const int active = min((end - begin + 1) / 2, ATTENDING);  // warps that have positions
    if (warp < active) {
      Found found;
      found.clear();
      u64 next_locations[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; j++) next_locations[j] = is_old(AHEAD + j) ? location_of(AHEAD + j) : 0;
#pragma unroll 1
      for (int turn = 0; begin + turn * ATTENDING * 2 < end; turn += AHEAD) {
        uint4 next_keys[AHEAD], next_values[AHEAD];
        bool there[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
          there[j] = is_there(turn + j);
          if (there[j] && !is_old(turn + j)) {
            keys[j] = *(const uint4*)(own.new_key + columns / 2), values[j] = *(const uint4*)(own.new_value + columns / 2);
          }
          next_keys[j] = next_values[j] = make_uint4(0, 0, 0, 0);
          if (is_old(turn + AHEAD + j)) {
            next_keys[j] = load_once(k_head + next_locations[j] * step.k_stride + columns);
            next_values[j] = load_once(v_head + next_locations[j] * step.v_stride + columns);
          }
          if (is_old(turn + 2 * AHEAD + j)) next_locations[j] = location_of(turn + 2 * AHEAD + j);
        }
        found.attend(own.queries, keys, values, there);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) keys[j] = next_keys[j], values[j] = next_values[j];
      }
      found.leave(own);
    }
    wait_for_all();
#pragma unroll 1
    for (int index = threadIdx.x; index < GROUP * HEAD_DIM; index += THREADS) {
      const int head = index / HEAD_DIM, column = index % HEAD_DIM, of_all = row * HEADS + kv_head * GROUP + head;
      float most = NOTHING, total = 0, sum = 0;
#pragma unroll 4
      for (int other = 0; other < active; other++) most = fmaxf(most, own.factors[other][head].x);
#pragma unroll 4
      for (int other = 0; other < active; other++) {
        const float2 factor = own.factors[other][head];
        const float shrink = exp2_of(factor.x - most);
        total += shrink * factor.y, sum += shrink * own.sums[other][head][column];
      }
      store_word(exchange.parts + (of_all * SPLITS + split) * HEAD_DIM + column, __float_as_uint(sum), tag);
      if (column < 2) {
        store_word(exchange.factors + (of_all * SPLITS + split) * 2 + column, __float_as_uint(column ? total : most), tag);
      }
    }
    wait_for_all();  // this part of shared memory is free again
  }
};

// Combines the programs' results. LANES_OF_PAIR lanes hold some of the shares of two numbers each.
__device__ __forceinline__ void put_together(const Exchange& exchange, u32 tag) {
  constexpr int LANES_OF_PAIR = SPLITS < 4 ? SPLITS : 4, SHARES = SPLITS / LANES_OF_PAIR, PAIRS_AT_ONCE = 32 / LANES_OF_PAIR;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = threadIdx.x / 32 * PAIRS_AT_ONCE; first < ATTENDED / 2; first += WARPS * PAIRS_AT_ONCE) {
    const int inside = first + lane % PAIRS_AT_ONCE, pair = blockIdx.x * (ATTENDED / 2) + min(inside, ATTENDED / 2 - 1);
    const int head = pair / HALF, split = lane / PAIRS_AT_ONCE * SHARES;
    const u64* factors = exchange.factors + (head * SPLITS + split) * 2;
    const u64* parts = exchange.parts + (head * SPLITS + split) * HEAD_DIM + pair % HALF * 2;
    Words found[2 * SHARES];  // factors, then parts
    await(found, tag, [&](int i) { return i < SHARES ? factors + 2 * i : parts + (i - SHARES) * HEAD_DIM; });
    float most = NOTHING, total = 0, low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < SHARES; i++) most = fmaxf(most, __uint_as_float((u32)found[i].first));
#pragma unroll
    for (int distance = PAIRS_AT_ONCE; distance < 32; distance *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
#pragma unroll
    for (int i = 0; i < SHARES; i++) {
      const float shrink = exp2_of(__uint_as_float((u32)found[i].first) - most);
      total += shrink * __uint_as_float((u32)found[i].second);
      low += shrink * __uint_as_float((u32)found[SHARES + i].first), high += shrink * __uint_as_float((u32)found[SHARES + i].second);
    }
#pragma unroll
    for (int distance = PAIRS_AT_ONCE; distance < 32; distance *= 2) {
      total += __shfl_xor_sync(~0u, total, distance);
      low += __shfl_xor_sync(~0u, low, distance), high += __shfl_xor_sync(~0u, high, distance);
    }
    const float factor_of_all = __fdividef(1.0f, total);
    if (lane < PAIRS_AT_ONCE && inside < ATTENDED / 2) {
      store_word(exchange.attended + place_of_pair(pair), pair_of(low * factor_of_all, high * factor_of_all), tag);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    resident_layers(const __grid_constant__ Exchange exchange, const __grid_constant__ Step step) {
  extern __shared__ char bytes[];
  Memory& memory = *(Memory*)(bytes + (-address_of(bytes) & 1023));
  const int thread = threadIdx.x;
#if BITS < 16
  if (thread < 8) memory.nothing[thread] = make_uint4(0, 0, 0, 0);
#endif
  if (thread == 0) {
    // One arrival each: of the loading thread, or of one thread for all readers.
    for (u64* barrier = memory.full; barrier < memory.second_empty + LAYERS_AHEAD; barrier++) init_barrier(address_of(barrier), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (thread >= THREADS) {
    // Weights are constants, so their loads do not wait for previous kernels.
    if (thread < THREADS + LOADING) load_layers(memory, step);
    return;
  }

  asm volatile("griddepcontrol.wait;" ::: "memory");
  const u32 first_tag = *(volatile u32*)exchange.tag;
  const Share share(step);
  u32 mine = 0;
  const int my_pair = min(thread / FINISHING, ROWS * HIDDEN_PAIRS - 1);
  const int my_place = (my_pair / HIDDEN_PAIRS * PROGRAMS + blockIdx.x) * HIDDEN_PAIRS + my_pair % HIDDEN_PAIRS;
  mine = ((const u32*)step.embedded)[my_place];
  if (thread < FINISHING * ROWS * HIDDEN_PAIRS && thread % FINISHING == 0) {
    store_word(exchange.stream + place_of_pair(my_place), mine, first_tag);
  }

  int begin = 0;  // of the next product in the ring
#pragma unroll 1
  for (int i = 0; i < step.num_layers; i++) {
    const int place = i % LAYERS_AHEAD, turn = i / LAYERS_AHEAD;
    const First& first = memory.first[place];
    const u32 tag = first_tag + i + 1;
#pragma unroll 1
    for (int product = 0; product < PRODUCTS; product++) {
      const u64* from = product == PACKED ? exchange.stream : product == OUTPUT ? exchange.attended
                        : product == GATES ? exchange.added : exchange.active;
      u64* to = product == PACKED ? exchange.packed : product == OUTPUT ? exchange.added
                : product == GATES ? exchange.active : exchange.stream;
      const u16* norm = nullptr;
      if (product == PACKED) wait_for(address_of(memory.first_full + place), turn & 1), norm = first.norm;
      if (product == GATES) wait_for(address_of(memory.second_full + place), turn & 1), norm = memory.second[place].norm;
      take(memory, from, product == PACKED ? tag - 1 : tag, of<SLICES>(product) * CHUNK, norm);
      wait_for_all();
      if (!IS_PACKED && product == OUTPUT && thread == 0) arrive(address_of(memory.first_empty + place));
      if (!IS_PACKED && product == GATES && thread == 0) arrive(address_of(memory.second_empty + place));
      if (product == PACKED && share.has_work()) share.bring(step, first);
      multiply(memory, product, begin, place);
      begin += of<UNITS>(product) * of<SLICES>(product);
      wait_for_all();
      // Scales of two products come with each of these loads.
      if (IS_PACKED && product == OUTPUT && thread == 0) arrive(address_of(memory.first_empty + place));
      if (IS_PACKED && product == DOWN && thread == 0) arrive(address_of(memory.second_empty + place));
      finish(memory, product, mine, to, tag, step.eps);
      if (product == PACKED) {
        if (share.has_work()) share.attend(memory.attention, step, exchange, first, tag);
        put_together(exchange, tag);
      }
    }
  }
  if (thread < FINISHING * ROWS * HIDDEN_PAIRS && thread % FINISHING == 0) ((u32*)step.out)[my_place] = mine;
  // All programs have read this step's first tag, because all have sent results.
  if (blockIdx.x == 0 && thread == 0) *exchange.tag = first_tag + step.num_layers + 1;
}
