#include "reader.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace moe_pack {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxTargets = IOV_MAX;  // of one call

struct File {
    int descriptor;
    int64_t num_bytes;  // when it was opened
};

// A run of a file's bytes that one call reads, to some of its request's targets.
struct Block {
    int64_t offset, num_bytes;
    size_t first, count;  // targets
};

int64_t rounded_up(int64_t num_bytes) {
    return num_bytes > INT64_MAX - kDiskBlock ? INT64_MAX : (num_bytes + kDiskBlock - 1) / kDiskBlock * kDiskBlock;
}

// Leaves out the first bytes of some targets; the first that is left.
iovec* advance(iovec* target, size_t num_bytes) {
    for (; num_bytes >= target->iov_len; target++) num_bytes -= target->iov_len;
    target->iov_base = static_cast<uint8_t*>(target->iov_base) + num_bytes;
    target->iov_len -= num_bytes;
    return target;
}

}  // namespace

struct Reader::Request {
    int64_t ticket = 0;
    int32_t file = 0;
    File from = {};
    std::vector<iovec> targets;  // those of a block belong to the thread that took it
    std::vector<Block> blocks;
    bool urgent = false;
    size_t next = 0;  // block
    int in_flight = 0;
    bool dropped = false;          // not all was begun
    size_t fault_block = SIZE_MAX;  // the first of those that had one
    ReadFault fault = {};

    bool is_over() const { return next == blocks.size() && in_flight == 0; }
    ReadState state() const {
        if (!is_over()) return ReadState::pending;
        if (fault_block != SIZE_MAX) return ReadState::faulty;
        return dropped ? ReadState::dropped : ReadState::done;
    }

    // Adds a piece: to the last block where it goes on there, as far as there is space, else to new ones.
    void add(uint8_t* to, int64_t offset, int64_t size, int64_t max_read_bytes) {
        while (size > 0) {
            Block* last = blocks.empty() ? nullptr : &blocks.back();
            if (last == nullptr || last->offset + last->num_bytes != offset || last->num_bytes == max_read_bytes ||
                last->count == kMaxTargets) {
                blocks.push_back({offset, 0, targets.size(), 0});
                last = &blocks.back();
            }
            int64_t part = std::min(size, max_read_bytes - last->num_bytes);
            iovec* before = last->count ? &targets.back() : nullptr;
            if (before != nullptr && static_cast<uint8_t*>(before->iov_base) + before->iov_len == to) {
                before->iov_len += part;
            } else {
                targets.push_back({to, (size_t)part});
                last->count++;
            }
            last->num_bytes += part;
            to += part;
            offset += part;
            size -= part;
        }
    }

    // Reads a block; false with its fault. Interrupted and short reads go on where they ended.
    bool read(const Block& block, bool direct, ReadFault* met, int64_t* num_reads) {
        int64_t at = block.offset, end = std::min(block.offset + block.num_bytes, from.num_bytes);
        iovec *target = &targets[block.first], *last = target + block.count;
        while (at < end) {
            ssize_t got = preadv(from.descriptor, target, (int)(last - target), at);
            ++*num_reads;
            if (got < 0 && errno == EINTR) continue;
            *met = {file, at, got < 0 ? errno : 0};
            if (got <= 0) return false;
            at += got;
            met->at = at;
            if (at >= end) break;
            // Direct reads end within a unit only where the file does, and none can begin there.
            if (direct && at % kDiskBlock) return false;
            target = advance(target, (size_t)got);
        }
        return true;
    }
};

struct Reader::State {
    using Queue = std::deque<std::shared_ptr<Request>>;

    mutable std::mutex mutex;
    std::condition_variable work, over;
    std::vector<std::thread> workers;
    std::vector<File> files;
    std::unordered_map<int64_t, std::shared_ptr<Request>> requests;
    Queue urgent, ahead;  // of which some blocks have not begun
    int64_t next_ticket = 1;
    int in_flight = 0;
    Clock::time_point busy_since;
    ReadStats stats = {};
    bool closed = false;

