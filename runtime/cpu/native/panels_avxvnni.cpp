// Panels with AVX2 and AVX-VNNI, which processors without AVX-512 have.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)

#include "panels.h"

#define MOE_PACK_AVX_VNNI
#include "target_avx2.h"

#include "panel_vnni.h"

namespace moe_pack {
namespace {

struct VnniYmm : Ymm {
    static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
    static Ints times_256(Ints ints) { return _mm256_slli_epi32(ints, 8); }
    static Ints dot_bytes(Ints sum, Ints codes, Ints digits) { return _mm256_dpbusd_avx_epi32(sum, codes, digits); }
    static Ints dot_words(Ints sum, Ints codes, Ints words) { return _mm256_dpwssd_avx_epi32(sum, codes, words); }
};

constexpr PanelKernels kRounded = panel_kernels<VnniYmm, VnniSums<VnniYmm, VnniYmm>, 2>();
constexpr PanelKernels kKernels = panel_kernels<VnniYmm, VnniSums<VnniYmm, VnniYmm>>(&kRounded);

}  // namespace

const PanelKernels* avx_vnni_panel_kernels() { return &kKernels; }

}  // namespace moe_pack

#include "target_end.h"

#elif defined(__x86_64__)

#include "panels.h"

namespace moe_pack {

const PanelKernels* avx_vnni_panel_kernels() { return nullptr; }

}  // namespace moe_pack

#endif
