// Rows as such: dense products, checksums, and gathering. All sizes have been checked.
#pragma once

#include <cstdint>

#include "experts.h"

namespace moe_pack {

// out [T, rows] = x [T, d] times the rows, transposed.
Outcome multiply(Pool& pool, const RowsLayout& layout, const uint8_t* rows, int32_t num_rows, const float* x,
                 int32_t num_tokens, float* out);

// Whether `multiply` takes tokens one by one, and not rows decoded for all of them. Then matrices can go side by side.
bool multiplies_few(const Pool& pool, const RowsLayout& layout, int32_t num_tokens);

// As `multiply`, with inputs rounded to 8 bits, for a part that `can_round`; for `multiply`, which holds the pool.
Outcome multiply_rounded(Pool& pool, const RowsLayout& layout, const uint8_t* rows, int32_t num_rows, const float* x,
                         int32_t num_tokens, float* out);

// Puts the rows, which `can_panel`, into panels, in their own bytes.
Outcome put_in_panels(Pool& pool, const RowsLayout& layout, uint8_t* rows, int32_t num_rows);

// out row k = row places[k] as it was before it was put into a panel, but for what follows its zeros.
Outcome take_rows(Pool& pool, const RowsLayout& layout, const uint8_t* rows, const int32_t* places, int32_t count,
                  uint8_t* out);

// out [rows, d]: the rows, which are in no panels, in float32.
Outcome decode(Pool& pool, const RowsLayout& layout, const uint8_t* rows, int32_t num_rows, float* out);

// The CRC-32 of bytes in one piece.
Outcome checksum(Pool& pool, const uint8_t* bytes, size_t num_bytes, uint32_t* out);

// Reads bytes and nothing else, as fast as the threads can: what the speed of kernels is measured by.
Outcome read_only(Pool& pool, const uint8_t* bytes, size_t num_bytes, uint64_t* parity);

// out row k = row places[k], each of `row_bytes`.
Outcome gather(Pool& pool, const uint8_t* rows, size_t row_bytes, const int32_t* places, int32_t count, uint8_t* out);

}  // namespace moe_pack
