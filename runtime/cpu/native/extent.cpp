#include "extent.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "crc.h"

namespace moe_pack {
namespace {

constexpr int32_t kRowsAtOnce = 32;
constexpr size_t kAloneBytes = 64 << 10;  // are done by the caller before other threads have woken

// Calls `each(item)` for `count` items that read `num_bytes` in all.
template <class Each>
bool shared_out(Pool& pool, size_t num_bytes, int count, Each& each) {
    if (num_bytes <= kAloneBytes) {
        for (int item = 0; item < count; item++) each(item);
        return true;
    }
    return pool.run(count, [](void* context, int item, int, int) { (*static_cast<Each*>(context))(item); }, &each);
}

}  // namespace

Outcome checksum_pages(Pool& pool, const Rows& extent, size_t num_bytes, uint32_t* out) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    size_t page_bytes = extent.page_bytes;
    int count = (int)((num_bytes + page_bytes - 1) / page_bytes);
    pool.arena().reset();
    auto* found = pool.arena().take<uint32_t>(count + 1);
    if (found == nullptr) return Outcome::no_memory;
    auto size = [&](int page) { return std::min(page_bytes, num_bytes - page * page_bytes); };
    auto each = [&](int page) { found[page] = crc32(0, extent.pages[page], size(page)); };
    bool whole = shared_out(pool, num_bytes, count, each);
    *out = 0;
    for (int page = 0; page < count; page++) *out = crc32_joined(*out, found[page], size(page));
    return whole ? Outcome::done : Outcome::cut;
}

void stitch(const Rows& rows, size_t num_rows, size_t row_bytes) {
    if (rows.pages == nullptr || num_rows == 0) return;
    size_t page_bytes = rows.page_bytes, end = rows.begin + num_rows * row_bytes;
    for (size_t page = rows.begin / page_bytes + 1; page * page_bytes < end; page++) {
        size_t before = (page * page_bytes - rows.begin) % row_bytes;  // bytes of the row that crosses
        auto* to = const_cast<uint8_t*>(rows.pages[page]) - before;
        std::memcpy(to, rows.pages[page - 1] + page_bytes - before, before);
    }
}

Outcome find_damaged(Pool& pool, const Rows& rows, const int32_t* wanted, int32_t count, size_t row_bytes,
                     size_t crc_offset, int32_t* found) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    std::atomic<int32_t> first{count};
    auto each = [&](int item) {
        int32_t stop = std::min(count, (item + 1) * kRowsAtOnce);
        for (int32_t k = item * kRowsAtOnce; k < stop; k++) {
            const uint8_t* row = rows.at(wanted[k], row_bytes);
            uint32_t stored;
            std::memcpy(&stored, row + crc_offset, sizeof stored);
            if (crc32(0, row, crc_offset) == stored) continue;
            int32_t seen = first.load();
            while (k < seen && !first.compare_exchange_weak(seen, k)) {
            }
            return;
        }
    };
    bool whole = shared_out(pool, count * row_bytes, (count + kRowsAtOnce - 1) / kRowsAtOnce, each);
    *found = first < count ? wanted[first] : -1;
    return whole ? Outcome::done : Outcome::cut;
}

}  // namespace moe_pack
