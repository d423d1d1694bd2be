// Panels by VNNI, whose instructions few machines have: emulated, they give the bits of AVX2, for one token and for
// several together. A small program that is built in seconds.
//
//   vnni [SEED]
//
// It prints a checksum of the exact results, the same for AVX2 and, where the program is compiled for Arm, for NEON.
#include "panels.h"

#if defined(__x86_64__)
#include "target_avx2.h"

#include "panel_vnni.h"
#endif

#include <algorithm>
#include <cstdio>
#include <vector>

#include "random.h"

namespace moe_pack {
namespace {

// Kernels, and what gives the same bits.
struct Twins {
    const PanelKernels &found, &expected;
};

#if defined(__x86_64__)

// sum[i] += the products of the values that lie in double word i.
template <class Code, class Factor>
__m256i emulated(__m256i sum, __m256i codes, __m256i factors) {
    constexpr int count = 32 / sizeof(Code);
    int32_t sums[8];
    Code code[count];
    Factor factor[count];
    std::memcpy(sums, &sum, 32);
    std::memcpy(code, &codes, 32);
    std::memcpy(factor, &factors, 32);
    for (int i = 0; i < count; i++) sums[i / (count / 8)] += code[i] * factor[i];
    std::memcpy(&sum, sums, 32);
    return sum;
}

struct Emulated : Ymm {
    static constexpr int tokens_at_once(int, int) { return 4; }  // as with AVX-512
    static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
    static Ints times_256(Ints ints) { return _mm256_slli_epi32(ints, 8); }
    static Ints dot_bytes(Ints sum, Ints codes, Ints digits) { return emulated<uint8_t, int8_t>(sum, codes, digits); }
    static Ints dot_words(Ints sum, Ints codes, Ints words) { return emulated<int16_t, int16_t>(sum, codes, words); }
};

constexpr PanelKernels kRounded = panel_kernels<Emulated, VnniSums<Emulated, Emulated>, 2>();
constexpr PanelKernels kExact = panel_kernels<Emulated, VnniSums<Emulated, Emulated>>(&kRounded);

const Twins kExactTwins{kExact, avx2_panel_kernels}, kRoundedTwins{kRounded, *avx2_panel_kernels.rounded};

#else

const Twins kExactTwins{*neon_panel_kernels(), *neon_panel_kernels()};

#endif

uint64_t checksum = 0xcbf29ce484222325u;  // FNV-1a, of floats

template <class T>
T* aligned(size_t count) {
    return static_cast<T*>(std::aligned_alloc(64, (sizeof(T) * count + 127) / 64 * 64));
}

// Bytes at random, with float16 scales of 2^-7 to 2^-6 and zeros of 2 to 4 behind one another from each place on.
class Bytes {
  public:
    Bytes(Random& random, size_t num_bytes) : random_(random), bytes_(aligned<uint8_t>(num_bytes)) {
        for (size_t i = 0; i < num_bytes; i++) bytes_[i] = (uint8_t)random.next();
    }
    ~Bytes() { std::free(bytes_); }
    void scale(size_t at, int count) {
        for (int i = 0; i < 2 * count; i++) {
            const uint16_t half = (uint16_t)((i < count ? 0x2000 : 0x4000) + random_.between(0, 0x3ff));
            std::memcpy(bytes_ + at + 2 * i, &half, 2);
        }
    }
    const uint8_t* get() const { return bytes_; }

