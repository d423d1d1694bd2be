// Rows of a key-value cache: float32, bfloat16, or codes of rotated values (runtime/model/caches/storage.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_pack {

enum class CacheKind : int32_t { f32 = 0, bf16 = 1, q8 = 2, q4 = 3 };

constexpr int32_t kCacheBlock = 32;  // values of a block of codes at most

// How a row of `width` values is stored: `num_blocks` blocks of `block` codes, then their scales, then their minima.
struct CachedRows {
    CacheKind kind;
    int32_t width;
    int32_t num_blocks, block;
    int32_t code_bytes;  // of a block
    size_t row_bytes;

    bool is_coded() const { return kind == CacheKind::q8 || kind == CacheKind::q4; }
};

CachedRows cached_rows(CacheKind kind, int32_t width);

// R x in place, or back to x: signs [width], and Hadamard's matrix of each piece of the largest power of two in width.
void rotate_cached(float* x, const float* signs, int32_t width);
void rotate_cached_back(float* x, const float* signs, int32_t width);
void fill_signs(float* signs, int32_t width);

// Stores a row of values, which are rotated already if they become codes. A value that is not finite makes all of its
// block NaNs.
void encode_cached(const CachedRows& rows, const float* values, uint8_t* out);

}  // namespace moe_pack
