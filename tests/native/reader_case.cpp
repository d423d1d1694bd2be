// Reads of files: random pieces, who goes first, what is cancelled, files that are cut or cannot be read.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "cases.h"
#include "reader.h"

namespace moe_pack {
namespace {

constexpr int64_t kRegionBytes = 24 * kDiskBlock;  // of memory, for one request
constexpr auto kSlice = std::chrono::milliseconds(50);

// A file's bytes as they were written, and the file: whole, cut afterwards, or a folder that stands in its place.
struct GivenFile {
    std::vector<uint8_t> bytes;
    int64_t left;  // what is not cut
    int number;
};

// What calls of preadv draw from, in any thread: linked in place of the system's (Makefile), it reads less than it could
// or is interrupted now and then, which drives rarely are.
std::atomic<uint64_t> hazard{0};
std::atomic<bool> whole_units{false};

enum class Kind { whole, cut, unreadable };

// Memory for requests, aligned as direct reads need it, and ended as it says.
class Memory {
  public:
    explicit Memory(int64_t num_bytes) : bytes_(static_cast<uint8_t*>(aligned_alloc(kDiskBlock, num_bytes))) {
        require(bytes_ != nullptr, "there is memory");
        std::memset(bytes_, 0, num_bytes);
    }
    ~Memory() { std::free(bytes_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint8_t* bytes() { return bytes_; }

  private:
    uint8_t* bytes_;
};

GivenFile add_file(Random& random, Reader& reader, Kind kind) {
    GivenFile given;
    given.bytes.resize(random.between(1, 40 * kDiskBlock));
    for (uint8_t& byte : given.bytes) byte = (uint8_t)random.next();
    const auto num_bytes = (int64_t)given.bytes.size();
    given.left = kind == Kind::cut ? random.between(0, num_bytes - 1) : num_bytes;
    int descriptor = memfd_create("fuzz", 0);
    require(descriptor >= 0 && write(descriptor, given.bytes.data(), num_bytes) == num_bytes, "a file is written");
    if (kind == Kind::unreadable) {
        close(descriptor);
        descriptor = ::open("/", O_RDONLY | O_DIRECTORY);
        require(descriptor >= 0, "a folder is opened");
    }
    if (kind == Kind::cut) require(ftruncate(descriptor, given.left) == 0, "a file is cut");
    given.number = reader.add_file(descriptor, num_bytes);
    return given;
}

struct Asked {
    const GivenFile* file;
    std::vector<ReadPiece> pieces;
    int64_t ticket;
    int64_t region;  // where its memory begins

    // Where a file that was cut would be missed first, of the pieces in their order; -1 if all is there.
    bool touches_cut() const {
        for (const ReadPiece& piece : pieces) {
            int64_t end = std::min<int64_t>(piece.offset + piece.size, file->bytes.size());
            if (end > file->left) return true;
        }
        return false;
    }
};

// Pieces within a region of memory, some of which go on in the file where the one before ended.
Asked ask(Random& random, Reader& reader, const GivenFile& file, int64_t region, bool direct) {
    Asked asked = {&file, {}, 0, region};
    const auto num_bytes = (int64_t)file.bytes.size();
    const int64_t unit = direct ? kDiskBlock : random.pick<int64_t>({1, 16, 512, kDiskBlock});
    const int64_t most = (num_bytes + kDiskBlock - 1) / kDiskBlock * kDiskBlock;
    int64_t place = region, next = 0;
    for (int64_t i = random.between(0, 12); i > 0; i--) {
        int64_t offset = random.chance(60) && next < num_bytes ? next : random.between(0, (num_bytes - 1) / unit) * unit;
        if (offset >= num_bytes) offset = 0;
        int64_t room = std::min(region + kRegionBytes - place, most - offset) / unit;
        if (room < 1) break;
        int64_t size = unit * random.between(1, std::min(room, std::max<int64_t>(4 * kDiskBlock / unit, 1)));
        asked.pieces.push_back({offset, place, size});
        place += size + (random.chance(50) ? 0 : unit);
        next = offset + size;
        if (place >= region + kRegionBytes) break;
    }
    require(reader.fault_of(file.number, asked.pieces) == nullptr, "right pieces have no fault");
    asked.ticket = reader.submit(file.number, asked.pieces, random.chance(50));
    require(asked.ticket > 0, "a request has a ticket");
    return asked;
}

void compare(const Asked& asked, const uint8_t* memory) {
    for (const ReadPiece& piece : asked.pieces) {
        int64_t size = std::min<int64_t>(piece.size, (int64_t)asked.file->bytes.size() - piece.offset);
        require(size <= 0 || std::memcmp(memory + piece.place, asked.file->bytes.data() + piece.offset, size) == 0,
                "what is read is what was written");
    }
}

void end_by_waiting(Random& random, Reader& reader, const Asked& asked, Kind kind, uint8_t* memory) {
    ReadFault fault = {-1, -1, -1};
    ReadState state;
    do {
        state = reader.wait(asked.ticket, random.chance(20) ? std::chrono::milliseconds(0) : kSlice, &fault);
    } while (state == ReadState::pending);
    const bool faulty = kind == Kind::cut ? asked.touches_cut() : kind == Kind::unreadable && !asked.pieces.empty();
    require(state == (faulty ? ReadState::faulty : ReadState::done), "a request ends as its file lets it");
    if (!faulty) return compare(asked, memory);
    require(fault.file == asked.file->number, "a fault names its file");
    require(fault.error == (kind == Kind::cut ? 0 : EISDIR), "a fault says what it is");
    auto holds = [&](const ReadPiece& piece) {
        return kind == Kind::cut ? std::max(piece.offset, asked.file->left) : piece.offset;
    };
    // The first in the order of the pieces, whichever thread was faster.
    for (const ReadPiece& piece : asked.pieces) {
        int64_t end = std::min<int64_t>(piece.offset + piece.size, asked.file->bytes.size());
        if (kind == Kind::cut && end <= asked.file->left) continue;
        return require(fault.at == holds(piece), "a fault is where the file ends");
    }
}

// One user of a reader: asks for some, and ends each in some way; regions of memory are its own, used again and again.
void use(Random random, Reader& reader, const std::vector<std::pair<GivenFile, Kind>>& files, uint8_t* memory,
         int64_t region, bool direct) {
    for (int round = 0; round < 6; round++) {
        std::vector<std::pair<Asked, Kind>> all;
        for (int64_t i = 0; i < 3; i++) {
            auto& [file, kind] = files[random.between(0, (int64_t)files.size() - 1)];
            all.emplace_back(ask(random, reader, file, region + i * kRegionBytes, direct), kind);
        }
        while (!all.empty()) {
            auto chosen = all.begin() + random.between(0, (int64_t)all.size() - 1);
            auto& [asked, kind] = *chosen;
            if (random.chance(30)) require(reader.promote(asked.ticket), "what was asked for can be promoted");
            if (random.chance(30)) require(reader.look(asked.ticket) != ReadState::unknown, "a ticket is known");
            if (random.chance(30)) {
                ReadState state = reader.cancel(asked.ticket);
                if (state == ReadState::done) compare(asked, memory);
                // Nobody writes there any more: a sanitizer would see that they race.
                std::memset(memory + asked.region, 0x5a, kRegionBytes);
            } else {
                end_by_waiting(random, reader, asked, kind, memory);
            }
            ReadFault fault;
            require(reader.wait(asked.ticket, kSlice, &fault) == ReadState::unknown, "an ended ticket is forgotten");
            require(!reader.promote(asked.ticket), "an ended ticket is not promoted");
            require(reader.cancel(asked.ticket) == ReadState::unknown, "an ended ticket is not cancelled");
            all.erase(chosen);
        }
    }
}

// What a caller has wrong is told; sums that would overflow among it.
void refuse_wild(Random& random, Reader& reader, const GivenFile& file, int64_t num_bytes) {
    auto wild = [&] {
        return random.pick<int64_t>({INT64_MIN, INT64_MIN + 1, -1, 0, 1, kDiskBlock, num_bytes, num_bytes + 1,
                                     INT64_MAX - kDiskBlock, INT64_MAX, (int64_t)random.next()});
    };
    ReadPiece piece = {wild(), wild(), wild()};
    const auto file_bytes = (int64_t)file.bytes.size();
    const bool outside = piece.size < 1 || piece.place < 0 || piece.place > num_bytes ||
                         piece.size > num_bytes - piece.place || piece.offset < 0 || piece.offset >= file_bytes;
    if (outside) require(reader.fault_of(file.number, {piece}) != nullptr, "a piece outside is refused");
    require(reader.fault_of(file.number + 1000, {}) != nullptr && reader.fault_of(-1, {}) != nullptr,
            "files that are none are refused");
}

}  // namespace

void reader_case(Random& random, Pools&, Counts& counts) {
    hazard = random.next();
    const int64_t num_users = random.between(1, 3), num_bytes = 3 * kRegionBytes * num_users;
    // Files in memory cannot be open for direct reads, but all that is asked of them can be whole blocks.
    const bool direct = random.chance(30);
    whole_units = direct;
    Memory memory(num_bytes);
    Reader reader(memory.bytes(), num_bytes, (int)random.between(1, 6), direct,
                  kDiskBlock * random.pick<int64_t>({1, 2, 5, 256}));
    require(reader.has_threads() && reader.is_ours(), "a reader is opened");
    std::vector<std::pair<GivenFile, Kind>> files;
    for (int64_t i = random.between(1, 4); i > 0; i--) {
        Kind kind = random.chance(60) ? Kind::whole : random.chance(60) ? Kind::cut : Kind::unreadable;
        files.emplace_back(add_file(random, reader, kind), kind);
        counts.cut += kind == Kind::cut;
    }
    refuse_wild(random, reader, files[0].first, num_bytes);
    std::vector<std::thread> users;
    for (int64_t i = 0; i < num_users; i++)
        users.emplace_back([&, i, own = Random(random.next())] {
            use(own, reader, files, memory.bytes(), 3 * kRegionBytes * i, direct);
        });
    for (std::thread& user : users) user.join();
    ReadStats stats = reader.stats();
    require(stats.num_reads >= 0 && stats.busy_ns >= 0 && stats.bytes_ahead >= 0 && stats.bytes_urgent >= 0,
            "what is counted is not negative");
    if (random.chance(50)) {  // closed with requests that nobody waited for
        Asked left = ask(random, reader, files[0].first, 0, direct);
        reader.close();
        std::memset(memory.bytes(), 0x5a, num_bytes);
        require(reader.look(left.ticket) != ReadState::pending, "nothing is read any more");
        require(reader.submit(0, {}, true) == -1, "a closed reader takes no more");
        if (random.chance(50)) reader.close();
    }
    counts.compared++;
}

}  // namespace moe_pack

extern "C" ssize_t __real_preadv(int descriptor, const iovec* targets, int count, off_t at);

extern "C" ssize_t __wrap_preadv(int descriptor, const iovec* targets, int count, off_t at) {
    using namespace moe_pack;
    Random random(hazard.fetch_add(1));
    if (random.chance(10)) {
        errno = EINTR;
        return -1;
    }
    if (random.chance(60)) return __real_preadv(descriptor, targets, count, at);
    // Whole targets, then a part of one.
    std::vector<iovec> fewer(targets, targets + random.between(1, count));
    const auto unit = whole_units ? (size_t)kDiskBlock : 1;
    fewer.back().iov_len = std::max<size_t>(fewer.back().iov_len / 2 / unit, 1) * unit;
    return __real_preadv(descriptor, fewer.data(), (int)fewer.size(), at);
}