    std::shared_ptr<Request> find(int64_t ticket) const {
        auto found = requests.find(ticket);
        return found == requests.end() ? nullptr : found->second;
    }
    Queue& queue_of(const Request& request) { return request.urgent ? urgent : ahead; }
    void unqueue(const std::shared_ptr<Request>& request) {
        Queue& queue = queue_of(*request);
        queue.erase(std::remove(queue.begin(), queue.end(), request), queue.end());
    }
    int64_t busy_until_now() const {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - busy_since).count();
    }
};

Reader::Reader(uint8_t* memory, int64_t num_bytes, int threads, bool direct, int64_t max_read_bytes)
    : memory_(memory),
      num_bytes_(num_bytes),
      direct_(direct),
      max_read_bytes_(max_read_bytes),
      state_(*new State),
      owner_(getpid()) {
    try {
        for (int i = 0; i < threads; i++) state_.workers.emplace_back([this] { serve(); });
    } catch (const std::exception&) {
        // The system gives no more threads, or no more memory: those there are do all the reading.
    }
}

Reader::~Reader() {
    if (!is_ours()) return;
    close();
    delete &state_;
}

bool Reader::has_threads() const { return !state_.workers.empty(); }

bool Reader::is_ours() const { return getpid() == owner_; }

int32_t Reader::add_file(int descriptor, int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(state_.mutex);
    state_.files.push_back({descriptor, num_bytes});
    return (int32_t)state_.files.size() - 1;
}

const char* Reader::fault_of(int32_t file, const std::vector<ReadPiece>& pieces) const {
    std::lock_guard<std::mutex> lock(state_.mutex);
    if (file < 0 || (size_t)file >= state_.files.size()) return "no such file";
    const int64_t num_bytes = state_.files[file].num_bytes, most = rounded_up(num_bytes);
    for (const ReadPiece& piece : pieces) {
        if (piece.size < 1) return "a piece has no bytes";
        if (piece.place < 0 || piece.place > num_bytes_ || piece.size > num_bytes_ - piece.place)
            return "a piece does not lie in memory";
        if (piece.offset < 0 || piece.offset >= num_bytes || piece.size > most - piece.offset)
            return "a piece does not lie in the file";
        if (direct_ && (piece.offset % kDiskBlock || piece.place % kDiskBlock || piece.size % kDiskBlock))
            return "direct reads are of whole blocks of 4096 bytes, in the file and in memory";
    }
    return nullptr;
}

int64_t Reader::submit(int32_t file, const std::vector<ReadPiece>& pieces, bool urgent) {
    auto request = std::make_shared<Request>();
    request->file = file;
    request->urgent = urgent;
    for (const ReadPiece& piece : pieces)
        request->add(memory_ + piece.place, piece.offset, piece.size, max_read_bytes_);
    const size_t num_blocks = request->blocks.size();
    {
        std::lock_guard<std::mutex> lock(state_.mutex);
        if (state_.closed) return -1;
        request->from = state_.files[file];
        request->ticket = state_.next_ticket++;
        state_.requests.emplace(request->ticket, request);
        try {
            if (num_blocks) state_.queue_of(*request).push_back(request);
        } catch (...) {
            state_.requests.erase(request->ticket);
            throw;
        }
    }
    if (num_blocks == 1)
        state_.work.notify_one();
    else
        state_.work.notify_all();
    return request->ticket;
}

ReadState Reader::wait(int64_t ticket, std::chrono::milliseconds most, ReadFault* fault) {
    std::unique_lock<std::mutex> lock(state_.mutex);
    std::shared_ptr<Request> request = state_.find(ticket);
    if (!request) return ReadState::unknown;
    if (!state_.over.wait_for(lock, most, [&] { return request->is_over(); })) return ReadState::pending;
    state_.requests.erase(ticket);
    *fault = request->fault;
    return request->state();
}

