// Reads of files into memory that stays the caller's, several in flight: threads of our own that wait for the disk.
//
// What is asked for at once is a request, cut into blocks; a thread takes a block at a time. Urgent requests go before
// all others, and of a kind the first before the next.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace moe_pack {

constexpr int64_t kDiskBlock = 4096;  // offsets, sizes and addresses of direct reads are multiples of it

// `size` bytes of a file from `offset` on, to memory[place:].
struct ReadPiece {
    int64_t offset, place, size;
};

// Where reading ended. Without an error number, the file does: it is shorter than it was.
struct ReadFault {
    int32_t file;
    int64_t at;
    int error;
};

// `busy_ns`: during which at least one read was in flight. A block is urgent if its request was when it was taken.
struct ReadStats {
    int64_t bytes_urgent, bytes_ahead, num_reads, busy_ns;
};

enum class ReadState { pending, done, faulty, dropped, unknown };

class Reader {
  public:
    // Into `num_bytes` of memory, which must outlive it; one call reads `max_read_bytes` at most. Where `direct` says so,
    // the files are open for direct reads.
    Reader(uint8_t* memory, int64_t num_bytes, int threads, bool direct, int64_t max_read_bytes);
    ~Reader();
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    // False if the system gave no thread at all.
    bool has_threads() const;

    // False in a forked child, which has no threads; there only the destructor may be called.
    bool is_ours() const;

    // A file's number. The descriptor is closed with the reader, but stays the caller's where this throws.
    int32_t add_file(int descriptor, int64_t num_bytes);

    // What keeps pieces of a file from being read, or null. That they do not overlap in memory is not checked.
    const char* fault_of(int32_t file, const std::vector<ReadPiece>& pieces) const;

    // A ticket for pieces that have no fault; -1 if the reader is closed.
    int64_t submit(int32_t file, const std::vector<ReadPiece>& pieces, bool urgent);

    // How a request ended, and then it is forgotten; pending if it has not after so long.
    ReadState wait(int64_t ticket, std::chrono::milliseconds most, ReadFault* fault);

    // Whether waiting would end at once; nothing is forgotten.
    ReadState look(int64_t ticket) const;

    // Makes a request urgent. False if there is none.
    bool promote(int64_t ticket);

    // Drops what has not begun, waits for what has, and forgets the request: done if all was read.
    ReadState cancel(int64_t ticket);

    ReadStats stats() const;

    // Drops all that has not begun, waits for what has, and ends threads and files.
    void close();

  private:
    struct Request;
    struct State;

    void serve();
    std::shared_ptr<Request> take(size_t* block, bool* urgent);
    void finish(Request& request, size_t block, const ReadFault* fault);
    void drop(const std::shared_ptr<Request>& request);

    uint8_t* const memory_;
    const int64_t num_bytes_;
    const bool direct_;
    const int64_t max_read_bytes_;
    State& state_;     // of the process that made it: a child cannot know who holds its lock
    const int owner_;  // process
};

}  // namespace moe_pack
