// Look up tokens by slot and position, for steps that need nothing but the tables: ids, pages, temperatures and seeds.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace srt {

struct PageGroup {
    const int32_t* pages;  // [slots, stride]
    int64_t stride;
};

struct Sequences {
    int32_t* tokens;  // [slots, max_tokens]
    int64_t max_tokens;
    const PageGroup* groups;
    int64_t num_groups;
    int64_t page_size;
    const float* temperatures;  // [slots]
    const int64_t* seeds;       // [slots]
    int64_t vocab_size;
    void* logits;  // memory for the logits of a step
    float* taps;   // memory for the inputs of the layers that a head reads; or null
};

// What a head that drafts reads beside its own tokens.
struct HeadTables {
    const void* features;      // [locations, hidden]: of the model, at each token, of the model's type
    const int32_t* locations;  // [slots, stride]: of tokens
    int64_t stride;
    const int64_t* known;  // the ids of the head's logits
    void* logits;          // [rows, vocabulary] of the model's type: minus infinity where the head knows no token
};

// Rows that draft. Each computes its positions starts[i] to lengths[i], the last of which has its last known token, then draws counts[i] ids.
struct DraftRows {
    int64_t num_rows;
    const int64_t* slots;
    const int64_t* starts;
    const int64_t* lengths;
    const int64_t* counts;
};

// Rows whose drafts are verified: counts[i] tokens of each from position lengths[i] on, all but the first of which are drafts.
struct VerifyRows {
    int64_t num_rows;
    const int64_t* slots;
    const int64_t* lengths;
    const int64_t* counts;
    int64_t* seq_lens;  // by slot: set to the position of the last known token
    int32_t* ids;       // the draws that count, end to end
    int32_t* told;      // how many there are of each row; -1: the first one was not finite
};

// What a step needs of each of its tokens.
struct Looked {
    std::vector<int64_t> ids, next, seeds;  // `next` is the position behind the token
    std::vector<float> temperatures;
    std::vector<std::vector<int64_t>> locations;  // by group of pages

    Looked(const Sequences& all, const int64_t* slots, const int64_t* positions, int64_t num_tokens) : locations(all.num_groups) {
        for (int64_t i = 0; i < num_tokens; i++) {
            const int64_t slot = slots[i], position = positions[i], column = position / all.page_size;
            ids.push_back(all.tokens[slot * all.max_tokens + position]);
            next.push_back(position + 1);
            seeds.push_back(all.seeds[slot]);
            temperatures.push_back(all.temperatures[slot]);
            for (int64_t n = 0; n < all.num_groups; n++) {
                const int64_t page = all.groups[n].pages[slot * all.groups[n].stride + column];
                locations[n].push_back(page * all.page_size + position % all.page_size);
            }
        }
    }
};

// Draw the drafts of all rows, one of each row in a step, and write them into the token table. `draw_behind(slots, positions, ids)` runs a
// step of these tokens.
template <class Draw>
void draft(const Sequences& all, const DraftRows& rows, Draw&& draw_behind) {
    std::vector<int64_t> slots, positions, ids;
    for (int64_t step = 0;; step++) {
        slots.clear();
        positions.clear();
        for (int64_t row = 0; row < rows.num_rows; row++) {
            if (rows.counts[row] <= step) continue;
            const int64_t last = rows.lengths[row] + step;
            for (int64_t position = step ? last : rows.starts[row]; position <= last; position++) {
                slots.push_back(rows.slots[row]);
                positions.push_back(position);
            }
        }
        if (slots.empty()) return;
        ids.resize(slots.size());
        draw_behind(slots, positions, ids.data());
        for (size_t i = 0; i < slots.size(); i++) {
            const bool is_last = i + 1 == slots.size() || slots[i + 1] != slots[i];
            if (is_last) all.tokens[slots[i] * all.max_tokens + positions[i] + 1] = int32_t(ids[i]);
        }
    }
}

// Keep each row's draws up to the first that differs from the draft at its position, that one included, in the token table and the lengths.
// A draw that is not finite does not count. If it is a row's first, the row gets its id nevertheless, which nobody sees.
inline void accept(const Sequences& all, const VerifyRows& rows, const int64_t* ids, const float* values) {
    int32_t* told_ids = rows.ids;
    for (int64_t row = 0; row < rows.num_rows; row++) {
        int32_t* behind = all.tokens + rows.slots[row] * all.max_tokens + rows.lengths[row] + 1;
        int64_t num_told = 0;
        for (bool goes_on = true; goes_on && num_told < rows.counts[row] && std::isfinite(values[num_told]); num_told++) {
            goes_on = ids[num_told] == behind[num_told];
            *told_ids++ = behind[num_told] = int32_t(ids[num_told]);
        }
        if (!num_told) behind[0] = int32_t(ids[0]);
        rows.told[row] = num_told ? int32_t(num_told) : -1;
        rows.seq_lens[rows.slots[row]] = rows.lengths[row] + (num_told ? num_told : 1);
        ids += rows.counts[row];
        values += rows.counts[row];
    }
}

}  // namespace srt