ReadState Reader::look(int64_t ticket) const {
    std::lock_guard<std::mutex> lock(state_.mutex);
    std::shared_ptr<Request> request = state_.find(ticket);
    return request ? request->state() : ReadState::unknown;
}

bool Reader::promote(int64_t ticket) {
    std::lock_guard<std::mutex> lock(state_.mutex);
    std::shared_ptr<Request> request = state_.find(ticket);
    if (!request) return false;
    if (request->urgent) return true;
    if (request->next < request->blocks.size()) {
        state_.urgent.push_back(request);
        state_.unqueue(request);
    }
    request->urgent = true;
    return true;
}

ReadState Reader::cancel(int64_t ticket) {
    std::unique_lock<std::mutex> lock(state_.mutex);
    std::shared_ptr<Request> request = state_.find(ticket);
    if (!request) return ReadState::unknown;
    drop(request);
    state_.over.wait(lock, [&] { return request->is_over(); });
    state_.requests.erase(ticket);
    return request->state();
}

ReadStats Reader::stats() const {
    std::lock_guard<std::mutex> lock(state_.mutex);
    ReadStats now = state_.stats;
    if (state_.in_flight > 0) now.busy_ns += state_.busy_until_now();
    return now;
}

void Reader::close() {
    std::vector<std::thread> workers;
    std::vector<File> files;
    {
        std::lock_guard<std::mutex> lock(state_.mutex);
        state_.closed = true;
        for (auto& [ticket, request] : state_.requests) drop(request);
        workers.swap(state_.workers);
        files.swap(state_.files);
    }
    state_.work.notify_all();
    for (std::thread& worker : workers) worker.join();
    for (const File& file : files) ::close(file.descriptor);
}

// With the lock held.
void Reader::drop(const std::shared_ptr<Request>& request) {
    if (request->next == request->blocks.size()) return;
    state_.unqueue(request);
    request->next = request->blocks.size();
    request->dropped = true;
    if (request->is_over()) state_.over.notify_all();
}

// The next block, once there is one; none once the reader is closed.
std::shared_ptr<Reader::Request> Reader::take(size_t* block, bool* urgent) {
    std::unique_lock<std::mutex> lock(state_.mutex);
    state_.work.wait(lock, [&] { return state_.closed || !state_.urgent.empty() || !state_.ahead.empty(); });
    if (state_.closed) return nullptr;
    State::Queue& queue = state_.urgent.empty() ? state_.ahead : state_.urgent;
    std::shared_ptr<Request> request = queue.front();
    *block = request->next++;
    *urgent = request->urgent;
    if (request->next == request->blocks.size()) queue.pop_front();
    request->in_flight++;
    if (state_.in_flight++ == 0) state_.busy_since = Clock::now();
    return request;
}

// With the lock held.
void Reader::finish(Request& request, size_t block, const ReadFault* fault) {
    request.in_flight--;
    if (--state_.in_flight == 0) state_.stats.busy_ns += state_.busy_until_now();
    if (fault != nullptr && block < request.fault_block) {
        request.fault_block = block;
        request.fault = *fault;
    }
}

void Reader::serve() {
    size_t block_idx;
    bool urgent;
    while (std::shared_ptr<Request> request = take(&block_idx, &urgent)) {
        const Block block = request->blocks[block_idx];
        ReadFault fault = {};
        int64_t num_reads = 0;
        bool whole = request->read(block, direct_, &fault, &num_reads);
        std::lock_guard<std::mutex> lock(state_.mutex);
        finish(*request, block_idx, whole ? nullptr : &fault);
        if (!whole) drop(request);  // the rest is not needed
        state_.stats.num_reads += num_reads;
        // A block may lie beyond the end of the file as a whole.
        const int64_t of_file = std::max<int64_t>(request->from.num_bytes - block.offset, 0);
        int64_t& num_bytes = urgent ? state_.stats.bytes_urgent : state_.stats.bytes_ahead;
        if (whole) num_bytes += std::min(block.num_bytes, of_file);
        if (request->is_over()) state_.over.notify_all();
    }
}

}  // namespace moe_pack
