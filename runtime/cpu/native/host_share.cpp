#include "host_share.h"

#include <chrono>
#include <cstring>
#include <exception>

namespace moe_pack {
namespace {

// Longer than a GPU takes from one layer's experts to the next's. Threads that sleep are woken in as much time as a
// layer of small experts takes.
constexpr auto kBetweenLayers = std::chrono::milliseconds(1);

constexpr int64_t kToken = 0;  // the one row of a token's x, and of its y

}  // namespace

HostShare::HostShare(Pool& pool, const ShareSizes& sizes, std::vector<std::vector<ShareExpert>> layers,
                     const ShareBuffers& buffers)
    : pool_(pool),
      sizes_(sizes),
      layers_(std::move(layers)),
      buffers_(buffers),
      counts_(sizes.k),
      neurons_((size_t)sizes.k * sizes.f),
      weights_(sizes.k),
      num_read_(sizes.k),
      works_(sizes.k) {}

void HostShare::compute(int32_t at) noexcept {
    const int32_t token = at / sizes_.num_places, layer_idx = at % sizes_.num_layers;
    float* y = buffers_.y + (size_t)token * sizes_.d;
    ShareFault fault = ShareFault::no_memory;
    int32_t expert_idx = 0;
    try {
        std::lock_guard<std::mutex> lock(one_layer_);
        pool_.spin_for(layer_idx + 1 < sizes_.num_layers ? kBetweenLayers : Pool::kSpin);
        std::memset(y, 0, sizeof(float) * sizes_.d);
        std::memcpy(counts_.data(), buffers_.counts + (size_t)at * sizes_.k, sizeof(int32_t) * sizes_.k);
        bool any = false;
        for (int32_t count : counts_) any |= count != 0;
        if (!any) return;
        const auto start = std::chrono::steady_clock::now();
        fault = take_works(at, &expert_idx);
        if (fault == ShareFault::none) fault = run(token);
        if (fault != ShareFault::none) std::memset(y, 0, sizeof(float) * sizes_.d);
        busy_ns_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    } catch (const std::exception&) {
        std::memset(y, 0, sizeof(float) * sizes_.d);
    }
    if (fault != ShareFault::none) keep_fault(fault, layer_idx, expert_idx);
}

ShareFault HostShare::take_works(int32_t at, int32_t* expert_idx) {
    const std::vector<ShareExpert>& experts = layers_[at % sizes_.num_layers];
    const size_t first = (size_t)(at / sizes_.num_places) * sizes_.k;
    num_works_ = 0;
    for (int32_t p = 0; p < sizes_.k; p++) {
        *expert_idx = p;
        if (counts_[p] == 0) continue;
        int32_t chosen;
        std::memcpy(&chosen, buffers_.experts + first + p, sizeof chosen);
        if (chosen < 0 || (size_t)chosen >= experts.size()) return ShareFault::expert;
        const ShareExpert& expert = experts[chosen];
        ExpertWork& work = works_[num_works_];
        work = {&expert.layout, expert.selector, expert.records, expert.threshold, 1, &kToken, &weights_[p]};
        work.num_read = &num_read_[num_works_];
        weights_[p] = buffers_.weights[first + p];
        num_read_[num_works_++] = 0;
        if (counts_[p] == kWholeExpert) continue;
        const ShareFault fault = take_neurons(work, at, p);
        if (fault != ShareFault::none) return fault;
    }
    return ShareFault::none;
}

ShareFault HostShare::take_neurons(ExpertWork& work, int32_t at, int32_t p) {
    const size_t first = (size_t)p * sizes_.f, of_token = (size_t)(at / sizes_.num_places) * sizes_.k * sizes_.f;
    const int32_t count = counts_[p], num_rows = work.layout->num_rows;
    if (count < 0 || count > num_rows) return ShareFault::count;
    int32_t* neurons = &neurons_[first];
    const int32_t* given = buffers_.neurons + (size_t)at * sizes_.k * sizes_.f + first;
    std::memcpy(neurons, given, sizeof(int32_t) * count);
    bool fits = count == 0 || (neurons[0] >= 0 && neurons[count - 1] < num_rows);
    for (int32_t i = 1; i < count; i++) fits &= neurons[i - 1] < neurons[i];
    work.neurons = neurons;
    work.num_neurons = count;
    work.listed_a = work.layout->selector == Selector::none ? nullptr : buffers_.a + of_token + first;
    return fits ? ShareFault::none : ShareFault::neurons;
}

ShareFault HostShare::run(int32_t token) {
    const size_t first = (size_t)token * sizes_.d;
    const Outcome outcome = run_experts(pool_, works_.data(), num_works_, buffers_.x + first, buffers_.y + first);
    if (outcome != Outcome::done) return outcome == Outcome::cut ? ShareFault::cut : ShareFault::no_memory;
    num_experts_ += num_works_;
    for (int32_t i = 0; i < num_works_; i++) {
        num_neurons_ += num_read_[i];
        record_bytes_ += (int64_t)num_read_[i] * works_[i].layout->record_row_bytes;
    }
    return ShareFault::none;
}

void HostShare::keep_fault(ShareFault fault, int32_t layer_idx, int32_t expert_idx) {
    const uint64_t word = (uint64_t)fault << 56 | (uint64_t)expert_idx << 32 | (uint32_t)layer_idx;
    uint64_t none = 0;
    fault_.compare_exchange_strong(none, word);
}

HostShare::Fault HostShare::take_fault() {
    const uint64_t word = fault_.exchange(0);
    return {(ShareFault)(word >> 56), (int32_t)(uint32_t)word, (int32_t)(word >> 32 & 0xffffff)};
}

ShareCounts HostShare::counts() const { return {num_experts_, num_neurons_, record_bytes_, busy_ns_}; }

}  // namespace moe_pack