  private:
    Random& random_;
    uint8_t* bytes_;
};

void require_equal(const std::vector<float>& found, const std::vector<float>& expected, const char* what) {
    for (float value : found) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        checksum = (checksum ^ bits) * 0x100000001b3u;
    }
    if (std::memcmp(found.data(), expected.data(), 4 * found.size()) == 0) return;
    std::printf("%s differ\n", what);
    std::exit(1);
}

std::vector<float> values(Random& random, size_t count) {
    std::vector<float> made(count);
    for (float& value : made) value = random.sign() * random.real(0.0f, 2.0f);
    return made;
}

Part part_of(int width, int num_groups) {
    Part part = {};
    part.codec = Codec::affine;
    part.width = width;
    part.group = kBlock;
    part.num_groups = num_groups;
    part.num_cols = num_groups * kBlock;
    part.scales_at = part.code_bytes = part.num_cols * width / 8;
    part.scale_bytes = part.zero_bytes = 2 * num_groups;
    return part;
}

std::vector<float> products(const PanelKernels& kernels, const Part& part, const uint8_t* panels, int count,
                            const float* x, int num_tokens) {
    const size_t num_bytes = kernels.prepared_bytes(part);
    auto* prepared = aligned<uint8_t>(num_bytes * num_tokens);
    std::vector<float> out((size_t)num_tokens * count * kPanelRows);
    std::vector<const void*> inputs;
    std::vector<float*> outs;
    for (int t = 0; t < num_tokens; t++) {
        kernels.prepare(part, x + (size_t)t * part.num_cols, prepared + t * num_bytes);
        inputs.push_back(prepared + t * num_bytes);
        outs.push_back(out.data() + (size_t)t * count * kPanelRows);
    }
    PanelAhead ahead(panels, panels + count * panel_bytes(part), panels);
    kernels.dot(part, panels, panel_bytes(part), count, inputs.data(), outs.data(), num_tokens, ahead);
    std::free(prepared);
    return out;
}

void compare_products(Random& random, const PanelKernels& found, const PanelKernels& expected, const Part& part,
                      int num_tokens) {
    constexpr int count = 3;
    Bytes codes(random, count * panel_bytes(part));
    const size_t block = panel_block_bytes(part);
    for (size_t at = block - kPanelScaleBytes; at < count * panel_bytes(part); at += block) codes.scale(at, kPanelRows);
    const std::vector<float> x = values(random, (size_t)num_tokens * part.num_cols);
    std::vector<float> each;
    for (int t = 0; t < num_tokens; t++) {
        const auto alone = products(expected, part, codes.get(), count, x.data() + (size_t)t * part.num_cols, 1);
        each.insert(each.end(), alone.begin(), alone.end());
    }
    require_equal(products(expected, part, codes.get(), count, x.data(), num_tokens), each, "tokens alone and together");
    require_equal(products(found, part, codes.get(), count, x.data(), num_tokens), each, "products");
}

std::vector<float> sums(const PanelKernels& kernels, const Part& part, const uint8_t* tile, const float* h,
                        int num_tokens) {
    const size_t floats = (kernels.sum_floats(part) + 15) / 16 * 16;
    auto* sum = aligned<float>(floats * num_tokens);
    std::memset(sum, 0, 4 * floats * num_tokens);
    PanelAhead ahead(tile, tile + down_tile_bytes(part), tile);
    kernels.add(part, tile, h, num_tokens, ahead, sum, floats);
    std::vector<float> found(sum, sum + floats * num_tokens);
    std::free(sum);
    return found;
}

void compare_sums(Random& random, const PanelKernels& found, const PanelKernels& expected, const Part& part,
                  int num_tokens) {
    Bytes codes(random, down_tile_bytes(part));
    size_t at = 0;
    for (int first = 0; first < part.num_groups; first += kDownGroups) {
        const int count = std::min(kDownGroups, part.num_groups - first);
        codes.scale(at, kMaxTile * count);
        at += (size_t)count * (2 * 2 * kMaxTile + kBlock / kPanelRows * kDownPanelBytes);
    }
    const std::vector<float> h = values(random, (size_t)num_tokens * kMaxTile);
    require_equal(sums(found, part, codes.get(), h.data(), num_tokens),
                  sums(expected, part, codes.get(), h.data(), num_tokens), "sums of down rows");
}

// Rows as they lie: products, and the sum of all.
std::vector<float> of_rows(const PanelKernels& kernels, const Part& part, const uint8_t* bytes, size_t stride, int count,
                           const float* x) {
    std::vector<const uint8_t*> rows;
    for (int r = 0; r < count; r++) rows.push_back(bytes + r * stride);
    auto* prepared = aligned<uint8_t>(kernels.prepared_bytes(part));
    kernels.prepare(part, x, prepared);
    std::vector<float> found(count + part.num_cols);
    kernels.dot_rows(part, rows.data(), count, prepared, Ahead{}, nullptr, found.data());
    auto* sum = aligned<float>(kernels.sum_floats(part));
    std::memset(sum, 0, 4 * kernels.sum_floats(part));
    kernels.add_rows(part, rows.data(), count, x, Ahead{}, nullptr, sum);
    kernels.finish_sum(part, sum, 0.7f, 0, part.num_cols, found.data() + count);
    std::free(prepared);
    std::free(sum);
    return found;
}

void compare_rows(Random& random, const Twins& twins, const Part& part, int count) {
    const size_t stride = (part.code_bytes + part.scale_bytes + part.zero_bytes + 63) / 64 * 64;
    Bytes codes(random, count * stride);
    for (int r = 0; r < count; r++) codes.scale(r * stride + part.scales_at, part.num_groups);
    const std::vector<float> x = values(random, part.num_cols);
    require_equal(of_rows(twins.found, part, codes.get(), stride, count, x.data()),
                  of_rows(twins.expected, part, codes.get(), stride, count, x.data()), "rows as they lie");
}

void compare(const Twins& twins, uint64_t seed) {
    Random random(seed);
    for (int num_groups : {1, 3, 8, 9, 32}) {
        for (int num_tokens = 1; num_tokens <= 11; num_tokens++) {
            for (int width : {4, 8})
                compare_products(random, twins.found, twins.expected, part_of(width, num_groups), num_tokens);
            compare_sums(random, twins.found, twins.expected, part_of(4, num_groups), num_tokens);
            compare_rows(random, twins, part_of(4, num_groups), 6 * num_tokens - 5);
        }
    }
}

}  // namespace
}  // namespace moe_pack

#if defined(__x86_64__)
#include "target_end.h"
#endif

int main(int count, char** arguments) {
    using namespace moe_pack;
    const uint64_t seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
    compare(kExactTwins, seed);
    std::printf("the bits of AVX2, checksum %016llx\n", (unsigned long long)checksum);
#if defined(__x86_64__)
    compare(kRoundedTwins, seed);
#endif
}
