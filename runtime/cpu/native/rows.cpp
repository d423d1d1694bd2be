#include "rows.h"

#include <algorithm>
#include <cstring>

#include "crc.h"
#include "panels.h"
#include "products.h"
#include "rounded.h"
#include "tiles.h"

namespace moe_pack {
namespace {

constexpr size_t kAloneBytes = 64 << 10;   // less is done before another thread is awake
constexpr size_t kChecksumBytes = 1 << 20;  // a thread takes at once
constexpr size_t kReadAheadBytes = 2048;

// Many tokens, by decoded rows.
struct Multiply {
    const Kernels& kernels;
    const RowsLayout& layout;
    const uint8_t* rows;
    int32_t num_rows;
    const float* x;
    int32_t num_tokens;
    float* out;
    float* decoded;  // one a thread
};

void multiply_many(void* context, int item, int, int worker) {
    const auto& m = *static_cast<const Multiply*>(context);
    const int32_t first = item * kManyRows, count = std::min(kManyRows, m.num_rows - first);
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

// `work` of each item, by all threads or, where that is not worth it, by this one.
template <class Context>
Outcome each_item(Pool& pool, size_t num_bytes, int count, Pool::Work work, Context& context) {
    bool whole = num_bytes < kAloneBytes ? pool.run_alone(count, work, &context) : pool.run(count, work, &context);
    return whole ? Outcome::done : Outcome::cut;
}

}  // namespace

bool multiplies_few(const Pool& pool, const RowsLayout& layout, int32_t num_tokens) {
    if (num_tokens <= kFewTokens || pool.are_tokens_alone()) return true;
    if (!layout.in_panels) return false;
    return num_tokens <= kFewOfDense || !pool.rounds() || !can_round(layout.part.part);
}

Outcome multiply(Pool& pool, const RowsLayout& layout, const uint8_t* rows, int32_t num_rows, const float* x,
                 int32_t num_tokens, float* out) {
    if (multiplies_few(pool, layout, num_tokens)) {
        const DenseMatrix matrix = {layout, rows, num_rows};
        Products products(pool, x, num_tokens);
        products.add(matrix, out);
        return products.run_few();
    }
    std::lock_guard<std::mutex> lock(pool.one_job());
    if (pool.rounds() && can_round(layout.part.part))
        return multiply_rounded(pool, layout, rows, num_rows, x, num_tokens, out);
    Arena& arena = pool.arena();
    arena.reset();
    Multiply m = {pool.kernels(), layout, rows, num_rows, x, num_tokens, out, nullptr};
    m.decoded = arena.take<float>((size_t)pool.threads() * kManyRows * kManyCols);
    if (m.decoded == nullptr) return Outcome::no_memory;
    const size_t num_bytes = (size_t)num_rows * layout.row_bytes * num_tokens;
    return each_item(pool, num_bytes, (num_rows + kManyRows - 1) / kManyRows, multiply_many, m);
}

Outcome put_in_panels(Pool& pool, const RowsLayout& layout, uint8_t* rows, int32_t num_rows) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    struct Rows {
        const RowsLayout& layout;
        uint8_t* rows;
        size_t bytes;  // of a panel's rows
        uint8_t* copies;  // one a thread
    } context = {layout, rows, (size_t)kPanelRows * layout.row_bytes, nullptr};
    pool.arena().reset();
    context.copies = pool.arena().take<uint8_t>(pool.threads() * context.bytes);
    if (context.copies == nullptr) return Outcome::no_memory;
    const Pool::Work item = [](void* context, int item, int, int worker) {
        const auto& c = *static_cast<const Rows*>(context);
        uint8_t *from = c.rows + item * c.bytes, *copy = c.copies + worker * c.bytes;
        std::memcpy(copy, from, c.bytes);
        const uint8_t* begins[kPanelRows];
        for (int32_t r = 0; r < kPanelRows; r++) begins[r] = copy + (size_t)r * c.layout.row_bytes;
        make_panel(c.layout.part.part, begins, panel_in(from));
    };
    return each_item(pool, (size_t)num_rows * layout.row_bytes, num_rows / kPanelRows, item, context);
}

Outcome take_rows(Pool& pool, const RowsLayout& layout, const uint8_t* rows, const int32_t* places, int32_t count,
                  uint8_t* out) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    struct Rows {
        const RowsLayout& layout;
        const uint8_t* rows;
        const int32_t* places;
        uint8_t* out;
    } context = {layout, rows, places, out};
    const Pool::Work item = [](void* context, int item, int, int) {
        const auto& c = *static_cast<const Rows*>(context);
        take_row_of(c.layout, c.rows, c.places[item], c.out + (size_t)item * c.layout.row_bytes);
    };
    return each_item(pool, (size_t)count * layout.row_bytes, count, item, context);
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
