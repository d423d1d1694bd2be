#include "module_layers.h"

#include "attention.h"
#include "norm.h"
#include "recurrence.h"
#include "rotation.h"
#include "router.h"

namespace moe_pack {
namespace {

constexpr int kMaxHeads = 1 << 16;    // and values of one: their product is of 32 bits
constexpr int kMaxRouted = 1 << 20;    // experts of a layer
constexpr size_t kMaxValues = 1 << 20;  // of a row that is normed
constexpr int kMaxTaps = 64;            // of a convolution
constexpr size_t kMaxRotated = 1 << 24;  // of a row that is rotated

// The buffers of a call of `attend`.
struct GivenAttention {
    Buffer<const float> q, k, v, q_norm, k_norm, cosines, sines, sinks;
    Buffer<float> float_keys, float_values, out;
    Buffer<uint8_t> stored_keys, stored_values;
    bool is_float = true;

    bool take(PyObject* const* from, CacheKind kind) {
        is_float = kind == CacheKind::f32;
        return q.take(from[0], "q") && k.take(from[1], "k") && v.take(from[2], "v") && q_norm.take(from[3], "q_norm") &&
               k_norm.take(from[4], "k_norm") && cosines.take(from[5], "cosines") && sines.take(from[6], "sines") &&
               (is_float ? float_keys.take(from[7], "keys", true) && float_values.take(from[8], "values", true)
                         : stored_keys.take(from[7], "keys", true) && stored_values.take(from[8], "values", true)) &&
               sinks.take(from[9], "sinks") && out.take(from[10], "out", true);
    }

    // Whether all sizes fit; those that follow from them are set.
    bool fit(AttentionWork* work, Py_ssize_t start, Py_ssize_t window) const {
        const size_t d = work->head_dim, q_width = work->num_heads * d, kv_width = work->num_kv_heads * d;
        if (!count_tokens("q", q.size(), q_width, &work->num_tokens)) return false;
        // In floats, or in bytes of rows.
        const size_t cached_width = is_float ? kv_width : work->num_kv_heads * work->rows.row_bytes;
        const size_t keys_size = is_float ? float_keys.size() : stored_keys.size();
        const size_t values_size = is_float ? float_values.size() : stored_values.size();
        const size_t tokens = work->num_tokens, places = keys_size / cached_width;
        if (tokens * work->num_heads > kMaxTokens) return refuse("q", "too many tokens") != nullptr;
        if ((q_norm.values() == nullptr) != (k_norm.values() == nullptr))
            return refuse("norms", "of queries and of keys, or of neither") != nullptr;
        if (!has_size("k", k.size(), tokens * kv_width) || !has_size("v", v.size(), tokens * kv_width) ||
            !has_size("out", out.size(), q.size()) || !norm_fits("q_norm", q_norm, d) ||
            !norm_fits("k_norm", k_norm, d) || !angles_fit(tokens, d))
            return false;
        if (sinks.values() != nullptr && !has_size("sinks", sinks.size(), work->num_heads)) return false;
        if (places > kMaxTokens) return refuse("keys", "too many positions") != nullptr;
        if (!has_size("keys", keys_size, places * cached_width) || !has_size("values", values_size, keys_size))
            return false;
        if (window < 0 || (size_t)window > kMaxTokens) return refuse("window", "expected 0 to 2^30") != nullptr;
        if (start < 0 || (size_t)start >= kMaxTokens) return refuse("start", "expected 0 to 2^30 - 1") != nullptr;
        const size_t seen = window && window <= start ? window - 1 : start;  // before the first new token, by it
        if (seen > places || tokens > places - seen)
            return refuse("start", "what the new tokens see is not within the cache") != nullptr;
        work->places = (int32_t)places;
        work->start = (int32_t)start;
        work->window = (int32_t)window;
        work->num_angles = tokens ? (int32_t)(cosines.size() / tokens) : 0;
        work->keys = is_float ? reinterpret_cast<uint8_t*>(float_keys.values()) : stored_keys.values();
        work->values = is_float ? reinterpret_cast<uint8_t*>(float_values.values()) : stored_values.values();
        return true;
    }

