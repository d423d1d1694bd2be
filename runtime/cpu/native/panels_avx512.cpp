// Panels with AVX-512 and its VNNI: a line is a register.
#if defined(__x86_64__)

#include "panels.h"

#include "target_avx512.h"

#include "panel_vnni.h"

namespace moe_pack {
namespace {

struct Zmm {
    using Ints = __m512i;
    using Floats = __m512;
    static constexpr int32_t lanes = 16;

    static constexpr int tokens_at_once(int, int) { return 4; }  // in 32 registers

    static Ints zero() { return _mm512_setzero_si512(); }
    static Ints load(const void* from) { return _mm512_loadu_si512(from); }
    static Ints broadcast(const void* word) { return _mm512_set1_epi32(word_at(word)); }
    static Ints low_nibbles(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
    static Ints high_nibbles(Ints bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }
    static Ints even_bytes(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi16(255)); }
    static Ints odd_bytes(Ints bytes) { return _mm512_srli_epi16(bytes, 8); }
    static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
    static Ints times_256(Ints ints) { return _mm512_slli_epi32(ints, 8); }
    static Ints dot_bytes(Ints sum, Ints codes, Ints digits) { return _mm512_dpbusd_epi32(sum, codes, digits); }
    static Ints dot_words(Ints sum, Ints codes, Ints words) { return _mm512_dpwssd_epi32(sum, codes, words); }
    static Floats floats(Ints ints) { return _mm512_cvtepi32_ps(ints); }
    static Floats halves(const void* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
    }
    static Floats set(float value) { return _mm512_set1_ps(value); }
    static Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
    static void store_floats(float* to, Floats values) { _mm512_storeu_ps(to, values); }
    static void store_anywhere(float* to, Floats values) { store_floats(to, values); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
};

struct VnniYmm : Ymm {
    static Ints dot_bytes(Ints sum, Ints codes, Ints digits) { return _mm256_dpbusd_epi32(sum, codes, digits); }
};

constexpr PanelKernels kRounded = panel_kernels<Zmm, VnniSums<Zmm, VnniYmm>, 2>();

}  // namespace

const PanelKernels avx512_panel_kernels = panel_kernels<Zmm, VnniSums<Zmm, VnniYmm>>(&kRounded);

}  // namespace moe_pack

#include "target_end.h"

#endif  // __x86_64__
