// The decode step of a decoder with pre-norm, rotary grouped-query attention and a gated MLP: one call for all layers.
//
// `decode_step.py` builds the structs. Activations are float32, whatever the type of the weights.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "attention.h"
#include "products.h"
#include "rows.h"
#include "sequences.h"
#include "team.h"

namespace srt {

struct Layer {
    const float* input_norm;
    const float* post_norm;
    const float* q_norm;  // [head_dim], or null
    const float* k_norm;
    Matrix qkv;
    Matrix o;
    Matrix gate_up;
    Matrix down;
    void* keys;  // [locations, kv_heads, head_dim] of the model's type
    void* values;
    int64_t window;  // positions that a token sees; 0: all
    int64_t group;   // of pages
};

struct Model {
    const Layer* layers;
    int64_t num_layers;
    const void* embedding;  // [vocabulary, hidden]
    const float* final_norm;
    const float* frequencies;  // [head_dim / 2]
    Matrix head;
    Heads heads;
    int64_t hidden_size;
    int64_t page_size;
    float eps;
    float angle_factor;
    Kind kind;            // of the embedding, the memory of keys and values, and the logits
    int32_t num_taps;     // layers whose inputs are kept
    const int64_t* taps;  // their numbers
    Matrix fuse;          // makes one vector of these inputs, side by side
    const float* fuse_norm;  // of the inputs together; or null
    void* features;          // [locations, outputs of `fuse`] of the model's type: where the vectors go, by location in the first group
    float fuse_eps;
    // A head that drafts reads two vectors of each token: the embedding, of which this is the norm, and another, normed by the layer's own.
    const float* embedding_norm;  // null: the model is no such head
    int32_t begins_normed;        // its stream begins with the normed vector
    int32_t ends_normed;          // what it gives for the next token is normed
};

struct PageTable {
    const int32_t* pages;  // [slots, stride]
    int64_t stride;
    const int64_t* locations;  // [rows]: where each row's new key and value are stored
};

struct Rows {
    int64_t num_rows;
    const int64_t* ids;
    const int64_t* positions;
    const int64_t* slots;
    const PageTable* tables;  // [groups]
    void* logits;             // [rows, vocabulary]
    float* taps;              // [rows, taps, hidden]: the inputs of the tapped layers; or null
    const float* vectors;     // [rows, hidden]: what a head reads beside the embedding
    float* streams;           // [rows, hidden]: what it gives for the next token; or null
};

constexpr int64_t CHUNK_BYTES = 64 << 10;  // of weights, unless there are too few of them for all threads

enum Part { NORM, QKV, KEYS, ATTENTION, ROUND_ATTENDED, O, POST_NORM, GATE_UP, ROUND_ACTIVATED, DOWN, NUM_PARTS };

// Memory for the activations of a step.
struct Buffers {
    std::vector<float> hidden, normed, wide, activated, attended, cosines, sines;
    std::vector<float> scales;     // of the rows of the product's input
    std::vector<int16_t> numbers;  // that input as integers, if the weights are integers

    void fit(const Model& model, int64_t rows) {
        int64_t widest = 0, most_activated = 0;
        for (int64_t i = 0; i < model.num_layers; i++) {
            const Layer& layer = model.layers[i];
            widest = std::max({widest, layer.qkv.num_outputs, layer.gate_up.num_outputs, layer.qkv.num_inputs});
            most_activated = std::max(most_activated, layer.down.num_inputs);
        }
        grow(hidden, rows * model.hidden_size);
        grow(normed, rows * std::max(model.hidden_size, widest));
        grow(wide, rows * widest);
        grow(activated, rows * most_activated);
        grow(attended, rows * model.heads.num_heads * model.heads.head_dim);
        grow(cosines, rows * model.heads.head_dim / 2);
        grow(sines, rows * model.heads.head_dim / 2);
        grow(scales, rows);
        grow(numbers, rows * std::max({model.hidden_size, most_activated, model.heads.num_heads * model.heads.head_dim}));
    }

