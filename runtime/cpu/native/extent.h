// An expert's extent in pages, as it came from its file: checked, and made whole where rows cross from page to page.
#pragma once

#include "experts.h"

namespace moe_pack {

// The CRC-32 of an extent's first `num_bytes`; `extent` begins at its first byte.
Outcome checksum_pages(Pool& pool, const Rows& extent, size_t num_bytes, uint32_t* out);

// Puts the beginning of each row that ends in another page than it begins in into the room before that page, from which
// on it lies in one piece.
void stitch(const Rows& rows, size_t num_rows, size_t row_bytes);

// The first of `wanted` rows whose bytes before `crc_offset` have another CRC-32 than stands there; -1 if none.
Outcome find_damaged(Pool& pool, const Rows& rows, const int32_t* wanted, int32_t count, size_t row_bytes,
                     size_t crc_offset, int32_t* found);

}  // namespace moe_pack
