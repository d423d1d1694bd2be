#include "rows.h"

#include <algorithm>
#include <cstring>

#include "crc.h"
#include "rounded.h"
#include "tiles.h"

namespace moe_pack {
namespace {

constexpr size_t kAloneBytes = 64 << 10;   // less is done before another thread is awake
constexpr size_t kChecksumBytes = 1 << 20;  // a thread takes at once
constexpr size_t kReadAheadBytes = 2048;

struct Multiply {
    const Kernels& kernels;
    const RowsLayout& layout;
    const uint8_t* rows;
    int32_t num_rows;
    const float* x;
    int32_t num_tokens;
    float* out;
    int32_t tile;
    size_t prepared_bytes, work_floats;
    uint8_t* prepared;  // few tokens
    float* work;        // few tokens: one a thread
    float* decoded;     // many tokens: one a thread
};

// `next`: the row this thread begins with afterwards.
void multiply_few(Multiply& m, int32_t first, int32_t count, int32_t next, int worker) {
    const Part& part = m.layout.part.part;
    const uint8_t *rows[kMaxTile], *ahead[kMaxTile];
    int32_t distance = ahead_rows(m.layout.row_bytes);
    for (int32_t r = 0; r < count; r++) {
        rows[r] = m.rows + (size_t)(first + r) * m.layout.row_bytes + m.layout.part.offset;
        int32_t wanted = r + distance < count ? first + r + distance : next + r + distance - count;
        ahead[r] = m.rows + (size_t)std::min(wanted, m.num_rows - 1) * m.layout.row_bytes;
    }
    for (int32_t t = 0; t < m.num_tokens; t++)
        m.kernels.dot_rows(part, rows, count, m.prepared + t * m.prepared_bytes,
                           {ahead, t == 0 ? m.layout.row_bytes : 0}, m.work + worker * m.work_floats,
                           m.out + (size_t)t * m.num_rows + first);
}

void multiply_many(Multiply& m, int32_t first, int32_t count, int worker) {
    const Part& part = m.layout.part.part;
    size_t d = part.num_cols;
    float* decoded = m.decoded + (size_t)worker * kManyRows * kManyCols;
    const uint8_t* begins[kManyRows];
    for (int32_t r = 0; r < count; r++) {
        begins[r] = m.rows + (size_t)(first + r) * m.layout.row_bytes + m.layout.part.offset;
        float bias = bias_of(part, begins[r]);
        for (int32_t t = 0; t < m.num_tokens; t++) m.out[(size_t)t * m.num_rows + first + r] = bias;
    }
    for (int32_t start = 0; start < part.num_cols; start += kManyCols) {
        int32_t stop = std::min(part.num_cols, start + kManyCols);
        for (int32_t r = 0; r < count; r++) m.kernels.decode(part, begins[r], start, stop, decoded + r * kManyCols);
        for (int32_t t = 0; t < m.num_tokens; t += kManyTokens)
            m.kernels.dots(decoded, count, kManyCols, m.x + t * d + start, std::min(kManyTokens, m.num_tokens - t), d,
                           stop - start, m.out + (size_t)t * m.num_rows + first, m.num_rows);
    }
}

void multiply_item(void* context, int item, int next, int worker) {
    auto& m = *static_cast<Multiply*>(context);
    int32_t first = item * m.tile, count = std::min(m.tile, m.num_rows - first);
    if (m.decoded != nullptr)
        multiply_many(m, first, count, worker);
    else
        multiply_few(m, first, count, next < 0 ? m.num_rows : next * m.tile, worker);
}

// `work` of each item, by all threads or, where that is not worth it, by this one.
template <class Context>
Outcome each_item(Pool& pool, size_t num_bytes, int count, Pool::Work work, Context& context) {
    bool whole = num_bytes < kAloneBytes ? pool.run_alone(count, work, &context) : pool.run(count, work, &context);
    return whole ? Outcome::done : Outcome::cut;
}

}  // namespace

Outcome multiply(Pool& pool, const RowsLayout& layout, const uint8_t* rows, int32_t num_rows, const float* x,
                 int32_t num_tokens, float* out) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    const Part& part = layout.part.part;
    bool many = num_tokens > kFewTokens && !pool.are_tokens_alone();
    if (many && pool.rounds() && can_round(part)) {
        return multiply_rounded(pool, layout, rows, num_rows, x, num_tokens, out);
    }
    Multiply m = {pool.kernels(), layout, rows, num_rows, x, num_tokens, out, kManyRows, 0, 0, nullptr, nullptr, nullptr};
    Arena& arena = pool.arena();
    arena.reset();
    if (many) {
        m.decoded = arena.take<float>((size_t)pool.threads() * kManyRows * kManyCols);
        if (m.decoded == nullptr) return Outcome::no_memory;
    } else {
        m.tile = tile_rows(layout.row_bytes);
        m.prepared_bytes = m.kernels.prepared_bytes(part);
        m.work_floats = m.kernels.work_floats(part);
        m.prepared = arena.take<uint8_t>(num_tokens * m.prepared_bytes);
        m.work = arena.take<float>(pool.threads() * m.work_floats);
        if (m.prepared == nullptr || m.work == nullptr) return Outcome::no_memory;
        for (int32_t t = 0; t < num_tokens; t++)
            m.kernels.prepare(part, x + (size_t)t * part.num_cols, m.prepared + t * m.prepared_bytes);
    }
    size_t num_bytes = (size_t)num_rows * layout.row_bytes * num_tokens;
    return each_item(pool, num_bytes, (num_rows + m.tile - 1) / m.tile, multiply_item, m);
}