    template <class Element>
    static void grow(std::vector<Element>& buffer, int64_t size) {
        if (int64_t(buffer.size()) < size) buffer.resize(size);
    }
};

// Memory that a thread has for itself.
struct Own {
    std::vector<float> scores;
    std::vector<Query> queries;
};

constexpr int64_t MOST_TOGETHER = 3;  // tokens of a slot that attend together: with more, fewer threads would share the work

// Stored: the type of the embedding, of keys and values, and of the logits.
template <class Stored>
class Step final : public Job {
public:
    Step(const Model& model, const Rows& rows, Buffers& buffers, std::vector<Own>& own, int num_threads)
        : model_(model), rows_(rows), buffers_(buffers), own_(own), num_threads_(num_threads) {
        for (int64_t row = 0; row < rows.num_rows; row++) {
            const bool follows = row && rows.slots[row] == rows.slots[row - 1] && rows.positions[row] > rows.positions[row - 1];
            if (!follows || row - runs_.back() == MOST_TOGETHER) runs_.push_back(row);
        }
        shares_slots_ = int64_t(runs_.size()) < rows.num_rows;
        runs_.push_back(rows.num_rows);
    }

    // Embedding, then the parts of each layer, then the last norm, the head, and what a head that drafts reads.
    int num_phases() const override { return phases_of(model_); }

    static int phases_of(const Model& model) { return 4 + NUM_PARTS * int(model.num_layers); }

    int num_chunks(int phase) const override {
        if (phase == 0 || phase == num_phases() - 3) return int(rows_.num_rows);
        if (phase == num_phases() - 2) return chunks_of(model_.head);
        if (phase == num_phases() - 1) return rows_.taps ? chunks_of(model_.fuse) : 0;
        const Layer& layer = model_.layers[(phase - 1) / NUM_PARTS];
        switch ((phase - 1) % NUM_PARTS) {
            case NORM: return model_.embedding_norm ? 0 : int(rows_.num_rows);
            case QKV: return chunks_of(layer.qkv);
            case KEYS: return shares_slots_ ? int(rows_.num_rows * model_.heads.num_kv_heads) : 0;
            case ATTENTION: return int(int64_t(runs_.size() - 1) * model_.heads.num_kv_heads);
            case ROUND_ATTENDED: return rounds_inputs(layer.o) ? int(rows_.num_rows) : 0;
            case O: return chunks_of(layer.o);
            case GATE_UP: return chunks_of(half_of(layer.gate_up));
            case ROUND_ACTIVATED: return rounds_inputs(layer.down) ? int(rows_.num_rows) : 0;
            case DOWN: return chunks_of(layer.down);
            default: return int(rows_.num_rows);
        }
    }

    void run(int phase, int chunk, int thread) override {
        if (phase == 0) return embed(chunk);
        if (phase == num_phases() - 3) return end_row(chunk);
        if (phase == num_phases() - 2) return logits(chunk);
        if (phase == num_phases() - 1) return fuse(chunk);
        const Layer& layer = model_.layers[(phase - 1) / NUM_PARTS];
        switch ((phase - 1) % NUM_PARTS) {
            case NORM: keep_input((phase - 1) / NUM_PARTS, chunk); return norm_row(chunk, layer.input_norm, layer.qkv);
            case QKV: return project(layer.qkv, chunk);
            case KEYS: return store_chunk(layer, chunk);
            case ATTENTION: return attend_chunk(layer, chunk, own_[thread]);
            case ROUND_ATTENDED: return round(buffers_.attended.data(), chunk, layer.o);
            case O: return add(layer.o, buffers_.attended, chunk);
            case POST_NORM: return norm_row(chunk, layer.post_norm, layer.gate_up);
            case GATE_UP: return gate(layer.gate_up, chunk);
            case ROUND_ACTIVATED: return round(buffers_.activated.data(), chunk, layer.down);
            case DOWN: return add(layer.down, buffers_.activated, chunk);
        }
    }

private:
    static Matrix half_of(Matrix matrix) {
        matrix.num_outputs /= 2;
        return matrix;
    }

