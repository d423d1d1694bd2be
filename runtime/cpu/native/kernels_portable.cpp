// Kernels for any machine: rows are decoded piece by piece into floats, then multiplied.
//
// No instruction set assumed; compilers make vector code of the loops (SSE2, NEON). Sums are in natural order.
#define MOE_PACK_VECTOR_FLOATS 4

#include "codes.h"
#include "kernels.h"
#include "recurrence_vector.h"
#include "cached_decode.h"

namespace moe_pack {
namespace {

// A piece of this many columns of this many rows is decoded at a time: 6 KiB, which stays in the first level cache.
constexpr int32_t kPiece = 512;
constexpr int32_t kBatch = 3;

size_t prepared_bytes(const Part& part) { return 4 * round_up(size_t(part.num_cols), 16); }

void prepare(const Part& part, const float* x, void* prepared) {
    prepare_floats(part, x, 1.0f, static_cast<float*>(prepared));
}

size_t work_floats(const Part&) { return kBatch * kPiece + kReadPastFloats; }

size_t sum_floats(const Part& part) { return round_up(size_t(part.num_cols), 16); }

// Columns from `start` on of a batch of rows, kPiece floats apart, and their share of what is wanted next.
void decode_batch(const Part& part, const uint8_t* const* rows, int32_t num_rows, int32_t start, int32_t stop,
                  Prefetch* prefetches, int32_t lines, float* work) {
    for (int32_t r = 0; r < num_rows; ++r) {
        prefetches[r].lines(lines);
        decode(part, rows[r], start, stop, work + r * kPiece);
    }
}

// Calls `use(first row, rows, start, columns)` for each decoded piece, all pieces of a batch of rows in turn.
template <typename Use>
void for_each_piece(const Part& part, const uint8_t* const* rows, int32_t num_rows, const Ahead& ahead, float* work,
                    Use use) {
    const int32_t num_pieces = (part.num_cols + kPiece - 1) / kPiece;
    const int32_t lines = ahead.num_bytes / (kLineBytes * num_pieces) + 2;
    for (int32_t first = 0; first < num_rows; first += kBatch) {
        const int32_t batch = num_rows - first < kBatch ? num_rows - first : kBatch;
        Prefetch prefetches[kBatch];
        for (int32_t r = 0; r < batch; ++r) {
            prefetches[r] = Prefetch(ahead, first + r);
        }
        for (int32_t start = 0; start < part.num_cols; start += kPiece) {
            const int32_t stop = part.num_cols - start < kPiece ? part.num_cols : start + kPiece;
            decode_batch(part, rows + first, batch, start, stop, prefetches, lines, work);
            use(first, batch, start, stop - start);
        }
    }
}

void dot_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared, const Ahead& ahead,
              float* work, float* out) {
    const float* x = static_cast<const float*>(prepared);
    for (int32_t r = 0; r < num_rows; ++r) {
        out[r] = row_bias(part, rows[r]);
    }
    for_each_piece(part, rows, num_rows, ahead, work, [=](int32_t first, int32_t batch, int32_t start, int32_t n) {
        dots(work, batch, kPiece, x + start, 1, 0, n, out + first, 0);
    });
}

void add_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
              float* work, float* sum) {
    for_each_piece(part, rows, num_rows, ahead, work, [=](int32_t first, int32_t batch, int32_t start, int32_t n) {
        add(work, batch, kPiece, h + first, 1, 0, n, sum + start, 0);
    });
}

void finish_sum(const Part&, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    for (int32_t c = start; c < stop; ++c) {
        out[c] += weight * sum[c];
    }
}

}  // namespace

const Kernels portable_kernels = {
    "portable", prepared_bytes, prepare, dot_rows, work_floats, sum_floats, add_rows, finish_sum, decode, dots, add,
    exponentials, decode_cached, rotate, recur, convolve, nullptr, nullptr,
};

}  // namespace moe_pack
