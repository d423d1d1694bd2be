// Rows as such: products and decoding against plain loops; bytes against the obvious.
#include <algorithm>

#include "cases.h"
#include "crc.h"
#include "layouts.h"
#include "panels.h"
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

// Panels take the place of 16 rows each, and begin at the first multiple of 64 bytes there.
void check_panels(const RowsLayout& layout, const Exact<uint8_t>& rows, const Exact<uint8_t>& panels, int32_t num_rows) {
    for (int32_t first = 0; first < num_rows; first += 16) {
        const uint8_t *of_panel[16], *panel = panels.get() + (size_t)first * layout.row_bytes;
        while ((uintptr_t)panel % kLineBytes) panel++;
        for (int32_t r = 0; r < 16; r++) of_panel[r] = rows.get() + (size_t)(first + r) * layout.row_bytes;
        check_panel(layout.part.part, of_panel, panel);
    }
}

// Rows that are taken out again are as they were, but for bytes that are of no part.
void check_taken(Random& random, Pool& pool, const RowsLayout& layout, const Exact<uint8_t>& rows,
                 const Exact<uint8_t>& panels, int32_t num_rows) {
    const Part& part = layout.part.part;
    const size_t row_bytes = layout.row_bytes;
    Exact<int32_t> places(random, num_rows ? random.between(0, 40) : 0);
    for (size_t k = 0; k < places.size(); k++) places[k] = (int32_t)random.between(0, num_rows - 1);
    Exact<uint8_t> out(random, places.size() * row_bytes), expected(random, out.size());
    expected.copy_from(out);
    for (size_t k = 0; k < places.size(); k++) {
        const uint8_t* row = rows.get() + places[k] * row_bytes;
        std::memcpy(expected.get() + k * row_bytes, row, part.code_bytes);
        std::memcpy(expected.get() + k * row_bytes + part.scales_at, row + part.scales_at, 2 * part.scale_bytes);
    }
    require(take_rows(pool, layout, panels.get(), places.get(), (int32_t)places.size(), out.get()) == Outcome::done,
            "rows are taken");
    require(out.same_bits(expected), "rows that are taken are as they were");
}

// A token alone gets what it gets among others, unless many share decoded rows.
void check_alone(Random& random, Pool& pool, const RowsLayout& layout, const Exact<uint8_t>& panels, int32_t num_rows,
                 const Exact<float>& x, const Exact<float>& out) {
    const size_t d = layout.part.part.num_cols, num_tokens = x.size() / d;
    if (num_tokens == 0 || num_rows == 0) return;
    const size_t t = random.between(0, (int64_t)num_tokens - 1);
    std::vector<float> found(num_rows);
    require(multiply(pool, layout, panels.get(), num_rows, x.get() + t * d, 1, found.data()) == Outcome::done,
            "a token's products are done");
    require(std::memcmp(found.data(), out.get() + t * num_rows, sizeof(float) * num_rows) == 0,
            "a token has the same bits alone");
}

// The same rows in panels. `of_rows`: their products.
void run_panels(Random& random, Pool& alone, Pool& several, RowsLayout layout, const Exact<uint8_t>& rows,
                int32_t num_rows, const Exact<float>& x, bool sane, const Exact<float>& of_rows, Counts& counts) {
    const int32_t d = layout.part.part.num_cols, num_tokens = (int32_t)(x.size() / d);
    Exact<uint8_t> panels(random, rows.size());
    panels.copy_from(rows);
    require(put_in_panels(several, layout, panels.get(), num_rows) == Outcome::done, "rows are put in panels");
    layout.in_panels = true;
    check_panels(layout, rows, panels, num_rows);
    check_taken(random, several, layout, rows, panels, num_rows);
    if (alone.kernels().panels == nullptr) return;
    Exact<float> out(random, of_rows.size()), same_out(random, of_rows.size());
    for (auto [pool, product] : {std::pair(&alone, &out), std::pair(&several, &same_out)})
        require(multiply(*pool, layout, panels.get(), num_rows, x.get(), num_tokens, product->get()) == Outcome::done,
                "products of panels are done");
    require(out.same_bits(same_out), "the same bits for any number of threads, in panels");
    counts.compared++;
    const bool rounds = alone.rounds() && num_tokens > 3 && !alone.are_tokens_alone();
    if (rounds) return require(out.same_bits(of_rows), "rounded products of panels are those of rows");
    check_wild(layout, x, out, num_rows);
    check_alone(random, several, layout, panels, num_rows, x, out);
    if (sane) check_products(layout, false, rows, num_rows, x, num_tokens, 0, out);
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
    // Numbers that were tampered with may say that random bytes are panels: they are rows here.
    layout.in_panels = false;
    const Part& part = layout.part.part;
    const bool may_panel = layout.part.offset == 0 && can_panel(part, layout.row_bytes, 0);
    if (may_panel) sizes.num_rows = (sizes.num_rows + kPanelRows - 1) / kPanelRows * kPanelRows;
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
    if (may_panel)
        run_panels(random, alone, several, layout, rows, num_rows, x, sane && !numbers.tampered, out, counts);
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