    static int64_t tiles_of(const Matrix& matrix) { return (matrix.num_outputs + OUTPUTS - 1) / OUTPUTS; }

    // Tiles of outputs in a chunk: enough chunks for all threads, and few enough that claiming them costs nothing.
    int64_t tiles_in_chunk(const Matrix& matrix) const {
        const int64_t tile_bytes = OUTPUTS * matrix.num_inputs * bytes_of(matrix.kind);
        const int64_t share = tiles_of(matrix) / (3 * num_threads_);
        const int64_t tiles = std::max<int64_t>(1, std::min(share, CHUNK_BYTES / tile_bytes));
        return (tiles + 1) / 2 * 2;  // whole vectors, for `gate`
    }

    int chunks_of(const Matrix& matrix) const {
        const int64_t in_chunk = tiles_in_chunk(matrix);
        return int((tiles_of(matrix) + in_chunk - 1) / in_chunk);
    }

    template <class Use>
    void each_tile(const Matrix& matrix, int chunk, Use use) const {
        const int64_t in_chunk = tiles_in_chunk(matrix), last = std::min((chunk + 1) * in_chunk, tiles_of(matrix));
        for (int64_t tile = chunk * in_chunk; tile < last; tile++) use(tile * OUTPUTS);
    }

    void embed(int64_t row) {
        const int64_t size = model_.hidden_size, half = model_.heads.head_dim / 2;
        const Stored* from = static_cast<const Stored*>(model_.embedding) + rows_.ids[row] * size;
        for (int64_t i = 0; i < size; i += LANES) store(&buffers_.hidden[row * size + i], load(from + i));
        if (model_.embedding_norm) join(row);
        for (int64_t i = 0; i < half; i++) {
            const float angle = float(rows_.positions[row]) * model_.frequencies[i];
            buffers_.cosines[row * half + i] = std::cos(angle) * model_.angle_factor;
            buffers_.sines[row * half + i] = std::sin(angle) * model_.angle_factor;
        }
    }

    // Norm the embedding and the other vector of a head's token, side by side; the stream begins with the other.
    void join(int64_t row) {
        const int64_t size = model_.hidden_size;
        float *stream = &buffers_.hidden[row * size], *both = &buffers_.normed[row * 2 * size];
        const float* vector = rows_.vectors + row * size;
        norm(stream, model_.embedding_norm, size, model_.eps, both);
        norm(vector, model_.layers[0].input_norm, size, model_.eps, both + size);
        std::copy_n(model_.begins_normed ? both + size : vector, size, stream);
    }

    void keep_input(int64_t layer, int64_t row) {
        if (!rows_.taps) return;
        const int64_t size = model_.hidden_size;
        for (int64_t tap = 0; tap < model_.num_taps; tap++) {
            if (model_.taps[tap] == layer) std::copy_n(&buffers_.hidden[row * size], size, rows_.taps + (row * model_.num_taps + tap) * size);
        }
    }

    void end_row(int64_t row) {
        const int64_t size = model_.hidden_size;
        norm_row(row, model_.final_norm, model_.head);
        if (rows_.taps && model_.fuse_norm) {
            float* kept = rows_.taps + row * model_.num_taps * size;
            norm(kept, model_.fuse_norm, model_.num_taps * size, model_.fuse_eps, kept);
        }
        if (!rows_.streams) return;
        const std::vector<float>& from = model_.ends_normed ? buffers_.normed : buffers_.hidden;
        std::copy_n(&from[row * size], size, rows_.streams + row * size);
    }

    // Norm a row for its product with `next`.
    void norm_row(int64_t row, const float* weight, const Matrix& next) {
        const int64_t size = model_.hidden_size;
        norm(&buffers_.hidden[row * size], weight, size, model_.eps, &buffers_.normed[row * size]);
        if (rounds_inputs(next)) round(buffers_.normed.data(), row, next);
    }

    static bool rounds_inputs(const Matrix& matrix) { return matrix.kind == Kind::INT8 || (matrix.kind == Kind::E4M3 && matrix.rounded); }

