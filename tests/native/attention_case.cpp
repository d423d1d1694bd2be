// Attention over caches of every kind, and norms of float rows, against plain sums in double precision.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "cached_rows.h"
#include "cases.h"
#include "norm.h"
#include "rotation.h"

namespace moe_pack {
namespace {

constexpr double kMaxSums = 400'000;  // products that a case may cost
constexpr double kRounding = 1e-5;    // of float32 sums of some hundred values

using Values = std::vector<double>;

struct Tensors {
    Exact<float> q, k, v, q_norm, k_norm, cosines, sines, sinks, out;
    Exact<uint8_t> keys, values;

    Tensors(Random& random, const AttentionWork& w, size_t t, size_t d)
        : q(random, t * w.num_heads * d), k(random, t * w.num_kv_heads * d), v(random, t * w.num_kv_heads * d),
          q_norm(random, d), k_norm(random, d), cosines(random, t * w.num_angles), sines(random, t * w.num_angles),
          sinks(random, w.num_heads), out(random, q.size()),
          keys(random, (size_t)w.num_kv_heads * w.places * w.rows.row_bytes, unit_of(w)),
          values(random, keys.size(), unit_of(w)) {}

    static size_t unit_of(const AttentionWork& w) { return w.rows.kind == CacheKind::f32 ? sizeof(float) : 1; }

