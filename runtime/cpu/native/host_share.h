// The host's share of a GPU's experts: what the GPU leaves to the CPU of a token, computed without Python.
//
// The GPU says in page-locked memory which experts a token takes and which of their neurons the CPU computes. What is
// read there is checked each time: a fault ends the layer with an output of zeros, never with a read out of bounds.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "experts.h"

namespace moe_pack {

constexpr int32_t kMaxShareExperts = 256;  // of a token
constexpr int32_t kWholeExpert = -1;  // as a count: the expert selects for itself, and all that run are computed

// An expert of a layer; its rows lie in one piece each. The row of extra values is not added.
struct ShareExpert {
    ExpertLayout layout;
    Rows selector, records;
    float threshold;
};

// d columns, k experts of a token, L layers; f: the neurons that a list has space for. T tokens have P places each, a
// multiple of L: token t's place p, of layer p % L, is t * P + p.
struct ShareSizes {
    int32_t d, k, f, num_layers, num_tokens, num_places;
};

// Memory that a GPU reads and writes as well.
struct ShareBuffers {
    const float* x;          // [T, d]
    const float* weights;    // [T, k], the router's
    const int32_t* experts;  // [T, k]
    const int32_t* counts;   // [T * P, k], of neurons, or kWholeExpert
    const int32_t* neurons;  // [T * P, k, f], rising
    const float* a;          // [T, k, f], of the selector, in the order of the list; not read without a selector
    float* y;                // [T, d], the sum over the experts of weight * output of these neurons
};

// What was wrong; Python has a message for each (runtime/cpu/host_share.py).
enum class ShareFault : int32_t { none = 0, expert = 1, count = 2, neurons = 3, cut = 4, no_memory = 5 };

struct ShareCounts {
    int64_t experts, neurons, record_bytes, busy_ns;
};

class HostShare {
  public:
    // `layers`: the experts of each, whose layouts have d columns and at most f rows. k is at most kMaxShareExperts.
    // Throws std::bad_alloc.
    HostShare(Pool& pool, const ShareSizes& sizes, std::vector<std::vector<ShareExpert>> layers,
              const ShareBuffers& buffers);
    HostShare(const HostShare&) = delete;
    HostShare& operator=(const HostShare&) = delete;

    // Computes the share of a token at a place; any thread may call it, one at a time does the work.
    void compute(int32_t at) noexcept;

    ShareCounts counts() const;

    // The first fault since the last call, with its layer and the number among the token's experts.
    struct Fault {
        ShareFault fault;
        int32_t layer_idx, expert_idx;
    };
    Fault take_fault();

    int32_t num_computed() const { return sizes_.num_tokens * sizes_.num_places; }

  private:
    // Fills `works_` from the buffers; `*expert_idx` is that which has a fault, if any has.
    ShareFault take_works(int32_t at, int32_t* expert_idx);
    ShareFault take_neurons(ExpertWork& work, int32_t at, int32_t expert_idx);
    ShareFault run(int32_t token);
    void keep_fault(ShareFault fault, int32_t layer_idx, int32_t expert_idx);

    Pool& pool_;
    const ShareSizes sizes_;
    const std::vector<std::vector<ShareExpert>> layers_;
    const ShareBuffers buffers_;
    std::mutex one_layer_;
    // Of the layer at work, copied from the buffers and checked.
    std::vector<int32_t> counts_;        // [k]
    std::vector<int32_t> neurons_;       // [k, f]
    std::vector<float> weights_;         // [k]
    std::vector<int32_t> num_read_;      // [k], records
    std::vector<ExpertWork> works_;      // [k]
    int32_t num_works_ = 0;
    std::atomic<int64_t> num_experts_{0}, num_neurons_{0}, record_bytes_{0}, busy_ns_{0};
    std::atomic<uint64_t> fault_{0};  // fault, expert and layer in 8, 24 and 32 bits
};

}  // namespace moe_pack