    // Round a row of the next product's input: to integers, or in place to numbers of type e4m3.
    void round(float* x, int64_t row, const Matrix& next) {
        const int64_t size = next.num_inputs;
        if (next.kind == Kind::E4M3) return round_to_e4m3(next, x + row * size);
        buffers_.scales[row] = round_row(x + row * size, size, next.most, &buffers_.numbers[row * size]);
    }

    Inputs inputs(const std::vector<float>& x) const { return {x.data(), buffers_.numbers.data(), buffers_.scales.data()}; }

    void project(const Matrix& matrix, int chunk) {
        float* out = buffers_.wide.data();
        each_tile(matrix, chunk, [&](int64_t begin) {
            multiply(matrix, begin, inputs(buffers_.normed), rows_.num_rows, [&](int64_t row, int64_t output, float value) {
                out[row * matrix.num_outputs + output] = value;
            });
        });
    }

    // Add the product to the stream.
    void add(const Matrix& matrix, const std::vector<float>& from, int chunk) {
        const Inputs x = inputs(from);
        float* out = buffers_.hidden.data();
        each_tile(matrix, chunk, [&](int64_t begin) {
            multiply(matrix, begin, x, rows_.num_rows, [&](int64_t row, int64_t output, float value) {
                out[row * matrix.num_outputs + output] += value;
            });
        });
    }

    // Compute silu(gate) * up of the matrix' halves.
    void gate(const Matrix& matrix, int chunk) {
        const int64_t size = matrix.num_outputs / 2;
        const Matrix half = half_of(matrix);
        float* out = buffers_.wide.data();
        const auto keep = [&](int64_t row, int64_t output, float value) { out[row * 2 * size + output] = value; };
        each_tile(half, chunk, [&](int64_t begin) {
            multiply(matrix, begin, inputs(buffers_.normed), rows_.num_rows, keep);
            multiply(matrix, size + begin, inputs(buffers_.normed), rows_.num_rows, keep);
        });
        const int64_t width = tiles_in_chunk(half) * OUTPUTS, begin = chunk * width, end = std::min(begin + width, size);
        for (int64_t row = 0; row < rows_.num_rows; row++) {
            for (int64_t i = begin; i < end; i += LANES) {
                const Floats gated = load(out + row * 2 * size + i), up = load(out + row * 2 * size + size + i);
                store(&buffers_.activated[row * size + i], gated / (fill(1.0f) + exp(-gated)) * up);
            }
        }
    }

    void logits(int chunk) {
        Stored* out = static_cast<Stored*>(rows_.logits);
        each_tile(model_.head, chunk, [&](int64_t begin) {
            multiply(model_.head, begin, inputs(buffers_.normed), rows_.num_rows, [&](int64_t row, int64_t output, float value) {
                put(out + row * model_.head.num_outputs + output, value);
            });
        });
    }

    void fuse(int chunk) {
        Stored* out = static_cast<Stored*>(model_.features);
        each_tile(model_.fuse, chunk, [&](int64_t begin) {
            multiply(model_.fuse, begin, {rows_.taps, nullptr, nullptr}, rows_.num_rows, [&](int64_t row, int64_t output, float value) {
                put(out + rows_.tables[0].locations[row] * model_.fuse.num_outputs + output, value);
            });
        });
    }

    // Norm and rotate one key head of one row, and store the key and the value.
    void store_chunk(const Layer& layer, int chunk) {
        const Heads& heads = model_.heads;
        const int64_t row = chunk / heads.num_kv_heads, kv_head = chunk % heads.num_kv_heads, size = heads.head_dim;
        float* key = &buffers_.wide[row * layer.qkv.num_outputs + (heads.num_heads + kv_head) * size];
        const float* value = key + heads.num_kv_heads * size;
        turn(key, layer.k_norm, row);
        const PageTable& table = rows_.tables[layer.group];
        const int64_t at = (table.locations[row] * heads.num_kv_heads + kv_head) * size;
        Stored *keys = static_cast<Stored*>(layer.keys), *values = static_cast<Stored*>(layer.values);
        for (int64_t d = 0; d < size; d++) {
            put(keys + at + d, key[d]);
            put(values + at + d, value[d]);
        }
    }

