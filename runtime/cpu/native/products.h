// Products of one input with several dense matrices, whose rows are shared out together: one wait instead of one a matrix.
#pragma once

#include <cstdint>

#include "experts.h"

namespace moe_pack {

// A dense matrix, with a bias [rows] or null. `rows` is null: there is none.
struct DenseMatrix {
    RowsLayout layout;
    const uint8_t* rows = nullptr;
    int32_t num_rows = 0;
    const float* bias = nullptr;
};

constexpr int kMostProducts = 4;  // of one input, side by side

// The products of x, float32 [tokens, columns], with some matrices; those without rows are left out.
class Products {
  public:
    Products(Pool& pool, const float* x, int32_t num_tokens) : pool_(pool), x_(x), num_tokens_(num_tokens) {}

    // out [tokens, rows]
    void add(const DenseMatrix& matrix, float* out);
    Outcome run();
    // The same whatever the number of tokens: each is multiplied as if it were alone.
    Outcome run_few();

  private:
    // A matrix times the tokens; its rows are shared out from item `first_item` on.
    struct Product {
        const DenseMatrix* matrix;
        float* out;
        int32_t tile, first_item;
        size_t prepared_bytes;  // a token
        const uint8_t* prepared;

        const RowsLayout& layout() const { return matrix->layout; }
        const Part& part() const { return matrix->layout.part.part; }
        const uint8_t* row(int32_t number) const {
            return matrix->rows + (size_t)number * layout().row_bytes;
        }
    };

    Outcome run_some(int32_t first_token, int32_t num_tokens);
    bool prepare(int32_t i, int32_t first_token, int32_t num_tokens);
    void share_out(int32_t i);
    const Product& of_item(int item) const;
    void run_item(int item, int next, int worker) const;
    void run_rows(const Product& mine, int32_t first, int32_t count, int next, int worker) const;
    void run_panels(const Product& mine, int32_t first, int32_t count, int next) const;
    // The row with which an item begins, or the last one of all.
    const uint8_t* first_row(int item) const;

    Pool& pool_;
    const float* x_;
    int32_t num_tokens_;
    Product each_[kMostProducts];
    int32_t count_ = 0, num_items_ = 0;
    // Of the tokens at once.
    int32_t first_token_ = 0, num_at_once_ = 0;
    float* work_ = nullptr;  // one a thread
    size_t work_floats_ = 0;
};

}  // namespace moe_pack