  private:
    static bool norm_fits(const char* name, const Buffer<const float>& norm, size_t d) {
        return norm.values() == nullptr || has_size(name, norm.size(), d);
    }
    bool angles_fit(size_t tokens, size_t d) const {
        const size_t num_angles = tokens ? cosines.size() / tokens : 0;
        if (num_angles > d / 2) return refuse("cosines", "more than a head has pairs of values") != nullptr;
        return has_size("cosines", cosines.size(), tokens * num_angles) &&
               has_size("sines", sines.size(), cosines.size());
    }
};

// Whether the sizes of a recurrence's heads fit.
template <class Work>
bool heads_fit(const Work& work) {
    for (int size : {work.num_key_heads, work.num_heads, work.num_keys, work.num_values})
        if (size < 1 || size > kMaxHeads) return refuse("heads", "sizes out of range") != nullptr;
    return work.num_heads % work.num_key_heads == 0 ||
           refuse("heads", "keys are not shared by as many values each") != nullptr;
}

}  // namespace

PyObject* attend_heads(PyObject*, PyObject* arguments) {
    PyObject *capsule, *from[11];
    AttentionWork work = {};
    Py_ssize_t start, window;
    int interleaved, kind;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOOiiinnffpi:attend", &capsule, &from[0], &from[1], &from[2], &from[3],
                          &from[4], &from[5], &from[6], &from[7], &from[8], &from[9], &from[10],
                          &work.num_heads, &work.num_kv_heads, &work.head_dim, &start, &window, &work.scale, &work.eps, &interleaved, &kind))
        return nullptr;
    Pool* pool = pool_of(capsule);
    if (pool == nullptr) return nullptr;
    for (int size : {work.num_heads, work.num_kv_heads, work.head_dim})
        if (size < 1 || size > kMaxHeads) return refuse("heads", "sizes out of range");
    if (work.num_heads % work.num_kv_heads) return refuse("heads", "keys are not shared by as many queries each");
    if (kind < 0 || kind > (int)CacheKind::q4) return refuse("kind", "expected 0 to 3");
    work.rows = cached_rows((CacheKind)kind, work.head_dim);
    GivenAttention given;
    if (!given.take(from, work.rows.kind) || !given.fit(&work, start, window)) return nullptr;
    if (work.num_tokens == 0) Py_RETURN_NONE;
    work.interleaved = interleaved;
    work.q = given.q.values();
    work.k = given.k.values();
    work.v = given.v.values();
    work.q_norm = given.q_norm.values();
    work.k_norm = given.k_norm.values();
    work.cosines = given.cosines.values();
    work.sines = given.sines.values();
    work.sinks = given.sinks.values();
    return unlocked([&] { return attend(*pool, work, given.out.values()); });
}

PyObject* recur_heads(PyObject*, PyObject* arguments) {
    PyObject *capsule, *from[7];
    RecurrenceWork work = {};
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOiiii:recur", &capsule, &from[0], &from[1], &from[2], &from[3], &from[4],
                          &from[5], &from[6], &work.num_key_heads, &work.num_heads, &work.num_keys, &work.num_values))
        return nullptr;
    Pool* pool = pool_of(capsule);
    if (pool == nullptr) return nullptr;
    if (!heads_fit(work)) return nullptr;
    Buffer<const float> q, k, v, log_decay, rate;
    Buffer<float> recurrent, out;
    if (!q.take(from[0], "q") || !k.take(from[1], "k") || !v.take(from[2], "v") ||
        !log_decay.take(from[3], "log_decay") || !rate.take(from[4], "rate") ||
        !recurrent.take(from[5], "recurrent", true) || !out.take(from[6], "out", true))
        return nullptr;
    const size_t heads = work.num_heads, keys = work.num_keys, values = work.num_values;
    if (!count_tokens("v", v.size(), heads * values, &work.num_tokens)) return nullptr;
    const size_t tokens = work.num_tokens, decays = tokens * heads;
    work.by_key = log_decay.size() != decays;
    if (!has_size("q", q.size(), tokens * work.num_key_heads * keys) || !has_size("k", k.size(), q.size()) ||
        !has_size("log_decay", log_decay.size(), work.by_key ? decays * keys : decays) ||
        (rate.values() && !has_size("rate", rate.size(), decays)) ||
        !has_size("recurrent", recurrent.size(), heads * keys * values) || !has_size("out", out.size(), v.size()))
        return nullptr;
    work.q = q.values();
    work.k = k.values();
    work.v = v.values();
    work.log_decay = log_decay.values();
    work.rate = rate.values();
    work.recurrent = recurrent.values();
    return unlocked([&] { return recur(*pool, work, out.values()); });
}