    // Norm and rotate the queries of one key head of a run of tokens, and attend. Tokens of one slot see each other's keys, so these are
    // stored in a phase before this one; the key of a token that is alone is stored here.
    void attend_chunk(const Layer& layer, int chunk, Own& own) {
        const Heads& heads = model_.heads;
        const int64_t run = chunk / heads.num_kv_heads, kv_head = chunk % heads.num_kv_heads, size = heads.head_dim;
        const int64_t group = heads.num_heads / heads.num_kv_heads, first = runs_[run], num_tokens = runs_[run + 1] - first;
        const auto queries = [&](int64_t token) { return &buffers_.wide[(first + token) * layer.qkv.num_outputs + kv_head * group * size]; };
        const auto outs = [&](int64_t token) { return &buffers_.attended[((first + token) * heads.num_heads + kv_head * group) * size]; };
        int64_t begins[MOST_TOGETHER], ends[MOST_TOGETHER];
        for (int64_t token = 0; token < num_tokens; token++) {
            for (int64_t g = 0; g < group; g++) turn(queries(token) + g * size, layer.q_norm, first + token);
            ends[token] = rows_.positions[first + token] + 1;
            begins[token] = layer.window ? std::max<int64_t>(0, ends[token] - layer.window) : 0;
        }
        if (!shares_slots_) store_chunk(layer, chunk);

        const PageTable& table = rows_.tables[layer.group];
        const Pages pages{table.pages + rows_.slots[first] * table.stride, model_.page_size};
        const Stored *keys = static_cast<const Stored*>(layer.keys), *values = static_cast<const Stored*>(layer.values);
        attend(num_tokens, queries, outs, begins, ends, heads, kv_head, keys, values, pages, own.scores, own.queries);
    }

    void turn(float* head, const float* weight, int64_t row) {
        const int64_t size = model_.heads.head_dim, half = size / 2;
        if (weight) norm(head, weight, size, model_.eps, head);
        rotate(head, &buffers_.cosines[row * half], &buffers_.sines[row * half], size);
    }

    const Model& model_;
    const Rows& rows_;
    Buffers& buffers_;
    std::vector<Own>& own_;
    const int num_threads_;
    std::vector<int64_t> runs_;  // the first row of each run of tokens of one slot, one behind the other; then the number of rows
    bool shares_slots_;          // some run has several tokens
};

// A model, and the memory that its steps use again.
struct Runner {
    Runner(const Model& model, int num_threads) : model(model), own(num_threads) {}

    const Model model;
    Buffers buffers;
    std::vector<Own> own;
};

std::mutex& one_at_a_time() {
    static std::mutex& mutex = *new std::mutex;
    return mutex;
}

// The threads of this process, which run one job at a time.
Team& team_of(int num_threads) {
    static std::map<int, std::unique_ptr<Team>>& teams = *new std::map<int, std::unique_ptr<Team>>;
    std::unique_ptr<Team>& team = teams[num_threads];
    if (!team) team = std::make_unique<Team>(num_threads);
    return *team;
}

template <class Stored>
void run_step(Runner& runner, const Rows& rows) {
    Team& team = team_of(int(runner.own.size()));
    runner.buffers.fit(runner.model, rows.num_rows);
    Step<Stored> step(runner.model, rows, runner.buffers, runner.own, team.num_threads());
    team.run(step);
}

// Draft with a head: draw one token of each row in a step. Sequences begin at each slot's second token, whose entry is the first.
template <class Stored>
class HeadSteps {
public:
    HeadSteps(Runner& runner, const Sequences& all, const HeadTables& head) : runner_(runner), all_(all), head_(head) {}

