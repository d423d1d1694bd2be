// CRC-32 of zlib: polynomial 0x04C11DB7 reflected, initial value and final xor all ones.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_pack {

// The checksum of what had `crc`, followed by these bytes; 0 is the checksum of nothing.
uint32_t crc32(uint32_t crc, const uint8_t* bytes, size_t num_bytes);

// The checksum of two pieces after each other, the second of `num_bytes`.
uint32_t crc32_joined(uint32_t first, uint32_t second, size_t num_bytes);

}  // namespace moe_pack