PyObject* convolve_channels(PyObject*, PyObject* arguments) {
    PyObject *capsule, *inputs, *kernels, *biases, *states, *outputs;
    ConvolutionWork work = {};
    if (!PyArg_ParseTuple(arguments, "OOOOOOi:convolve", &capsule, &inputs, &kernels, &biases, &states, &outputs,
                          &work.num_taps))
        return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const float> x, kernel, bias;
    Buffer<float> state, out;
    if (pool == nullptr || !x.take(inputs, "x") || !kernel.take(kernels, "kernel") || !bias.take(biases, "bias") ||
        !state.take(states, "state", true) || !out.take(outputs, "out", true))
        return nullptr;
    if (work.num_taps < 1 || work.num_taps > kMaxTaps) return refuse("taps", "expected 1 to 64");
    const size_t taps = work.num_taps, channels = kernel.size() / taps;
    if (channels < 1 || channels > kMaxRotated) return refuse("kernel", "expected 1 to 2^24 channels");
    if (!has_size("kernel", kernel.size(), channels * taps) ||
        (bias.values() && !has_size("bias", bias.size(), channels)) ||
        !has_size("state", state.size(), (taps - 1) * channels) ||
        !count_tokens("x", x.size(), channels, &work.num_tokens) || !has_size("out", out.size(), x.size()))
        return nullptr;
    work.num_channels = (int32_t)channels;
    work.x = x.values();
    work.kernel = kernel.values();
    work.bias = bias.values();
    work.state = state.values();
    return unlocked([&] { return convolve(*pool, work, out.values()); });
}

namespace {

// The buffers of a call of `gated_delta`.
struct GivenDelta {
    Buffer<const float> qkv, z, steps, rates, kernel, a_log, dt_bias, norm;
    Buffer<float> conv, recurrent, mixed, out;

    bool take(PyObject* const* from) {
        return qkv.take(from[0], "qkv") && z.take(from[1], "z") && steps.take(from[2], "steps") &&
               rates.take(from[3], "rates") && kernel.take(from[4], "kernel") && a_log.take(from[5], "a_log") &&
               dt_bias.take(from[6], "dt_bias") && norm.take(from[7], "norm") && conv.take(from[8], "conv", true) &&
               recurrent.take(from[9], "recurrent", true) && mixed.take(from[10], "mixed", true) &&
               out.take(from[11], "out", true);
    }

    // Whether all sizes fit; the number of tokens is set.
    bool fit(DeltaWork* work) const {
        const size_t heads = work->num_heads, channels = work->num_channels(), width = work->value_width();
        if (!count_tokens("qkv", qkv.size(), channels, &work->num_tokens)) return false;
        const size_t tokens = work->num_tokens;
        return has_size("z", z.size(), tokens * width) && has_size("steps", steps.size(), tokens * heads) &&
               has_size("rates", rates.size(), tokens * heads) &&
               has_size("kernel", kernel.size(), channels * work->num_taps) &&
               has_size("a_log", a_log.size(), heads) && has_size("dt_bias", dt_bias.size(), heads) &&
               has_size("norm", norm.size(), work->num_values) &&
               has_size("conv", conv.size(), channels * (work->num_taps - 1)) &&
               has_size("recurrent", recurrent.size(), width * work->num_keys) &&
               has_size("mixed", mixed.size(), tokens * channels) && has_size("out", out.size(), tokens * width);
    }
};

}  // namespace

PyObject* gated_delta_heads(PyObject*, PyObject* arguments) {
    PyObject *capsule, *from[12];
    DeltaWork work = {};
    int is_sigmoid;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOOOiiiiipf:gated_delta", &capsule, &from[0], &from[1], &from[2], &from[3],
                          &from[4], &from[5], &from[6], &from[7], &from[8], &from[9], &from[10], &from[11],
                          &work.num_key_heads, &work.num_heads, &work.num_keys, &work.num_values, &work.num_taps,
                          &is_sigmoid, &work.eps))
        return nullptr;
    Pool* pool = pool_of(capsule);
    if (pool == nullptr) return nullptr;
    if (!heads_fit(work)) return nullptr;
    if (work.num_taps < 1 || work.num_taps > kMaxTaps) return refuse("taps", "expected 1 to 64");
    if (work.num_channels() > kMaxRotated) return refuse("heads", "expected up to 2^24 channels");
    GivenDelta given;
    if (!given.take(from) || !given.fit(&work)) return nullptr;
    work.is_sigmoid = is_sigmoid;
    work.qkv = given.qkv.values();
    work.z = given.z.values();
    work.steps = given.steps.values();
    work.rates = given.rates.values();
    work.kernel = given.kernel.values();
    work.a_log = given.a_log.values();
    work.dt_bias = given.dt_bias.values();
    work.norm = given.norm.values();
    work.conv = given.conv.values();
    work.recurrent = given.recurrent.values();
    return unlocked([&] { return gated_delta(*pool, work, given.mixed.values(), given.out.values()); });
}