    void operator()(const std::vector<int64_t>& slots, const std::vector<int64_t>& entries, int64_t* ids) {
        const int64_t num_tokens = int64_t(slots.size()), size = runner_.model.hidden_size;
        const Looked looked(all_, slots.data(), entries.data(), num_tokens);
        vectors_.resize(num_tokens * size);
        for (int64_t i = 0; i < num_tokens; i++) read_vector(slots[i], entries[i], &vectors_[i * size]);
        streams_.resize(num_tokens * size);
        const PageTable table{all_.groups[0].pages, all_.groups[0].stride, looked.locations[0].data()};
        const Rows rows{num_tokens, looked.ids.data(), entries.data(), slots.data(), &table, all_.logits, nullptr, vectors_.data(), streams_.data()};
        run_step<Stored>(runner_, rows);
        is_first_ = false;
        draw_lasts(slots, looked, ids);
    }

private:
    // Read what precedes a token: the model's hidden states at first, then the head's own.
    void read_vector(int64_t slot, int64_t entry, float* to) {
        const int64_t size = runner_.model.hidden_size;
        if (!is_first_) {
            std::copy_n(stream_of_[slot].data(), size, to);
            return;
        }
        const Stored* from = static_cast<const Stored*>(head_.features) + head_.locations[slot * head_.stride + entry] * size;
        for (int64_t i = 0; i < size; i += LANES) store(to + i, load(from + i));
    }

    void draw_lasts(const std::vector<int64_t>& slots, const Looked& looked, int64_t* ids) {
        const int64_t size = runner_.model.hidden_size, num_known = runner_.model.head.num_outputs;
        const Stored* logits = static_cast<const Stored*>(all_.logits);
        Stored* whole = static_cast<Stored*>(head_.logits);
        std::vector<int64_t> lasts, seeds, positions, drawn;
        std::vector<float> temperatures, values;
        for (int64_t i = 0; i < int64_t(slots.size()); i++) {
            if (i + 1 < int64_t(slots.size()) && slots[i + 1] == slots[i]) continue;
            stream_of_[slots[i]].assign(&streams_[i * size], &streams_[i * size] + size);
            Stored* row = whole + int64_t(lasts.size()) * all_.vocab_size;
            for (int64_t n = 0; n < num_known; n++) row[head_.known[n]] = logits[i * num_known + n];
            lasts.push_back(i);
            seeds.push_back(looked.seeds[i]);
            temperatures.push_back(looked.temperatures[i]);
            positions.push_back(looked.next[i] + 1);  // of tokens, which are one more than entries
        }
        drawn.resize(lasts.size());
        values.resize(lasts.size());
        const Draws draws{whole, int64_t(lasts.size()), all_.vocab_size, all_.vocab_size, 0, temperatures.data(), seeds.data(),
                          positions.data(), nullptr, drawn.data(), values.data(), runner_.model.kind == Kind::BFLOAT16};
        for (int64_t n = 0; n < int64_t(lasts.size()); n++) DrawJob<Stored>(draws).run(0, int(n), 0);
        for (size_t n = 0; n < lasts.size(); n++) ids[lasts[n]] = std::min(drawn[n], all_.vocab_size - 1);
    }

    Runner& runner_;
    const Sequences& all_;
    const HeadTables& head_;
    std::vector<float> vectors_, streams_;
    std::map<int64_t, std::vector<float>> stream_of_;  // of each slot's last token
    bool is_first_ = true;
};

template <class Stored>
void draw(const Draws& draws, int num_threads) {
    DrawJob<Stored> job(draws);
    if (draws.num_rows > 1 && draws.num_rows * draws.num_columns > SHARED_COLUMNS) {
        const std::lock_guard<std::mutex> lock(one_at_a_time());
        return team_of(num_threads).run(job);
    }
    for (int row = 0; row < draws.num_rows; row++) job.run(0, row, 0);
}

}  // namespace srt

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The layers and all tensors must outlive the runner. Null: the model has too many layers.
EXPORTED srt::Runner* srt_new_runner(const srt::Model* model, int num_threads) {
    if (srt::Step<float>::phases_of(*model) > srt::MOST_PHASES) return nullptr;
    return new srt::Runner(*model, num_threads);
}

EXPORTED void srt_delete_runner(srt::Runner* runner) { delete runner; }

