// Operations on the rows of a decode step, around the layers: look them up in the tables, draw ids, and store the draws.
//
// Each function has the results, to the bit, of the Python in the file that its heading names.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "team.h"
#include "vectors.h"

namespace srt {

// ---- Draws (srt/layers/sampler.py, srt/layers/philox.py)

struct Draws {
    const void* logits;  // [rows, stride], float32 or bfloat16
    int64_t num_rows;
    int64_t num_columns;
    int64_t stride;
    int64_t first_token;          // the id of the first column
    const float* temperatures;    // [rows]; 0 is greedy
    const int64_t* seeds;         // [rows]
    const int64_t* positions;     // [rows]
    const float* thresholds;      // [rows]: the smallest logit / T that may be drawn; or null
    int64_t* ids;                 // [rows]
    float* values;                // [rows]: a NaN if a logit is one
    int32_t is_bfloat16;
};

constexpr int GROUPS = LANES;          // groups of random words made together
constexpr int WORDS = 4 * GROUPS;      // each group has four
constexpr int64_t SHARED_COLUMNS = 1 << 15;  // with more logits than these, threads share the rows

// Philox4x32-10 of the counters (first + i, position, 0, 0): words[4 * i + lane].
inline void random_words(uint64_t seed, uint32_t position, uint32_t first, uint32_t* words) {
    uint32_t c0[GROUPS], c1[GROUPS], c2[GROUPS], c3[GROUPS], k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int i = 0; i < GROUPS; i++) c0[i] = first + i, c1[i] = position, c2[i] = 0, c3[i] = 0;
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < GROUPS; i++) {
            const uint64_t product_0 = uint64_t(c0[i]) * 0xD2511F53u, product_1 = uint64_t(c2[i]) * 0xCD9E8D57u;
            c0[i] = uint32_t(product_1 >> 32) ^ c1[i] ^ k0;
            c2[i] = uint32_t(product_0 >> 32) ^ c3[i] ^ k1;
            c1[i] = uint32_t(product_1);
            c3[i] = uint32_t(product_0);
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < GROUPS; i++) {
        words[4 * i] = c0[i], words[4 * i + 1] = c1[i], words[4 * i + 2] = c2[i], words[4 * i + 3] = c3[i];
    }
}

inline float gumbel(uint32_t word) {
    return float(-std::log(-std::log((double(word) + 0.5) * 0x1p-32)));
}

template <class Stored>
class DrawJob final : public Job {
public:
    explicit DrawJob(const Draws& draws) : draws_(draws) {}

    int num_phases() const override { return 1; }
    int num_chunks(int) const override { return int(draws_.num_rows); }

    void run(int, int row, int) override {
        const Stored* logits = static_cast<const Stored*>(draws_.logits) + row * draws_.stride;
        const Best best = draws_.temperatures[row] > 0 ? noisy(logits, row) : greedy(logits);
        draws_.ids[row] = best.column + draws_.first_token;
        draws_.values[row] = best.value;
    }

private:
    // The first of the largest values; a NaN counts as the largest.
    struct Best {
        int64_t column = 0;
        float value = -std::numeric_limits<float>::infinity();

        void offer(int64_t other, float offered) {
            if (offered > value || (offered != offered && value == value)) column = other, value = offered;
        }
    };

    Best greedy(const Stored* logits) const {
        Best best;
        for (int64_t i = 0; i < draws_.num_columns; i++) best.offer(i, to_float(logits[i]));
        return best;
    }

    // A value of noise is above d only if 1 - u is below exp(-d), u being its uniform number. Logarithms are taken of such numbers alone.
    Best noisy(const Stored* logits, int64_t row) const {
        const float temperature = draws_.temperatures[row];
        const float threshold = draws_.thresholds ? draws_.thresholds[row] : -std::numeric_limits<float>::infinity();
        const uint32_t position = uint32_t(draws_.positions[row]);
        const int64_t first = draws_.first_token, end = first + draws_.num_columns;
        Best best;
        uint32_t words[WORDS];
        for (int64_t token = first / 4 * 4; token < end; token += WORDS) {
            random_words(uint64_t(draws_.seeds[row]), position, uint32_t(token / 4), words);
            for (int i = 0; i < WORDS; i++) {
                const int64_t column = token + i - first;
                if (column < 0 || column >= draws_.num_columns) continue;
                const float logit = to_float(logits[column]) / temperature;
                const float scaled = logit < threshold ? -std::numeric_limits<float>::infinity() : logit;
                const float gap = best.value - scaled;  // a NaN or infinity where the noise does not matter, or nothing is known
                if (gap > 0.0f && is_below(words[i], gap)) continue;
                best.offer(column, scaled + gumbel(words[i]));
            }
        }
        return best;
    }