PyObject* norm_rows(PyObject*, PyObject* arguments) {
    PyObject *capsule, *inputs, *weights, *outputs;
    float eps;
    if (!PyArg_ParseTuple(arguments, "OOOfO:rms_norm", &capsule, &inputs, &weights, &eps, &outputs)) return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const float> x, weight;
    Buffer<float> out;
    if (pool == nullptr || !x.take(inputs, "x") || !weight.take(weights, "weight") || !out.take(outputs, "out", true))
        return nullptr;
    const size_t n = weight.size();
    if (n < 1 || n > kMaxValues) return refuse("weight", "expected 1 to 2^20 values");
    int32_t num_rows;
    if (!count_tokens("x", x.size(), n, &num_rows) || !has_size("out", out.size(), x.size())) return nullptr;
    return unlocked([&] {
        return rms_norm(*pool, x.values(), weight.values(), num_rows, (int32_t)n, eps, out.values());
    });
}

PyObject* rotate_all(PyObject*, PyObject* arguments) {
    PyObject *capsule, *inputs, *scales, *matrix, *outputs;
    int is_scaled_first;
    if (!PyArg_ParseTuple(arguments, "OOOpOO:rotate", &capsule, &inputs, &scales, &is_scaled_first, &matrix, &outputs))
        return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const float> x, scale, hartley;
    Buffer<float> out;
    if (pool == nullptr || !x.take(inputs, "x") || !scale.take(scales, "scale") || !hartley.take(matrix, "hartley") ||
        !out.take(outputs, "out", true))
        return nullptr;
    const size_t d = scale.size();
    if (d < 64 || d % 64 || d > kMaxRotated) return refuse("scale", "expected a multiple of 64, up to 2^24 values");
    const size_t m = d / (d & (~d + 1));
    if (m > kMaxOdd) return refuse("scale", "its odd factor is above 1023");
    RotationWork work = {};
    if (!has_size("hartley", hartley.size(), m * m) || !count_tokens("x", x.size(), d, &work.num_rows) ||
        !has_size("out", out.size(), x.size()))
        return nullptr;
    work.x = x.values();
    work.scale = scale.values();
    work.hartley = hartley.values();
    work.d = (int32_t)d;
    work.m = (int32_t)m;
    work.is_scaled_first = is_scaled_first;
    return unlocked([&] { return rotate_rows(*pool, work, out.values()); });
}

PyObject* route_tokens(PyObject*, PyObject* arguments) {
    PyObject *capsule, *inputs, *biases, *experts_out, *weights_out;
    RouterWork work = {};
    int kind;
    if (!PyArg_ParseTuple(arguments, "OOOOOiiiiifff:route", &capsule, &inputs, &biases, &experts_out, &weights_out,
                          &kind, &work.num_experts, &work.num_chosen, &work.num_groups, &work.num_chosen_groups,
                          &work.least_sum, &work.factor, &work.jitter))
        return nullptr;
    if (pool_of(capsule) == nullptr) return nullptr;
    if (kind < 0 || kind > (int)RouterKind::topk_sigmoid) return refuse("kind", "expected 0 to 5");
    if (work.num_experts < 1 || work.num_experts > kMaxRouted) return refuse("experts", "expected 1 to 2^20");
    if (work.num_chosen < 1 || work.num_chosen > work.num_experts)
        return refuse("chosen", "more than there are, or none");
    if (work.num_groups < 1 || work.num_experts % work.num_groups) return refuse("groups", "not of equal size");
    if (work.num_chosen_groups < 1 || work.num_chosen_groups > work.num_groups)
        return refuse("chosen groups", "more than there are, or none");
    Buffer<const float> logits, bias;
    Buffer<int64_t> experts;
    Buffer<float> weights;
    if (!logits.take(inputs, "logits") || !bias.take(biases, "bias") || !experts.take(experts_out, "experts", true) ||
        !weights.take(weights_out, "weights", true) ||
        !count_tokens("logits", logits.size(), work.num_experts, &work.num_tokens))
        return nullptr;
    size_t chosen = (size_t)work.num_tokens * work.num_chosen;
    if ((bias.values() && !has_size("bias", bias.size(), work.num_experts)) ||
        !has_size("experts", experts.size(), chosen) || !has_size("weights", weights.size(), chosen))
        return nullptr;
    work.kind = (RouterKind)kind;
    work.logits = logits.values();
    work.bias = bias.values();
    return unlocked([&] {
        std::vector<float> room(4 * (size_t)work.num_experts);
        route(work, room.data(), experts.values(), weights.values());
        return Outcome::done;
    });
}

}  // namespace moe_pack