    // `with` sane numbers rows of the cache are such; otherwise they are any bytes, as they were made.
    void fill(Random& random, const AttentionWork& w, void (*with)(Random&, float*, size_t)) {
        for (Exact<float>* each : {&q, &k, &v, &q_norm, &k_norm, &sinks}) with(random, each->get(), each->size());
        for (size_t i = 0; i < cosines.size(); i++) {
            const float angle = random.real(-9.0f, 9.0f);
            cosines[i] = std::cos(angle);
            sines[i] = std::sin(angle);
        }
        std::vector<float> row(w.head_dim);
        for (Exact<uint8_t>* each : {&keys, &values})
            for (size_t at = 0; with == fill_inputs && at < each->size(); at += w.rows.row_bytes) {
                with(random, row.data(), row.size());
                encode_cached(w.rows, row.data(), each->get() + at);
            }
    }
    AttentionWork given(AttentionWork w, bool normed, bool has_sinks) {
        w.sinks = has_sinks ? sinks.get() : nullptr;
        w.q = q.get();
        w.k = k.get();
        w.v = v.get();
        w.q_norm = normed ? q_norm.get() : nullptr;
        w.k_norm = normed ? k_norm.get() : nullptr;
        w.cosines = cosines.get();
        w.sines = sines.get();
        w.keys = keys.get();
        w.values = values.get();
        return w;
    }
};

AttentionWork random_work(Random& random) {
    AttentionWork w = {};
    w.num_kv_heads = (int32_t)random.between(1, 4);
    w.num_heads = w.num_kv_heads * (int32_t)random.pick({1, 2, 3, 8, 17});
    w.head_dim = random.chance(50) ? random.pick({32, 64, 80, 96, 128, 192, 256}) : (int32_t)random.between(1, 70);
    w.num_tokens = random.pick({0, 1, 1, 2, 5, 40, 70});
    w.start = random.chance(40) ? 0 : (int32_t)random.between(0, random.chance(20) ? 1500 : 300);
    w.window = random.chance(50) ? 0 : (int32_t)random.between(1, random.chance(50) ? 10 : 400);
    const int32_t seen = w.window && random.chance(70) ? std::min(w.start, w.window - 1) : w.start;
    w.places = seen + w.num_tokens + (int32_t)random.between(0, 3);
    w.num_angles = random.chance(50) ? w.head_dim / 2 : (int32_t)random.between(0, w.head_dim / 2);
    w.interleaved = random.chance(50);
    w.scale = random.pick({1.0f, 0.125f});
    w.eps = random.pick({1e-6f, 1e-3f});
    w.rows = cached_rows(random.pick({CacheKind::f32, CacheKind::bf16, CacheKind::q8, CacheKind::q4}), w.head_dim);
    return w;
}

double norm_of(const Values& x) {
    double squares = 0;
    for (double value : x) squares += value * value;
    return std::sqrt(squares);
}

// The rotation of codes, plainly: value c is multiplied with a sign; then Hadamard's matrix takes each piece of the
// largest power of two in their number. `back`: its transpose.
Values rotated(const Values& x, bool back) {
    const size_t size = x.size() & -x.size();
    Values signs(x.size()), found(x.size());
    for (uint64_t c = 0; c < x.size(); c++) signs[c] = (c * 2654435761u >> 15) & 1 ? -1 : 1;
    for (size_t i = 0; i < x.size(); i++) {
        double sum = 0;
        for (size_t c = i / size * size; c < i / size * size + size; c++)
            sum += (__builtin_parityll(i % size & c % size) ? -1 : 1) * x[c] * (back ? 1 : signs[c]);
        found[i] = sum / std::sqrt((double)size) * (back ? signs[i] : 1);
    }
    return found;
}

double half_at(const uint8_t* at) {
    const int stored = at[0] | at[1] << 8, exponent = stored >> 10 & 31, fraction = stored & 1023;
    const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return stored & 0x8000 ? -size : size;
}

// A row of a cache as numbers, of codes those that are rotated; `steps`: how far an encoded value may be from each.
Values plain_row_of(const CachedRows& rows, const uint8_t* row, Values* steps) {
    Values found(rows.width);
    steps->assign(rows.width, 0.0);
    const uint8_t *scales = row + rows.num_blocks * rows.code_bytes, *minima = scales + 2 * rows.num_blocks;
    for (int32_t c = 0; c < rows.width; c++) {
        float value = 0;
        if (!rows.is_coded()) {
            if (rows.kind == CacheKind::f32) std::memcpy(&value, row + 4 * c, 4);
            if (rows.kind == CacheKind::bf16) std::memcpy(reinterpret_cast<uint8_t*>(&value) + 2, row + 2 * c, 2);
            found[c] = value;
            (*steps)[c] = rows.kind == CacheKind::bf16 ? std::fabs(value) * 0x1p-8 : 0;
            continue;
        }
        const int32_t block = c / rows.block, i = c % rows.block, half = rows.block / 2;
        const uint8_t* codes = row + block * rows.code_bytes;
        const double scale = half_at(scales + 2 * block), lost = std::max(scale * 0x1p-11, 0x1p-25);
        if (rows.kind == CacheKind::q8) {
            found[c] = (int8_t)codes[i] * scale;
            (*steps)[c] = scale / 2 + 127 * lost;  // of the scale, which is a half, lose the largest most
        } else {
            const double least = half_at(minima + 2 * block);
            found[c] = (codes[i % half] >> (i < half ? 0 : 4) & 15) * scale + least;
            (*steps)[c] = scale / 2 + 15 * lost + std::max(std::fabs(least) * 0x1p-11, 0x1p-25);
        }
    }
    return found;
}

// A position's keys or values as they are meant.
Values plain_cached(const AttentionWork& w, const uint8_t* cached, int32_t kv_head, int32_t position) {
    Values steps;
    const size_t place = (size_t)kv_head * w.places + position % w.places;
    const Values row = plain_row_of(w.rows, cached + place * w.rows.row_bytes, &steps);
    return w.rows.is_coded() ? rotated(row, true) : row;
}

Values plain_head(const AttentionWork& w, const float* head, const float* norm, int32_t token) {
    Values x(head, head + w.head_dim);
    double squares = 0;
    for (double value : x) squares += value * value;
    for (int32_t c = 0; norm && c < w.head_dim; c++) x[c] *= norm[c] / std::sqrt(squares / w.head_dim + w.eps);
    for (int32_t i = 0; i < w.num_angles; i++) {
        double &a = x[w.interleaved ? 2 * i : i], &b = x[w.interleaved ? 2 * i + 1 : i + w.num_angles];
        const size_t place = (size_t)token * w.num_angles + i;
        const double cosine = w.cosines[place], sine = w.sines[place];
        const double first = a * cosine - b * sine, second = b * cosine + a * sine;
        a = first;
        b = second;
    }
    return x;
}

// What one query head of a token makes of the cache, in which its own keys and values are by now.
void check_head(const AttentionWork& w, int32_t token, int32_t head, const float* found) {
    const size_t d = w.head_dim;
    const Values q = plain_head(w, w.q + ((size_t)token * w.num_heads + head) * d, w.q_norm, token);
    const int32_t kv_head = head / (w.num_heads / w.num_kv_heads);
    const int32_t end = w.start + token + 1, begin = w.window ? std::max(0, end - w.window) : 0;
    Values scores, mixed(d);
    double size = 0, largest = w.sinks ? w.sinks[head] : -INFINITY, sum = 0, peak = 0;
    for (int32_t p = begin; p < end; p++) {
        const Values key = plain_cached(w, w.keys, kv_head, p);
        double score = 0, magnitude = 0;
        for (size_t c = 0; c < d; c++) {
            score += q[c] * key[c] * w.scale;
            magnitude += std::fabs(q[c] * key[c] * w.scale);
        }
        // What is rotated has its values' sizes from all of them.
        if (w.rows.is_coded()) magnitude = norm_of(q) * norm_of(key) * w.scale;
        scores.push_back(score);
        largest = std::max(largest, score);
        size = std::max(size, magnitude);
    }
    if (w.sinks) sum = std::exp(w.sinks[head] - largest);
    for (int32_t p = begin; p < end; p++) {
        const Values value = plain_cached(w, w.values, kv_head, p);
        const double share = std::exp(scores[p - begin] - largest);
        sum += share;
        if (w.rows.is_coded()) peak = std::max(peak, norm_of(value));
        for (size_t c = 0; c < d; c++) {
            mixed[c] += share * value[c];
            peak = std::max(peak, std::fabs(value[c]));
        }
    }
    const double slack = peak * kRounding * (1 + size);
    for (size_t c = 0; c < d; c++)
        if (!(std::fabs(found[c] - mixed[c] / sum) <= slack))
            fail("attention of token %d, head %d is %.9g, expected %.9g within %.3g", token, head, found[c],
                 mixed[c] / sum, slack);
}

// What entered the cache for a value or a key, against what should have.
void check_entered(const AttentionWork& w, const uint8_t* row, const Values& expected, const char* name) {
    Values steps;
    const Values found = plain_row_of(w.rows, row, &steps);
    const Values given = w.rows.is_coded() ? rotated(expected, false) : expected;
    double peak = 0;
    for (double each : given) peak = std::max(peak, std::fabs(each));
    for (size_t c = 0; c < found.size(); c++)
        if (!(std::fabs(found[c] - given[c]) <= 1.001 * steps[c] + 2 * kRounding * peak))
            fail("%s: %.9g, expected %.9g within %.3g", name, found[c], given[c], steps[c]);
}

void check_cache(const AttentionWork& w, const Exact<uint8_t>& keys_before, const Exact<uint8_t>& values_before) {
    const size_t d = w.head_dim, row_bytes = w.rows.row_bytes;
    for (int32_t h = 0; h < w.num_kv_heads; h++)
        for (int32_t p = 0; p < w.places; p++) {
            const size_t place = ((size_t)h * w.places + p) * row_bytes;
            const int32_t token = (p - w.start % w.places + w.places) % w.places;
            if (token >= w.num_tokens) {
                require(std::memcmp(w.values + place, values_before.get() + place, row_bytes) == 0, "other values");
                require(std::memcmp(w.keys + place, keys_before.get() + place, row_bytes) == 0, "other keys");
                continue;
            }
            const size_t from = ((size_t)token * w.num_kv_heads + h) * d;
            check_entered(w, w.values + place, Values(w.v + from, w.v + from + d), "a value of the cache");
            check_entered(w, w.keys + place, plain_head(w, w.k + from, w.k_norm, token), "a key of the cache");
        }
}

void norm_case(Random& random, Pool& alone, Pool& several, bool sane) {
    const int32_t n = (int32_t)random.between(1, 300), num_rows = random.pick({0, 1, 2, 7, 300});
    Exact<float> x(random, (size_t)num_rows * n), weight(random, n), out(random, x.size()), same(random, x.size());
    (sane ? fill_inputs : fill_wild)(random, x.get(), x.size());
    (sane ? fill_inputs : fill_wild)(random, weight.get(), weight.size());
    const float eps = 1e-5f;
    require(rms_norm(alone, x.get(), weight.get(), num_rows, n, eps, out.get()) == Outcome::done, "norms are done");
    require(rms_norm(several, x.get(), weight.get(), num_rows, n, eps, same.get()) == Outcome::done, "norms are done");
    require(out.same_bits(same), "the same bits for any number of threads, in norms");
    for (int32_t r = 0; sane && r < num_rows; r++) {
        double squares = 0;
        for (int32_t c = 0; c < n; c++) squares += (double)x[(size_t)r * n + c] * x[(size_t)r * n + c];
        for (int32_t c = 0; c < n; c++) {
            const double expected = weight[c] * x[(size_t)r * n + c] / std::sqrt(squares / n + eps);
            require(std::fabs(out[(size_t)r * n + c] - expected) <= kRounding * std::fabs(expected), "a norm");
        }
    }
}

// With any symmetric matrix for that of Hartley: the kernel's is an argument.
void rotation_case(Random& random, Pool& alone, Pool& several, bool sane) {
    const int32_t m = random.pick({1, 3, 5, 9, 15}), n = 64 << random.between(0, 3), d = m * n;
    const int32_t num_rows = random.pick({0, 1, 3, 40});
    Exact<float> x(random, (size_t)num_rows * d), scale(random, d), matrix(random, (size_t)m * m);
    Exact<float> out(random, x.size()), same(random, x.size());
    (sane ? fill_inputs : fill_wild)(random, x.get(), x.size());
    (sane ? fill_inputs : fill_wild)(random, scale.get(), scale.size());
    (sane ? fill_inputs : fill_wild)(random, matrix.get(), matrix.size());
    const bool is_first = random.chance(50);
    const RotationWork work = {x.get(), scale.get(), matrix.get(), num_rows, d, m, is_first};
    require(rotate_rows(alone, work, out.get()) == Outcome::done, "rotations are done");
    require(rotate_rows(several, work, same.get()) == Outcome::done, "rotations are done");
    require(out.same_bits(same), "the same bits for any number of threads, in rotations");
    if (!sane || num_rows == 0) return;
    const int32_t row = (int32_t)random.between(0, num_rows - 1), c = (int32_t)random.between(0, d - 1);
    double sum = 0, magnitude = 0;
    for (int32_t i = 0; i < d; i++) {
        const double factor = m == 1 ? 1 : matrix[(size_t)(c / n) * m + i / n];
        const double sign = __builtin_parity((unsigned)(c % n) & (unsigned)(i % n)) ? -1 : 1;
        const double term = factor * sign * x[(size_t)row * d + i] * (is_first ? scale[i] : scale[c]) / std::sqrt(n);
        sum += term;
        magnitude += std::fabs(term);
    }
    require(std::fabs(out[(size_t)row * d + c] - sum) <= 4 * kRounding * magnitude, "a rotated value");
}

}  // namespace

void attention_case(Random& random, Pools& pools, Counts& counts) {
    const size_t set_idx = pools.any_set(random);
    Pool &alone = pools.alone(set_idx), &several = pools.several(random, set_idx);
    const bool sane = random.chance(60), normed = random.chance(50);
    norm_case(random, alone, several, sane);
    rotation_case(random, alone, several, sane);
    const AttentionWork sizes = random_work(random);
    const double sums = (double)sizes.num_tokens * sizes.num_heads * sizes.places * sizes.head_dim;
    // Larger ones would take a sanitizer minutes.
    if (sizes.num_tokens == 0 || sums > 10 * kMaxSums) return;
    Tensors first(random, sizes, sizes.num_tokens, sizes.head_dim);
    Tensors second(random, sizes, sizes.num_tokens, sizes.head_dim);
    first.fill(random, sizes, sane ? fill_inputs : fill_wild);
    for (auto [to, from] : {std::pair(&second.keys, &first.keys), std::pair(&second.values, &first.values)})
        to->copy_from(*from);
    Exact<uint8_t> keys_before(random, first.keys.size()), values_before(random, first.keys.size());
    keys_before.copy_from(first.keys);
    values_before.copy_from(first.values);
    const AttentionWork work = first.given(sizes, normed, random.chance(50));
    AttentionWork again = work;
    again.keys = second.keys.get();
    again.values = second.values.get();
    require(attend(alone, work, first.out.get()) == Outcome::done, "attention is done");
    require(attend(several, again, second.out.get()) == Outcome::done, "attention is done");
    require(first.out.same_bits(second.out) && first.keys.same_bits(second.keys) &&
                first.values.same_bits(second.values),
            "the same bits for any number of threads, in attention");
    if (!sane || sums > kMaxSums) return;
    counts.compared++;
    check_cache(work, keys_before, values_before);
    for (int32_t t = 0; t < sizes.num_tokens; t++)
        for (int32_t h = 0; h < sizes.num_heads; h++)
            check_head(work, t, h, first.out.get() + ((size_t)t * sizes.num_heads + h) * sizes.head_dim);
}

}  // namespace moe_pack