Outcome decode(Pool& pool, const RowsLayout& layout, const uint8_t* rows, int32_t num_rows, float* out) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    struct Rows {
        const Kernels& kernels;
        const RowsLayout& layout;
        const uint8_t* rows;
        int32_t num_rows;
        float* out;
    } context = {pool.kernels(), layout, rows, num_rows, out};
    auto item = [](void* context, int item, int, int) {
        auto& c = *static_cast<Rows*>(context);
        const Part& part = c.layout.part.part;
        int32_t stop = std::min(c.num_rows, (item + 1) * kManyRows);
        for (int32_t r = item * kManyRows; r < stop; r++)
            c.kernels.decode(part, c.rows + (size_t)r * c.layout.row_bytes + c.layout.part.offset, 0, part.num_cols,
                             c.out + (size_t)r * part.num_cols);
    };
    size_t num_bytes = sizeof(float) * num_rows * layout.part.part.num_cols;
    return each_item(pool, num_bytes, (num_rows + kManyRows - 1) / kManyRows, item, context);
}

Outcome checksum(Pool& pool, const uint8_t* bytes, size_t num_bytes, uint32_t* out) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    struct Piece {
        const uint8_t* bytes;
        size_t num_bytes;
        uint32_t* found;
    } context = {bytes, num_bytes, nullptr};
    int count = (int)((num_bytes + kChecksumBytes - 1) / kChecksumBytes);
    pool.arena().reset();
    context.found = pool.arena().take<uint32_t>(count + 1);
    if (context.found == nullptr) return Outcome::no_memory;
    auto item = [](void* context, int item, int, int) {
        auto& c = *static_cast<Piece*>(context);
        size_t start = item * kChecksumBytes;
        c.found[item] = crc32(0, c.bytes + start, std::min(kChecksumBytes, c.num_bytes - start));
    };
    Outcome found = each_item(pool, num_bytes, count, item, context);
    *out = 0;
    for (int i = 0; found == Outcome::done && i < count; i++)
        *out = crc32_joined(*out, context.found[i], std::min(kChecksumBytes, num_bytes - i * kChecksumBytes));
    return found;
}

Outcome read_only(Pool& pool, const uint8_t* bytes, size_t num_bytes, uint64_t* parity) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    struct Bytes {
        const uint8_t* bytes;
        size_t num_bytes;
        std::atomic<uint64_t> parity;
    } context = {bytes, num_bytes, {0}};
    auto item = [](void* context, int item, int, int) {
        auto& c = *static_cast<Bytes*>(context);
        size_t start = item * kChecksumBytes, stop = std::min(c.num_bytes, start + kChecksumBytes);
        uint64_t lanes[32] = {}, words[32];
        for (; start + sizeof words <= stop; start += sizeof words) {
            for (size_t line = 0; line < sizeof words; line += kLineBytes)
                __builtin_prefetch(c.bytes + start + kReadAheadBytes + line);
            std::memcpy(words, c.bytes + start, sizeof words);
            for (int i = 0; i < 32; i++) lanes[i] ^= words[i];
        }
        uint64_t all = 0;
        for (uint64_t lane : lanes) all ^= lane;
        c.parity ^= all;
    };
    Outcome found = each_item(pool, num_bytes, (int)((num_bytes + kChecksumBytes - 1) / kChecksumBytes), item, context);
    *parity = context.parity;
    return found;
}

Outcome gather(Pool& pool, const uint8_t* rows, size_t row_bytes, const int32_t* places, int32_t count, uint8_t* out) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    struct Rows {
        const uint8_t* rows;
        size_t row_bytes;
        const int32_t* places;
        int32_t count, each;
        uint8_t* out;
    } context = {rows, row_bytes, places, count, std::max<int32_t>(1, (int32_t)(kAloneBytes / row_bytes)), out};
    auto item = [](void* context, int item, int, int) {
        auto& c = *static_cast<Rows*>(context);
        int32_t first = item * c.each, stop = std::min(c.count, first + c.each);
        for (int32_t k = first; k < stop; k++) {
            // The next rows lie anywhere: nothing but this list knows where.
            if (k + 2 < stop)
                for (size_t line = 0; line < c.row_bytes; line += kLineBytes)
                    __builtin_prefetch(c.rows + c.places[k + 2] * c.row_bytes + line);
            std::memcpy(c.out + k * c.row_bytes, c.rows + c.places[k] * c.row_bytes, c.row_bytes);
        }
    };
    return each_item(pool, count * row_bytes, (count + context.each - 1) / context.each, item, context);
}

}  // namespace moe_pack
