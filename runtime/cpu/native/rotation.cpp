#include "rotation.h"

#include <algorithm>

namespace moe_pack {
namespace {

constexpr size_t kAloneBytes = 128 << 10;  // of rows: less is done before another thread is awake
constexpr size_t kItemBytes = 64 << 10;

}  // namespace

Outcome rotate_rows(Pool& pool, const RotationWork& work, float* out) {
    const size_t row_bytes = sizeof(float) * work.d;
    struct Rows {
        const Kernels& kernels;
        const RotationWork& work;
        int32_t each;
        float* out;
    } context = {pool.kernels(), work, (int32_t)std::max<size_t>(1, kItemBytes / row_bytes), out};
    auto item = [](void* context, int item, int, int) {
        auto& c = *static_cast<Rows*>(context);
        const RotationWork& w = c.work;
        const int32_t first = item * c.each, count = std::min(c.each, w.num_rows - first);
        for (size_t r = first; r < (size_t)first + count; r++)
            c.kernels.rotate(w.x + r * w.d, w.scale, w.is_scaled_first, w.d, w.m, w.hartley, c.out + r * w.d);
    };
    const int count = (int)(((int64_t)work.num_rows + context.each - 1) / context.each);
    if (work.num_rows * row_bytes < kAloneBytes) {
        for (int i = 0; i < count; i++) item(&context, i, -1, 0);
        return Outcome::done;
    }
    std::lock_guard<std::mutex> lock(pool.one_job());
    return pool.run(count, item, &context) ? Outcome::done : Outcome::cut;
}

}  // namespace moe_pack
