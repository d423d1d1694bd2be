#include "products.h"

#include <algorithm>

#include "panels.h"
#include "rows.h"
#include "tiles.h"

namespace moe_pack {
namespace {

constexpr size_t kAloneBytes = 64 << 10;   // of rows: less is done before another thread is awake
constexpr int32_t kPreparedTokens = 64;    // at once

// y += bias, as torch adds it after the product.
void add_bias(const DenseMatrix& matrix, int32_t num_tokens, float* y) {
    if (matrix.bias == nullptr) return;
    for (int32_t t = 0; t < num_tokens; t++)
        for (int32_t r = 0; r < matrix.num_rows; r++) y[(size_t)t * matrix.num_rows + r] += matrix.bias[r];
}

}  // namespace

void Products::add(const DenseMatrix& matrix, float* out) {
    if (matrix.rows != nullptr) each_[count_++] = {&matrix, out, 0, 0, 0, nullptr};
}

Outcome Products::run() {
    // Matrices side by side, before those of which many tokens share decoded rows.
    const auto few = std::stable_partition(each_, each_ + count_, [&](const Product& product) {
        return multiplies_few(pool_, product.layout(), num_tokens_);
    });
    const int32_t all = count_;
    count_ = (int32_t)(few - each_);
    Outcome found = count_ ? run_few() : Outcome::done;
    for (int32_t i = count_; found == Outcome::done && i < all; i++) {
        const DenseMatrix& matrix = *each_[i].matrix;
        found = multiply(pool_, matrix.layout, matrix.rows, matrix.num_rows, x_, num_tokens_, each_[i].out);
    }
    for (int32_t i = 0; found == Outcome::done && i < all; i++)
        add_bias(*each_[i].matrix, num_tokens_, each_[i].out);
    return found;
}

// The inputs in the form that a matrix wants, which matrices of one form share.
bool Products::prepare(int32_t i, int32_t first_token, int32_t num_tokens) {
    Product& mine = each_[i];
    const Part& part = mine.part();
    const Kernels& kernels = pool_.kernels();
    const bool in_panels = mine.layout().in_panels;
    if (in_panels && kernels.panels == nullptr) return false;
    const auto prepare = in_panels ? kernels.panels->prepare : kernels.prepare;
    mine.prepared_bytes = (in_panels ? kernels.panels->prepared_bytes : kernels.prepared_bytes)(part);
    for (int32_t k = 0; k < i; k++)
        if (each_[k].layout().in_panels == in_panels && same_form(each_[k].part(), part)) {
            mine.prepared = each_[k].prepared;
            return true;
        }
    auto* prepared = pool_.arena().take<uint8_t>(num_tokens * mine.prepared_bytes);
    if (prepared == nullptr) return false;
    for (int32_t t = 0; t < num_tokens; t++)
        prepare(part, x_ + (size_t)(first_token + t) * part.num_cols, prepared + t * mine.prepared_bytes);
    mine.prepared = prepared;
    return true;
}

void Products::share_out(int32_t i) {
    Product& mine = each_[i];
    mine.tile = tile_rows(mine.layout().row_bytes);
    if (mine.layout().in_panels) mine.tile = std::max(kPanelRows, mine.tile / kPanelRows * kPanelRows);
    mine.first_item = num_items_;
    num_items_ += (mine.matrix->num_rows + mine.tile - 1) / mine.tile;
}

Outcome Products::run_few() {
    Outcome found = Outcome::done;
    for (int32_t first = 0; found == Outcome::done && first < num_tokens_; first += kPreparedTokens)
        found = run_some(first, std::min(kPreparedTokens, num_tokens_ - first));
    return found;
}

Outcome Products::run_some(int32_t first_token, int32_t num_tokens) {
    std::lock_guard<std::mutex> lock(pool_.one_job());
    pool_.arena().reset();
    size_t num_bytes = 0;
    num_items_ = 0;
    first_token_ = first_token;
    num_at_once_ = num_tokens;
    for (int32_t i = 0; i < count_; i++) {
        if (!prepare(i, first_token, num_tokens)) return Outcome::no_memory;
        work_floats_ = std::max(work_floats_, pool_.kernels().work_floats(each_[i].part()));
        share_out(i);
        num_bytes += (size_t)each_[i].matrix->num_rows * each_[i].layout().row_bytes * num_tokens;
    }
    work_floats_ = (work_floats_ + 15) / 16 * 16;
    work_ = pool_.arena().take<float>(pool_.threads() * work_floats_);
    if (work_ == nullptr) return Outcome::no_memory;
    const Pool::Work item = [](void* context, int item, int next, int worker) {
        static_cast<const Products*>(context)->run_item(item, next, worker);
    };
    const bool whole = num_bytes < kAloneBytes ? pool_.run_alone(num_items_, item, this)
                                               : pool_.run(num_items_, item, this);
    return whole ? Outcome::done : Outcome::cut;
}

const Products::Product& Products::of_item(int item) const {
    int32_t i = count_ - 1;
    while (item < each_[i].first_item) i--;
    return each_[i];
}

void Products::run_item(int item, int next, int worker) const {
    const Product& mine = of_item(item);
    const int32_t first = (item - mine.first_item) * mine.tile;
    const int32_t count = std::min(mine.tile, mine.matrix->num_rows - first);
    if (mine.layout().in_panels)
        run_panels(mine, first, count, next);
    else
        run_rows(mine, first, count, next < 0 ? item : next, worker);
}

void Products::run_rows(const Product& mine, int32_t first, int32_t count, int next, int worker) const {
    const Product& then = of_item(next);
    const int32_t distance = ahead_rows(mine.layout().row_bytes);
    const int32_t begin = (next - then.first_item) * then.tile;
    const uint8_t *rows[kMaxTile], *ahead[kMaxTile];
    for (int32_t r = 0; r < count; r++) {
        rows[r] = mine.row(first + r) + mine.layout().part.offset;
        const int32_t wanted = r + distance;
        ahead[r] = wanted < count ? mine.row(first + wanted)
                                  : then.row(std::min(begin + wanted - count, then.matrix->num_rows - 1));
    }
    for (int32_t t = 0; t < num_at_once_; t++)
        pool_.kernels().dot_rows(mine.part(), rows, count, mine.prepared + t * mine.prepared_bytes,
                                 {ahead, t == 0 ? mine.layout().row_bytes : 0}, work_ + worker * work_floats_,
                                 mine.out + (size_t)(first_token_ + t) * mine.matrix->num_rows + first);
}

void Products::run_panels(const Product& mine, int32_t first, int32_t count, int next) const {
    const size_t stride = (size_t)kPanelRows * mine.layout().row_bytes;
    const uint8_t *panels = panel_in(mine.row(first)), *end = panels + count / kPanelRows * stride;
    const void* prepared[kPreparedTokens];
    float* outs[kPreparedTokens];
    for (int32_t t = 0; t < num_at_once_; t++) {
        prepared[t] = mine.prepared + t * mine.prepared_bytes;
        outs[t] = mine.out + (size_t)(first_token_ + t) * mine.matrix->num_rows + first;
    }
    PanelAhead ahead(panels, end, first_row(next));
    pool_.kernels().panels->dot(mine.part(), panels, stride, count / kPanelRows, prepared, outs, num_at_once_, ahead);
}

const uint8_t* Products::first_row(int item) const {
    if (item < 0) return nullptr;
    const Product& product = of_item(item);
    return product.row((item - product.first_item) * product.tile);
}

}  // namespace moe_pack