    // Return whether the noise of this word is certainly below `gap`.
    static bool is_below(uint32_t word, float gap) {
        const float complement = float(~word) * 0x1p-32f;
        return gap > 24.0f || (complement > 0x1p-8f && -std::log2(complement) < gap * 1.442f - 0.01f);
    }

    const Draws& draws_;
};

// ---- Looking up rows (srt/model_executor/step/input_buffers.py)

struct Tables {
    int32_t* pages;  // [slots, max_pages]
    int64_t max_pages;
    const int32_t* tokens;  // [slots, max_tokens]
    int64_t max_tokens;
    int64_t* seq_lens;  // [slots]
    const float* temperatures;
    const int64_t* seeds;
    const int64_t* top_ks;
    const double* top_ps;
    const double* min_ps;
    int64_t dummy_slot;
    int64_t page_size;
};

struct Mail {
    const int64_t* words;  // [ring, stride]
    int64_t ring;
    int64_t stride;
    const int64_t* last_store;
    int64_t page_bits;
    int64_t number_bits;
};

struct Gathered {
    int64_t* ids;
    int64_t* positions;
    int64_t* locations;
    int64_t* seq_lens;
    float* temperatures;
    int64_t* seeds;
    int64_t* top_ks;
    double* top_ps;
    double* min_ps;
};

inline void gather(const int64_t* slots, int64_t num_rows, const Mail& mail, const Tables& tables, const Gathered& out) {
    const int64_t number = *mail.last_store + 1, tag = number & ((int64_t(1) << mail.number_bits) - 1);
    const int64_t* words = mail.words + number % mail.ring * mail.stride;
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t slot = slots[row];
        const bool is_real = slot != tables.dummy_slot;
        const int64_t position = is_real ? tables.seq_lens[slot] : 0;
        int32_t& page = tables.pages[slot * tables.max_pages + position / tables.page_size];
        if (is_real && words[row] >> mail.page_bits == tag) page = int32_t(words[row] & ((int64_t(1) << mail.page_bits) - 1));
        tables.seq_lens[slot] = is_real ? position + 1 : 0;
        out.ids[row] = tables.tokens[slot * tables.max_tokens + position];
        out.positions[row] = position;
        out.locations[row] = int64_t(page) * tables.page_size + position % tables.page_size;
        out.seq_lens[row] = position + 1;
        out.temperatures[row] = tables.temperatures[slot];
        out.seeds[row] = tables.seeds[slot];
        out.top_ks[row] = tables.top_ks[slot];
        out.top_ps[row] = tables.top_ps[slot];
        out.min_ps[row] = tables.min_ps[slot];
    }
}

// ---- Storing draws (srt/model_executor/step/draw_store.py)

struct Store {
    const int64_t* ids;  // [rows]
    const float* values;
    const int64_t* slots;
    const int64_t* positions;
    int64_t num_rows;
    int32_t* tokens;  // [slots, max_tokens]
    int64_t max_tokens;
    int64_t* words;  // [ring, stride]
    int64_t ring;
    int64_t stride;
    int64_t* last;
};

inline void store_draws(const Store& store) {
    const int64_t number = ++*store.last;
    int64_t* words = store.words + number % store.ring * store.stride;
    for (int64_t row = 0; row < store.num_rows; row++) {
        const int64_t id = store.ids[row], told = std::isfinite(store.values[row]) ? id : -1;
        store.tokens[store.slots[row] * store.max_tokens + store.positions[row]] = int32_t(id);
        words[row] = number << 32 | (told & 0xffffffff);
    }
}

}  // namespace srt
