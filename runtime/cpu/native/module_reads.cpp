#include "module_reads.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "reader.h"

namespace moe_pack {
namespace {

constexpr const char* kReaderName = "moe_pack.runtime.cpu._native.Reader";
constexpr int kMaxReaderThreads = 1024;
constexpr int64_t kLargestReadBytes = 1 << 30;  // what one call reads at most is just below 2^31
constexpr auto kSlice = std::chrono::milliseconds(50);  // of waiting: after it, Python looks for signals

// A reader and the memory it reads into, which is given back after the threads have ended.
struct HeldReader {
    Buffer<uint8_t> memory;
    std::unique_ptr<Reader> reader;
};

void free_reader(PyObject* capsule) { delete static_cast<HeldReader*>(PyCapsule_GetPointer(capsule, kReaderName)); }

Reader* reader_of(PyObject* capsule) {
    auto* held = static_cast<HeldReader*>(PyCapsule_GetPointer(capsule, kReaderName));
    if (held == nullptr || held->reader->is_ours()) return held == nullptr ? nullptr : held->reader.get();
    PyErr_SetString(PyExc_RuntimeError, "reader: opened by the process that this one was forked from");
    return nullptr;
}

// The reader and the ticket of most calls.
Reader* take_ticket(PyObject* arguments, const char* format, long long* ticket) {
    PyObject* capsule;
    return PyArg_ParseTuple(arguments, format, &capsule, ticket) ? reader_of(capsule) : nullptr;
}

PyObject* unknown_ticket() { return refuse("ticket", "there is none, or it was waited for or cancelled before"); }

// A duplicate of the descriptor of a regular file, with the size it has; -1 with an error set.
int duplicate(int descriptor, int64_t* num_bytes) {
    struct stat found;
    int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (own < 0 || fstat(own, &found) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
    } else if (!S_ISREG(found.st_mode)) {
        refuse("file", "is no regular file");
    } else {
        *num_bytes = found.st_size;
        return own;
    }
    if (own >= 0) close(own);
    return -1;
}

}  // namespace

PyObject* open_reader(PyObject*, PyObject* arguments) {
    PyObject* buffer;
    int threads, direct;
    long long max_read_bytes;
    if (!PyArg_ParseTuple(arguments, "OipL:open_reader", &buffer, &threads, &direct, &max_read_bytes)) return nullptr;
    if (threads < 1 || threads > kMaxReaderThreads) return refuse("threads", "expected 1 to 1024");
    if (max_read_bytes < kDiskBlock || max_read_bytes > kLargestReadBytes || max_read_bytes % kDiskBlock)
        return refuse("max_read_bytes", "expected a multiple of 4096, at most 2^30");
    auto held = std::make_unique<HeldReader>();
    if (!held->memory.take(buffer, "memory", true)) return nullptr;
    uint8_t* memory = held->memory.values();
    if (direct && (uintptr_t)memory % kDiskBlock)
        return refuse("memory", "direct reads need it aligned to 4096 bytes");
    held->reader = std::make_unique<Reader>(memory, (int64_t)held->memory.size(), threads, direct, max_read_bytes);
    if (!held->reader->has_threads()) {
        PyErr_SetString(PyExc_RuntimeError, "reader: the system gives no threads");
        return nullptr;
    }
    PyObject* capsule = PyCapsule_New(held.get(), kReaderName, free_reader);
    if (capsule != nullptr) held.release();
    return capsule;
}

PyObject* add_file(PyObject*, PyObject* arguments) {
    PyObject* capsule;
    int descriptor;
    if (!PyArg_ParseTuple(arguments, "Oi:add_file", &capsule, &descriptor)) return nullptr;
    Reader* reader = reader_of(capsule);
    if (reader == nullptr) return nullptr;
    int64_t num_bytes;
    int own = duplicate(descriptor, &num_bytes);
    if (own < 0) return nullptr;
    int32_t file;
    try {
        file = reader->add_file(own, num_bytes);
    } catch (...) {
        close(own);
        throw;
    }
    return Py_BuildValue("iL", (int)file, (long long)num_bytes);
}

PyObject* submit_reads(PyObject*, PyObject* arguments) {
    PyObject *capsule, *offset_values, *place_values, *size_values;
    int file, urgent;
    if (!PyArg_ParseTuple(arguments, "OiOOOp:submit_reads", &capsule, &file, &offset_values, &place_values,
                          &size_values, &urgent))
        return nullptr;
    Reader* reader = reader_of(capsule);
    Copied<int64_t> offsets, places, sizes;
    if (reader == nullptr || !offsets.take(offset_values, "offsets") || !places.take(place_values, "places") ||
        !sizes.take(size_values, "sizes") || !has_size("places", places.size(), offsets.size()) ||
        !has_size("sizes", sizes.size(), offsets.size()))
        return nullptr;
    std::vector<ReadPiece> pieces(offsets.size());
    for (size_t i = 0; i < pieces.size(); i++)
        pieces[i] = {offsets.values()[i], places.values()[i], sizes.values()[i]};
    if (const char* fault = reader->fault_of(file, pieces)) return refuse("pieces", fault);
    int64_t ticket = reader->submit(file, pieces, urgent);
    return ticket < 0 ? refuse("reader", "is closed") : PyLong_FromLongLong(ticket);
}

namespace {

PyObject* bytes_of(const std::vector<int64_t>& values) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()), sizeof(int64_t) * values.size());
}