EXPORTED void srt_run(srt::Runner* runner, const srt::Rows* rows) {
    const std::lock_guard<std::mutex> lock(srt::one_at_a_time());
    if (runner->model.kind == srt::Kind::FLOAT32) srt::run_step<float>(*runner, *rows);
    else srt::run_step<srt::BFloat16>(*runner, *rows);
}

EXPORTED void srt_draw(const srt::Draws* draws, int num_threads) {
    if (draws->is_bfloat16) srt::draw<srt::BFloat16>(*draws, num_threads);
    else srt::draw<float>(*draws, num_threads);
}

EXPORTED void srt_gather(const int64_t* slots, int64_t num_rows, const srt::Mail* mail, const srt::Tables* tables, const srt::Gathered* out) {
    srt::gather(slots, num_rows, *mail, *tables, *out);
}

EXPORTED void srt_store_draws(const srt::Store* store) { srt::store_draws(*store); }

// Run a step of these tokens, and draw the id behind each: `ids` and `values` have the draws.
static void draw_behind(srt::Runner* runner, const srt::Sequences* all, const int64_t* slots, const int64_t* positions,
                        int64_t num_tokens, int64_t* ids, float* values) {
    const srt::Looked looked(*all, slots, positions, num_tokens);
    std::vector<srt::PageTable> tables;
    for (int64_t n = 0; n < all->num_groups; n++) {
        tables.push_back({all->groups[n].pages, all->groups[n].stride, looked.locations[n].data()});
    }
    const srt::Rows rows{num_tokens, looked.ids.data(), positions, slots, tables.data(), all->logits, all->taps};
    srt_run(runner, &rows);
    const int64_t columns = runner->model.head.num_outputs;
    const srt::Draws draws{all->logits, num_tokens, columns, columns, 0, looked.temperatures.data(), looked.seeds.data(),
                           looked.next.data(), nullptr, ids, values, runner->model.kind == srt::Kind::BFLOAT16};
    srt_draw(&draws, int(runner->own.size()));
    for (int64_t i = 0; i < num_tokens; i++) ids[i] = std::min(ids[i], all->vocab_size - 1);
}

// Run a step of each row's last known token and its drafts, draw behind each, and keep the draws that count.
EXPORTED void srt_verify(srt::Runner* runner, const srt::Sequences* all, const srt::VerifyRows* rows) {
    std::vector<int64_t> slots, positions;
    for (int64_t row = 0; row < rows->num_rows; row++) {
        for (int64_t i = 0; i < rows->counts[row]; i++) {
            slots.push_back(rows->slots[row]);
            positions.push_back(rows->lengths[row] + i);
        }
    }
    std::vector<int64_t> ids(slots.size());
    std::vector<float> values(slots.size());
    draw_behind(runner, all, slots.data(), positions.data(), int64_t(slots.size()), ids.data(), values.data());
    srt::accept(*all, *rows, ids.data(), values.data());
}

EXPORTED void srt_draft(srt::Runner* runner, const srt::Sequences* all, const srt::DraftRows* rows) {
    std::unique_lock<std::mutex> lock(srt::one_at_a_time());
    const srt::Team::Awake awake(srt::team_of(int(runner->own.size())));
    lock.unlock();
    std::vector<float> values;
    srt::draft(*all, *rows, [&](const std::vector<int64_t>& slots, const std::vector<int64_t>& positions, int64_t* ids) {
        values.resize(slots.size());
        draw_behind(runner, all, slots.data(), positions.data(), int64_t(slots.size()), ids, values.data());
    });
}

// Compute the entries starts[i] to lengths[i] of each row with a head, then draft.
EXPORTED void srt_draft_with_head(srt::Runner* runner, const srt::Sequences* all, const srt::DraftRows* rows, const srt::HeadTables* head) {
    const std::lock_guard<std::mutex> lock(srt::one_at_a_time());
    const srt::Team::Awake awake(srt::team_of(int(runner->own.size())));
    if (runner->model.kind == srt::Kind::FLOAT32) srt::draft(*all, *rows, srt::HeadSteps<float>(*runner, *all, *head));
    else srt::draft(*all, *rows, srt::HeadSteps<srt::BFloat16>(*runner, *all, *head));
}
