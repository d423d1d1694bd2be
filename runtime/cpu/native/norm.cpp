#include "norm.h"

#include <algorithm>
#include <cmath>

namespace moe_pack {
namespace {

constexpr size_t kAloneBytes = 256 << 10;  // of rows: less is done before another thread is awake
constexpr size_t kItemBytes = 64 << 10;

}  // namespace

void rms_norm_row(const Kernels& kernels, const float* x, const float* weight, int32_t n, float eps, float* out) {
    float squares = 0.0f;
    kernels.dots(x, 1, 0, x, 1, 0, n, &squares, 0);
    float factor = 1.0f / std::sqrt(squares / (float)n + eps);
    for (int32_t c = 0; c < n; c++) out[c] = weight[c] * (x[c] * factor);
}

Outcome rms_norm(Pool& pool, const float* x, const float* weight, int32_t num_rows, int32_t n, float eps, float* out) {
    size_t row_bytes = sizeof(float) * n;
    struct Rows {
        const Kernels& kernels;
        const float *x, *weight;
        int32_t num_rows, n, each;
        float eps;
        float* out;
    } context = {pool.kernels(), x, weight, num_rows, n, (int32_t)std::max<size_t>(1, kItemBytes / row_bytes), eps, out};
    auto item = [](void* context, int item, int, int) {
        auto& c = *static_cast<Rows*>(context);
        int32_t first = item * c.each, count = std::min(c.each, c.num_rows - first);
        for (size_t r = first; r < (size_t)first + count; r++)
            rms_norm_row(c.kernels, c.x + r * c.n, c.weight, c.n, c.eps, c.out + r * c.n);
    };
    int count = (int)(((int64_t)num_rows + context.each - 1) / context.each);
    if (num_rows * row_bytes < kAloneBytes) {
        for (int i = 0; i < count; i++) item(&context, i, -1, 0);
        return Outcome::done;
    }
    std::lock_guard<std::mutex> lock(pool.one_job());
    return pool.run(count, item, &context) ? Outcome::done : Outcome::cut;
}

}  // namespace moe_pack