constexpr int64_t kMostPlace = (int64_t)1 << 60;  // of bytes in a file or in memory: sums stay below 2^63

// An extent in pages of whole blocks, from block `first_block` on; what has arrived of it, by block.
struct PagedExtent {
    Buffer<const uint8_t> has_block;
    Copied<int64_t> page_places;  // of memory
    Py_ssize_t begin, row_bytes, first_block, page_blocks;  // of row 0 in the extent

    bool makes_sense() const {
        constexpr Py_ssize_t most = (Py_ssize_t)1 << 40;
        return begin >= 0 && begin < most && row_bytes >= 1 && row_bytes < most && first_block >= 0 && page_blocks >= 1 &&
               first_block <= (Py_ssize_t)has_block.size() &&
               (has_block.size() - first_block + page_blocks - 1) / page_blocks <= page_places.size();
    }
    bool has_places() const {
        for (size_t i = 0; i < page_places.size(); i++)
            if (page_places.values()[i] < 0 || page_places.values()[i] > kMostPlace) return false;
        return true;
    }
    int64_t num_blocks() const { return (int64_t)has_block.size(); }
};

}  // namespace

PyObject* row_pieces(PyObject*, PyObject* arguments) {
    PyObject *neuron_idx, *has_block, *page_places;
    Py_ssize_t gap_blocks;
    long long offset;
    PagedExtent extent;
    if (!PyArg_ParseTuple(arguments, "OOOnnnnnL:row_pieces", &neuron_idx, &has_block, &page_places, &extent.begin,
                          &extent.row_bytes, &extent.first_block, &extent.page_blocks, &gap_blocks, &offset))
        return nullptr;
    Copied<int32_t> neurons;
    if (!neurons.take(neuron_idx, "neurons") || !extent.has_block.take(has_block, "has_block") ||
        !extent.page_places.take(page_places, "page_places"))
        return nullptr;
    if (!extent.makes_sense() || gap_blocks < 0) return refuse("extent", "its pages do not hold its blocks");
    if (offset < 0 || offset > kMostPlace || !extent.has_places()) return refuse("offset", "a place is out of range");
    std::vector<int64_t> blocks, offsets, places, sizes;
    auto want = [&](int64_t block) {
        if (extent.has_block.values()[block]) return;
        int64_t page = (block - extent.first_block) / extent.page_blocks;
        int64_t within = (block - extent.first_block) % extent.page_blocks;
        if (within && !blocks.empty() && blocks.back() == block - 1) {
            sizes.back() += kDiskBlock;
        } else {
            offsets.push_back(offset + block * kDiskBlock);
            places.push_back(extent.page_places.values()[page] + within * kDiskBlock);
            sizes.push_back(kDiskBlock);
        }
        blocks.push_back(block);
    };
    int64_t before = -1, next = 0;  // the last neuron; the first block that was not looked at
    for (size_t i = 0; i < neurons.size(); i++) {
        int64_t neuron = neurons.values()[i], first, last;
        if (neuron <= before) return refuse("neurons", "expected rising numbers");
        if (neuron >= (extent.num_blocks() * kDiskBlock - extent.begin) / extent.row_bytes)
            return refuse("neurons", "one is not in the extent");
        first = (extent.begin + neuron * extent.row_bytes) / kDiskBlock;
        last = (extent.begin + (neuron + 1) * extent.row_bytes - 1) / kDiskBlock;
        if (before < 0 || first - next > gap_blocks) next = std::max(next, first);
        for (next = std::max<int64_t>(next, extent.first_block); next <= last; next++) want(next);
        before = neuron;
    }
    PyObject* found[] = {bytes_of(blocks), bytes_of(offsets), bytes_of(places), bytes_of(sizes)};
    PyObject* all = found[0] && found[1] && found[2] && found[3] ? PyTuple_Pack(4, found[0], found[1], found[2], found[3])
                                                                : nullptr;
    for (PyObject* one : found) Py_XDECREF(one);
    return all;
}

