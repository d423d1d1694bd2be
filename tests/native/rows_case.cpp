// Rows as such: products and decoding against plain loops; bytes against the obvious.
#include <algorithm>

#include "cases.h"
#include "crc.h"
#include "layouts.h"
#include "plain.h"
#include "rounded.h"
#include "rows.h"

namespace moe_pack {
namespace {

void check_decoded(const RowsLayout& layout, const Exact<uint8_t>& rows, int32_t num_rows, const Exact<float>& out) {
    size_t d = layout.part.part.num_cols;
    for (int32_t r = 0; r < num_rows; r++) {
        PlainRow row = plain_row(layout.part, rows.get() + (size_t)r * layout.row_bytes);
        for (size_t c = 0; c < d; c++)
            if (!same_value(row.weights[c], out[r * d + c]))
                fail("weight [%d, %zu] is %.9g, expected %.9g", r, c, out[r * d + c], row.weights[c]);
    }
}

void check_products(const RowsLayout& layout, bool is_tampered, const Exact<uint8_t>& rows, int32_t num_rows,
                    const Exact<float>& x, int32_t num_tokens, int digits, const Exact<float>& out) {
    size_t d = layout.part.part.num_cols;
    for (int32_t r = 0; r < num_rows; r++) {
        PlainRow row = plain_row(layout.part, rows.get() + (size_t)r * layout.row_bytes);
        for (int32_t t = 0; t < num_tokens; t++) {
            Near expected = plain_dot(row, x.get() + t * d, digits);
            float found = out[(size_t)t * num_rows + r];
            // Where parts of a tampered layout overlap, what is no number must stay none.
            if (std::isnan(expected.value) && is_tampered && std::isnan(found)) continue;
            if (!expected.holds(found))
                fail("product [%d, %d] is %.9g, expected %.9g within %.3g, %d digits", t, r, found, expected.value,
                     expected.slack, digits);
        }
    }
}

// What is not finite makes every product of its token no number; others' tokens do not feel it.
void check_wild(const RowsLayout& layout, const Exact<float>& x, const Exact<float>& out, int32_t num_rows) {
    const size_t d = layout.part.part.num_cols;
    for (size_t t = 0; t < x.size() / d; t++) {
        bool is_finite = true;
        for (size_t c = 0; c < d; c++) is_finite = is_finite && std::isfinite(x[t * d + c]);
        for (int32_t r = 0; !is_finite && r < num_rows; r++)
            if (!std::isnan(out[t * num_rows + r])) fail("product [%zu, %d] of what is not finite is a number", t, r);
    }
}

void check_checksums(Random& random, Pool& pool, const Exact<uint8_t>& bytes) {
    uint32_t found = 1;
    require(checksum(pool, bytes.get(), bytes.size(), &found) == Outcome::done, "a checksum is done");
    require(found == plain_crc(bytes.get(), bytes.size()), "a checksum");
    size_t cut = random.between(0, (int64_t)bytes.size());
    uint32_t first = crc32(0, bytes.get(), cut), second = crc32(0, bytes.get() + cut, bytes.size() - cut);
    require(crc32_joined(first, second, bytes.size() - cut) == found, "joined checksums");
    require(crc32(first, bytes.get() + cut, bytes.size() - cut) == found, "a continued checksum");
}

void check_read(Pool& pool, const Exact<uint8_t>& bytes) {
    uint64_t found = 0, expected = 0;
    require(read_only(pool, bytes.get(), bytes.size(), &found) == Outcome::done, "reading is done");
    for (size_t i = 0; i + 8 <= bytes.size() / 256 * 256; i += 8) {
        uint64_t word;
        std::memcpy(&word, bytes.get() + i, 8);
        expected ^= word;
    }
    require(found == expected, "parity");
}

}  // namespace

void rows_case(Random& random, Pools& pools, Counts& counts) {
    Sizes sizes = random_sizes(random);
    size_t set_idx = pools.any_set(random);
    const TwoPools both(random, pools, set_idx);
    Pool &alone = both.alone, &several = both.several;
    Numbers numbers = random_rows(random, sizes);
    RowsLayout layout;
    const char* fault = read_rows_layout(numbers.values.data(), numbers.values.size(), &layout);
    fault == nullptr ? counts.accepted++ : counts.refused++;
    require(fault == nullptr || numbers.tampered, fault ? fault : "");
    if (fault != nullptr) return;
    check_rows(layout, numbers.values);
    const Part& part = layout.part.part;
    int32_t num_rows = random.chance(3) ? 0 : sizes.num_rows, num_tokens = sizes.num_tokens;
    if ((int64_t)num_rows * part.num_cols * std::max(num_tokens, 1) > 2 * kMaxProducts ||
        (int64_t)num_rows * layout.row_bytes > kMaxBytes || part.num_cols > 100'000)
        return;
    bool sane = random.chance(60);
    Exact<uint8_t> rows(random, (size_t)num_rows * layout.row_bytes);
    for (int32_t r = 0; sane && r < num_rows; r++)
        make_sane(random, layout.part, rows.get() + (size_t)r * layout.row_bytes);
    Exact<float> x(random, (size_t)num_tokens * part.num_cols);
    sane ? fill_inputs(random, x.get(), x.size()) : fill_wild(random, x.get(), x.size());
    Exact<float> weights(random, (size_t)num_rows * part.num_cols), same_weights(random, weights.size());
    Exact<float> out(random, (size_t)num_tokens * num_rows), same_out(random, out.size());
    for (auto [pool, decoded, product] :
         {std::tuple(&alone, &weights, &out), std::tuple(&several, &same_weights, &same_out)}) {
        require(decode(*pool, layout, rows.get(), num_rows, decoded->get()) == Outcome::done, "decoding is done");
        require(multiply(*pool, layout, rows.get(), num_rows, x.get(), num_tokens, product->get()) == Outcome::done,
                "products are done");
    }
    require(weights.same_bits(same_weights) && out.same_bits(same_out), "the same bits for any number of threads, in rows");
    check_decoded(layout, rows, num_rows, weights);
    if (alone.rounds() && can_round(part)) check_wild(layout, x, out, num_rows);
    if (!sane) return;
    counts.compared++;
    check_products(layout, numbers.tampered, rows, num_rows, x, num_tokens, alone.digits(), out);
}

void bytes_case(Random& random, Pools& pools, Counts& counts) {
    Pool& pool = pools.several(random, 0);
    size_t most = random.chance(1) ? 3 << 20 : random.chance(20) ? 200'000 : 2000;
    Exact<uint8_t> bytes(random, (size_t)random.between(0, (int64_t)most));
    check_checksums(random, pool, bytes);
    check_read(pool, bytes);
    size_t row_bytes = random.between(1, random.chance(50) ? 40 : 3000);
    int32_t count = (int32_t)(bytes.size() / row_bytes);
    Exact<int32_t> places(random, count ? (size_t)random.between(0, 300'000 / (int64_t)(row_bytes + 100)) : 0);
    for (size_t k = 0; k < places.size(); k++) places[k] = (int32_t)random.between(0, count - 1);
    Exact<uint8_t> out(random, places.size() * row_bytes);
    require(gather(pool, bytes.get(), row_bytes, places.get(), (int32_t)places.size(), out.get()) == Outcome::done,
            "gathering is done");
    for (size_t k = 0; k < places.size(); k++)
        require(std::memcmp(out.get() + k * row_bytes, bytes.get() + places[k] * row_bytes, row_bytes) == 0, "a gathered row");
    counts.compared++;
}

}  // namespace moe_pack