PyObject* wait_reads(PyObject*, PyObject* arguments) {
    long long ticket;
    Reader* reader = take_ticket(arguments, "OL:wait_reads", &ticket);
    if (reader == nullptr) return nullptr;
    ReadFault fault;
    while (true) {
        ReadState state;
        Py_BEGIN_ALLOW_THREADS;
        state = reader->wait(ticket, kSlice, &fault);
        Py_END_ALLOW_THREADS;
        if (state == ReadState::done) Py_RETURN_NONE;
        if (state == ReadState::faulty) return Py_BuildValue("iLi", (int)fault.file, (long long)fault.at, fault.error);
        if (state == ReadState::unknown) return unknown_ticket();
        if (state == ReadState::dropped) return refuse("ticket", "cancelled while it was waited for");
        if (PyErr_CheckSignals() != 0) return nullptr;
    }
}

PyObject* are_read(PyObject*, PyObject* arguments) {
    long long ticket;
    Reader* reader = take_ticket(arguments, "OL:are_read", &ticket);
    if (reader == nullptr) return nullptr;
    ReadState state = reader->look(ticket);
    return state == ReadState::unknown ? unknown_ticket() : PyBool_FromLong(state != ReadState::pending);
}

PyObject* promote_reads(PyObject*, PyObject* arguments) {
    long long ticket;
    Reader* reader = take_ticket(arguments, "OL:promote_reads", &ticket);
    if (reader == nullptr) return nullptr;
    if (!reader->promote(ticket)) return unknown_ticket();
    Py_RETURN_NONE;
}

PyObject* cancel_reads(PyObject*, PyObject* arguments) {
    long long ticket;
    Reader* reader = take_ticket(arguments, "OL:cancel_reads", &ticket);
    if (reader == nullptr) return nullptr;
    ReadState state;
    Py_BEGIN_ALLOW_THREADS;
    state = reader->cancel(ticket);
    Py_END_ALLOW_THREADS;
    return state == ReadState::unknown ? unknown_ticket() : PyBool_FromLong(state == ReadState::done);
}

PyObject* read_stats(PyObject*, PyObject* arguments) {
    PyObject* capsule;
    if (!PyArg_ParseTuple(arguments, "O:read_stats", &capsule)) return nullptr;
    Reader* reader = reader_of(capsule);
    if (reader == nullptr) return nullptr;
    ReadStats stats = reader->stats();
    return Py_BuildValue("LLLL", (long long)stats.bytes_urgent, (long long)stats.bytes_ahead,
                         (long long)stats.num_reads, (long long)stats.busy_ns);
}

PyObject* close_reader(PyObject*, PyObject* arguments) {
    PyObject* capsule;
    if (!PyArg_ParseTuple(arguments, "O:close_reader", &capsule)) return nullptr;
    Reader* reader = reader_of(capsule);
    if (reader == nullptr) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    reader->close();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

}  // namespace moe_pack
